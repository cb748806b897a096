"""Sequences that begin with the computed tokens of another: choices of one request, and branches."""

from __future__ import annotations

from kvengine.core.decision import Action, Decision
from kvengine.core.plan import StepPlan
from kvengine.core.sequence import Sequence, SequenceState
from kvengine.engine.memory import Memory
from kvengine.engine.seats import Seats
from kvengine.engine.waiting import WaitingLine


class Forks:
    """Seats children beside their parent, in the same blocks; that never fails, since nothing is allocated."""

    def __init__(self, seats: Seats, memory: Memory, line: WaitingLine) -> None:
        self._seats = seats
        self._memory = memory
        self._line = line
        self._plan = StepPlan(step=0, now_ns=0)

    def begin_plan(self, plan: StepPlan) -> None:
        self._plan = plan

    def branch(self, parent: Sequence, child: Sequence) -> None:
        """Let `child` go on from `parent`, or wait if that does not run or seats are short."""
        if child.state is SequenceState.FINISHED:
            return  # aborted before it began
        if parent.state is SequenceState.RUNNING and self._seats.wanted(child) <= self._seats.num_free:
            self._start(parent, child)
        else:
            self._line.push(child)

    def choices(self, leader: Sequence, forks: tuple[Sequence, ...]) -> list[Sequence]:
        """The prompt of `leader` is computed: `forks` take the seats kept for them; the siblings without one."""
        siblings = self._seats.give_to_siblings(leader)
        for child in forks:
            child.times.admitted_ns = leader.times.admitted_ns
            self._start(leader, child)
        return siblings[len(forks) :]

    def _start(self, parent: Sequence, child: Sequence) -> None:
        self._memory.fork(parent, child)
        self._seats.take(child, self._plan.now_ns)
        if child.is_prefilling:
            self._seats.prefilling[child] = None
        num_blocks, computed = len(child.block_table.blocks), child.num_computed_tokens
        free = self._memory.allocator.num_free_blocks
        decision = Decision(Action.FORK, child, "", parent.id, num_blocks, computed, free, computed, free)
        self._plan.decisions.append(decision)
