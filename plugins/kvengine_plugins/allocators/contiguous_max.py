"""Contiguous reservation of max_model_len slots per sequence, as engines did before paging.

Source: the Orca (Max) baseline of Kwon et al., SOSP 2023, section 6.1, over a buddy allocator.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvengine.core.errors import ConfigError
from kvengine.core.reasons import Reason, Refusal
from kvengine.core.sequence import Sequence
from kvengine.kv.buddy import BuddyArena
from kvengine.policies import Allocator


class ContiguousMaxAllocator(Allocator):
    """Every sequence gets one region for the longest sequence there can be, whatever it will use of it."""

    shares = False
    grows = False

    def __init__(self, num_blocks: int, block_size: int, max_model_len: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._arena = BuddyArena(num_blocks)
        self._region = self._arena.region_size(-(-max_model_len // block_size))
        if self._region > self._arena.largest_possible:
            raise ConfigError(
                "allocator",
                "contiguous_max",
                f"reserves {self._region} blocks per sequence (max_model_len={max_model_len} in blocks of "
                f"{block_size}, rounded up to a power of two), but the largest region of a pool of {num_blocks} "
                f"blocks is {self._arena.largest_possible}; lower engine.max_model_len or enlarge the pool",
            )

    @property
    def num_free_blocks(self) -> int:
        return self._arena.num_free

    @property
    def num_owned_slots(self) -> int:
        return (self.num_blocks - self._arena.num_free) * self.block_size

    @property
    def capacity(self) -> int:
        return self._region * self.block_size

    def blocks_needed(self, seq: Sequence, num_tokens: int) -> int:
        return 0 if seq.block_table.blocks else self._region

    def allocate(self, seq: Sequence, num_tokens: int) -> Refusal | None:
        table = seq.block_table
        if table.blocks:
            return None
        start = self._arena.take(self._region)
        if start is None:
            free, largest = self._arena.num_free, self._arena.largest_free
            if free >= self._region:
                return Refusal(Reason.FRAGMENTED, f"{free} free, the largest region is {largest}")
            return Refusal(Reason.NO_BLOCKS, f"{self._region} needed, {free} free")
        table.blocks = list(range(start, start + self._region))
        table.num_slots = self._region * self.block_size
        return None

    def free(self, seq: Sequence) -> None:
        table = seq.block_table
        if table.blocks:
            self._arena.give_back(table.blocks[0])
        table.blocks, table.num_slots = [], 0

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        self._arena.check_integrity()
        held = sorted(block for seq in sequences for block in seq.block_table.blocks)
        assert len(held) == len(set(held)), "a block is in two tables"
        assert len(held) + self._arena.num_free == self.num_blocks, "free and held blocks do not add up"
