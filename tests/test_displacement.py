"""At max_num_seqs a strictly higher static priority takes a seat from a strictly lower one, and nothing else does."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvengine.core.decision import Action, Decision
from kvengine.core.plan import StepPlan
from kvengine.core.reasons import Reason
from kvengine.core.request import Request, SamplingParams
from kvengine.core.sequence import Sequence
from kvengine.policies import Queue
from kvengine.registry import discover
from kvengine.testing.cases import Case, cases, check_nothing_is_left, check_outputs, drive, steps_one_by_one
from kvengine.testing.engines import TestEngine
from kvengine.testing.sources import checksum_output

FAST = settings(
    max_examples=80, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)


class ByPriority(Queue):
    """The highest static priority first, the oldest of equals."""

    def __init__(self) -> None:
        self._waiting: list[Sequence] = []

    def push(self, seq: Sequence) -> None:
        insort(self._waiting, seq, key=lambda other: (other.priority, other.order))

    def peek(self) -> Sequence:
        return self._waiting[0]

    def remove(self, seq: Sequence) -> None:
        self._waiting.remove(seq)

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting)


class FirstCandidate:
    """Takes the one that was admitted first."""

    def choose(self, candidates: list[Sequence], needy: Sequence) -> Sequence:
        return candidates[0]


def by_priority(**config: Any) -> TestEngine:
    registry = discover()
    registry.add("queue", "by_priority", lambda config, build: ByPriority(), summary="")
    registry.add("victim", "first_candidate", lambda config, build: FirstCandidate(), summary="")
    policies = {"queue": "by_priority", **config.pop("policies", {})}
    return TestEngine(registry=registry, policies=policies, **config)


def add(engine: TestEngine, name: str, priority: int, *, prompt: int = 3, new: int = 6, n: int = 1) -> None:
    sampling = SamplingParams(max_tokens=new, temperature=0.0, n=n)
    now = engine.engine.clock.now()
    tokens = tuple(range(prompt))
    engine.engine.add_request(
        Request(id=name, prompt_token_ids=tokens, sampling=sampling, priority=priority, arrival_ns=now)
    )


class Watch:
    """Checks every plan, and the engine after the step before: who was displaced, by whom, and who was not."""

    def __init__(self, engine: TestEngine) -> None:
        self._context = engine.engine.context
        self.displaced: list[tuple[str, str]] = []
        """Victim and beneficiary, in order."""
        planned = self._context.plan

        def plan(now: int) -> StepPlan:
            made = planned(now)
            self._check(made)
            return made

        self._context.plan = plan

    def _check(self, plan: StepPlan) -> None:
        entered = {
            decision.seq.id: decision.seq
            for decision in plan.decisions
            if decision.seq and decision.action in (Action.ADMIT, Action.RESUME)
        }
        for decision in plan.decisions:
            if decision.action in (Action.PREEMPT, Action.SWAP_OUT) and decision.detail in entered:
                assert decision.seq
                assert decision.reason is Reason.PREEMPTED_FOR
                assert decision.seq.priority > entered[decision.detail].priority
                self.displaced.append((decision.seq.id, decision.detail))
        self._check_head(plan.decisions)

    def _check_head(self, decisions: list[Decision]) -> None:
        """Nobody of lower priority sits while the head waits for a seat."""
        if not len(self._context.waiting):
            return
        head = self._context.waiting.peek()
        refused = [decision.reason for decision in decisions if decision.seq is head]
        if refused[-1:] == [Reason.MAX_NUM_SEQS]:
            assert all(seq.priority <= head.priority for seq in self._context.running)


def single(case: Case, num_seqs: int) -> Case:
    """With one choice each, so that a seat is all that anybody wants, and few seats."""
    asks = tuple(replace(ask, n=1) for ask in case.asks)
    return Case(asks, {**case.limits, "max_num_seqs": num_seqs})


@pytest.mark.parametrize("scheduler", ["chunked", "continuous"])
@pytest.mark.parametrize("victim", ["latest_arrival", "lowest_priority", "first_candidate"])
def test_only_strictly_lower_priorities_are_displaced_and_at_most_one_by_arrival(
    scheduler: str, victim: str
) -> None:
    chunks = scheduler == "chunked"

    @FAST
    @given(case=cases(chunks), num_seqs=st.integers(1, 3), preemption=st.sampled_from(["recompute", "swap"]))
    def check(case: Case, num_seqs: int, preemption: str) -> None:
        case = single(case, num_seqs)
        policies = {"scheduler": scheduler, "victim": victim, "preemption": preemption}
        engine = by_priority(policies=policies, **case.limits)
        watch = Watch(engine)
        delivered = drive(engine, case, max_steps=30 + 4 * steps_one_by_one(case, chunks))
        check_outputs(engine, case, delivered)
        check_nothing_is_left(engine)
        assert len(watch.displaced) <= len(case.asks)

    check()


@pytest.mark.parametrize("victim", ["latest_arrival", "lowest_priority", "first_candidate"])
def test_the_lowest_class_goes_first_whatever_the_victim_policy_likes(victim: str) -> None:
    """Else `high` would take the seat of `middle`, which would then take that of `low`: two for one arrival."""
    engine = by_priority(max_num_seqs=2, policies={"victim": victim})
    watch = Watch(engine)
    for name, priority in (
        [("low", 9), ("middle", 5)] if victim != "first_candidate" else [("middle", 5), ("low", 9)]
    ):
        add(engine, name, priority)
        engine.step()
    add(engine, "high", 1)
    engine.run(max_steps=40)
    assert watch.displaced == [("low", "high")]
    assert engine.outputs == dict.fromkeys(engine.outputs, checksum_output(range(3), 6))


@pytest.mark.parametrize("scheduler", ["chunked", "continuous"])
def test_equal_priority_never_displaces(scheduler: str) -> None:
    engine = by_priority(max_num_seqs=2, policies={"scheduler": scheduler})
    watch = Watch(engine)
    for name in "abcd":
        add(engine, name, 3)
    engine.run(max_steps=40)
    assert watch.displaced == []
    assert engine.log.num_preemptions == 0


@pytest.mark.parametrize("queue", ["by_priority", "fcfs"])
def test_who_is_not_at_the_head_displaces_nobody(queue: str) -> None:
    """The order is the queue's: under first come, first served `high` waits behind `same`, and takes its seat."""
    engine = by_priority(max_num_seqs=1, policies={"queue": queue})
    watch = Watch(engine)
    add(engine, "low", 5)
    engine.step()
    add(engine, "same", 5)
    add(engine, "high", 0)
    engine.run(max_steps=60)
    assert watch.displaced == [("low" if queue == "by_priority" else "same", "high")]


def test_several_give_way_where_a_request_wants_several_seats_and_none_of_them_comes_back_at_once() -> None:
    """`one` leaves, and then `two` with its two seats: one stays free, for which `one` is the head."""
    engine = by_priority(max_num_seqs=3, max_num_batched_tokens=8, policies={"victim": "first_candidate"})
    watch = Watch(engine)
    add(engine, "one", 5)
    engine.step()
    add(engine, "two", 5, prompt=9, n=2)  # its prompt takes two steps, between which a seat is kept
    engine.step()
    add(engine, "high", 0, prompt=4, n=2)
    engine.step()
    assert watch.displaced == [("one", "high/0"), ("two/0", "high/0")]
    assert engine.log.steps[-1].preempted == ("one", "two/0")
    assert not {"one", "two/0"} & set(engine.log.steps[-1].scheduled)
    engine.run(max_steps=60)
    lengths = {"one": 3, "two/0": 9, "two/1": 9, "high/0": 4, "high/1": 4}
    assert engine.outputs == {name: checksum_output(range(length), 6) for name, length in lengths.items()}


def test_a_request_that_wants_more_seats_than_lower_ones_hold_takes_none() -> None:
    """`wide` wants two seats, and of two `same` has one: it waits until that has ended, for `low` goes on too."""
    engine = by_priority(max_num_seqs=2)
    add(engine, "same", 1, new=4)
    add(engine, "low", 5)
    engine.step()
    add(engine, "wide", 1, n=2)
    engine.run(max_steps=60)
    assert [step.preempted for step in engine.log.steps[:5]] == [(), (), (), (), ("low",)]
    assert "wide/0" in engine.log.steps[4].scheduled
