"""A pool of equal blocks with an O(1) free list and reference counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class BlockPool:
    """Blocks 0..num_blocks-1, each free or held by as many tables as its reference count says.

    The free list is a stack, so a block that was just used (and is warm in cache) is reused first. Taking and
    giving back a block cost O(1) whatever the size of the pool.
    """

    __slots__ = ("_free", "_ref_counts", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._ref_counts = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks with reference count 0."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` free blocks, each with reference count 1; ValueError (and no change) if there are fewer."""
        if count == 0:
            return []
        if count < 0 or count > len(self._free):
            raise ValueError(f"cannot take {count} blocks, {len(self._free)} are free")
        taken = self._free[-count:]
        del self._free[-count:]
        taken.reverse()
        for block in taken:
            self._ref_counts[block] = 1
        return taken

    def give_back(self, blocks: list[int]) -> int:
        """Drop one reference per listed block; the number of blocks that became free.

        Raises ValueError, and changes nothing, when a block is listed more often than it is held.
        """
        for block, times in Counter(blocks).items():
            if not 0 <= block < self.num_blocks:
                raise ValueError(f"block {block} is not in this pool of {self.num_blocks}")
            if self._ref_counts[block] < times:
                raise ValueError(
                    f"block {block} is given back {times} times but held {self._ref_counts[block]}"
                )
        freed = 0
        for block in reversed(blocks):
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free.append(block)
                freed += 1
        return freed

    def check_integrity(self, tables: Iterable[list[int]]) -> None:
        """Raise AssertionError unless the reference counts equal what `tables` hold and the rest is free."""
        held = Counter(block for table in tables for block in table)
        surplus = {b: n - held[b] for b, n in enumerate(self._ref_counts) if n > held[b]}
        deficit = {b: held[b] - n for b, n in enumerate(self._ref_counts) if n < held[b]}
        assert not surplus, f"blocks counted more often than held: {surplus}"
        assert not deficit, f"blocks held more often than counted: {deficit}"
        free = set(self._free)
        assert len(free) == len(self._free), "a block is twice in the free list"
        assert not free & held.keys(), f"blocks both free and held: {sorted(free & held.keys())}"
        assert len(free) + len(held) == self.num_blocks, "free and held blocks do not add up to the pool"
