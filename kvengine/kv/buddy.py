"""A buddy allocator over a run of blocks: regions of power-of-two size that split and merge.

Source: K. C. Knowlton, "A fast storage allocator", CACM 8(10), 1965; the vLLM paper (Kwon et al., SOSP 2023,
section 6.1) manages its contiguous baselines this way.
"""

from __future__ import annotations

from bisect import bisect_left, insort


class BuddyArena:
    """Blocks 0..num_blocks-1 as the largest powers of two that sum to the pool, in descending order.

    A region of size 2**k inside an arena part that starts at s has its buddy at ((start - s) XOR 2**k) + s.
    The lowest free region of the smallest sufficient size is taken, so results do not depend on hash order. Of
    each size at most one region more is free than there are in use (else its buddy were free and they would be
    one), so a call costs their number and not the pool's.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"an arena needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self._parts: list[tuple[int, int]] = []
        self._free: list[list[int]] = [[] for _ in range(num_blocks.bit_length())]
        """By order k, the starts of the free regions of 2**k blocks, sorted."""
        self._taken: dict[int, int] = {}
        start = 0
        for order in range(num_blocks.bit_length() - 1, -1, -1):
            if num_blocks >> order & 1:
                self._parts.append((start, order))
                self._free[order].append(start)
                start += 1 << order

    @staticmethod
    def region_size(count: int) -> int:
        """The power of two that a demand of `count` blocks is rounded up to."""
        return 1 << max(count - 1, 0).bit_length()

    @property
    def largest_possible(self) -> int:
        """The largest region of an empty arena, in blocks."""
        return 1 << self._parts[0][1]

    @property
    def largest_free(self) -> int:
        """The largest region free now, in blocks; 0 when none is."""
        return max((1 << order for order, starts in enumerate(self._free) if starts), default=0)

    @property
    def regions(self) -> dict[int, int]:
        """The regions in use: first block and size in blocks."""
        return {start: 1 << order for start, order in self._taken.items()}

    def take(self, count: int) -> int | None:
        """The first block of a free region of at least `count` blocks, or None when none is that large."""
        wanted = self.region_size(count).bit_length() - 1
        order = next((k for k in range(wanted, len(self._free)) if self._free[k]), None)
        if order is None:
            return None
        start = self._free[order].pop(0)
        while order > wanted:  # the lists below are empty, down to `wanted`
            order -= 1
            self._free[order].append(start + (1 << order))
        self._taken[start] = wanted
        self.num_free -= 1 << wanted
        return start

    def give_back(self, start: int) -> int:
        """Free the region that starts at `start`, merging it with free buddies; its size in blocks.

        Raises ValueError when no region in use starts there.
        """
        if start not in self._taken:
            raise ValueError(f"no region in use starts at block {start}")
        order = self._taken.pop(start)
        size = 1 << order
        self.num_free += size
        part_start, part_order = next(p for p in reversed(self._parts) if p[0] <= start)
        while order < part_order:
            buddy = ((start - part_start) ^ (1 << order)) + part_start
            free = self._free[order]
            place = bisect_left(free, buddy)
            if place == len(free) or free[place] != buddy:
                break
            del free[place]
            start = min(start, buddy)
            order += 1
        insort(self._free[order], start)
        return size

    def check_integrity(self) -> None:
        """Raise AssertionError unless free and taken regions cover the arena exactly, without overlap."""
        assert all(starts == sorted(starts) for starts in self._free), "free regions are out of order"
        regions = [(start, 1 << order) for order, starts in enumerate(self._free) for start in starts]
        assert sum(size for _, size in regions) == self.num_free, "free regions do not add up"
        regions += self.regions.items()
        end = 0
        for start, size in sorted(regions):
            assert start == end, f"gap or overlap at block {end}: next region starts at {start}"
            end = start + size
        assert end == self.num_blocks, f"regions end at {end}, not at {self.num_blocks}"
