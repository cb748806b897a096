"""Who waits: the queue, and behind it those whom an admission policy lets all others precede."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from kvengine.core.errors import PolicyError
from kvengine.core.plan import StepPlan
from kvengine.core.sequence import Sequence
from kvengine.engine.policy_set import PolicySet


class WaitingLine:
    """Knows its members beside the queue, so that a queue that loses or invents somebody is found out."""

    def __init__(self, policies: PolicySet) -> None:
        self.queue = policies.queue
        self._policies = policies
        self._members: dict[Sequence, None] = {}
        self._deferred: deque[Sequence] = deque()
        self._plan = StepPlan(step=0, now_ns=0)

    def begin_plan(self, plan: StepPlan) -> None:
        self._plan = plan

    def __len__(self) -> int:
        return len(self._members) + len(self._deferred)

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._members or seq in self._deferred

    def __iter__(self) -> Iterator[Sequence]:
        """All who wait, in no order."""
        yield from self._members
        yield from self._deferred

    @property
    def num_queued(self) -> int:
        """Those in the queue."""
        return len(self._members)

    def queued(self, seq: Sequence) -> bool:
        """Whether `seq` is one of them."""
        return seq in self._members

    def push(self, seq: Sequence) -> None:
        """`seq` waits from now on."""
        self._members[seq] = None
        self.queue.push(seq)
        self._policies.scheduler.waits(seq, self._plan.now_ns)

    def remove(self, seq: Sequence) -> None:
        """`seq` waits no more."""
        if seq in self._members:
            del self._members[seq]
            self.queue.remove(seq)
        else:
            self._deferred.remove(seq)

    def defer(self, seq: Sequence) -> None:
        """Let all others go before `seq`."""
        self.remove(seq)
        seq.deferred = True
        self._deferred.append(seq)

    def refill(self) -> None:
        """When nobody else waits, the one that was deferred first joins the queue."""
        if self._deferred and not self._members:
            self.push(self._deferred.popleft())

    def head(self) -> Sequence | None:
        """The first in order; PolicyError when the queue names one that was not pushed, or was removed."""
        self.refill()
        if not self._members:
            return None
        head = self.queue.peek()
        if head not in self._members:
            raise self._broken(f"answers with {head!r}, which does not wait in it")
        return head

    def check(self) -> None:
        """PolicyError when the queue does not hold as many as were pushed and not removed."""
        held, wait = len(self.queue), len(self._members)
        if held != wait:
            raise self._broken(f"holds {held} sequences, and {wait} wait")

    def check_named(self, seq: Sequence) -> None:
        """PolicyError when `seq`, which does not wait, is in the queue all the same."""
        named = [*self.queue, self.queue.peek()] if len(self.queue) else [*self.queue]
        if not self.queued(seq) and any(other is seq for other in named):
            raise self._broken(f"answers with {seq!r}, which does not wait in it")

    def _broken(self, what: str) -> PolicyError:
        return self._policies.broken("queue", self._plan.step, what)
