"""The executor without a model: every step takes a fixed virtual time, and tokens come from a token source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvengine.core.errors import ConfigError
from kvengine.core.plan import ScheduledRow, StepPlan, StepResult
from kvengine.core.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class NullConfig:
    """`step_ms`: virtual milliseconds that every step takes."""

    step_ms: float = 10.0

    def __post_init__(self) -> None:
        if not 1e-6 <= self.step_ms < 1e9:
            raise ConfigError("executor.step_ms", self.step_ms, "must be milliseconds, from 1e-6 (1 ns) up")


class TokenSource(Protocol):
    """A stand-in for a model that sees KV only through slots, so that a misplaced slot changes its answer.

    Slot i of device block b is b * block_size + i; slot i of host block h is -1 - (h * block_size + i).
    """

    def copy(self, source_slots: list[int], destination_slots: list[int]) -> None:
        """Make each destination what its source is, unwritten if that is unwritten; the two do not overlap."""
        ...

    def write(self, slots: list[int], token_ids: list[int], first_position: int) -> None:
        """Tokens at positions first_position.. are computed; `slots` are theirs."""
        ...

    def next_token(self, slots: list[int], seq: Sequence) -> int:
        """The token after those in `slots` (of positions 0..len-1)."""
        ...


class NullExecutor:
    """Runs any policy without weights; lengths come from max_tokens or from the workload's known lengths.

    Without a `source` every token is `filler_id` (no end-of-sequence id), and nothing is written.
    """

    virtual_time = True

    def __init__(
        self, config: NullConfig, *, block_size: int, source: TokenSource | None = None, filler_id: int = 0
    ) -> None:
        self._duration_ns = round(config.step_ms * 1e6)
        self._block_size = block_size
        self._source = source
        self._filler_id = filler_id

    def execute(self, plan: StepPlan) -> StepResult:
        if self._source is None:
            token_ids = [[self._filler_id] * (1 + len(row.forks)) if row.samples else [] for row in plan.rows]
            return StepResult(token_ids, self._duration_ns)
        self._move(self._source, plan)
        for row in plan.rows:
            slots = self._slots(row.seq, row.start, row.start + row.num_tokens)
            tokens = row.seq.token_ids[row.start : row.start + row.num_tokens]
            self._source.write(slots, tokens, row.start)
        token_ids = [self._next(self._source, row) if row.samples else [] for row in plan.rows]
        return StepResult(token_ids, self._duration_ns)

    def close(self) -> None:
        """Nothing to free."""

    def _move(self, source: TokenSource, plan: StepPlan) -> None:
        """The block copies of `plan`, in the order of StepPlan."""
        device, host = self._device_slots, self._host_slots
        for pairs, of_source, of_destination in (
            (plan.swap_outs, device, host),
            (plan.swap_ins, host, device),
            (plan.copies, device, device),
        ):
            if pairs:
                sources = [slot for block, _ in pairs for slot in of_source(block)]
                source.copy(sources, [slot for _, block in pairs for slot in of_destination(block)])

    def _device_slots(self, block: int) -> range:
        return range(block * self._block_size, (block + 1) * self._block_size)

    def _host_slots(self, block: int) -> list[int]:
        return [-1 - slot for slot in self._device_slots(block)]

    def _next(self, source: TokenSource, row: ScheduledRow) -> list[int]:
        slots = self._slots(row.seq, 0, row.start + row.num_tokens)
        return [source.next_token(slots, seq) for seq in (row.seq, *row.forks)]

    def _slots(self, seq: Sequence, start: int, end: int) -> list[int]:
        blocks, size = seq.block_table.blocks, self._block_size
        return [blocks[i // size] * size + i % size for i in range(start, end)]
