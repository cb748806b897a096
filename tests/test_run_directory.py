"""The directory of a run: complete, interrupted, failed, killed, on a full disk, and what is read back."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from kvengine.compose import composer
from kvengine.core.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, PolicyError
from kvengine.executors.null import NullExecutor
from kvengine.overrides import expand
from kvengine.registry import discover
from kvengine.run import Run
from kvengine.telemetry import run_directory as run_directory_module
from kvengine.telemetry.run_directory import RunDirectory, read_tables
from kvengine.telemetry.tables import SCHEMAS, columns

QUICK = ("executor=null", "model=tiny", "workload=synthetic", "workload.num_requests=12", "max_num_seqs=4")
FILES = {
    "run.json", "outputs.jsonl", "spans.jsonl", "steps", "requests", "tokens", "prefills", "decisions",
    "unwritten",
}  # fmt: skip


def run(path: Path, *overrides: str) -> int:
    """The exit code of a run of QUICK and `overrides` that is recorded in `path`."""
    with composer() as compose:
        config = compose(expand([*QUICK, *overrides]))
    return Run(config, discover(), path).execute()


def content(path: Path) -> dict[str, Any]:
    """run.json, which must be JSON to the letter: Python would also take NaN."""
    return json.loads((path / "run.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)


def at_step(number: int, then: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `then` happen during step `number` of the null executor."""
    whole = NullExecutor.execute

    def execute(self: NullExecutor, plan: Any) -> Any:
        if plan.step == number:
            then()
        return whole(self, plan)

    monkeypatch.setattr(NullExecutor, "execute", execute)


def statuses(path: Path) -> dict[str, int]:
    words = read_tables(path)["requests"]["status"].to_pylist()
    return {word: words.count(word) for word in set(words)}


def outputs(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "outputs.jsonl").read_text(encoding="utf-8").splitlines()]


def test_a_complete_run_leaves_everything(tmp_path: Path) -> None:
    assert run(tmp_path, "scheduler=chunked") == EXIT_OK
    assert {p.name for p in tmp_path.iterdir()} == FILES
    assert not list(tmp_path.rglob("*.partial"))
    said = content(tmp_path)
    assert said["status"] == "complete"
    assert said["config"]["scheduler"]["name"] == "chunked"
    assert said["limits"]["max_num_seqs"] == said["config"]["engine"]["max_num_seqs"] == 4
    assert {"kvengine", "started_unix_s", "model", "pool", "times", "machine", "versions"} <= set(said)
    tables = read_tables(tmp_path)
    assert {name: table.schema for name, table in tables.items()} == SCHEMAS
    assert said["summary"]["num_steps"] == len(tables["steps"])
    assert said["summary"]["num_finished"] == said["summary"]["num_requests"] == 12
    assert statuses(tmp_path) == {"finished": 12}
    lines = outputs(tmp_path)
    assert sum(len(line["token_ids"]) for line in lines) == said["summary"]["output_tokens"]
    assert {line["request_id"] for line in lines} == {f"r{i}" for i in range(12)}
    num_spans = sum(
        len(scope["spans"])
        for line in (tmp_path / "spans.jsonl").read_text().splitlines()
        for scope in json.loads(line)["resourceSpans"][0]["scopeSpans"]
    )
    assert said["spans"]["num_spans"] == num_spans > 0


def test_texts_are_kept_with_what_was_asked(tmp_path: Path) -> None:
    assert (
        run(tmp_path, "workload=prompts", "workload.num_requests=3", "workload.sampling.max_tokens=2")
        == EXIT_OK
    )
    lines = outputs(tmp_path)
    assert len(lines) == 3
    for line in lines:
        assert line["finish_reason"] == "length"
        assert line["prompt"]
        assert line["text"] == "\x00" * len(line["token_ids"])
        assert line["choice"] == 0


def test_what_is_switched_off_is_not_written(tmp_path: Path) -> None:
    assert run(tmp_path / "a", "telemetry.spans=false") == EXIT_OK
    assert {p.name for p in (tmp_path / "a").iterdir()} == FILES - {"spans.jsonl"}
    said = content(tmp_path / "a")
    assert said["status"] == "complete"
    assert said["summary"]["num_finished"] == 12
    assert said.get("spans") is None
    assert run(tmp_path / "b", "telemetry.record=false") == EXIT_OK
    assert not (tmp_path / "b").exists()


def test_an_interrupt_ends_the_run_after_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the sixth step: four run, eight wait, and all are recorded as they stand."""
    at_step(5, lambda: signal.raise_signal(signal.SIGINT), monkeypatch)
    before = signal.getsignal(signal.SIGINT)
    lengths = ("workload.output_len.distribution=fixed", "workload.output_len.mean=50")
    assert run(tmp_path, *lengths, "scheduler=continuous", "workload.sampling.n=2") == EXIT_INTERRUPTED
    assert signal.getsignal(signal.SIGINT) is before
    said = content(tmp_path)
    assert said["status"] == "interrupted"
    assert said["summary"]["num_unfinished"] == 24
    assert {p.name for p in tmp_path.iterdir()} == FILES
    assert statuses(tmp_path) == {"unfinished": 24}
    assert [(line["finish_reason"], len(line["token_ids"])) for line in outputs(tmp_path)] == [(None, 6)] * 4
    tables = read_tables(tmp_path)
    assert len(tables["steps"]) == 6
    requests = tables["requests"].to_pylist()
    assert [row["num_output_tokens"] for row in requests] == [6] * 4 + [0] * 20
    assert all(row["finished_ns"] is row["finish_reason"] is None for row in requests)
    assert [row["admitted_ns"] for row in requests] == [0] * 4 + [None] * 20
    spans = (tmp_path / "spans.jsonl").read_text()
    assert spans.count('"request is unfinished"') == 12


def test_a_second_interrupt_ends_the_run_in_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    at_step(5, twice, monkeypatch)
    assert run(tmp_path) == EXIT_INTERRUPTED
    assert content(tmp_path)["status"] == "interrupted"
    assert len(read_tables(tmp_path)["steps"]) == 5
    assert sum(statuses(tmp_path).values()) == 12


def test_an_interrupt_during_the_last_step_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = ("workload.num_requests=1", "workload.output_len.distribution=fixed", "workload.output_len.mean=3")
    at_step(2, lambda: signal.raise_signal(signal.SIGINT), monkeypatch)
    assert run(tmp_path, *one) == EXIT_OK
    assert content(tmp_path)["status"] == "complete"


@pytest.mark.parametrize("error", [PolicyError("it lost count"), RuntimeError("out of memory")])
def test_a_run_that_fails_keeps_what_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail() -> None:
        raise error

    at_step(7, fail, monkeypatch)
    with pytest.raises(type(error), match=str(error)):
        run(tmp_path)
    assert content(tmp_path)["status"] == "failed"
    assert len(read_tables(tmp_path)["steps"]) == 7
    assert sum(statuses(tmp_path).values()) == 12
    assert (tmp_path / "spans.jsonl").exists()


def test_a_run_in_which_nothing_was_served_says_so_in_valid_json(tmp_path: Path) -> None:
    """No figure is NaN where nothing was measured."""
    long = ("workload.prompt_len.distribution=fixed", "workload.prompt_len.mean=100", "max_model_len=64")
    assert run(tmp_path, *long, "workload.clip_to_model_len=false") == EXIT_FAILED
    said = content(tmp_path)
    assert said["summary"]["num_rejected"] == 12
    assert said["summary"]["ttft_ms"] is said["summary"]["kv_held_of_pool"] is None
    assert statuses(tmp_path) == {"rejected": 12}
    assert len(read_tables(tmp_path)["steps"]) == 0
    with pytest.raises(ValueError, match="not JSON compliant"):
        RunDirectory(tmp_path).write_run({"figure": float("nan")})
    assert content(tmp_path) == said


def test_run_json_is_whole_at_every_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says running while the run goes on; a write that fails half-way leaves the one before."""
    seen: list[dict[str, Any]] = []
    at_step(3, lambda: seen.append(content(tmp_path)), monkeypatch)
    assert run(tmp_path) == EXIT_OK
    assert [(said["status"], "summary" in said) for said in seen] == [("running", False)]
    assert seen[0]["config"] == content(tmp_path)["config"]

    def half(self: Path, text: str, **options: Any) -> int:
        self.write_bytes(text[:40].encode())
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    whole = content(tmp_path)
    monkeypatch.setattr(Path, "write_text", half)
    directory = RunDirectory(tmp_path)
    directory.write_run({"status": "complete", "more": "x" * 100})
    assert directory.problem is not None
    assert content(tmp_path) == whole


@pytest.mark.parametrize("first_failure", [1, 3])
def test_a_full_disk_stops_the_recording_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], first_failure: int
) -> None:
    tables: list[Any] = []
    whole = pq.write_table

    def write_table(table: Any, where: Any, **options: Any) -> None:
        tables.append(table)
        if len(tables) >= first_failure:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(where))
        whole(table, where, **options)

    monkeypatch.setattr(run_directory_module.pq, "write_table", write_table)
    assert run(tmp_path) == EXIT_FAILED
    assert len(tables) == first_failure, "nothing is tried after the first failure"
    said = capsys.readouterr().out
    assert "12 finished" in said
    assert f"recording stopped, {tmp_path} is incomplete: [Errno 28] No space left on device" in said
    assert not (tmp_path / "spans.jsonl").exists()
    assert sum(len(table) > 0 for table in read_tables(tmp_path).values()) == first_failure - 1


def test_spans_that_cannot_be_written_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr("kvengine.run.write_spans", refuse)
    assert run(tmp_path) == EXIT_FAILED
    assert "is incomplete: [Errno 122] Disk quota exceeded" in capsys.readouterr().out
    assert statuses(tmp_path) == {"finished": 12}


KILLED = """
    import os, sys
    from pathlib import Path

    from kvengine.compose import composer
    from kvengine.executors.null import NullExecutor
    from kvengine.overrides import expand
    from kvengine.registry import discover
    from kvengine.run import Run
    from kvengine.telemetry import recorder

    recorder.ROWS_PER_PART, recorder.FLUSH_INTERVAL_NS = 64, 2**60
    whole = NullExecutor.execute
    NullExecutor.execute = lambda self, plan: os._exit(9) if plan.step == 150 else whole(self, plan)
    with composer() as compose:
        config = compose(expand(sys.argv[2:]))
    Run(config, discover(), Path(sys.argv[1])).execute()
"""


def test_a_killed_process_leaves_its_closed_parts(tmp_path: Path) -> None:
    """It ends without a word in step 150; parts have 64 rows and more."""
    words = [*QUICK, "workload.num_requests=200"]
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path), *words], check=False)
    assert done.returncode == 9
    assert content(tmp_path)["status"] == "running"
    tables = read_tables(tmp_path)
    assert tables["steps"]["step"].to_pylist() == list(range(128))
    assert {name: table.schema for name, table in tables.items()} == SCHEMAS
    assert len(outputs(tmp_path)) >= len(tables["requests"])


# ---- reading


def test_a_directory_that_is_missing_or_empty_has_empty_tables(tmp_path: Path) -> None:
    (tmp_path / "steps").mkdir()
    for path in (tmp_path, tmp_path / "missing"):
        tables = read_tables(path)
        assert {name: table.schema for name, table in tables.items()} == SCHEMAS
        assert not any(map(len, tables.values()))


def test_parts_are_read_in_the_order_they_were_closed(tmp_path: Path) -> None:
    """Also past the tenth, and with words that other parts do not have."""
    directory = RunDirectory(tmp_path)
    for number in range(12):
        row = (number, number, 0, 0, "r", 0, "refuse", f"REASON_{number}", "", "", 0, 0, 0, 0, 0, 0)
        directory.write_part("decisions", columns("decisions", [row]))
    decisions = read_tables(tmp_path)["decisions"]
    assert decisions["first_step"].to_pylist() == list(range(12))
    assert decisions["reason"].to_pylist() == [f"REASON_{number}" for number in range(12)]
    assert directory.problem is None
