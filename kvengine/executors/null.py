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
    """A stand-in for a model that sees KV only through slots, so that a misplaced slot changes its answer."""

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
            token_ids = [[self._filler_id] if row.samples else [] for row in plan.rows]
        else:
            for row in plan.rows:
                slots = self._slots(row.seq, row.start, row.start + row.num_tokens)
                tokens = row.seq.token_ids[row.start : row.start + row.num_tokens]
                self._source.write(slots, tokens, row.start)
            token_ids = [self._next(self._source, row) if row.samples else [] for row in plan.rows]
        return StepResult(token_ids, self._duration_ns)

    def close(self) -> None:
        """Nothing to free."""

    def _next(self, source: TokenSource, row: ScheduledRow) -> list[int]:
        return [source.next_token(self._slots(row.seq, 0, row.start + row.num_tokens), row.seq)]

    def _slots(self, seq: Sequence, start: int, end: int) -> list[int]:
        blocks, size = seq.block_table.blocks, self._block_size
        return [blocks[i // size] * size + i % size for i in range(start, end)]
