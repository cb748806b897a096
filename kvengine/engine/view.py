"""What a policy may look at while a step is planned: the half of policies.SchedulingView that changes nothing."""

from __future__ import annotations

from collections.abc import Iterator

from kvengine.core.limits import EngineLimits
from kvengine.core.sequence import Sequence, SequenceState
from kvengine.engine.memory import Memory
from kvengine.engine.seats import Seats
from kvengine.engine.waiting import WaitingLine
from kvengine.policies import Allocator, Queue


class EngineView:
    """Reads the engine's state; the context adds what decides."""

    def __init__(
        self, *, limits: EngineLimits, allocator: Allocator, seats: Seats, memory: Memory, line: WaitingLine
    ) -> None:
        self.limits = limits
        self.allocator = allocator
        self.seats = seats
        self.memory = memory
        self.line = line
        self.waiting: Queue = line.queue
        self.now = 0
        self.token_budget_left = 0

    @property
    def running(self) -> Iterator[Sequence]:
        return iter(self.seats)

    @property
    def prefilling(self) -> Iterator[Sequence]:
        return (seq for seq in list(self.seats.prefilling) if seq.state is SequenceState.RUNNING)

    @property
    def heads(self) -> Iterator[Sequence]:
        seen: set[Sequence] = set()
        while (head := self.line.head()) is not None and head not in seen:
            seen.add(head)
            yield head

    @property
    def held(self) -> list[Sequence]:
        return self.seats.held

    @property
    def num_free_seats(self) -> int:
        return self.seats.num_free

    @property
    def num_blocks(self) -> int:
        return self.allocator.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self.allocator.num_free_blocks

    @property
    def num_promised_blocks(self) -> int:
        needed = self.allocator.blocks_needed
        return sum(needed(seq, len(seq.token_ids)) for seq in self.seats.prefilling)

    def uncomputed(self, seq: Sequence) -> int:
        return len(seq.token_ids) - self.memory.num_computed(seq) - seq.num_scheduled_tokens

    def blocks_needed(self, seq: Sequence, num_tokens: int) -> int:
        return self.allocator.blocks_needed(seq, num_tokens)
