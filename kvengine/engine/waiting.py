"""Who waits: the queue, and behind it those whom an admission policy lets all others precede."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from kvengine.core.sequence import Sequence
from kvengine.engine.policy_set import PolicySet


class WaitingLine:
    """Knows its members beside the queue, so that a queue that loses or invents somebody is found out."""

    def __init__(self, policies: PolicySet) -> None:
        self.queue = policies.queue
        self._policies = policies
        self._members: dict[Sequence, None] = {}
        self._deferred: deque[Sequence] = deque()

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

    def push(self, seq: Sequence, now: int) -> None:
        """`seq` waits from `now` (ns) on."""
        self._members[seq] = None
        self.queue.push(seq)
        self._policies.scheduler.waits(seq, now)

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

    def head(self, now: int) -> Sequence | None:
        """The first in order; when the queue is empty the one that was deferred first joins it."""
        if not self._members:
            if not self._deferred:
                return None
            self.push(self._deferred.popleft(), now)
        return self.queue.peek()

    def check(self, step: int) -> None:
        """PolicyError when the queue does not hold as many as were pushed and not removed."""
        held, wait = len(self.queue), len(self._members)
        if held != wait:
            raise self._policies.broken("queue", step, f"holds {held} sequences, and {wait} wait")
