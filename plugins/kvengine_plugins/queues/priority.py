"""The most urgent first, and of those the oldest; waiting may make up for urgency."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvengine.core.errors import ConfigError
from kvengine.core.sequence import Sequence
from kvengine_plugins.queues.ordered import OrderedQueue


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorityConfig:
    """`ageing_s`: so many seconds of waiting count like one level of priority (null: none ever do)."""

    ageing_s: float | None = None

    def __post_init__(self) -> None:
        if self.ageing_s is not None and not 1e-9 <= self.ageing_s < math.inf:
            problem = "must be a number of seconds, at least 1e-9, or null for no ageing"
            raise ConfigError("queue.ageing_s", self.ageing_s, problem)


class PriorityQueue(OrderedQueue):
    """By `Request.priority`, the lower the more urgent, then by arrival.

    Under ageing it is by priority * ageing + arrival, both in ns: of two sequences the order never changes, however
    long they wait, so that nothing has to be sorted again. It moves the order only: who takes whose seat is
    decided by the static priority.
    """

    def __init__(self, config: PriorityConfig) -> None:
        super().__init__()
        self._ageing_ns = None if config.ageing_s is None else round(config.ageing_s * 1e9)

    def key(self, seq: Sequence) -> int:
        if self._ageing_ns is None:
            return seq.priority
        return seq.priority * self._ageing_ns + seq.arrival_ns
