"""First come, first served; a preempted sequence keeps its place by arrival."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from kvengine.core.sequence import Sequence
from kvengine.policies import Queue


class FcfsQueue(Queue):
    """Ordered by arrival. Pushing a newcomer and taking the head cost O(1)."""

    def __init__(self) -> None:
        self._waiting: deque[Sequence] = deque()

    def push(self, seq: Sequence) -> None:
        if not self._waiting or seq.order > self._waiting[-1].order:
            self._waiting.append(seq)
            return
        # A preempted sequence is older than most of the waiting: its place is near the head.
        place = next(i for i, other in enumerate(self._waiting) if other.order > seq.order)
        self._waiting.insert(place, seq)

    def peek(self) -> Sequence:
        return self._waiting[0]

    def remove(self, seq: Sequence) -> None:
        if self._waiting and self._waiting[0] is seq:
            self._waiting.popleft()
        else:
            self._waiting.remove(seq)

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting)
