"""Blocks of host memory that hold the KV of sequences that are swapped out, and of evicted cached blocks."""

from __future__ import annotations

from collections.abc import Callable

from kvengine.kv.block_pool import BlockPool


class SwapPool:
    """Host blocks 0..num_blocks-1, each of the size of a device block. Satisfies policies.HostPool.

    Only numbers: the executor owns the memory. `num_blocks` is a limit that is never passed.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._pool = BlockPool(num_blocks) if num_blocks else None
        self.reclaim: Callable[[int], object] = _nothing_to_reclaim

    @property
    def num_free(self) -> int:
        return self._pool.num_free if self._pool else 0

    def take(self, count: int) -> list[int] | None:
        if not count:
            return []
        if count > self.num_free:
            self.reclaim(count - self.num_free)
        if self._pool is None or count > self._pool.num_free:
            return None
        return self._pool.take(count)

    def give_back(self, blocks: list[int]) -> None:
        if not blocks:
            return
        assert self._pool is not None
        self._pool.put_back(self._pool.drop(blocks))

    def check_integrity(self, tables: list[list[int]], *, thorough: bool = True) -> None:
        """Raise AssertionError unless `tables` and the free list account for all host blocks.

        Not `thorough` it looks at no block that is free.
        """
        if self._pool:
            check = self._pool.check_integrity if thorough else self._pool.check_counts
            check(tables)


def _nothing_to_reclaim(count: int) -> None:
    """Nobody only caches here."""
