"""What a run lost: stalls against the timeline, unfair service by hand and by brute force, goodput, groups."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvengine import launch
from kvengine.analysis.fairness import MAX_TENANTS, fairness_gap
from kvengine.analysis.goodput import by_group, goodput
from kvengine.analysis.summary import PoolFacts, summarize
from kvengine.analysis.timeline import HELD, STALLED_BY_PREFILLS, Timeline
from kvengine.analysis.waste import TokenRuns, decode_stalls
from kvengine.cli import main
from kvengine.core.limits import SloConfig
from kvengine.core.request import Request, SamplingParams
from kvengine.engine.driver import Driver
from kvengine.engine.recording import PoolState
from kvengine.policies import Workload
from kvengine.telemetry.recorder import ColumnRecorder
from kvengine.telemetry.tables import SCHEMAS, columns
from kvengine.testing.engines import TestEngine

MS = 1_000_000
POOL = PoolFacts(num_blocks=64, block_size=4, block_bytes=1, max_num_seqs=8)


class Work(Workload):
    """A workload of (prompt tokens, new tokens, arrival in ms, tenant, priority)."""

    concurrency: int | None = None

    def __init__(self, *work: tuple[int, int, float, str | None, int]) -> None:
        self.num_requests, self._work = len(work), work

    def requests(self) -> Iterator[Request]:
        for ordinal, (prompt, new, arrival, tenant, priority) in enumerate(self._work):
            yield Request(
                id=f"r{ordinal}",
                prompt_token_ids=(ordinal % 200, *range(100, 99 + prompt)),
                sampling=SamplingParams(temperature=0.0),
                arrival_ns=round(arrival * MS),
                known_output_tokens=new,
                tenant=tenant,
                priority=priority,
            )


def run(work: Work, **settings: Any) -> dict[str, pa.Table]:
    test_engine = TestEngine(**{"num_blocks": 64, "block_size": 4, **settings})
    test_engine.engine.recorder = recorder = ColumnRecorder()
    Driver(test_engine.engine, work).run()
    recorder.flush()
    return recorder.tables()


def no_tables() -> dict[str, pa.Table]:
    return {name: columns(name, []) for name in SCHEMAS}


def step_rows(*spans: tuple[int, int], prefills: frozenset[int] = frozenset()) -> pa.Table:
    """Steps of these [start, end) in ms; those of `prefills` compute a prefill token."""
    pool = PoolState(*[0] * 9)
    rows = [
        (i, begin * MS, end * MS, 1, 1, int(i in prefills), 1, 0, 0, 0, 0, 0, *pool, 0, 0, 0)
        for i, (begin, end) in enumerate(spans)
    ]
    return columns("steps", rows)


# ---- stalls


def test_a_stall_worked_out_by_hand() -> None:
    """Steps of 10, 20, 30 ms and so on, with prefills in 1, 2, 5 and 6.

    `a` has tokens in steps 0, 3, 4 and 7 and is preempted by no one: it stalls in 1, 2 and in 5, 6. `b` has them in
    0 and 1, is preempted by the plan of 3 and has its next token in 6 and 7: it stalls in 2. `c` has one.
    """
    lengths = [10, 20, 30, 40, 50, 60, 70, 80]
    begins = [sum(lengths[:i]) for i in range(8)]
    spans = [(begin, begin + length) for begin, length in zip(begins, lengths, strict=True)]
    tokens = [("a", 0, 7, 1), ("a", 0, 0, 1), ("b", 0, 6, 2), ("b", 0, 0, 2), ("a", 0, 3, 2), ("c", 0, 1, 1)]
    gone = (3, 3, 60 * MS, 60 * MS, "b", 0, "preempt", "PREEMPTED_FOR", "a", "latest", 0, 0, 0, 0, 0, 0)
    tables = {
        **no_tables(),
        "steps": step_rows(*spans, prefills=frozenset({1, 2, 5, 6})),
        "tokens": columns("tokens", tokens),
        "decisions": columns("decisions", [gone]),
    }
    stalled, decoded = decode_stalls(tables, TokenRuns(tables))
    assert sorted(zip(stalled / MS, decoded / MS, strict=True)) == [
        (30, 20 + 30 + 80),  # b: the token of step 1, step 2, and from the token of 6 to that of 7
        (20 + 30 + 60 + 70, 350),
    ]
    tpot = dict(zip(TokenRuns(tables).numbers, TokenRuns(tables).tpot_ms().tolist(), strict=True))
    assert tpot["a", 0] == pytest.approx(350 / 3)
    assert np.isnan(tpot["c", 0])


@pytest.mark.parametrize("scheduler", ["chunked", "continuous", "static"])
@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 14), st.integers(1, 9), st.integers(0, 60)), min_size=1, max_size=9))
def test_stalls_are_those_of_the_timelines(scheduler: str, work: list[tuple[int, int, int]]) -> None:
    requests = [(prompt, new, at, None, 0) for prompt, new, at in sorted(work, key=lambda one: one[2])]
    tables = run(
        Work(*requests), policies={"scheduler": scheduler}, num_blocks=8, max_num_seqs=4, max_model_len=24
    )
    timeline = Timeline(tables)
    expected = []
    for key, life in timeline.lives.items():
        shares = [(share.name, share.ns) for part in timeline.parts(key) if part.phase == "decode"
                  for share in part.shares]  # fmt: skip
        if life.request["num_output_tokens"] > 1:
            stalled = sum(ns for name, ns in shares if name == STALLED_BY_PREFILLS)
            expected.append((stalled, sum(ns for name, ns in shares if name != HELD)))
    found = decode_stalls(tables, TokenRuns(tables))
    assert sorted(zip(*(column.tolist() for column in found), strict=True)) == sorted(expected)


def test_chunked_prefills_stall_nobody_and_whole_ones_do() -> None:
    work = Work(*((8, 10, 25.0 * i, None, 0) for i in range(4)))
    stall = {
        name: summarize(run(work, policies={"scheduler": name}), POOL)["decode_stall_share"]
        for name in ("chunked", "continuous")
    }
    assert stall["chunked"] == 0
    assert stall["continuous"] > 0.1


# ---- fairness


def request_row(
    request_id: str, tenant: str | None, prompt: int, arrival: int, admitted: int | None, **more: Any
) -> tuple:
    """Times in ms."""
    of = {"cached": 0, "finished": None, "status": "finished", **more}
    times = [None if moment is None else moment * MS for moment in (admitted, None, None, of["finished"])]
    return (
        request_id,
        0,
        "",
        tenant,
        0,
        of["status"],
        None,
        None,
        prompt,
        of["cached"],
        0,
        arrival * MS,
        *times,
        0,
        0,
    )


def test_a_gap_worked_out_by_hand() -> None:
    """Steps of 10 ms. Both tenants have a request waiting from 5 ms to 35.

    ann's first (prompt 4, of which 1 cached) is admitted at 10 and has a token in the steps that end at 20 and 30;
    bob's first (prompt 8) is admitted at 20. Ahead by ann: 3 at 10, then 3 + 2 - 8 = -3 at 20, -1 at 30. What begins
    at 35 no longer counts: bob's second is admitted there.
    """
    requests = [
        request_row("a0", "ann", 4, 0, 10, cached=1, finished=30),
        request_row("a1", "ann", 9, 5, 50, finished=60),
        request_row("b0", "bob", 8, 0, 20, finished=60),
        request_row("b1", "bob", 50, 5, 35, finished=60),
        request_row("huge", "eve", 99, 0, None, status="rejected"),
    ]
    tables = {
        **no_tables(),
        "steps": step_rows(*((10 * i, 10 * i + 10) for i in range(6))),
        "requests": columns("requests", requests),
        "tokens": columns("tokens", [("a0", 0, 1, 2)]),
    }
    assert fairness_gap(tables) == 6
    alone = {**tables, "requests": tables["requests"].slice(0, 2)}
    assert fairness_gap(alone) is None


def test_a_preempted_request_waits_too() -> None:
    """From 20 to 40, while the other tenant's second waits; ann gets 2 tokens meanwhile by another sequence."""
    requests = [
        request_row("a0", "ann", 4, 0, 0, finished=60),
        request_row("a1", "ann", 4, 0, 0, finished=60),
        request_row("b0", "bob", 8, 0, 50, finished=60),
    ]
    common = ("a0", 0)
    decisions = [
        (2, 2, 20 * MS, 20 * MS, *common, "preempt", "PREEMPTED_FOR", "a1", "", 0, 0, 0, 0, 0, 0),
        (4, 4, 40 * MS, 40 * MS, *common, "resume", "", "", "", 0, 0, 0, 0, 0, 0),
    ]
    tables = {
        **no_tables(),
        "steps": step_rows(*((10 * i, 10 * i + 10) for i in range(6))),
        "requests": columns("requests", requests),
        "tokens": columns("tokens", [("a1", 0, 0, 6)]),
    }
    assert fairness_gap(tables) == 0
    assert fairness_gap({**tables, "decisions": columns("decisions", decisions)}) == 2 * 2


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"), st.integers(1, 9), st.integers(0, 9), st.integers(0, 6), st.integers(0, 4)
        ),
        min_size=2,
        max_size=7,
    )
)  # fmt: skip
def test_the_gap_is_that_of_the_worst_interval(work: list[tuple[str, int, int, int, int]]) -> None:
    """Against all pairs of moments; steps of 1 ms, admission at a step's start, a token for each step after it."""
    num_steps = 22
    requests, tokens = [], []
    waits: dict[str, list[tuple[int, int]]] = {}
    gifts: list[tuple[int, str, int]] = []
    for i, (tenant, prompt, arrival, wait, new) in enumerate(work):
        admitted = arrival + wait
        requests.append(request_row(f"r{i}", tenant, prompt, arrival, admitted, finished=admitted + new + 1))
        waits.setdefault(tenant, []).append((arrival, admitted))
        gifts.append((admitted, tenant, prompt))
        if new:
            tokens.append((f"r{i}", 0, admitted, new))
            gifts += [(admitted + k + 1, tenant, 2) for k in range(new)]
    tables = {
        **no_tables(),
        "steps": step_rows(*((i, i + 1) for i in range(num_steps))),
        "requests": columns("requests", requests),
        "tokens": columns("tokens", tokens),
    }

    def waiting(tenant: str, moment: int) -> bool:
        """Throughout [moment, moment + 1)."""
        return any(begin <= moment < end for begin, end in waits[tenant])

    expected = 0
    for one, other in combinations(sorted(waits), 2):
        for begin in range(num_steps):
            for end in range(begin + 1, num_steps):
                if not (waiting(one, end - 1) and waiting(other, end - 1)):
                    break
                difference = sum(
                    tokens if tenant == one else -tokens
                    for moment, tenant, tokens in gifts
                    if tenant in (one, other) and begin <= moment < end
                )
                expected = max(expected, abs(difference))
    assert fairness_gap(tables) == (expected if len(waits) > 1 else None)


def test_many_tenants_and_requests_take_no_time_to_speak_of() -> None:
    """Of so many tenants, those count that waited longest: the last ones come last and wait least."""
    num, tenants = 3000, MAX_TENANTS + 5
    requests = [request_row(f"r{i}", f"t{i % tenants}", 5, i, i + 400, finished=i + 500) for i in range(num)]
    requests.append(request_row("short", "short", 1000, 0, 3, finished=5))
    tables = {
        **no_tables(),
        "steps": step_rows(*((i, i + 1) for i in range(num + 500))),
        "requests": columns("requests", requests),
        "tokens": columns("tokens", [(f"r{i}", 0, i + 400, 50) for i in range(num)]),
    }
    gap = fairness_gap(tables)
    assert gap is not None
    assert 5 <= gap < 1000


# ---- goodput and groups


def test_goodput_worked_out_by_hand() -> None:
    """TTFT of 10, 20, 30, 40 ms and none; TPOT of 5, 9, none, 9 and none; `d` has a second choice, which is slow."""
    rows = [request_row(name, None, 1, 0, 0) for name in "abcd"]
    rows += [request_row("d", None, 1, 0, 0), request_row("e", None, 1, 0, None, status="refused")]
    served = columns("requests", rows)
    nan = float("nan")
    ttft, tpot = np.array([10.0, 20, 30, 40, 99, nan]), np.array([5.0, 9, nan, 9, 9, nan])

    def met(**limits: float) -> tuple[float | None, float | None]:
        found = goodput(served, SloConfig(**limits), 2.0, ttft, tpot)
        return found["goodput_per_s"], found["slo_attainment"]

    assert met() == (None, None)
    assert met(ttft_ms=30.0) == (1.5, 3 / 5)
    assert met(ttft_ms=40.0) == (1.5, 3 / 5), "both choices of d must be in time"
    assert met(ttft_ms=99.0) == (2.0, 4 / 5)
    assert met(tpot_ms=8.0) == (1.0, 2 / 5), "an output of one token has no TPOT"
    assert met(ttft_ms=15.0, tpot_ms=5.0) == (0.5, 1 / 5)
    assert met(ttft_ms=1.0) == (0.0, 0.0)


def test_groups_have_their_own_percentiles() -> None:
    rows = [request_row(f"r{i}", [None, "x"][i % 2], 1, 0, 0) for i in range(4)]
    found = by_group(columns("requests", rows), "tenant", ttft_ms=np.array([1.0, 10, 3, 30]))
    assert found == {
        "none": {"num_sequences": 2, "ttft_ms": pytest.approx({"p50": 2, "p90": 2.8, "p99": 2.98})},
        "x": {"num_sequences": 2, "ttft_ms": pytest.approx({"p50": 20, "p90": 28, "p99": 29.8})},
    }
    assert by_group(columns("requests", rows), "priority", ttft_ms=np.zeros(4)) is None


def test_a_run_has_its_groups_and_its_goodput() -> None:
    """On one seat: TTFT of 10, 30 and 50 ms."""
    work = Work((4, 2, 0, "x", 0), (4, 2, 0, "y", 1), (4, 2, 0, "y", 1))
    figures = summarize(run(work, max_num_seqs=1), POOL, SloConfig(ttft_ms=30.0))
    assert figures["by_tenant"]["y"]["ttft_ms"]["p50"] == pytest.approx(40)
    assert figures["by_priority"]["0"]["num_sequences"] == 1
    assert figures["slo_attainment"] == pytest.approx(2 / 3)
    assert figures["goodput_per_s"] == pytest.approx(2 / 0.06)
    assert figures["fairness_gap_tokens"] == 0, "x has nobody waiting"


def test_what_says_something_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "checkout", lambda: None)
    monkeypatch.setenv("COLUMNS", "140")
    lines = [
        {"id": f"q{i}", "prompt_token_ids": [i, 5, 6, 7] * 6, "output_tokens": 20, "arrival_s": 0.03 * i,
         "tenant": "ab"[i % 2]}
        for i in range(12)
    ]  # fmt: skip
    Path("w.jsonl").write_text("\n".join(map(json.dumps, lines)))
    words = ["executor=null", "model=checksum", "workload=jsonl", "workload.path=w.jsonl", "num_blocks=8",
             "max_model_len=64"]  # fmt: skip
    assert main([*words, "slo.ttft_ms=100"]) == 0
    said = capsys.readouterr().out
    for label in (
        "stalled by prefills",
        "goodput",
        "fairness gap",
        "tenant a",
        "tenant b",
        "of all computed",
    ):
        assert label in said, label
    assert "priority" not in said
    assert main([*words, "-m", "scheduler=continuous,chunked", "slo.ttft_ms=1"]) == 0
    table = capsys.readouterr().out.split("All variants")[1]
    assert "stall ms" in table
    assert "good-" in table, "none is an answer"
    assert "%)" in table, "tokens computed again"
    assert all(len(line) <= 140 for line in table.splitlines())


@pytest.mark.parametrize(("word", "says"), [("slo.ttft_ms=0", "positive"), ("slo.tpot_ms=x", "number"),
                                            ("slo.tpott_ms=1", "did you mean 'slo.tpot_ms'")])  # fmt: skip
def test_a_wrong_limit_is_one_line(word: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {word.split('=')[0]}=")
    assert says in said
    assert said.count("\n") == 1
