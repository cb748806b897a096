"""What attention must know about one step's ragged batch: lengths, block tables and write slots.

Shapes: S rows, T real query tokens, T_all = T + padding tokens, B block size, L a row's KV length.
"""

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionMetadata:
    """One step's batch: its rows one after another, then padding tokens whose output is zero.

    Query i of a row with query length q and KV length L stands at position L - q + i and attends to the
    row's positions up to its own; a query at a negative position attends to nothing and yields zero.
    An idle row writes to the scratch block: its slot_mapping does not agree with its block table.
    """

    query_start: Tensor  # [S+1] int64, cumulative query tokens
    query_lens: tuple[int, ...]  # [S]
    seq_lens: tuple[int, ...]  # [S], KV length after this step's writes
    block_tables: Tensor  # [S, max_blocks] int64, padded with any valid id
    slot_mapping: Tensor  # [T_all] int64, slot = block * B + offset; padding tokens write to a scratch block
    block_size: int

    @property
    def num_tokens(self) -> int:
        """Real tokens, T; the tokens after them are padding."""
        return sum(self.query_lens)

    @property
    def row_starts(self) -> tuple[int, ...]:
        """[S+1] cumulative query tokens on the host: query_start without waiting for its device."""
        return tuple(accumulate(self.query_lens, initial=0))

    def check(self) -> None:
        """Raise ValueError for shapes, dtypes or lengths that contradict each other."""
        rows = len(self.query_lens)
        _require(self.block_size >= 1, "block_size", "is below 1")
        _require(len(self.seq_lens) == rows, "seq_lens", "and query_lens differ in length")
        _require(min((*self.query_lens, *self.seq_lens), default=0) >= 0, "lengths", "include a negative one")
        for name in ("query_start", "block_tables", "slot_mapping"):
            _require(getattr(self, name).dtype == torch.int64, name, "is not int64")
        _require(tuple(self.query_start.tolist()) == self.row_starts, "query_start", "is not the running sum")
        tables = self.block_tables
        _require(tables.dim() == 2 and len(tables) == rows, "block_tables", "is not [S, max_blocks]")
        room = tables.shape[1] * self.block_size
        _require(max(self.seq_lens, default=0) <= room, "seq_lens", "exceed the block table")
        slots = self.slot_mapping
        _require(slots.dim() == 1 and len(slots) >= self.num_tokens, "slot_mapping", "misses tokens")
        _require(not bool((slots < 0).any()), "slot_mapping", "has a negative slot")


def _require(holds: bool, name: str, problem: str) -> None:
    if not holds:
        raise ValueError(f"{name} {problem}")
