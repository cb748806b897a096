"""After every plan, each waiting sequence has exactly one reason, and a preemption says who gained by it."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from kvengine.core.decision import Action, Decision
from kvengine.core.plan import StepPlan
from kvengine.core.reasons import Reason
from kvengine.core.sequence import Sequence
from kvengine.registry import discover
from kvengine.testing.cases import Case, cases, drive, steps_one_by_one
from kvengine.testing.engines import TestEngine
from kvengine_plugins.schedulers.chunked import ChunkedScheduler

REGISTRY = discover()
SCHEDULERS = REGISTRY.names("scheduler")


def watched(engine: TestEngine) -> list[StepPlan]:
    """All plans that `engine` will make, each checked as it is made."""
    context, plans = engine.engine.context, []
    planned = context.plan

    def plan(now: int) -> StepPlan:
        made = planned(now)
        plans.append(made)
        check_reasons(made, list(context.waiting))
        return made

    context.plan = plan
    return plans


def check_reasons(plan: StepPlan, waiting: list[Sequence]) -> None:
    own = {decision.seq for decision in plan.decisions if decision.action is Action.REFUSE}
    stops = [decision for decision in plan.decisions if decision.action is Action.STOP]
    rest = [seq for seq in waiting if seq not in own]
    assert len(stops) <= 1
    assert bool(stops) == bool(rest), f"step {plan.step}: {rest} wait, stops: {stops}"
    for decision in stops:
        assert decision.num_tokens == len(rest)
        assert decision.reason in tuple(Reason)
        if decision.reason is Reason.HEAD_OF_LINE:
            assert decision.detail in {seq.id for seq in own if seq is not None}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_every_waiting_sequence_has_a_reason_in_every_plan(scheduler: str) -> None:
    chunks = TestEngine(policies={"scheduler": scheduler}).engine.context.scheduler.chunks

    @settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    @given(case=cases(chunks))
    def has(case: Case) -> None:
        engine = TestEngine(policies={"scheduler": scheduler}, **case.limits)
        plans = watched(engine)
        drive(engine, case, max_steps=30 + 4 * steps_one_by_one(case, chunks))
        for plan in plans:
            check_preemptions(plan)

    has()


def check_preemptions(plan: StepPlan) -> None:
    """Whom it preempted and for whom, the blocks that made free, and which policy chose."""
    found = [decision for decision in plan.decisions if decision.action in (Action.PREEMPT, Action.SWAP_OUT)]
    assert [decision.seq for decision in found] == plan.preempted
    for decision in found:
        assert decision.seq is not None
        assert decision.reason in (Reason.PREEMPTED_FOR, Reason.QUANTUM)
        assert decision.detail
        assert decision.num_free_after - decision.num_free_before == decision.num_blocks
        assert decision.policy


def decisions_of(engine: TestEngine) -> list[Decision]:
    plans = watched(engine)
    engine.run(max_steps=100)
    return [decision for plan in plans for decision in plan.decisions]


def test_a_preemption_names_victim_beneficiary_blocks_and_policy() -> None:
    engine = TestEngine(block_size=4, num_blocks=4)
    engine.add("a", range(8), 3)
    engine.add("b", range(8, 16), 3)
    preempted = [decision for decision in decisions_of(engine) if decision.action is Action.PREEMPT]
    # The prompts take two blocks each and fill the pool; in step 1 a needs a third, and b came last.
    assert [(d.seq.id if d.seq else "", *d[2:]) for d in preempted] == [
        ("b", Reason.PREEMPTED_FOR, "a", 2, 8, 0, 0, 2, 0, "latest_arrival")
    ]


def test_those_behind_a_refused_head_are_told_so() -> None:
    engine = TestEngine(max_num_seqs=1)
    for name in "abc":
        engine.add(name, [1, 2], 2)
    plans = watched(engine)
    engine.step()
    refused, stop = plans[0].decisions[1:]
    assert (refused.seq and refused.seq.id, refused.reason) == ("b", Reason.MAX_NUM_SEQS)
    assert (stop.reason, stop.detail, stop.num_tokens) == (Reason.HEAD_OF_LINE, "b", 1)


class Skips(ChunkedScheduler):
    """Serves who runs and looks at nobody else, but in the first step."""

    def schedule(self, view) -> None:
        if any(view.running):
            view.schedule_decodes()
        else:
            super().schedule(view)


def test_who_is_passed_over_without_a_word_is_told_by_whom() -> None:
    registry = discover()
    registry.add("scheduler", "skips", lambda config, build: Skips(), summary="")
    engine = TestEngine(registry=registry, policies={"scheduler": "skips"}, max_num_seqs=2)
    engine.add("a", [1, 2], 4)
    plans = watched(engine)
    engine.step()
    engine.add("b", [1, 2], 2)
    engine.step()
    (decision,) = plans[1].decisions
    assert (decision.reason, decision.detail) == (Reason.POLICY, "scheduler=skips passed it over")
