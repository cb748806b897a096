"""What queues that order by a key share: items ranked on a heap, and a queue over it."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any, Generic, TypeVar

from kvengine.core.sequence import Sequence
from kvengine.policies import Queue

Item = TypeVar("Item", bound=Hashable)
_SLACK = 8
"""So many outdated entries a heap may hold beside one for each valid entry."""


class Ranking(Generic[Item]):
    """Items by key, the least first; of equal keys the one that got it first.

    Getting the first costs O(1), and ranking, moving or removing an item O(log n) amortised: its old entry stays
    until it comes up, or until there are more of that kind than valid ones.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Any, int, Item]] = []
        self._tickets: dict[Item, int] = {}
        """Of each item its valid entry. The first of the heap is always valid."""
        self._next_ticket = count()

    def put(self, item: Item, key: Any) -> None:
        """Rank `item` by `key`, whether or not it is here already."""
        ticket = self._tickets[item] = next(self._next_ticket)
        heappush(self._heap, (key, ticket, item))
        self._tidy()

    def discard(self, item: Item) -> bool:
        """Take `item` out; whether it was here."""
        if self._tickets.pop(item, None) is None:
            return False
        self._tidy()
        return True

    def first(self) -> Item:
        """The item of the least key; IndexError when there is none."""
        return self._heap[0][2]

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[Item]:
        """In order; the first k cost O(k log k) and a copy of the heap. Who leaves meanwhile is not yielded."""
        heap = list(self._heap)
        reached = [(heap[0], 0)] if heap else []
        while reached:
            (_, ticket, item), place = heappop(reached)
            if self._tickets.get(item) == ticket:
                yield item
            for child in (2 * place + 1, 2 * place + 2):
                if child < len(heap):
                    heappush(reached, (heap[child], child))

    def _tidy(self) -> None:
        heap, tickets = self._heap, self._tickets
        if len(heap) > 2 * len(tickets) + _SLACK:
            heap[:] = [entry for entry in heap if tickets.get(entry[2]) == entry[1]]
            heapify(heap)
        while heap and tickets.get(heap[0][2]) != heap[0][1]:
            heappop(heap)


class OrderedQueue(Queue):
    """The waiting by what `key` says of each when it begins to wait, then by arrival.

    Every call costs O(log n) amortised, peeking O(1). A preempted sequence is asked for its key anew.
    """

    def __init__(self) -> None:
        self._waiting: Ranking[Sequence] = Ranking()

    def key(self, seq: Sequence) -> Any:
        """Something comparable; the least goes first."""
        raise NotImplementedError

    def push(self, seq: Sequence) -> None:
        self._waiting.put(seq, (self.key(seq), seq.order))

    def peek(self) -> Sequence:
        return self._waiting.first()

    def remove(self, seq: Sequence) -> None:
        if not self._waiting.discard(seq):
            raise ValueError(f"{seq} does not wait here")

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._waiting)
