"""Policies that mean no good cost time and nothing else, or end the run by name; limits hold whatever is asked."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvengine.core.errors import EngineStalledError, PolicyError
from kvengine.core.reasons import Reason, Refusal
from kvengine.core.sequence import Sequence
from kvengine.policies import Admission, Preemption
from kvengine.registry import Registry, discover
from kvengine.testing.cases import (
    Case,
    cases,
    check_nothing_is_left,
    check_outputs,
    check_step,
    drive,
    steps_one_by_one,
)
from kvengine.testing.engines import TestEngine
from kvengine.testing.sources import checksum_output
from kvengine_plugins.queues.fcfs import FcfsQueue
from kvengine_plugins.schedulers.chunked import ChunkedScheduler
from kvengine_plugins.schedulers.continuous import ContinuousScheduler

REGISTRY = discover()
SCHEDULERS = REGISTRY.names("scheduler")
BUILT = {
    name: TestEngine(registry=REGISTRY, policies={"scheduler": name}).engine.context.scheduler
    for name in SCHEDULERS
}
SLOWEST = 4
"""So many times the steps of running one by one may a workload take."""

FAST = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)


def registry_with(kind: str, policy: object) -> Registry:
    """All built-ins, and `policy` as the `kind` named hostile."""
    registry = discover()
    registry.add(kind, "hostile", lambda config, build: policy, summary="")
    return registry


def hostile_engine(
    kind: str, policy: object, policies: dict[str, str] | None = None, **config: Any
) -> TestEngine:
    chosen = {**(policies or {}), kind: "hostile"}
    return TestEngine(registry=registry_with(kind, policy), policies=chosen, **config)


class RandomVictim:
    """Anybody."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, candidates: list[Sequence], needy: Sequence) -> Sequence:
        return self._random.choice(candidates)


class LifoQueue(FcfsQueue):
    """Last come, first served."""

    def __init__(self) -> None:
        self._waiting: list[Sequence] = []

    def push(self, seq: Sequence) -> None:
        self._waiting.insert(0, seq)

    def remove(self, seq: Sequence) -> None:
        self._waiting.remove(seq)


@pytest.mark.parametrize(
    ("scheduler", "kind"),
    [
        (name, kind)
        for name, kind in product(SCHEDULERS, ("victim", "queue", "both"))
        if kind == "victim" or not BUILT[name].orders
    ],
)
def test_hostile_order_and_victims_cost_time_but_nothing_else(scheduler, kind):
    chunks = BUILT[scheduler].chunks
    registry = discover()
    registry.add("victim", "hostile", lambda config, build: RandomVictim(build.seed), summary="")
    registry.add("queue", "hostile", lambda config, build: LifoQueue(), summary="")
    kinds = ["victim", "queue"] if kind == "both" else [kind]
    policies = {"scheduler": scheduler, **dict.fromkeys(kinds, "hostile")}

    @FAST
    @given(case=cases(chunks), seed=st.integers(0, 1000))
    def serves(case: Case, seed: int) -> None:
        engine = TestEngine(registry=registry, policies=policies, seed=seed, **case.limits)
        delivered = drive(engine, case, max_steps=30 + SLOWEST * steps_one_by_one(case, chunks))
        check_outputs(engine, case, delivered)
        check_nothing_is_left(engine)

    serves()


class RefusesAll(Admission):
    """Admission that lets nobody in, against its contract."""

    def refuses(self, seq: Sequence, view) -> Refusal | None:
        return Refusal(Reason.NO_BLOCKS, "on principle")


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_admission_that_refuses_everything_ends_by_name(scheduler):
    engine = hostile_engine("admission", RefusesAll(), policies={"scheduler": scheduler})
    engine.add("starved", [1, 2, 3], 4)
    with pytest.raises(EngineStalledError, match="starved"):
        engine.run(max_steps=10)


class Hostile(ChunkedScheduler):
    """The chunked scheduler for `good` steps, then `act(view)`."""

    def __init__(self, good: int, act) -> None:
        self._good = good
        self._act = act

    def schedule(self, view) -> None:
        if self._good:
            self._good -= 1
            super().schedule(view)
        else:
            self._act(view)


@pytest.mark.parametrize("good", [0, 2])
def test_scheduler_that_schedules_nothing_ends_by_name(good):
    engine = hostile_engine("scheduler", Hostile(good, lambda view: None))
    engine.add("first", [1, 2, 3], 4)
    engine.add("second", [4, 5, 6], 4)
    with pytest.raises(EngineStalledError, match="scheduler=hostile schedules nothing"):
        engine.run(max_steps=10)


def boom(self: object, *args: object, **named: object) -> Any:
    raise ValueError("boom")


def test_scheduler_that_raises_is_named_with_the_step():
    engine = hostile_engine("scheduler", Hostile(2, boom))
    engine.add("a", [1, 2, 3], 9)
    with pytest.raises(PolicyError, match=r"Hostile\), step 2: raised ValueError: boom"):
        engine.run(max_steps=10)


class RaisingVictim:
    choose = boom


class RaisingAdmission(Admission):
    refuses = boom


class RaisingPreemption(Preemption):
    mechanism = boom


class RaisingQueue(FcfsQueue):
    peek = boom


@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        ("victim", RaisingVictim()),
        ("admission", RaisingAdmission()),
        ("preemption", RaisingPreemption()),
        ("queue", RaisingQueue()),
    ],
)
def test_other_policy_that_raises_is_named_and_not_the_scheduler(kind, policy):
    engine = hostile_engine(kind, policy, block_size=1, num_blocks=8)
    engine.add("a", [1, 2, 3, 4], 5)
    engine.add("b", [5, 6, 7, 8], 5)
    with pytest.raises(PolicyError, match=rf"{type(policy).__name__}\), step \d+.*: raised ValueError: boom"):
        engine.run(max_steps=20)


class RaisingPush(FcfsQueue):
    push = boom


def test_queue_that_raises_when_a_request_arrives_is_named():
    engine = hostile_engine("queue", RaisingPush())
    engine.add("a", [1, 2, 3, 4], 5)
    with pytest.raises(PolicyError, match=r"RaisingPush\), step 0: raised ValueError: boom"):
        engine.run(max_steps=20)


class ChoosesTheProtected:
    """Preempts whoever is in need, here the oldest, who is not a candidate."""

    def choose(self, candidates: list[Sequence], needy: Sequence) -> Sequence:
        return needy


class ChoosesNobody:
    """Answers with no sequence at all."""

    def choose(self, candidates: list[Sequence], needy: Sequence) -> None:
        return None


@pytest.mark.parametrize("policy", [ChoosesTheProtected(), ChoosesNobody()])
def test_victim_that_is_no_candidate_is_an_error_that_names_the_policy_and_the_step(policy):
    engine = hostile_engine("victim", policy, block_size=1, num_blocks=8)
    engine.add("a", [1, 2, 3, 4], 5)
    engine.add("b", [5, 6, 7, 8], 5)
    # Both prompts fill the pool, so in step 1 the oldest, a, needs a block; it may not be taken itself.
    with pytest.raises(PolicyError, match=rf"{type(policy).__name__}\), step 1, .*: chose .*not a candidate"):
        engine.run(max_steps=20)


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda view: view.schedule(view.waiting.peek(), 1), "scheduled <b WAITING.*does not run"),
        (lambda view: view.admit(next(view.running), 1), "admitted <a RUNNING.*does not wait"),
        (lambda view: view.idle_row(next(view.running)), "asked for an idle row of <a RUNNING.*not held"),
    ],
)
def test_scheduler_that_breaks_its_contract_is_named(act, said):
    engine = hostile_engine("scheduler", Hostile(1, act), max_num_seqs=1)
    engine.add("a", [1, 2, 3], 4)
    engine.add("b", [1, 2, 3], 4)
    with pytest.raises(PolicyError, match=rf"Hostile\), step 1: {said}"):
        engine.run(max_steps=10)


def overreach(view) -> None:
    """Ask for far more than there is, twice, in steps that also pad."""
    for seq in view.running:
        view.schedule(seq, -5)
        view.schedule(seq, 10**9)
        view.schedule(seq, 10**9)
    while len(view.waiting) and view.admit(view.waiting.peek(), 10**9):
        pass
    view.pad(10**9)
    view.pad(-3)


def test_scheduler_that_asks_for_too_much_gets_what_there_is():
    limits: dict[str, Any] = {
        "block_size": 2,
        "num_blocks": 9,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 5,
        "max_model_len": 16,
    }
    engine = hostile_engine("scheduler", Hostile(0, overreach), **limits)
    prompts = {"a": [1, 2, 3], "b": [4, 5, 6, 7, 8, 9, 10], "c": [11]}
    for name, prompt in prompts.items():
        engine.add(name, prompt, 5)
    engine.run(max_steps=50)
    for step in engine.log.steps:
        check_step(step, limits)
        assert sum(step.scheduled.values()) + step.num_padding_tokens == 5
    assert engine.outputs == {name: checksum_output(prompt, 5) for name, prompt in prompts.items()}
    check_nothing_is_left(engine)


def in_dribs(view) -> None:
    """One token at a time, and up to three times a step."""
    while len(view.waiting) and view.admit(view.waiting.peek(), 1):
        pass
    for _ in range(3):
        for seq in view.running:
            view.schedule(seq, 1)


def test_scheduler_that_schedules_a_sequence_several_times_a_step():
    engine = hostile_engine("scheduler", Hostile(0, in_dribs), block_size=2, num_blocks=9, max_model_len=16)
    prompts = {"a": [1, 2, 3, 4, 5, 6, 7, 8, 9], "b": [4, 5, 6]}
    for name, prompt in prompts.items():
        engine.add(name, prompt, 3)
    engine.run(max_steps=50)
    assert engine.outputs == {name: checksum_output(prompt, 3) for name, prompt in prompts.items()}
    for name, prompt in prompts.items():
        assert sum(step.scheduled.get(name, 0) for step in engine.log.steps) == len(prompt) + 3 - 1
    check_nothing_is_left(engine)


class AdmitsAnybody(ChunkedScheduler):
    """Tries all who wait, not only the head."""

    def schedule(self, view) -> None:
        super().schedule(view)
        for seq in list(view.waiting):
            view.admit(seq)


def test_nobody_enters_in_a_step_that_preempted():
    engine = hostile_engine("scheduler", AdmitsAnybody(), block_size=4, num_blocks=4)
    engine.add("a", range(8), 3)
    engine.add("b", range(8, 16), 3)
    engine.add("small", [1], 3)
    engine.run(max_steps=20)
    # The prompts of a and b fill the pool. In step 1 a needs a third block and b gives two, so one is free.
    assert [step.scheduled for step in engine.log.steps[:3]] == [
        {"a": 8, "b": 8},
        {"a": 1},
        {"a": 1, "small": 1},
    ]
    assert engine.log.steps[1].preempted == ("b",)


class HoldsAndAdmits(ContinuousScheduler):
    """Keeps finished rows as a static batch does, but lets newcomers in all the time."""

    holds_finished = True


def test_held_rows_take_seats():
    engine = hostile_engine("scheduler", HoldsAndAdmits(), max_num_seqs=2)
    for name, new in [("a", 1), ("b", 3), ("c", 1)]:
        engine.add(name, [1, 2, 3], new)
    engine.run(max_steps=20)
    assert [step.scheduled for step in engine.log.steps] == [{"a": 3, "b": 3}, {"b": 1}, {"b": 1}, {"c": 3}]
    assert [step.pool.num_held for step in engine.log.steps] == [1, 1, 0, 0]


def test_continuous_batching_prefills_in_steps_of_their_own():
    engine = TestEngine(policies={"scheduler": "continuous"}, max_num_seqs=3)
    engine.add("a", range(5), 4)
    engine.step()
    engine.step()
    for i, name in enumerate("bcd"):
        engine.add(name, range(3 + i), 2)
    engine.run(max_steps=20)
    # b and c enter at once while a waits; d enters as soon as b and c have left.
    assert [step.scheduled for step in engine.log.steps] == [
        {"a": 5},
        {"a": 1},
        {"b": 3, "c": 4},
        {"a": 1, "b": 1, "c": 1},
        {"d": 5},
        {"a": 1, "d": 1},
    ]


# ---- aborts


@pytest.mark.parametrize("num_steps", [0, 3])
def test_abort_of_the_only_request_leaves_nothing_behind(num_steps):
    engine = TestEngine(block_size=2, num_blocks=8)
    engine.add("a", [1, 2, 3], 9)
    for _ in range(num_steps):
        engine.step()
    engine.engine.abort("a")
    engine.run()  # until the engine says that nothing is left to do
    check_nothing_is_left(engine)
    assert [seq.finish_reason for seq in engine.log.finished_sequences] == ["abort"]
