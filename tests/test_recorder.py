"""The recorder: its columns against a step log of the same run, refusals as rows, parts, a full disk."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kvengine.core.decision import Action, Decision
from kvengine.core.errors import RequestError
from kvengine.core.plan import ScheduledRow, StepPlan, StepResult
from kvengine.core.reasons import Reason, Refusal, Verdict
from kvengine.core.request import Request, SamplingParams
from kvengine.core.sequence import Sequence
from kvengine.core.shapes import PrefixCacheConfig
from kvengine.engine.recording import PoolState
from kvengine.registry import discover
from kvengine.telemetry import recorder as recorder_module
from kvengine.telemetry.recorder import ColumnRecorder
from kvengine.telemetry.run_directory import RunDirectory, read_tables
from kvengine.telemetry.tables import SCHEMAS
from kvengine.testing.engines import TestEngine
from kvengine_plugins.admissions.whole_prompt import WholePromptAdmission

MS = 1_000_000
NOTHING = PoolState(*[0] * 9)

COLUMNS = {
    "steps": "step start_ns end_ns num_rows num_sampled num_prefill_tokens num_decode_tokens num_idle_rows"
    " num_padding_tokens num_recomputed_tokens num_admitted num_preempted num_running num_held num_waiting"
    " num_free_blocks num_cached_blocks num_saved_blocks num_slots_held num_slots_owned num_host_blocks"
    " num_copied_blocks num_swapped_out_blocks num_swapped_in_blocks",
    "requests": "request_id choice pair_key tenant priority status finish_reason problem num_prompt_tokens"
    " num_cached_tokens num_output_tokens arrival_ns admitted_ns first_token_ns last_token_ns finished_ns"
    " num_preemptions num_recomputed_tokens",
    "tokens": "request_id choice first_step num_steps",
    "prefills": "request_id choice first_step num_steps num_tokens",
    "decisions": "first_step last_step time_ns last_ns request_id choice action reason detail policy num_blocks"
    " num_tokens num_free_before num_free_after num_cached num_moved_blocks",
    "unwritten": "request_id choice first_step last_step num_slots",
}
"""What README and analyses rely on: a column that is renamed breaks recorded runs."""


class Tee:
    """Tells several recorders the same."""

    def __init__(self, *recorders: Any) -> None:
        self._recorders = recorders

    def __getattr__(self, name: str) -> Any:
        calls = [getattr(recorder, name) for recorder in self._recorders]
        return lambda *told: [call(*told) for call in calls]


def recorded(sink: Any = None, **settings: Any) -> tuple[TestEngine, ColumnRecorder]:
    """An engine that is recorded and logged."""
    test_engine, recorder = TestEngine(**settings), ColumnRecorder(sink)
    tee: Any = Tee(test_engine.log, recorder)
    test_engine.engine.recorder = tee
    return test_engine, recorder


def load(test_engine: TestEngine) -> None:
    """Five requests, one of them of three choices, in a pool for two; one cannot be served, one is aborted."""
    for i in range(4):
        test_engine.add(f"r{i}", range(10 * i, 10 * i + 8), 8)
    test_engine.add("many", range(6), 8, n=3)
    with pytest.raises(RequestError):
        test_engine.add("long", range(200), 100)
    for _ in range(3):
        test_engine.step()
    test_engine.engine.abort("r3")
    test_engine.run()


def rows(table: pa.Table, *names: str, **equal: Any) -> list[tuple]:
    """The columns `names` of the rows in which other columns equal the given values."""
    return [tuple(row[n] for n in names) for row in table.to_pylist() if equal.items() <= row.items()]


PRESSED = {"num_blocks": 7, "block_size": 4}
ALL_POLICIES = [
    {"policies": {"scheduler": "chunked"}, "max_num_batched_tokens": 11, **PRESSED},
    {"policies": {"scheduler": "chunked"}, "max_num_batched_tokens": 3, "max_num_seqs": 3, **PRESSED},
    {"policies": {"scheduler": "continuous"}, **PRESSED},
    {"policies": {"scheduler": "static"}, "max_num_seqs": 3, **PRESSED, "num_blocks": 9},
]


POLICY_NAMES = ["chunked", "chunked_tight", "continuous", "static"]


def forks_of(tables: dict[str, pa.Table]) -> dict[str, int]:
    """The step in which each fork began: that in which the first choice got its first token."""
    found = rows(tables["decisions"], "request_id", "choice", "first_step", "detail", action="fork")
    assert {(key, detail) for key, _, _, detail in found} <= {("many", "many/0")}
    return {f"{key}/{choice}": step for key, choice, step, _ in found}


@pytest.fixture(params=ALL_POLICIES, ids=POLICY_NAMES)
def finished_run(request: pytest.FixtureRequest) -> tuple[TestEngine, dict[str, pa.Table]]:
    test_engine, recorder = recorded(**request.param)
    load(test_engine)
    recorder.flush()
    return test_engine, recorder.tables()


def test_tables_have_the_documented_columns(finished_run: tuple[TestEngine, dict[str, pa.Table]]) -> None:
    _, tables = finished_run
    assert {name: " ".join(table.column_names) for name, table in tables.items()} == COLUMNS
    assert {name: table.schema for name, table in tables.items()} == SCHEMAS
    assert all(len(table) for table in tables.values())
    counts = [c for table in tables.values() for c in table.column_names if c.startswith("num_")]
    assert {table[c].null_count for table in tables.values() for c in counts if c in table.column_names} == {
        0
    }


def test_steps_are_those_of_the_step_log(finished_run: tuple[TestEngine, dict[str, pa.Table]]) -> None:
    test_engine, tables = finished_run
    logged = test_engine.log.steps
    steps = tables["steps"].to_pylist()
    assert [row["step"] for row in steps] == [step.step for step in logged] == list(range(len(logged)))
    for row, step in zip(steps, logged, strict=True):
        assert row["end_ns"] - row["start_ns"] == 10 * MS
        assert row["num_rows"] == len(step.scheduled)
        assert row["num_sampled"] == len(step.sampled)
        assert row["num_prefill_tokens"] + row["num_decode_tokens"] == sum(step.scheduled.values())
        assert (row["num_idle_rows"], row["num_padding_tokens"]) == (
            step.num_idle_rows,
            step.num_padding_tokens,
        )
        assert row["num_preempted"] == len(step.preempted)
        assert PoolState(*(row[name] for name in PoolState._fields)) == step.pool
        assert row["num_copied_blocks"] == len(step.copies)
        assert row["num_swapped_out_blocks"] == len(step.swap_outs)
        assert row["num_swapped_in_blocks"] == len(step.swap_ins)


@pytest.mark.parametrize("settings", ALL_POLICIES, ids=POLICY_NAMES)
def test_work_is_told_apart(settings: dict[str, Any]) -> None:
    """Admissions, decodes and recomputed tokens, from nothing but what the log says was scheduled, and from who
    was forked; without a prefix cache, so that whoever is admitted begins at 0."""
    test_engine, recorder = recorded(prefix_cache=PrefixCacheConfig(mode="off"), **settings)
    load(test_engine)
    recorder.flush()
    tables = recorder.tables()
    forks = forks_of(tables)
    prompts = {seq.id: seq.num_prompt_tokens for seq in test_engine.log.finished_sequences}
    computed: Counter[str] = Counter()
    peak: Counter[str] = Counter()
    for row, step in zip(tables["steps"].to_pylist(), test_engine.log.steps, strict=True):
        for victim in step.preempted:
            computed[victim] = 0
        decodes = {
            key
            for key, tokens in step.scheduled.items()
            if tokens == 1 and key in step.sampled and computed[key] >= prompts[key]
        }
        assert row["num_decode_tokens"] == len(decodes), step
        assert row["num_admitted"] == sum(computed[key] == 0 for key in step.scheduled)
        again = sum(
            min(computed[k] + n, peak[k]) - computed[k]
            for k, n in step.scheduled.items()
            if computed[k] < peak[k]
        )
        assert row["num_recomputed_tokens"] == again
        computed.update(step.scheduled)
        computed.update({key: prompts[key] for key, at in forks.items() if at == step.step})
        peak |= computed
    assert sum(tables["steps"]["num_recomputed_tokens"].to_pylist()) == sum(
        tables["requests"]["num_recomputed_tokens"].to_pylist()
    )


def test_one_token_of_a_chunk_is_no_decode() -> None:
    """Recomputed after a preemption, token by token, until the one that gives a new token."""
    recorder, seq = ColumnRecorder(), sequence("a")
    seq.token_ids += [3, 4, 5]
    rows_of_steps = [ScheduledRow(seq, 3, 1, False), ScheduledRow(seq, 4, 1, True)]
    for step, row in enumerate(rows_of_steps):
        recorder.step(StepPlan(step=step, now_ns=0, rows=[row]), StepResult([[]], 0), NOTHING, 0)
    recorder.flush()
    assert rows(recorder.tables()["steps"], "num_prefill_tokens", "num_decode_tokens") == [(1, 0), (0, 1)]


def test_requests_are_the_finished_sequences(finished_run: tuple[TestEngine, dict[str, pa.Table]]) -> None:
    test_engine, tables = finished_run
    of_request = ("request_id", "choice", "finish_reason", "num_prompt_tokens", "num_output_tokens")
    of_times = ("admitted_ns", "first_token_ns", "last_token_ns", "finished_ns")
    names = (*of_request, *of_times, "arrival_ns", "num_preemptions", "num_recomputed_tokens")
    expected = [
        (
            *(
                seq.request.id,
                seq.choice,
                str(seq.finish_reason),
                seq.num_prompt_tokens,
                seq.num_output_tokens,
            ),
            *(getattr(seq.times, name) for name in of_times),
            *(seq.arrival_ns, seq.num_preemptions, seq.num_recomputed_tokens),
        )
        for seq in test_engine.log.finished_sequences
    ]
    served = [row for row in rows(tables["requests"], *names, "status") if row[-1] != "rejected"]
    assert [row[:-1] for row in served] == expected
    assert Counter(tables["requests"]["status"].to_pylist()) == {"finished": 6, "aborted": 1, "rejected": 1}
    assert rows(tables["requests"], "request_id", status="aborted") == [("r3",)]
    [(key, problem, admitted)] = rows(
        tables["requests"], "request_id", "problem", "admitted_ns", status="rejected"
    )
    assert (key, admitted) == ("long", None)
    assert "exceed max_model_len=256" in problem


def test_tokens_are_the_steps_that_sampled(finished_run: tuple[TestEngine, dict[str, pa.Table]]) -> None:
    test_engine, tables = finished_run
    sampled: dict[tuple[str, int], list[int]] = {}
    for key in test_engine.log.finished_sequences:
        steps = [step.step for step in test_engine.log.steps if key.id in step.sampled]
        if steps:
            sampled[key.request.id, key.choice] = steps
    for key, step in forks_of(tables).items():  # its first token is of the row of many/0
        assert step == sampled["many", 0][0] == sampled[split(key)][0]
    found: dict[tuple[str, int], list[int]] = {}
    for request_id, choice, first, num_steps in rows(tables["tokens"], *COLUMNS["tokens"].split()):
        steps = found.setdefault((request_id, choice), [])
        assert not steps or steps[-1] < first - 1, "runs of consecutive steps are as long as can be"
        steps += range(first, first + num_steps)
    assert found == sampled


def test_decisions_are_those_of_the_step_log(finished_run: tuple[TestEngine, dict[str, pa.Table]]) -> None:
    test_engine, tables = finished_run
    decisions = tables["decisions"]
    logged = {
        s.step: sorted(key.partition("/")[0] for key in s.preempted)
        for s in test_engine.log.steps
        if s.preempted
    }
    found: dict[int, list[str]] = {}
    for step, request_id in rows(decisions, "first_step", "request_id", action="preempt"):
        found[step] = sorted([*found.get(step, []), request_id])
    assert found == logged
    first = {}
    for step in test_engine.log.steps:
        for key in step.scheduled:
            first.setdefault(key, step.step)
    admitted = rows(decisions, "first_step", "request_id", "choice", action="admit")
    forks = forks_of(tables)
    assert sorted(admitted) == sorted((at, *split(key)) for key, at in first.items() if key not in forks)
    shared = rows(decisions, "num_blocks", "num_tokens", "num_cached", action="fork")
    assert shared == [(2, 6, 6)] * len(forks), "6 tokens in 2 blocks of 4"
    assert len(rows(decisions, "action", action="resume")) <= test_engine.log.num_preemptions
    assert rows(decisions, "request_id", action="abort") == [("r3",)]
    assert all(time_ns == step * 10 * MS for step, time_ns in rows(decisions, "first_step", "time_ns"))


def split(key: str) -> tuple[str, int]:
    request_id, _, choice = key.partition("/")
    return request_id, int(choice or 0)


# ---- rows of refusals


def sequence(request_id: str) -> Sequence:
    request = Request(id=request_id, prompt_token_ids=(1, 2))
    return Sequence(request, choice=0, order=0, max_tokens_total=9, stop_ids=frozenset(), seed=0)


def refuse(seq: Sequence | None, reason: Reason = Reason.NO_BLOCKS, detail: str = "") -> Decision:
    return Decision(Action.STOP if seq is None else Action.REFUSE, seq, reason, detail)


def record_steps(recorder: ColumnRecorder, steps: dict[int, list[Decision]]) -> None:
    for step, decisions in steps.items():
        plan = StepPlan(step=step, now_ns=step * 10 * MS, decisions=decisions)
        recorder.step(plan, StepResult([], 0), NOTHING, (step + 1) * 10 * MS)


def parts_of(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Close a part at so many rows, and never because time has passed."""
    monkeypatch.setattr(recorder_module, "ROWS_PER_PART", num_rows)
    monkeypatch.setattr(recorder_module, "FLUSH_INTERVAL_NS", 2**60)


def refusals(recorder: ColumnRecorder) -> list[tuple]:
    recorder.flush()
    found = rows(recorder.tables()["decisions"], "first_step", "last_step", "request_id", "reason")
    return sorted((row for row in found if row[-1]), key=str)


def test_refusals_of_consecutive_steps_are_one_row() -> None:
    recorder, a, b = ColumnRecorder(), sequence("a"), sequence("b")
    no_seats = Reason.MAX_NUM_SEQS
    record_steps(
        recorder,
        {
            0: [refuse(a, detail="2 needed"), refuse(None, Reason.BATCH_DRAINING)],
            1: [refuse(a, detail="3 needed"), refuse(None, Reason.BATCH_DRAINING), refuse(b)],
            2: [refuse(a), refuse(a), refuse(a, no_seats)],
            3: [],
            4: [refuse(a)],
            5: [refuse(a), refuse(b)],
        },
    )
    assert refusals(recorder) == [
        (0, 1, None, "BATCH_DRAINING"),
        (0, 2, "a", "NO_BLOCKS"),
        (1, 1, "b", "NO_BLOCKS"),
        (2, 2, "a", "MAX_NUM_SEQS"),
        (4, 5, "a", "NO_BLOCKS"),
        (5, 5, "b", "NO_BLOCKS"),
    ]
    [(detail, time_ns)] = rows(
        recorder.tables()["decisions"], "detail", "time_ns", request_id="a", first_step=0
    )
    assert (detail, time_ns) == ("2 needed", 0)


def test_ten_thousand_steps_of_waiting_are_one_row() -> None:
    """Although the numbers in its detail change from step to step."""
    recorder, a = ColumnRecorder(), sequence("a")
    steps = {
        step: [refuse(a, detail=f"{step} free"), refuse(None, Reason.HEAD_OF_LINE, "a")]
        for step in range(10_000)
    }
    record_steps(recorder, steps)
    recorder.flush()
    found = rows(
        recorder.tables()["decisions"], "action", "first_step", "last_step", "time_ns", "last_ns", "detail"
    )
    assert sorted(found) == [
        ("refuse", 0, 9999, 0, 99_990 * MS, "0 free"),
        ("stop", 0, 9999, 0, 99_990 * MS, "a"),
    ]


def test_a_plan_without_it_ends_a_refusal() -> None:
    """An idle one too, which has the number of the step after it; and one of the same number does not lengthen it."""
    recorder, a = ColumnRecorder(), sequence("a")

    def plan(step: int, moment: int, *decisions: Decision) -> StepPlan:
        return StepPlan(step=step, now_ns=moment, decisions=list(decisions))

    recorder.step(plan(0, 0, refuse(a)), StepResult([], 0), NOTHING, 5)
    recorder.idle(plan(1, 10, refuse(a)))
    recorder.idle(plan(1, 20))
    recorder.idle(plan(1, 30, refuse(a)))
    recorder.step(plan(1, 40, refuse(a)), StepResult([], 0), NOTHING, 45)
    recorder.step(plan(2, 50), StepResult([], 0), NOTHING, 55)
    recorder.flush()
    found = rows(recorder.tables()["decisions"], "first_step", "last_step", "time_ns", "last_ns")
    assert found == [(0, 1, 0, 10), (1, 1, 30, 40)]


@pytest.mark.parametrize(
    ("reason", "action", "num_rows"),
    [
        (Reason.NO_BLOCKS, Action.REFUSE, 1),
        (Reason.HEAD_OF_LINE, Action.REFUSE, 2),
        (Reason.POLICY, Action.REFUSE, 2),
        (Reason.NO_BLOCKS, Action.STOP, 2),
    ],
)
def test_details_that_say_what_the_reason_is_tell_rows_apart(
    reason: Reason, action: Action, num_rows: int
) -> None:
    recorder, a = ColumnRecorder(), sequence("a") if action is Action.REFUSE else None
    record_steps(recorder, {step: [Decision(action, a, reason, "ab"[step > 1])] for step in range(4)})
    recorder.flush()
    found = rows(recorder.tables()["decisions"], "first_step", "last_step", "detail")
    assert found == ([(0, 3, "a")] if num_rows == 1 else [(0, 1, "a"), (2, 3, "b")])


def test_a_preemption_says_by_whom_and_what_it_freed() -> None:
    test_engine, recorder = recorded(num_blocks=6, block_size=4, policies={"scheduler": "continuous"})
    for name in "ab":
        test_engine.add(name, range(ord(name), ord(name) + 8), 8)
    test_engine.run()
    recorder.flush()
    names = ("first_step", "request_id", "reason", "detail", "policy", "num_blocks", "num_tokens", "num_free_before",
             "num_free_after", "num_moved_blocks")  # fmt: skip
    assert rows(recorder.tables()["decisions"], *names, action="preempt") == [
        (5, "b", "PREEMPTED_FOR", "a", "latest_arrival", 3, 12, 0, 3, 0)
    ]


def test_prefills_are_the_rows_that_were_no_decodes(
    finished_run: tuple[TestEngine, dict[str, pa.Table]],
) -> None:
    """Their tokens per step are those of the table `steps`, and the runs are as long as can be."""
    _, tables = finished_run
    known, least = Counter[int](), Counter[int]()
    ends: dict[tuple[str, int], int] = {}
    for request_id, choice, first, num_steps, tokens in rows(
        tables["prefills"], *COLUMNS["prefills"].split()
    ):
        assert first > ends.get((request_id, choice), -2) + 1
        ends[request_id, choice] = first + num_steps - 1
        (known if num_steps == 1 else least)[first] += tokens if num_steps == 1 else 1
        for step in range(first + 1, first + num_steps):
            least[step] += 1
    computed = dict(rows(tables["steps"], "step", "num_prefill_tokens"))
    for step, tokens in computed.items():
        assert tokens >= known[step] + least[step]
        assert least[step] or tokens == known[step]
    assert sum(computed.values()) == sum(tables["prefills"]["num_tokens"].to_pylist())


class Refusing(WholePromptAdmission):
    def refuses(self, seq: Sequence, view: Any) -> Refusal | None:
        return Refusal(Reason.DEADLINE, "too late", Verdict.REFUSE) if any(view.running) else None


def test_who_is_refused_for_good_is_a_status_of_its_own() -> None:
    """With both its choices, its tenant and its priority."""
    registry = discover()
    registry.add("admission", "refusing", lambda config, build: Refusing(), summary="of this test")
    test_engine, recorder = recorded(registry=registry, policies={"admission": "refusing"})
    test_engine.add("a", range(8), 3)
    test_engine.step()
    params = SamplingParams(max_tokens=2, n=2)
    request = Request(id="b", prompt_token_ids=(1, 2), sampling=params, tenant="t", priority=3)
    test_engine.engine.add_request(request)
    test_engine.run()
    recorder.flush()
    names = ("request_id", "choice", "tenant", "priority", "finish_reason", "finished_ns", "admitted_ns")
    assert rows(recorder.tables()["requests"], *names, status="refused") == [
        ("b", choice, "t", 3, "refused", 20 * MS, None) for choice in (0, 1)
    ]
    reject = rows(recorder.tables()["decisions"], "request_id", "reason", "detail", "policy", action="reject")
    assert reject == [("b", "DEADLINE", "too late", "refusing")]
    assert test_engine.log.steps[1].refused == ("b/0",)


def test_a_refusal_goes_on_over_the_end_of_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where `steps` and `decisions` fill a part in the same step."""
    parts_of(4, monkeypatch)
    recorder, a = ColumnRecorder(), sequence("a")
    over = [refuse(sequence(f"other{i}"), Reason.MAX_NUM_SEQS) for i in range(2)]
    admit = Decision(Action.ADMIT, sequence("b"))
    record_steps(recorder, {step: [refuse(a), admit, *(over if step == 1 else [])] for step in range(10)})
    assert rows(recorder.tables()["decisions"], "request_id", action="admit"), "no part was closed"
    assert refusals(recorder) == [
        (0, 9, "a", "NO_BLOCKS"),
        (1, 1, "other0", "MAX_NUM_SEQS"),
        (1, 1, "other1", "MAX_NUM_SEQS"),
    ]


def test_decisions_of_plans_without_work_are_recorded() -> None:
    """A static batch that waits for a second member, and the abort of the only one that runs."""
    test_engine, recorder = recorded(
        policies={"scheduler": "static"}, settings={"scheduler": {"max_wait_s": 0.02}}
    )
    test_engine.add("a", range(8), 8)
    test_engine.step()
    assert test_engine.log.steps == []
    test_engine.step()
    test_engine.engine.abort("a")
    test_engine.step()
    recorder.flush()
    tables = recorder.tables()
    assert len(tables["steps"]) == 1
    forming = rows(tables["decisions"], "first_step", "action", "time_ns", reason="BATCH_FORMING")
    assert forming == [(0, "stop", 0)]
    assert rows(tables["decisions"], "request_id", "time_ns", "num_blocks", action="abort") == [
        ("a", 30 * MS, 1)
    ]
    assert rows(tables["requests"], "status", "finish_reason", "num_output_tokens") == [
        ("aborted", "abort", 1)
    ]


# ---- parts on disk


def some_steps(test_engine: TestEngine, num_steps: int) -> None:
    """So many steps of two sequences, and one request after another that ends at once."""
    test_engine.add("a", range(8), 200)
    test_engine.add("b", range(8), 200)
    for step in range(num_steps):
        test_engine.add(f"short{step}", range(4), 1)
        test_engine.step()


def test_a_process_that_dies_leaves_its_closed_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody calls flush, and a file was being written when it ended."""
    parts_of(16, monkeypatch)
    test_engine, recorder = recorded(RunDirectory(tmp_path))
    some_steps(test_engine, 71)
    (tmp_path / "steps" / "00004.partial").write_bytes(b"half a file")
    kept = read_tables(tmp_path)
    assert {name: table.schema for name, table in kept.items()} == SCHEMAS
    assert kept["steps"]["step"].to_pylist() == list(range(64))
    assert [pq.read_metadata(p).num_rows for p in sorted((tmp_path / "steps").glob("*.parquet"))] == [16] * 4
    assert kept["requests"]["request_id"].to_pylist() == [f"short{i}" for i in range(len(kept["requests"]))]
    assert len(kept["requests"]) == len(kept["tokens"]) >= 64
    recorder.flush()
    whole = recorder.tables()
    assert {name: len(table) for name, table in whole.items()} != {n: len(t) for n, t in kept.items()}
    for name, table in kept.items():
        assert table.to_pylist() == whole[name].slice(0, len(table)).to_pylist()


def test_what_is_old_is_written_although_no_part_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that moves by a second whenever it is read; a refusal that goes on stays one row."""
    ticks: Iterator[int] = count(0, 10**9)
    monkeypatch.setattr(recorder_module.time, "perf_counter_ns", lambda: next(ticks))
    recorder, a = ColumnRecorder(RunDirectory(tmp_path)), sequence("a")
    record_steps(recorder, {step: [refuse(a)] for step in range(20)})
    written = read_tables(tmp_path)
    assert 15 <= len(written["steps"]) < 20
    assert len(list((tmp_path / "steps").iterdir())) < 15
    assert len(written["decisions"]) == 0
    assert refusals(recorder) == [(0, 19, "a", "NO_BLOCKS")]
    assert len(read_tables(tmp_path)["steps"]) == 20


def test_what_is_flushed_is_read_back(tmp_path: Path) -> None:
    test_engine, recorder = recorded(RunDirectory(tmp_path), **ALL_POLICIES[0])
    load(test_engine)
    recorder.flush()
    recorder.flush()
    written = read_tables(tmp_path)
    for name, table in recorder.tables().items():
        assert sorted(written[name].to_pylist(), key=str) == sorted(table.to_pylist(), key=str)
        assert len(list((tmp_path / name).iterdir())) == 1


def test_a_full_disk_ends_the_recording_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts_of(16, monkeypatch)
    calls = count()

    def write_table(table: pa.Table, where: Path, **options: Any) -> None:
        if next(calls) >= 2:
            raise OSError(errno.ENOSPC, "No space left on device", str(where))
        Path(where).write_bytes(b"a part")

    monkeypatch.setattr(pq, "write_table", write_table)
    directory = RunDirectory(tmp_path)
    test_engine, recorder = recorded(directory)
    some_steps(test_engine, 40)
    problem = directory.problem
    assert isinstance(problem, OSError)
    assert problem.errno == errno.ENOSPC
    test_engine.run()
    recorder.flush()
    directory.write_output({"request_id": "a"})
    assert directory.problem is problem
    assert next(calls) == 3, "nothing is tried after the first failure"
    assert not (tmp_path / "outputs.jsonl").exists()
    assert len(list(tmp_path.rglob("*.parquet"))) == 2
    tables = recorder.tables()
    assert len(tables["steps"]) == len(test_engine.log.steps)
    assert len(tables["requests"]) == len(test_engine.log.finished_sequences) == 42


# ---- ends that are not the usual one


def test_sequences_that_live_when_the_run_ends_are_unfinished() -> None:
    test_engine, recorder = recorded(max_num_seqs=1)
    test_engine.add("running", range(8), 8)
    test_engine.add("waiting", range(8), 8)
    test_engine.step()
    for seq in test_engine.engine.live_sequences():
        recorder.finished(seq, test_engine.engine.clock.now())
    recorder.flush()
    names = ("request_id", "status", "finish_reason", "num_output_tokens", "first_token_ns", "finished_ns")
    assert rows(recorder.tables()["requests"], *names) == [
        ("running", "unfinished", None, 1, 10 * MS, None),
        ("waiting", "unfinished", None, 0, None, None),
    ]


def test_a_static_batch_that_was_not_handed_over_is_unfinished() -> None:
    """`short` has all its tokens, and the user none of them."""
    test_engine, recorder = recorded(policies={"scheduler": "static"})
    test_engine.add("short", range(8), 1)
    test_engine.add("long", range(8), 8)
    test_engine.step()
    for seq in test_engine.engine.live_sequences():
        recorder.finished(seq, test_engine.engine.clock.now())
    recorder.flush()
    names = ("request_id", "status", "finish_reason", "num_output_tokens", "first_token_ns")
    assert rows(recorder.tables()["requests"], *names) == [
        ("short", "unfinished", None, 1, None),
        ("long", "unfinished", None, 1, None),
    ]


def test_a_recorder_without_steps_gives_empty_tables(tmp_path: Path) -> None:
    recorder = ColumnRecorder(RunDirectory(tmp_path))
    recorder.flush()
    assert {name: table.schema for name, table in recorder.tables().items()} == SCHEMAS
    assert not any(map(len, recorder.tables().values()))
    assert list(tmp_path.iterdir()) == []


def test_time_in_every_call_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that moves by 5 ns whenever it is read."""
    ticks: Iterator[int] = count(0, 5)
    monkeypatch.setattr(recorder_module.time, "perf_counter_ns", lambda: next(ticks))
    recorder = ColumnRecorder()
    assert recorder.seconds == 0
    record_steps(recorder, {0: [], 1: []})
    recorder.finished(sequence("a"), 0)
    recorder.rejected(sequence("b").request, RequestError("b", "too long"), 0)
    recorder.idle(StepPlan(step=2, now_ns=0, decisions=[refuse(None)]))
    assert recorder.seconds == pytest.approx(5 * 5e-9)
