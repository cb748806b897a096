"""A queue: last come, first served while many wait.

Source: adaptive LIFO of Maurer, "Fail at Scale", ACM Queue 13(8), 2015.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvengine.core.errors import ConfigError
from kvengine.core.sequence import Sequence
from kvengine.hookspecs import hookimpl
from kvengine.policies import Queue

if TYPE_CHECKING:
    from kvengine.registry import Registry

KVENGINE_API = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LifoConfig:
    """`fifo_up_to`: as long as no more than that many wait, first come is first served."""

    fifo_up_to: int = 4

    def __post_init__(self) -> None:
        if self.fifo_up_to < 0:
            raise ConfigError("queue.fifo_up_to", self.fifo_up_to, "must be at least 0")


class LifoQueue(Queue):
    """Under overload the newest is served while it still matters to somebody; the old may have given up.

    Who was preempted stands at the far end, with those that came first. Every call costs O(1).
    """

    def __init__(self, config: LifoConfig) -> None:
        self._fifo_up_to = config.fifo_up_to
        self._waiting: OrderedDict[Sequence, None] = OrderedDict()

    def push(self, seq: Sequence) -> None:
        self._waiting[seq] = None
        if seq.num_preemptions:
            self._waiting.move_to_end(seq, last=False)

    def peek(self) -> Sequence:
        if not self._waiting:
            raise IndexError("nobody waits")
        return next(iter(self))

    def remove(self, seq: Sequence) -> None:
        if seq not in self._waiting:
            raise ValueError(f"{seq} does not wait")
        del self._waiting[seq]

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        crowded = len(self._waiting) > self._fifo_up_to
        return reversed(self._waiting) if crowded else iter(self._waiting)


@hookimpl
def kvengine_register(registry: Registry) -> None:
    """Called once when kvengine starts."""
    registry.add(
        "queue",
        "lifo",
        lambda config, build: LifoQueue(config),
        schema=LifoConfig,
        summary="last come, first served while many wait",
    )
