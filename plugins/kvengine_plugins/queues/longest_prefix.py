"""Whoever has the longest cached prefix goes first, so that it is used before it is evicted.

Source: the cache-aware scheduling of RadixAttention (Zheng et al., "SGLang", NeurIPS 2024, section 3), which looks at
all that wait; the window and the limit to being passed over are ours.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass

from kvengine.core.errors import ConfigError
from kvengine.core.plan import StepPlan
from kvengine.core.sequence import Sequence, SequenceState
from kvengine.policies import Allocator, Queue
from kvengine_plugins.queues.ordered import Ranking


@dataclass(frozen=True, slots=True, kw_only=True)
class LongestPrefixConfig:
    """Looks at the first `window` by arrival only; whoever `max_skips` younger ones went before is next."""

    window: int = 32
    max_skips: int = 64

    def __post_init__(self) -> None:
        for name in ("window", "max_skips"):
            if getattr(self, name) < 1:
                raise ConfigError(f"queue.{name}", getattr(self, name), "must be at least 1")


class LongestPrefixQueue(Queue):
    """By tokens that need not be computed, ties by arrival, among the first few.

    A prefix is looked up once per sequence and step, since a plan publishes nothing; what it evicts shows in the
    next. Peeking costs O(window) after a change and O(1) else, pushing and removing O(window + log n).
    """

    needs_cache = True

    def __init__(self, config: LongestPrefixConfig, allocator: Allocator) -> None:
        self._config = config
        self._allocator = allocator
        self._first: list[Sequence] = []
        """The first `window` by arrival."""
        self._rest: Ranking[Sequence] = Ranking()
        self._num_cached: dict[Sequence, int] = {}
        """As looked up since the last step."""
        self._skips: dict[Sequence, int] = {}
        """How many younger ones were admitted before each."""
        self._head: Sequence | None = None

    def push(self, seq: Sequence) -> None:
        self._head = None
        insort(self._first, seq, key=_order)
        if len(self._first) > self._config.window:
            last = self._first.pop()
            self._rest.put(last, last.order)

    def peek(self) -> Sequence:
        if self._head is None:
            self._head = self._choose(self._first, self._skips)
        return self._head

    def remove(self, seq: Sequence) -> None:
        if seq in self._first:
            self._first.remove(seq)
            if len(self._rest):
                self._first.append(self._rest.first())
                self._rest.discard(self._first[-1])
        elif not self._rest.discard(seq):
            raise ValueError(f"{seq} does not wait here")
        self._head = None
        self._num_cached.pop(seq, None)
        self._skips.pop(seq, None)

    def __len__(self) -> int:
        return len(self._first) + len(self._rest)

    def __iter__(self) -> Iterator[Sequence]:
        """As if each were admitted in its turn, and nothing were cached or evicted by that."""
        first, rest, skips = list(self._first), iter(self._rest), dict(self._skips)
        while first:
            seq = self._choose(first, skips)
            first.remove(seq)
            if seq.state is SequenceState.WAITING:
                _pass_over(first, seq, skips)
            yield seq
            first += [after for after in [next(rest, None)] if after is not None]

    def admitted(self, seq: Sequence, num_tokens: int) -> None:
        _pass_over(self._first, seq, self._skips)

    def committed(self, plan: StepPlan) -> None:
        self._num_cached.clear()
        self._head = None

    def _choose(self, candidates: list[Sequence], skips: dict[Sequence, int]) -> Sequence:
        if not candidates:
            raise IndexError("nobody waits")
        for seq in candidates:
            if skips.get(seq, 0) >= self._config.max_skips:
                return seq
        return max(candidates, key=self._reusable)

    def _reusable(self, seq: Sequence) -> int:
        """Tokens of `seq` that are cached, or on the host since it was swapped out."""
        found = self._num_cached.get(seq)
        if found is None:
            found = max(seq.num_computed_tokens, self._allocator.cached_tokens(seq))
            self._num_cached[seq] = found
        return found


def _order(seq: Sequence) -> int:
    return seq.order


def _pass_over(candidates: list[Sequence], admitted: Sequence, skips: dict[Sequence, int]) -> None:
    """`admitted` went before those of `candidates` that are older."""
    for seq in candidates:
        if seq.order > admitted.order:
            return
        skips[seq] = skips.get(seq, 0) + 1
