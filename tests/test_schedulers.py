"""Prefill-first with a cap, chunks in order of admission, budgets for prefills; no plan looks at all who wait."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvengine.core.errors import ConfigError
from kvengine.core.plan import StepPlan, StepResult
from kvengine.core.shapes import PrefixCacheConfig
from kvengine.engine.recording import PoolState
from kvengine.registry import discover
from kvengine.testing.cases import Case, cases, check_nothing_is_left, check_outputs, drive, steps_one_by_one
from kvengine.testing.engines import TestEngine
from kvengine.testing.step_log import StepLog

SCHEDULERS = discover().names("scheduler")
RANDOM = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)


class ReasonLog(StepLog):
    """Also keeps why each step left whom waiting (None: all others)."""

    def __init__(self) -> None:
        super().__init__()
        self.reasons: list[dict[str | None, str]] = []

    def step(self, plan: StepPlan, result: StepResult, pool: PoolState, end_ns: int) -> None:
        super().step(plan, result, pool, end_ns)
        said = [d for d in plan.decisions if d.action in ("refuse", "stop")]
        self.reasons.append({d.seq.id if d.seq else None: str(d.reason) for d in said})


def engine_of(
    scheduler: str, chosen: dict[str, Any] | None = None, **config: Any
) -> tuple[TestEngine, ReasonLog]:
    engine = TestEngine(
        policies={"scheduler": scheduler},
        settings={"scheduler": chosen or {}},
        **{"prefix_cache": PrefixCacheConfig(mode="off"), **config},
    )
    engine.log = engine.engine.recorder = log = ReasonLog()
    return engine, log


def prompt_of(length: int) -> list[int]:
    return [(7 * i + 3) % 251 for i in range(length)]


def scheduled(log: StepLog) -> list[dict[str, int]]:
    return [step.scheduled for step in log.steps]


# ---- continuous: a cap on consecutive prefills


@pytest.mark.parametrize(
    ("cap", "kinds"), [(None, "pppppd"), (1, "pdpdpdpdpd"), (2, "ppdppdpd"), (3, "pppdppd"), (5, "pppppd")]
)
def test_decodes_have_a_turn_after_so_many_prefill_steps(cap, kinds):
    chosen = {"max_consecutive_prefills": cap}
    engine, log = engine_of("continuous", chosen, max_model_len=16, max_num_batched_tokens=16)
    engine.add("d", prompt_of(9), 7)
    engine.step()
    for i in range(5):
        engine.add(f"p{i}", prompt_of(9), 7)  # one to a step
    engine.run()
    ids = [next(iter(step))[0] for step in scheduled(log)]
    assert "".join(ids[1 : 1 + len(kinds)]) == kinds
    if cap and cap < 5:
        assert log.reasons[1 + cap] == {None: "PREFILL_INTERVAL"}


def test_prefills_for_which_nobody_waits_do_not_count():
    engine, log = engine_of("continuous", {"max_consecutive_prefills": 1}, max_num_batched_tokens=256)
    for i in range(3):
        engine.add(f"p{i}", prompt_of(200), 1)  # ends with its prefill
    engine.run()
    assert [list(step) for step in scheduled(log)] == [["p0"], ["p1"], ["p2"]]


# ---- chunked: order of admission


@pytest.mark.parametrize(
    ("order", "step"),
    [("decodes_first", {"a": 1, "late": 1, "long": 6}), ("admission", {"a": 1, "long": 7})],
)
def test_order_of_those_that_run(order, step):
    """Two branches of `a` run at once: `long` with 20 tokens of its own, and after it one that decodes."""
    engine, log = engine_of("chunked", {"order": order}, max_num_batched_tokens=8)
    engine.add("a", prompt_of(3), 30)
    engine.step()
    engine.fork("long", "a", prompt_of(20), 5)
    engine.fork("late", "a", [], 5)
    engine.step()
    assert scheduled(log)[-1] == step


# ---- prefill_budgeted by hand


def decoding(chosen: dict[str, Any], **config: Any) -> tuple[TestEngine, ReasonLog]:
    """An engine in which `d` decodes for long."""
    engine, log = engine_of("prefill_budgeted", chosen, **{"max_num_batched_tokens": 16, **config})
    engine.add("d", [1], 40)
    engine.step()
    log.steps.clear()
    log.reasons.clear()
    return engine, log


def steps(engine: TestEngine, count: int) -> None:
    for _ in range(count):
        engine.step()


def test_prefills_have_a_budget_of_their_own():
    engine, log = decoding({"max_prefill_tokens": 4})
    engine.add("p", prompt_of(10), 2)
    engine.add("q", prompt_of(3), 2)
    steps(engine, 5)
    assert scheduled(log) == [
        {"d": 1, "p": 4},
        {"d": 1, "p": 4},
        {"d": 1, "p": 2, "q": 2},
        {"d": 1, "p": 1, "q": 1},
        {"d": 1, "q": 1},
    ]
    assert log.reasons[:2] == [{None: "NO_TOKEN_BUDGET"}] * 2


LONG = {"long_prefill_tokens": 4, "long_prefill_cap": 4}


def test_prompts_that_may_be_unfinished():
    engine, log = decoding({**LONG, "max_partial_prefills": 2})
    for name in "abc":
        engine.add(name, prompt_of(10), 1)
    steps(engine, 5)
    # What is left of 10 after two chunks is no longer long. It is finished, so another may be begun.
    assert scheduled(log) == [
        {"d": 1, "a": 4, "b": 4},
        {"d": 1, "a": 4, "b": 4},
        {"d": 1, "a": 2, "b": 2, "c": 4},
        {"d": 1, "c": 4},
        {"d": 1, "c": 2},
    ]
    assert log.reasons == [{"c": "PARTIAL_PREFILLS"}] * 2 + [{}] * 3


def test_prompt_that_a_step_finishes_is_not_unfinished():
    engine, log = decoding({**LONG, "max_partial_prefills": 1})
    engine.add("long", prompt_of(10), 1)
    engine.add("short", prompt_of(4), 1)
    steps(engine, 1)
    assert scheduled(log) == [{"d": 1, "long": 4, "short": 4}]


def test_long_prompts_that_may_be_unfinished():
    engine, log = decoding({**LONG, "max_partial_prefills": 3, "max_long_prefills": 1})
    for name in "ab":
        engine.add(name, prompt_of(10), 1)
    engine.add("c", prompt_of(3), 1)
    steps(engine, 5)
    assert scheduled(log) == [
        {"d": 1, "a": 4},
        {"d": 1, "a": 4},
        {"d": 1, "a": 2, "b": 4, "c": 3},
        {"d": 1, "b": 4},
        {"d": 1, "b": 2},
    ]
    assert log.reasons[:2] == [{"b": "LONG_PREFILL_CAP", None: "HEAD_OF_LINE"}] * 2


def test_long_prompt_that_a_step_finishes_is_not_unfinished():
    engine, log = decoding({"long_prefill_tokens": 4, "max_partial_prefills": 3, "max_long_prefills": 1})
    for name in "ab":
        engine.add(name, prompt_of(10), 1)
    steps(engine, 2)
    assert scheduled(log) == [{"d": 1, "a": 10, "b": 5}, {"d": 1, "b": 5}]


def test_prefills_have_every_third_step_while_decodes_run():
    engine, log = decoding({"prefill_interval": 3}, max_num_batched_tokens=8)
    engine.add("p", prompt_of(20), 1)
    steps(engine, 8)
    # The prompt of d was the last prefill, a step ago.
    assert [step.get("p", 0) for step in scheduled(log)] == [0, 0, 7, 0, 0, 7, 0, 0]
    assert [why.get(None) for why in log.reasons[:3]] == ["PREFILL_INTERVAL", "PREFILL_INTERVAL", None]
    engine.engine.abort("d")
    steps(engine, 1)
    assert scheduled(log)[-1] == {"p": 6}, "nobody decodes"


def test_cadence_is_off_while_more_wait_than_there_are_seats():
    engine, log = decoding({"prefill_interval": 3}, max_num_batched_tokens=8, max_num_seqs=2)
    engine.add("p", prompt_of(28), 1)
    engine.add("q", prompt_of(28), 1)  # with one free seat
    steps(engine, 4)
    assert [step.get("p") for step in scheduled(log)] == [7, 7, 7, 7]


def test_prefill_after_a_pause_begins_at_once():
    engine, log = decoding({"prefill_interval": 3})
    steps(engine, 7)
    engine.add("p", prompt_of(5), 1)
    steps(engine, 1)
    assert scheduled(log)[-1] == {"d": 1, "p": 5}


UNLIMITED = 99
counts = st.integers(1, 6)
budgets = st.fixed_dictionaries(
    {"max_partial_prefills": counts, "prefill_interval": counts},
    optional={"max_prefill_tokens": counts, "long_prefill_tokens": counts},
)


@RANDOM
@given(case=cases(True), chosen=budgets, cap=st.none() | counts, long=st.none() | counts)
def test_any_limits_of_prefills_serve_every_workload(case: Case, chosen, cap, long):
    if "long_prefill_tokens" in chosen:
        most = chosen["max_partial_prefills"]
        chosen = {**chosen, "long_prefill_cap": cap, "max_long_prefills": long and min(long, most)}
    engine, log = engine_of("prefill_budgeted", chosen, **case.limits)
    per_step = min(
        chosen.get("max_prefill_tokens", UNLIMITED), cap or UNLIMITED, case.limits["max_num_batched_tokens"]
    )
    tokens = sum(len(ask.prompt) + ask.max_tokens for ask in case.asks for _ in range(ask.n))
    bound = 60 + 4 * steps_one_by_one(case, chunks=True) + chosen["prefill_interval"] * 4 * tokens // per_step
    check_outputs(engine, case, drive(engine, case, max_steps=bound))
    check_nothing_is_left(engine)
    most = chosen.get("max_prefill_tokens", UNLIMITED)
    for step in log.steps:
        assert sum(tokens for tokens in step.scheduled.values() if tokens > 1) <= most


@pytest.mark.parametrize(
    ("scheduler", "chosen", "key"),
    [
        ("continuous", {"max_consecutive_prefills": 0}, "max_consecutive_prefills"),
        *[("prefill_budgeted", {name: 0}, name) for name in ("max_prefill_tokens", "max_partial_prefills")],
        *[("prefill_budgeted", {name: -1}, name) for name in ("long_prefill_tokens", "prefill_interval")],
        ("prefill_budgeted", {"long_prefill_tokens": 4, "long_prefill_cap": 0}, "long_prefill_cap"),
        ("prefill_budgeted", {"long_prefill_cap": 4}, "long_prefill_cap"),
        ("prefill_budgeted", {"max_long_prefills": 1}, "max_long_prefills"),
        ("prefill_budgeted", {"long_prefill_tokens": 4, "max_long_prefills": 2}, "max_long_prefills"),
        ("chunked", {"order": "arrival"}, "order"),
        ("static", {"mode": "stop"}, "mode"),
    ],
)
def test_nonsense_settings_fail_by_name(scheduler, chosen, key):
    with pytest.raises(ConfigError) as error:
        engine_of(scheduler, chosen)
    assert error.value.key == f"scheduler.{key}"


# ---- what a plan costs


def calls_of_a_step(scheduler: str, num_waiting: int) -> int:
    """Python functions called in a step in which two run and `num_waiting` wait."""
    engine, _ = engine_of(scheduler, max_num_seqs=2)
    for i in range(2 + num_waiting):
        engine.add(f"r{i}", [1, 2, 3], 20)
    steps(engine, 12)
    count = 0

    def counted(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        engine.engine.step()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_step_costs_the_same_however_many_wait(scheduler):
    assert calls_of_a_step(scheduler, 50) == calls_of_a_step(scheduler, 500)


# ---- branches of live requests


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_branches_with_tokens_of_their_own_are_served(scheduler):
    engine, _ = engine_of(scheduler, {"deliver": "token"} if scheduler == "static" else {})
    engine.add("a", prompt_of(5), 12)
    steps(engine, 3)
    engine.fork("b", "a", [7, 8, 9], 4)
    engine.run(max_steps=60)
    assert len(engine.outputs["b"]) == 4
