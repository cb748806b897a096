"""A pool of equal blocks: an O(1) free list, reference counts, and pins that last until a plan was executed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable


class BlockPool:
    """Blocks 0..num_blocks-1. Everywhere: ref_count(b) = tables that hold b + pins on b.

    A block whose count falls to 0 is returned by `drop` or `unpin`; whoever asked either puts it back on the free
    list (`put_back`) or keeps it cached. The free list is a stack, so a block that was just used (and is warm
    in the processor's caches) is reused first; blocks that were never used cost nothing but a counter.
    """

    __slots__ = ("_next_fresh", "_pins", "_ref_counts", "_stack", "num_blocks", "num_saved")

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self._stack: list[int] = []
        self._next_fresh = 0
        self._ref_counts = [0] * num_blocks
        self._pins: dict[int, int] = {}
        self.num_saved = 0
        """Blocks that sharing saves: the sum over all blocks of the tables that hold one, less one."""

    @property
    def num_free(self) -> int:
        """Blocks on the free list."""
        return len(self._stack) + self.num_blocks - self._next_fresh

    def take(self, count: int) -> list[int]:
        """`count` free blocks, each with reference count 1; ValueError (and no change) if there are fewer."""
        stack, refs = self._stack, self._ref_counts
        if count == 1 and stack:  # what nearly every call wants
            block = stack.pop()
            refs[block] = 1
            return [block]
        if count < 0 or count > self.num_free:
            raise ValueError(f"cannot take {count} blocks, {self.num_free} are free")
        used = min(count, len(stack))
        taken = stack[len(stack) - used :]
        del stack[len(stack) - used :]
        taken.reverse()
        if used < count:
            first = self._next_fresh
            self._next_fresh = first + count - used
            taken += range(first, self._next_fresh)
        for block in taken:
            refs[block] = 1
        return taken

    def hold(self, blocks: Iterable[int]) -> None:
        """One more reference on each of `blocks`."""
        refs = self._ref_counts
        for block in blocks:
            self.num_saved += refs[block] > self._pins.get(block, 0)
            refs[block] += 1

    def drop(self, blocks: list[int]) -> list[int]:
        """One reference less on each of `blocks`; those that nobody holds any more, last one first.

        Raises ValueError, and changes nothing, when a block is listed twice, is not in the pool, or is held by
        fewer tables than that.
        """
        refs = self._ref_counts
        self._check_drop(blocks)
        left = []
        for block in reversed(blocks):
            count = refs[block] - 1
            refs[block] = count
            if not count:
                left.append(block)
            elif count > self._pins.get(block, 0):
                self.num_saved -= 1
        return left

    def put_back(self, blocks: Iterable[int]) -> None:
        """Put blocks with reference count 0, which are not on the free list, on it."""
        self._stack.extend(blocks)

    def num_tables(self, block: int) -> int:
        """Tables that hold `block`: its reference count without pins."""
        return self._ref_counts[block] - self._pins.get(block, 0)

    def ref_count(self, block: int) -> int:
        """Tables that hold `block`, and pins on it."""
        return self._ref_counts[block]

    @property
    def pinned(self) -> Collection[int]:
        """Blocks with pins."""
        return self._pins.keys()

    def pin(self, block: int) -> None:
        """Keep `block` from being freed until `unpin`, whatever happens to the tables that hold it."""
        self._ref_counts[block] += 1
        self._pins[block] = self._pins.get(block, 0) + 1

    def unpin(self, block: int) -> bool:
        """Take a pin off; whether nobody holds the block any more. ValueError when it has none."""
        if block not in self._pins:
            raise ValueError(f"block {block} is not pinned")
        self._pins[block] -= 1
        if not self._pins[block]:
            del self._pins[block]
        self._ref_counts[block] -= 1
        return not self._ref_counts[block]

    def check_counts(self, tables: Iterable[list[int]], num_cached: int = 0) -> None:
        """Raise AssertionError unless counts of the blocks that `tables` hold, and of all others, add up.

        Costs O(blocks held); `check_integrity` looks at every block.
        """
        held = self._held(tables)
        refs = self._ref_counts
        wrong = {block: (count, refs[block]) for block, count in held.items() if count != refs[block]}
        assert not wrong, f"blocks of which (held, counted) differ: {wrong}"
        total = self.num_free + num_cached + len(held)
        assert total == self.num_blocks, (
            f"free, cached and held blocks add up to {total}, not {self.num_blocks}"
        )

    def _held(self, tables: Iterable[list[int]]) -> Counter[int]:
        """How often each block is held or pinned."""
        held = Counter(block for table in tables for block in table)
        held.update(self._pins)
        return held

    def check_integrity(self, tables: Iterable[list[int]], cached: Collection[int] = ()) -> None:
        """Raise AssertionError unless reference counts equal what `tables` hold plus pins, and the rest is free.

        `cached` are the blocks that are kept with reference count 0. Costs O(pool).
        """
        held = self._held(tables)
        refs = self._ref_counts
        surplus = {b: n - held[b] for b, n in enumerate(refs) if n > held[b]}
        deficit = {b: n - refs[b] for b, n in held.items() if n > refs[b]}
        assert not surplus, f"blocks counted more often than held: {surplus}"
        assert not deficit, f"blocks held more often than counted: {deficit}"
        free = set(self._stack)
        assert len(free) == len(self._stack), "a block is twice in the free list"
        for name, others in (("held", held.keys()), ("cached", set(cached))):
            assert not free & others, f"blocks both free and {name}: {sorted(free & others)}"
        assert not held.keys() & set(cached), "a block is both held and cached as idle"
        saved = sum(n - 1 for b in held if (n := held[b] - self._pins.get(b, 0)) > 1)
        assert self.num_saved == saved, (
            f"{self.num_saved} blocks are said to be saved by sharing, not {saved}"
        )
        total = self.num_free + len(cached) + len(held)
        assert total == self.num_blocks, (
            f"free, cached and held blocks add up to {total}, not {self.num_blocks}"
        )

    def _check_drop(self, blocks: list[int]) -> None:
        refs = self._ref_counts
        for block in blocks:
            if not 0 <= block < self.num_blocks:
                raise ValueError(f"block {block} is not in this pool of {self.num_blocks}")
            if refs[block] - (self._pins.get(block, 0) if self._pins else 0) < 1:
                raise ValueError(f"block {block} is given back but no table holds it")
        if len(blocks) > 1 and len(set(blocks)) < len(blocks):
            twice = [block for block, count in Counter(blocks).items() if count > 1]
            raise ValueError(f"blocks {twice} are listed more than once in one release")
