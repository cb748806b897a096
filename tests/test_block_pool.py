"""BlockPool and BuddyArena: single cases, and random histories against models too simple to be wrong."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvengine.kv.block_pool import BlockPool
from kvengine.kv.buddy import BuddyArena

FAST = settings(max_examples=100, stateful_step_count=30, deadline=None, derandomize=True)


# ---- BlockPool


def give_back(pool: BlockPool, blocks: list[int]) -> list[int]:
    """Let a table's blocks go; those that nobody holds any more are free afterwards."""
    left = pool.drop(blocks)
    pool.put_back(left)
    return left


def test_a1_double_free_never_inflates_the_pool():
    pool = BlockPool(8)
    x, y, z = pool.take(3)
    assert pool.num_free == 5
    with pytest.raises(ValueError, match=rf"blocks \[{x}\] are listed more than once"):
        pool.drop([x, x])
    assert pool.num_free == 5
    pool.check_integrity([[x, y, z]])
    assert pool.drop([x]) == [x]
    pool.put_back([x])
    with pytest.raises(ValueError, match=f"block {x} is given back but no table holds it"):
        pool.drop([x])
    assert pool.num_free == 6
    pool.check_integrity([[y, z]])


def test_a1_one_bad_block_among_good_ones_changes_nothing():
    pool = BlockPool(8)
    x, y, z = pool.take(3)
    give_back(pool, [z])
    for bad in ([x, y, z], [z, x, y], [x, y, y], [x, 8], [x, -1]):
        with pytest.raises(ValueError):
            pool.drop(bad)
        assert pool.num_free == 6
        pool.check_integrity([[x, y]])


def test_take_is_all_or_nothing():
    pool = BlockPool(4)
    held = pool.take(3)
    for count in (2, 5, -1):
        with pytest.raises(ValueError, match=f"cannot take {count} blocks, 1 are free"):
            pool.take(count)
    assert pool.take(0) == []
    assert pool.num_free == 1
    assert sorted(held + pool.take(1)) == [0, 1, 2, 3]


def test_a_block_that_was_just_used_is_used_first():
    pool = BlockPool(8)
    held = pool.take(4)
    give_back(pool, [held[2]])
    assert pool.take(1) == [held[2]]
    give_back(pool, held)
    assert pool.take(4) == held, "the first of a release is on top"


@pytest.mark.parametrize("make", [BlockPool, BuddyArena])
@pytest.mark.parametrize("num_blocks", [0, -1])
def test_a_pool_has_at_least_one_block(make, num_blocks):
    with pytest.raises(ValueError, match="at least one block"):
        make(num_blocks)


def test_integrity_tells_surplus_from_deficit():
    pool = BlockPool(4)
    a, b = pool.take(2)
    with pytest.raises(AssertionError, match=f"more often than held: {{{b}: 1}}"):
        pool.check_integrity([[a]])
    with pytest.raises(AssertionError, match=f"more often than counted: {{{b}: 1}}"):
        pool.check_integrity([[a, b], [b]])
    free = next(block for block in range(4) if block not in (a, b))
    with pytest.raises(AssertionError, match=f"more often than counted: {{{free}: 1}}"):
        pool.check_integrity([[a, b, free]])


class PoolAgainstSets(RuleBasedStateMachine):
    """The model: which table holds which blocks; all others are free."""

    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.pool = BlockPool(num_blocks)
        self.tables: list[list[int]] = []

    def free(self) -> set[int]:
        return set(range(self.num_blocks)) - {block for table in self.tables for block in table}

    @rule(count=st.integers(0, 14))
    def take(self, count: int) -> None:
        free = self.free()
        if count > len(free):
            with pytest.raises(ValueError):
                self.pool.take(count)
            return
        taken = self.pool.take(count)
        assert len(taken) == len(set(taken)) == count
        assert set(taken) <= free
        self.tables.append(taken)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        keep = data.draw(st.integers(0, len(table)))
        assert give_back(self.pool, table[keep:]) == table[keep:][::-1]
        self.tables.append(table[:keep])

    @rule(block=st.integers(-2, 14))
    def give_back_what_nobody_holds(self, block: int) -> None:
        if block in self.free() or not 0 <= block < self.num_blocks:
            with pytest.raises(ValueError):
                self.pool.drop([block])

    @invariant()
    def counts_agree(self) -> None:
        assert self.pool.num_free == len(self.free())
        self.pool.check_integrity(self.tables)

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for table in self.tables:
                give_back(self.pool, table)
            assert sorted(self.pool.take(self.num_blocks)) == list(range(self.num_blocks))


TestPoolAgainstSets = PoolAgainstSets.TestCase
TestPoolAgainstSets.settings = FAST


# ---- BuddyArena


@pytest.mark.parametrize(
    ("count", "size"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8), (9, 16), (1000, 1024), (1025, 2048)]
)
def test_regions_are_rounded_up_to_a_power_of_two(count, size):
    assert BuddyArena.region_size(count) == size


@pytest.mark.parametrize(
    ("num_blocks", "parts"),
    [(1, [1]), (8, [8]), (6, [4, 2]), (7, [4, 2, 1]), (13, [8, 4, 1]), (100, [64, 32, 4])],
)
def test_an_arena_is_the_largest_powers_of_two_that_sum_to_it(num_blocks, parts):
    arena = BuddyArena(num_blocks)
    assert arena.largest_possible == arena.largest_free == parts[0]
    starts = [arena.take(size) for size in parts]
    assert starts == [sum(parts[:i]) for i in range(len(parts))]
    assert arena.num_free == arena.largest_free == 0
    assert arena.take(1) is None


def test_split_and_merge_by_hand():
    arena = BuddyArena(8)
    assert arena.take(1) == 0  # 8 -> 4 + 4, 4 -> 2 + 2, 2 -> 1 + 1
    assert arena.take(2) == 2
    assert arena.take(1) == 1
    assert arena.take(3) == 4  # rounded up to 4
    assert (arena.num_free, arena.largest_free) == (0, 0)
    assert arena.give_back(2) == 2
    assert arena.give_back(0) == 1
    assert (arena.num_free, arena.largest_free) == (3, 2)  # 0 and 2..3 are free, 1 is not: no merge
    assert arena.take(4) is None
    assert arena.give_back(1) == 1
    assert (arena.num_free, arena.largest_free) == (4, 4)  # 0 + 1, then 0..1 + 2..3
    assert arena.give_back(4) == 4
    assert arena.largest_free == 8


def test_the_lowest_of_equal_regions_is_taken():
    arena = BuddyArena(8)
    assert [arena.take(1) for _ in range(6)] == [0, 1, 2, 3, 4, 5]
    arena.give_back(4)
    arena.give_back(2)
    assert arena.take(1) == 2


def test_parts_of_the_arena_never_merge_with_each_other():
    arena = BuddyArena(12)  # 8 + 4
    small = arena.take(4)
    assert small == 8  # the smallest region that is large enough
    arena.give_back(small)
    assert arena.largest_free == 8
    assert arena.take(9) is None


@pytest.mark.parametrize("start", [1, 3, 8, -1])
def test_giving_back_what_is_no_region_in_use_changes_nothing(start):
    arena = BuddyArena(8)
    assert arena.take(3) == 0
    with pytest.raises(ValueError, match=f"starts at block {start}"):
        arena.give_back(start)
    assert arena.num_free == 4
    arena.check_integrity()
    arena.give_back(0)
    with pytest.raises(ValueError):
        arena.give_back(0)
    assert arena.num_free == 8


class Bitmap:
    """A buddy arena by brute force: one flag per block, and every aligned run looked at."""

    def __init__(self, num_blocks: int) -> None:
        self.used = [False] * num_blocks
        self.parts: list[tuple[int, int]] = []
        start = 0
        while start < num_blocks:
            size = max(2**k for k in range(8) if 2**k <= num_blocks - start)
            self.parts.append((start, size))
            start += size

    def runs(self, size: int) -> list[int]:
        """Starts of all free runs of `size` blocks, aligned within their part."""
        return [
            start
            for first, length in self.parts
            for start in range(first, first + length, size)
            if size <= length and not any(self.used[start : start + size])
        ]

    def largest_free(self) -> int:
        return max((2**k for k in range(8) if self.runs(2**k)), default=0)

    def expected(self, size: int) -> int | None:
        """Where a region of `size` goes: the lowest of the smallest maximal free runs that hold it."""
        for larger in (2**k for k in range(8) if 2**k >= size):
            maximal = [
                start for start in self.runs(larger) if not self.is_part_of_free_run(start, larger * 2)
            ]
            if maximal:
                return min(maximal)
        return None

    def is_part_of_free_run(self, block: int, size: int) -> bool:
        return any(start <= block < start + size for start in self.runs(size))


class BuddyAgainstBitmap(RuleBasedStateMachine):
    """Random demands; every answer must be the one that brute force finds."""

    @initialize(num_blocks=st.integers(1, 70) | st.sampled_from([16, 31, 32, 64]))
    def start(self, num_blocks: int) -> None:
        self.arena = BuddyArena(num_blocks)
        self.bitmap = Bitmap(num_blocks)
        self.regions: dict[int, int] = {}

    @rule(count=st.sampled_from([1, 1, 1, 2, 2, 3, 4, 5, 7, 9, 20, 40]))
    def take(self, count: int) -> None:
        size = next(2**k for k in range(8) if 2**k >= count)
        expected = self.bitmap.expected(size)
        assert self.arena.take(count) == expected
        if expected is not None:
            self.regions[expected] = size
            self.bitmap.used[expected : expected + size] = [True] * size

    @precondition(lambda self: self.regions)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        start = data.draw(st.sampled_from(sorted(self.regions)))
        self.give_back_region(start)

    def give_back_region(self, start: int) -> None:
        size = self.regions.pop(start)
        self.bitmap.used[start : start + size] = [False] * size
        assert self.arena.give_back(start) == size

    @rule(start=st.integers(-1, 71))
    def give_back_what_is_no_region(self, start: int) -> None:
        if start not in self.regions:
            with pytest.raises(ValueError):
                self.arena.give_back(start)

    @invariant()
    def counts_agree(self) -> None:
        self.arena.check_integrity()
        assert self.arena.num_free == self.bitmap.used.count(False)
        assert self.arena.largest_free == self.bitmap.largest_free()

    def teardown(self) -> None:
        """After everything is freed the arena is as new: its parts can be taken whole."""
        if hasattr(self, "arena"):
            for start in list(self.regions):
                self.give_back_region(start)
            self.counts_agree()
            for start, size in self.bitmap.parts:
                assert self.arena.take(size) == start
            assert self.arena.num_free == 0


TestBuddyAgainstBitmap = BuddyAgainstBitmap.TestCase
TestBuddyAgainstBitmap.settings = FAST
