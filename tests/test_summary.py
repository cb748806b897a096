"""The figures of a run: worked out by hand, from memory and from disk, and what they say bound it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from kvengine.analysis.bound import ADVICE, bound_line
from kvengine.analysis.summary import PoolFacts, summarize
from kvengine.core.reasons import Reason
from kvengine.core.request import Request, SamplingParams
from kvengine.engine.driver import Driver
from kvengine.engine.recording import PoolState
from kvengine.policies import Workload
from kvengine.telemetry.recorder import ColumnRecorder
from kvengine.telemetry.run_directory import RunDirectory, read_tables
from kvengine.telemetry.tables import SCHEMAS, columns
from kvengine.testing.engines import TestEngine

MS = 1_000_000
BLOCK_BYTES = 1000
D1 = ("a", "b")
"""The load of D1 in the list of known failures: two prompts of 8 tokens, 8 new ones each, 6 blocks of 4."""


class Tee:
    """Tells several recorders the same."""

    def __init__(self, *recorders: Any) -> None:
        self._recorders = recorders

    def __getattr__(self, name: str) -> Any:
        calls = [getattr(recorder, name) for recorder in self._recorders]
        return lambda *told: [call(*told) for call in calls]


class Work(Workload):
    """A workload of (id, prompt tokens, new tokens, arrival in ms); `n` choices each, no two prompts begin alike."""

    concurrency: int | None = None

    def __init__(self, *work: tuple[str, int, int, float], n: int = 1) -> None:
        self.num_requests, self._work, self._n = len(work), work, n

    def requests(self) -> Iterator[Request]:
        for ordinal, (request_id, prompt, new, arrival) in enumerate(self._work):
            yield Request(
                id=request_id,
                prompt_token_ids=(ordinal + 1, *range(100, 99 + prompt)),
                sampling=SamplingParams(temperature=0.0, n=self._n),
                arrival_ns=round(arrival * MS),
                known_output_tokens=new,
            )


def run(
    work: Work, sink: Any = None, num_blocks: int = 64, block_size: int = 4, **settings: Any
) -> tuple[TestEngine, dict[str, pa.Table], dict[str, Any]]:
    """Drive `work`; the engine with its step log, the tables, and their figures."""
    test_engine = TestEngine(num_blocks=num_blocks, block_size=block_size, **settings)
    recorder = ColumnRecorder(sink)
    tee: Any = Tee(test_engine.log, recorder)
    test_engine.engine.recorder = tee
    Driver(test_engine.engine, work).run()
    recorder.flush()
    tables = recorder.tables()
    return test_engine, tables, summarize(tables, facts(test_engine))


def facts(test_engine: TestEngine) -> PoolFacts:
    context = test_engine.engine.context
    return PoolFacts(
        num_blocks=context.allocator.num_blocks,
        block_size=context.allocator.block_size,
        block_bytes=BLOCK_BYTES,
        max_num_seqs=context.limits.max_num_seqs,
    )


def percentiles(p50: float, p90: float, p99: float) -> Any:
    return pytest.approx({"p50": p50, "p90": p90, "p99": p99})


def mean_and_peak(mean: float, peak: float) -> Any:
    return pytest.approx({"mean": mean, "peak": peak})


def test_a_run_worked_out_by_hand() -> None:
    """Steps of 10 ms, two seats, whole prompts first; blocks of 4 slots, 8 of them.

    step  computes                      held  blocks owned  internal  reserved  external  cached
      0   prompts of a (4) and c (8)    12    1 + 2         0         0         20        0
      1   a, c                          14    2 + 3         2 + 1     3         12        0
      2   a (its last), c               10    0 + 3         1         1         20        4
      3   prompt of b (4), which came at 5 ms
                                        14    1 + 3         1         1         16        4
      4   b (its last), c (its last)     0    0             0         0         32        16

    In slots. a computes 4 + 2 of its 8 slots and c 8 + 3 of its 12, so 2 and 1 are never written, from step 1 on,
    when they came with the last block of each. b's second block lives within step 4. Of a one full block stays
    cached, of b one and of c two.
    """
    work = Work(("a", 4, 3, 0), ("c", 8, 4, 0), ("b", 4, 2, 5))
    _, _, figures = run(work, num_blocks=8, max_num_seqs=2, policies={"scheduler": "continuous"})
    assert figures == {
        "num_requests": 3,
        "num_finished": 3,
        "num_unfinished": 0,
        "num_refused": 0,
        "num_rejected": 0,
        "prompt_tokens": 16,
        "output_tokens": 9,
        "duration_s": pytest.approx(0.05),
        "output_tokens_per_s": pytest.approx(180),
        "ttft_ms": percentiles(10, 30, 34.5),  # of 10, 10, 35
        "tpot_ms": percentiles(10, 10 + 0.8 * 10 / 3, 10 + 0.98 * 10 / 3),  # of 10, 10, 40 / 3
        "itl_ms": percentiles(10, 15, 19.5),  # of 10, 10, 10, 10, 10, 20
        "queue_ms": percentiles(0, 20, 24.5),  # of 0, 0, 25
        "goodput_per_s": None,
        "slo_attainment": None,
        "by_priority": None,
        "by_tenant": None,
        "fairness_gap_tokens": None,
        "decode_stall_ms": percentiles(0, 8, 9.8),  # of 0, 10 (c, in step 3), 0
        "decode_stall_share": pytest.approx(10 / (20 + 40 + 10)),
        "kv_held_of_pool": mean_and_peak(50 / 160, 14 / 32),
        "kv_reserved_of_pool": mean_and_peak(5 / 160, 3 / 32),
        "kv_internal_of_pool": mean_and_peak(5 / 160, 3 / 32),
        "kv_external_of_pool": mean_and_peak(100 / 160, 1),
        "kv_cached_of_pool": mean_and_peak(24 / 160, 16 / 32),
        "kv_held_of_owned": mean_and_peak((12 / 12 + 14 / 20 + 10 / 12 + 14 / 16) / 4, 1),
        "kv_saved_bytes": mean_and_peak(0, 0),
        "kv_shared_share": 0,
        "reused_tokens": 0,
        "reused_token_share": 0,
        "copied_blocks": 0,
        "swapped_out_blocks": 0,
        "swapped_in_blocks": 0,
        "swapped_bytes": 0,
        "slot_occupancy": pytest.approx(9 / 10),
        "num_steps": 5,
        "num_preemptions": 0,
        "recomputed_tokens": 0,
        "recompute_share": 0,
        "padding_tokens": 0,
        "padding_share": 0,
        "row_steps": 9,
        "idle_row_share": 0,
        "fragmented_steps": 0,
    }


@pytest.mark.parametrize("deliver", ["batch_end", "token"])
def test_a_static_batch_worked_out_by_hand(deliver: str) -> None:
    """Outputs of 1, 2, 3 and 10 tokens: 9 + 8 + 7 rows are computed for nothing beside 16 real ones."""
    work = Work(("a", 2, 1, 0), ("b", 4, 2, 0), ("c", 1, 3, 0), ("d", 3, 10, 0))
    policies, settings = {"scheduler": "static"}, {"scheduler": {"deliver": deliver}}
    _, _, figures = run(work, policies=policies, settings=settings, max_num_seqs=5)
    assert figures["num_steps"] == 10
    assert figures["row_steps"] == 40
    assert figures["idle_row_share"] == pytest.approx(24 / 40)
    assert figures["padding_tokens"] == 2 + 0 + 3 + 1
    computed = (2 + 4 + 1 + 3) + 6 + (1 + 2 + 9) + 24  # prompts, padding, decodes, finished rows
    assert figures["padding_share"] == pytest.approx(6 / computed)
    assert figures["slot_occupancy"] == pytest.approx(16 / 10 / 5)
    assert figures["ttft_ms"] == percentiles(*[100 if deliver == "batch_end" else 10] * 3)
    assert figures["tpot_ms"] == figures["itl_ms"] == percentiles(10, 10, 10)
    assert figures["duration_s"] == pytest.approx(0.1)


def test_steps_weigh_as_long_as_they_last() -> None:
    """6 tokens in 3 of 10 blocks for 30 ms, 15 in 5 for 10 ms, none for 20 ms; one row of two, two, one.

    Two slots of step 0 and one of steps 0 and 1 are never written, 2 blocks are cached in step 2 and 3 are saved
    in step 1.
    """
    steps = columns(
        "steps",
        [
            step_row(0, 0, 30, held=6, owned=12, free=7, moved=(1, 2, 3)),
            step_row(1, 30, 40, rows=2, held=15, owned=20, free=5, saved=3),
            step_row(2, 40, 60, free=10, cached=2, moved=(5, 0, 1)),
        ],
    )
    unwritten = columns("unwritten", [("a", 0, 0, 0, 2), ("b", 0, 0, 1, 1)])
    tables = {**no_tables(), "steps": steps, "unwritten": unwritten}
    figures = summarize(tables, PoolFacts(num_blocks=10, block_size=4, block_bytes=100, max_num_seqs=2))
    assert figures["kv_held_of_pool"] == mean_and_peak((6 / 40 * 3 + 15 / 40) / 6, 15 / 40)
    assert figures["kv_internal_of_pool"] == mean_and_peak((3 / 40 * 3 + 1 / 40) / 6, 3 / 40)
    assert figures["kv_reserved_of_pool"] == mean_and_peak((3 / 40 * 3 + 4 / 40) / 6, 4 / 40)
    assert figures["kv_external_of_pool"] == mean_and_peak((0.7 * 3 + 0.5 + 1 * 2) / 6, 1)
    assert figures["kv_cached_of_pool"] == mean_and_peak(0.2 * 2 / 6, 0.2)
    assert figures["kv_held_of_owned"] == mean_and_peak((6 / 12 * 3 + 15 / 20) / 4, 15 / 20)
    assert figures["kv_saved_bytes"] == mean_and_peak(300 / 6, 300)
    assert (figures["swapped_bytes"], figures["copied_blocks"]) == (6 * 100, 6)
    assert figures["slot_occupancy"] == pytest.approx((0.5 * 3 + 1 + 0.5 * 2) / 6)


def test_a_run_lasts_from_the_first_arrival() -> None:
    """A static batch that waits 20 ms for a second member, then takes two steps; it came at 7 ms."""
    settings = {"scheduler": {"max_wait_s": 0.02}}
    _, tables, figures = run(Work(("a", 4, 2, 7)), policies={"scheduler": "static"}, settings=settings)
    assert tables["steps"]["start_ns"][0].as_py() == 27 * MS
    assert figures["duration_s"] == pytest.approx(0.04)
    assert figures["output_tokens_per_s"] == pytest.approx(50)
    assert figures["queue_ms"]["p50"] == pytest.approx(20)


def step_row(
    step: int,
    start_ms: int,
    end_ms: int,
    rows: int = 1,
    held: int = 0,
    owned: int = 0,
    free: int = 0,
    cached: int = 0,
    saved: int = 0,
    moved: tuple[int, int, int] = (0, 0, 0),
) -> tuple[int, ...]:
    """A row of the table `steps`: slots `held` and `owned`, and blocks `free`, after it; `moved` blocks in it."""
    pool = PoolState(rows, 0, 0, free, cached, saved, held, owned, 0)
    return (step, start_ms * MS, end_ms * MS, rows, rows, 0, rows, 0, 0, 0, 0, 0, *pool, *moved)


def no_tables() -> dict[str, pa.Table]:
    return {name: columns(name, []) for name in SCHEMAS}


def test_preemption_by_recompute_changes_no_figure_but_its_own() -> None:
    """D1 beside the same work in a large pool: each token is counted once, TTFT is that of the first one."""
    work = Work(*((name, 8, 8, 0) for name in D1))
    pressed, tables, figures = run(work, num_blocks=6)
    _, _, roomy = run(work, num_blocks=64)
    assert (figures["num_requests"], figures["num_finished"]) == (2, 2)
    assert figures["output_tokens"] == roomy["output_tokens"] == 16
    assert figures["prompt_tokens"] == 16
    assert figures["ttft_ms"] == roomy["ttft_ms"] == percentiles(10, 10, 10)
    assert figures["queue_ms"] == roomy["queue_ms"] == percentiles(0, 0, 0)
    assert (
        figures["num_preemptions"]
        == pressed.log.num_preemptions
        == sum(tables["requests"]["num_preemptions"].to_pylist())
    )
    assert figures["num_preemptions"] >= 1
    assert roomy["num_preemptions"] == roomy["recomputed_tokens"] == 0
    assert figures["recomputed_tokens"] > 0
    scheduled = sum(sum(step.scheduled.values()) for step in pressed.log.steps)
    assert scheduled == figures["recomputed_tokens"] + 2 * (8 + 8 - 1)
    assert figures["recompute_share"] == pytest.approx(figures["recomputed_tokens"] / scheduled)
    assert figures["itl_ms"]["p99"] > roomy["itl_ms"]["p99"] == 10
    assert math.isclose(figures["duration_s"], len(pressed.log.steps) / 100)
    gaps = [b - a for victim in tokens_ms(pressed) for a, b in pairwise(victim)]
    assert figures["itl_ms"]["p50"] == sorted(gaps)[len(gaps) // 2]
    assert len(gaps) == 14


def tokens_ms(test_engine: TestEngine) -> list[list[int]]:
    """When each sequence got its tokens, from the step log."""
    steps = test_engine.log.steps
    return [[10 * (s.step + 1) for s in steps if name in s.sampled] for name in D1]


LOADS = [
    {"num_blocks": 9, "max_num_seqs": 4},
    {"num_blocks": 9, "max_num_seqs": 4, "policies": {"scheduler": "continuous"}},
    {"num_blocks": 9, "max_num_seqs": 3, "policies": {"scheduler": "static"}},
    {"num_blocks": 20, "policies": {"scheduler": "continuous", "allocator": "contiguous_max"}},
]


@pytest.mark.parametrize(("settings", "n"), list(product(LOADS, [1, 2])))
def test_shares_are_shares_and_disk_says_what_memory_says(
    tmp_path: Path, settings: dict[str, Any], n: int
) -> None:
    requests = [(f"r{i}", 3 + 5 * (i % 3), 1 + 7 * (i % 2), 4.0 * i) for i in range(12)]
    work = Work(*requests, ("long", 30, 20, 50), n=n)
    test_engine, tables, figures = run(work, RunDirectory(tmp_path), max_model_len=40, **settings)
    assert figures["num_rejected"] == 1
    assert figures["num_finished"] == 12 * n
    assert figures["num_requests"] == 12
    assert summarize(read_tables(tmp_path), facts(test_engine)) == figures
    mixed = {**tables, "tokens": tables["tokens"].sort_by("first_step")}
    assert summarize(mixed, facts(test_engine)) == figures, "rows of sequences may be mixed"
    for name in ("kv_held_of_pool", "kv_held_of_owned", "kv_external_of_pool", "kv_internal_of_pool"):
        share = figures[name]
        assert 0 < share["mean"] <= share["peak"] <= 1, name
    for name in ("kv_reserved_of_pool", "kv_cached_of_pool"):
        share = figures[name]
        assert 0 <= share["mean"] <= share["peak"] <= 1, name
    parts = [figures[f"kv_{name}_of_pool"]["mean"] for name in ("held", "reserved", "internal", "external")]
    assert sum(parts) == pytest.approx(1)
    assert 0 < figures["slot_occupancy"] <= 1
    assert 0 <= figures["idle_row_share"] < 1
    assert figures["num_preemptions"] == test_engine.log.num_preemptions
    assert figures["num_steps"] == len(test_engine.log.steps)
    pool = [step.pool for step in test_engine.log.steps]
    size = facts(test_engine).num_blocks * facts(test_engine).block_size
    external = [1 - state.num_slots_owned / size for state in pool]
    assert figures["kv_external_of_pool"] == mean_and_peak(sum(external) / len(external), max(external))
    assert figures["ttft_ms"]["p50"] > figures["queue_ms"]["p50"] >= 0


def test_choices_of_a_request_are_sequences_of_their_own() -> None:
    """Two choices of three tokens each, one after the other on one seat."""
    _, tables, figures = run(Work(("a", 4, 3, 0), n=2), max_num_seqs=1)
    assert (figures["num_requests"], figures["num_finished"], figures["output_tokens"]) == (1, 2, 6)
    assert figures["itl_ms"] == percentiles(10, 10, 10)
    assert figures["ttft_ms"] == percentiles(25, 37, 39.7)  # of 10, 40
    assert len(tables["tokens"]) == 2
    _, _, together = run(Work(("a", 4, 3, 0), n=2))
    assert together["tpot_ms"] == percentiles(10, 10, 10)


def test_a_run_without_a_step_has_no_figures() -> None:
    figures = summarize(no_tables(), PoolFacts(num_blocks=1, block_size=1, block_bytes=1, max_num_seqs=1))
    counts = {name for name, value in figures.items() if value == 0}
    assert {name for name, value in figures.items() if value is None} == set(figures) - counts
    assert counts >= {"num_requests", "output_tokens", "duration_s", "num_steps", "num_preemptions"}
    assert figures["ttft_ms"] is figures["kv_held_of_pool"] is figures["output_tokens_per_s"] is None


def test_tokens_of_steps_that_a_killed_run_lost_are_left_out() -> None:
    _, tables, _ = run(Work(("a", 4, 8, 0), ("b", 4, 3, 0)))
    for kept in range(9):
        short = {**tables, "steps": tables["steps"].slice(0, kept)}
        figures = summarize(short, PoolFacts(num_blocks=64, block_size=4, block_bytes=1, max_num_seqs=64))
        assert figures["itl_ms"] == (percentiles(10, 10, 10) if kept >= 2 else None)


# ---- what bound it

BOUND = [
    ("MAX_NUM_SEQS", {"max_num_seqs": 1}),
    ("NO_BLOCKS", {"num_blocks": 4}),
    ("NO_TOKEN_BUDGET", {"max_num_batched_tokens": 4}),
    ("BATCH_DRAINING", {"policies": {"scheduler": "static"}, "max_num_seqs": 2}),
    ("NO_BLOCKS", {"num_blocks": 16, "policies": {"allocator": "contiguous_max"}, "max_model_len": 64}),
]


@pytest.mark.parametrize(("reason", "settings"), BOUND)
def test_the_reason_that_kept_requests_waiting_is_named(reason: str, settings: dict[str, Any]) -> None:
    requests = [(f"r{i}", 8, 6, 0.0) for i in range(12)]
    _, tables, _ = run(Work(*requests), **settings)
    assert bound_line(tables).startswith(f"Bound by: {reason} in ")
    assert bound_line(tables).endswith(f"{ADVICE[Reason(reason)]}.")


def test_every_reason_that_can_keep_somebody_waiting_has_an_advice() -> None:
    without = {
        Reason.HEAD_OF_LINE,  # follows from the reason of the one who stands first
        Reason.PREEMPTED_FOR,  # says why somebody left; while it waits it has a reason like all others
        Reason.STEP_IN_PROGRESS,  # is what a wait begins with, before a plan could give a reason
        Reason.NEVER_FITS,  # ends a request as it is added
    }
    assert set(ADVICE) == set(Reason) - without
    assert all("; " in advice for advice in ADVICE.values()), "what it means, and what to do"


def test_a_run_that_nothing_bound() -> None:
    _, tables, _ = run(Work(("a", 8, 6, 0), ("b", 8, 6, 100)))
    assert bound_line(tables) == "Bound by: the model and the arrivals alone; no limit kept requests waiting."
    assert bound_line(no_tables()) == "Bound by: nothing; no request ran."


def test_who_stands_behind_somebody_is_bound_by_what_binds_that_one() -> None:
    """HEAD_OF_LINE holds in all 10 steps, what the heads waited for in 6 and in 4 of them."""
    steps = columns("steps", [step_row(i, i, i + 1) for i in range(10)])
    numbers = (0, 0, 0, 0, 0, 0)
    rows = [
        (0, 9, 0, 9 * MS, None, None, "stop", "HEAD_OF_LINE", "a", "", *numbers),
        (0, 3, 0, 3 * MS, "a", 0, "refuse", "MAX_NUM_SEQS", "", "", *numbers),
        (4, 9, 4 * MS, 9 * MS, "a", 0, "refuse", "NO_BLOCKS", "", "", *numbers),
    ]
    line = bound_line({**no_tables(), "steps": steps, "decisions": columns("decisions", rows)})
    assert line.startswith("Bound by: NO_BLOCKS in 60% of steps")


@pytest.mark.parametrize("reason", list(ADVICE))
def test_the_most_frequent_reason_wins(reason: Reason) -> None:
    """It held in 60 of 100 steps, another in 20 and in one; below one step in 20 nothing bound the run."""
    other = Reason.NO_BLOCKS if reason is Reason.MAX_NUM_SEQS else Reason.MAX_NUM_SEQS
    steps = columns("steps", [step_row(i, i, i + 1) for i in range(100)])

    def refused(first: int, last: int, why: Reason, action: str = "refuse") -> tuple:
        return (first, last, 0, 0, "r", 0, action, why.value, "", "", 0, 0, 0, 0, 0, 0)

    rows = [
        refused(0, 19, other),
        refused(20, 20, other),
        refused(10, 49, reason, "stop"),
        refused(60, 79, reason),
        refused(0, 99, Reason.PREEMPTED_FOR, "preempt"),
    ]
    line = bound_line({**no_tables(), "steps": steps, "decisions": columns("decisions", rows)})
    assert line == f"Bound by: {reason} in 60% of steps: {ADVICE[reason]}."
    few = columns("decisions", [refused(0, 3, reason)])
    assert "alone" in bound_line({**no_tables(), "steps": steps, "decisions": few})
