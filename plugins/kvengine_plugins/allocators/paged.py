"""Paged allocation: blocks from anywhere in the pool, one at a time as a sequence grows.

Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention",
SOSP 2023, section 4.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvengine.core.reasons import Reason, Refusal
from kvengine.core.sequence import Sequence
from kvengine.kv.block_pool import BlockPool
from kvengine.policies import Allocator


class PagedAllocator(Allocator):
    """Wastes less than one block per sequence, and knows no external fragmentation."""

    shares = False
    grows = True

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._pool = BlockPool(num_blocks)

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free

    @property
    def num_owned_slots(self) -> int:
        return (self.num_blocks - self._pool.num_free) * self.block_size

    @property
    def capacity(self) -> int:
        return self.num_blocks * self.block_size

    def blocks_needed(self, seq: Sequence, num_tokens: int) -> int:
        return max(0, -(-num_tokens // self.block_size) - len(seq.block_table.blocks))

    def allocate(self, seq: Sequence, num_tokens: int) -> Refusal | None:
        missing = self.blocks_needed(seq, num_tokens)
        if missing > self._pool.num_free:
            return Refusal(Reason.NO_BLOCKS, f"{missing} needed, {self._pool.num_free} free")
        table = seq.block_table
        table.blocks += self._pool.take(missing)
        table.num_slots = len(table.blocks) * self.block_size
        return None

    def free(self, seq: Sequence) -> int:
        table = seq.block_table
        freed = self._pool.give_back(table.blocks)
        table.blocks, table.num_slots = [], 0
        return freed

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        self._pool.check_integrity([seq.block_table.blocks for seq in sequences])
