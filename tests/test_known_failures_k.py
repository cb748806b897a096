"""known-failures.md, K1: what Hydra's override grammar does to users, said in one line with exit code 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvengine import launch
from kvengine.cli import main

QUICK = ["executor=null", "model=checksum", "workload=synthetic", "workload.num_requests=2"]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "checkout", lambda: None)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("workload.path=a=b", "error: workload.path=a=b: cannot be read; quote"),
        ('workload.path="a=b"', "error: workload.path=a=b: No such file"),
        (r"workload.path=a\=b", "error: workload.path=a=b: No such file"),
        ("workload.path=a,b", "error: workload.path=a,b: several values need -m"),
        ("workload.path=[###]", "error: workload.path=[###]: "),
        ('workload.path="[###]"', "error: workload.path=[###]: No such file"),
        ("workload.sampling.stop_token_ids=5", "error: workload.sampling.stop_token_ids=5: must be a list"),
        (
            'workload.sampling.stop_token_ids="5,6"',
            "error: workload.sampling.stop_token_ids=5,6: must be a list",
        ),
        ("workload.path=???", "error: workload.path=???: must be given"),
        ("kv.block_size=0", "error: kv.block_size=0: must be at least 1"),
        ("block_size=0", "error: kv.block_size=0: must be at least 1"),
        ("engine.num_blocks=0", "error: engine.num_blocks=0: must be at least 1"),
    ],
)
def test_what_hydra_lets_through_or_garbles_is_one_line(
    word: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word]) == 2
    error = capsys.readouterr().err
    assert error.startswith(said)
    assert error.count("\n") == 1


def test_a_list_of_one_and_words_for_true(tmp_path: Path) -> None:
    lists = ["workload=jsonl", "workload.path=w.jsonl", "workload.sampling.stop_token_ids=[104]"]
    (tmp_path / "w.jsonl").write_text('{"prompt_token_ids": [1, 2, 3], "max_tokens": 9}\n')
    for word in ("1", "yes", "on", "true"):
        assert main([*QUICK[:2], *lists, f"telemetry.record={word}", f"hydra.run.dir=run_{word}"]) == 0
        output = json.loads((tmp_path / f"run_{word}" / "outputs.jsonl").read_text())
        assert output["token_ids"] == [20, 104]  # the golden list 20, 104, 127 ends at the stop token
        assert output["finish_reason"] == "stop"
    assert main([*QUICK, "telemetry.record=no"]) == 0
    assert not (tmp_path / "traces").exists()
