"""A buddy allocator over a run of blocks: regions of power-of-two size that split and merge.

Source: K. C. Knowlton, "A fast storage allocator", CACM 8(10), 1965; the vLLM paper (Kwon et al., SOSP 2023,
section 6.1) manages its contiguous baselines this way.
"""

from __future__ import annotations


class BuddyArena:
    """Blocks 0..num_blocks-1 as the largest powers of two that sum to the pool, in descending order.

    A region of size 2**k inside an arena part that starts at s has its buddy at ((start - s) XOR 2**k) + s.
    The lowest free region of the smallest sufficient size is taken, so results do not depend on hash order.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"an arena needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self._parts: list[tuple[int, int]] = []
        self._free: dict[int, set[int]] = {order: set() for order in range(num_blocks.bit_length())}
        self._taken: dict[int, int] = {}
        start = 0
        for order in range(num_blocks.bit_length() - 1, -1, -1):
            if num_blocks >> order & 1:
                self._parts.append((start, order))
                self._free[order].add(start)
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
        return max((1 << order for order, starts in self._free.items() if starts), default=0)

    def take(self, count: int) -> int | None:
        """The first block of a free region of at least `count` blocks, or None when none is that large."""
        wanted = self.region_size(count).bit_length() - 1
        order = next((k for k in sorted(self._free) if k >= wanted and self._free[k]), None)
        if order is None:
            return None
        start = min(self._free[order])
        self._free[order].remove(start)
        while order > wanted:
            order -= 1
            self._free[order].add(start + (1 << order))
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
            if buddy not in self._free[order]:
                break
            self._free[order].remove(buddy)
            start = min(start, buddy)
            order += 1
        self._free[order].add(start)
        return size

    def check_integrity(self) -> None:
        """Raise AssertionError unless free and taken regions cover the arena exactly, without overlap."""
        regions = [(start, 1 << order) for order, starts in self._free.items() for start in starts]
        assert sum(size for _, size in regions) == self.num_free, "free regions do not add up"
        regions += [(start, 1 << order) for start, order in self._taken.items()]
        end = 0
        for start, size in sorted(regions):
            assert start == end, f"gap or overlap at block {end}: next region starts at {start}"
            end = start + size
        assert end == self.num_blocks, f"regions end at {end}, not at {self.num_blocks}"
