"""Who gives way, and how: victims, protected sequences, and the way back into the waiting line."""

from __future__ import annotations

from kvengine.core.decision import Action, Decision
from kvengine.core.plan import StepPlan
from kvengine.core.reasons import Reason
from kvengine.core.sequence import Sequence, SequenceState
from kvengine.engine.memory import Memory
from kvengine.engine.policy_set import PolicySet
from kvengine.engine.seats import Seats
from kvengine.engine.waiting import WaitingLine
from kvengine.policies import Mechanism


class Preemptor:
    """Takes sequences out of the batch and of the plan being made.

    The oldest running sequence of the highest static priority is nobody's victim, so that it can always grow:
    whatever the victim policy prefers, work ends.
    """

    def __init__(self, *, seats: Seats, memory: Memory, line: WaitingLine, policies: PolicySet) -> None:
        self._seats = seats
        self._memory = memory
        self._line = line
        self._policies = policies
        self._plan = StepPlan(step=0, now_ns=0)

    @property
    def preempts(self) -> bool:
        """Whether anybody is ever preempted."""
        return self._policies.preemption.preempts

    def begin_plan(self, plan: StepPlan) -> None:
        self._plan = plan

    def victim_for(self, needy: Sequence) -> Sequence | None:
        """The victim policy's choice among all running but the protected one; None when there is nobody else."""
        candidates = self._seats.all_but_the_protected()
        return self._choose(candidates, needy) if candidates else None

    def make_seats(self, seq: Sequence) -> int:
        """Preempt sequences of lower static priority until the seats for `seq` are free; tokens given back."""
        given_back = 0
        while self._seats.wanted(seq) > self._seats.num_free:
            outranked = self._seats.outranked_by(seq)
            lowest = max(other.priority for other in outranked)  # else one arrival might move more than one
            victim = self._choose([other for other in outranked if other.priority == lowest], seq)
            given_back += self.preempt(victim, seq, Reason.PREEMPTED_FOR, "victim")
        return given_back

    def preempt(self, victim: Sequence, beneficiary: Sequence, reason: Reason, kind: str) -> int:
        """Let `victim` wait again, as the policy of `kind` chose; the tokens it had scheduled in this plan."""
        plan, allocator = self._plan, self._memory.allocator
        free, lost = allocator.num_free_blocks, victim.num_computed_tokens
        scheduled, victim.num_scheduled_tokens = victim.num_scheduled_tokens, 0
        if scheduled:
            plan.rows[:] = [row for row in plan.rows if row.seq is not victim]
        mechanism = self._policies.preemption.mechanism(victim)
        if mechanism not in tuple(Mechanism):
            problem = f"answered {mechanism!r}, which is no Mechanism"
            raise self._policies.broken("preemption", plan.step, problem, victim)
        swapped, refusal = self._memory.give_way(victim, swap=mechanism == Mechanism.SWAP)
        if refusal is not None:
            plan.decisions.append(Decision(Action.REFUSE, victim, refusal.reason, refusal.detail))
        victim.num_preemptions += 1
        victim.state = SequenceState.SWAPPED if swapped else SequenceState.PREEMPTED
        self._seats.leave(victim)
        self._line.push(victim)
        plan.preempted.append(victim)
        after = allocator.num_free_blocks
        plan.decisions.append(
            Decision(
                Action.SWAP_OUT if swapped else Action.PREEMPT, victim, reason, beneficiary.id, after - free, lost,
                free, 0, after, len(victim.block_table.host_blocks), self._policies.name(kind),
            )
        )  # fmt: skip
        return scheduled

    def _choose(self, candidates: list[Sequence], needy: Sequence) -> Sequence:
        victim = self._policies.victim.choose(list(candidates), needy)
        if victim not in candidates:
            problem = f"chose {victim}, which is not a candidate"
            raise self._policies.broken("victim", self._plan.step, problem, needy)
        return victim
