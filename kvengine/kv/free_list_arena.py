"""A free-list allocator over a run of blocks: regions of any size, cut from gaps that merge again.

Source: D. E. Knuth, "The Art of Computer Programming", volume 1, section 2.5 (first fit and best fit; liberation
with merging from a list sorted by address).
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Literal


class FreeListArena:
    """Blocks 0..num_blocks-1; a region takes the front of a gap and has exactly the size that was asked for.

    `first` takes the gap at the lowest address that is large enough, `best` the smallest such gap (of equal ones
    the lowest). There is at most one gap more than there are regions in use, so a call costs their number.
    """

    def __init__(self, num_blocks: int, fit: Literal["first", "best"]) -> None:
        if num_blocks < 1:
            raise ValueError(f"an arena needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self._fit = fit
        self._gaps: list[tuple[int, int]] = [(0, num_blocks)]
        """(start, size), sorted; no two of them touch."""
        self._taken: dict[int, int] = {}

    @staticmethod
    def region_size(count: int) -> int:
        """What a demand of `count` blocks takes: just that."""
        return count

    @property
    def largest_possible(self) -> int:
        """The largest region of an empty arena, in blocks."""
        return self.num_blocks

    @property
    def largest_free(self) -> int:
        """The largest region free now, in blocks; 0 when none is."""
        return max((size for _, size in self._gaps), default=0)

    @property
    def regions(self) -> dict[int, int]:
        """The regions in use: first block and size in blocks."""
        return dict(self._taken)

    def take(self, count: int) -> int | None:
        """The first block of a region of `count` blocks, or None when no gap is that large."""
        if count < 1:
            raise ValueError(f"a region has at least one block, not {count}")
        index = self._choose(count)
        if index is None:
            return None
        start, size = self._gaps[index]
        if size == count:
            del self._gaps[index]
        else:
            self._gaps[index] = (start + count, size - count)
        self._taken[start] = count
        self.num_free -= count
        return start

    def _choose(self, count: int) -> int | None:
        """The place in the list of the gap that `count` blocks are cut from."""
        fitting = ((size, index) for index, (_, size) in enumerate(self._gaps) if size >= count)
        if self._fit == "first":
            return next((index for _, index in fitting), None)
        return min(fitting, default=(0, None))[1]

    def give_back(self, start: int) -> int:
        """Free the region that starts at `start`, merging it with the gaps it touches; its size in blocks.

        Raises ValueError when no region in use starts there.
        """
        if start not in self._taken:
            raise ValueError(f"no region in use starts at block {start}")
        freed = size = self._taken.pop(start)
        self.num_free += freed
        index = bisect_left(self._gaps, (start, 0))
        if index < len(self._gaps) and self._gaps[index][0] == start + size:
            size += self._gaps.pop(index)[1]
        if index and sum(self._gaps[index - 1]) == start:
            index -= 1
            start, before = self._gaps.pop(index)
            size += before
        self._gaps.insert(index, (start, size))
        return freed

    def check_integrity(self) -> None:
        """Raise AssertionError unless gaps and regions cover the arena exactly, without overlap or split gaps."""
        assert self._gaps == sorted(self._gaps), "the gaps are out of order"
        assert sum(size for _, size in self._gaps) == self.num_free, "free gaps do not add up"
        end, end_of_gap = 0, -1
        for start, size in sorted([*self._gaps, *self._taken.items()]):
            assert size > 0, f"an empty region or gap at block {start}"
            assert start == end, f"gap or overlap at block {end}: next region starts at {start}"
            end = start + size
            if start not in self._taken:
                assert start != end_of_gap, f"two gaps touch at block {start}"
                end_of_gap = end
        assert end == self.num_blocks, f"regions end at {end}, not at {self.num_blocks}"
