"""Contiguous allocators: arenas against a list of slots, reservations by hand, refusals, and whole runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvengine import launch
from kvengine.analysis.summary import PoolFacts, summarize
from kvengine.analysis.table import print_summary, stdout
from kvengine.cli import main
from kvengine.core.errors import ConfigError, PolicyError, RequestError
from kvengine.core.limits import EngineLimits
from kvengine.core.reasons import Reason, Refusal
from kvengine.core.request import Request, SamplingParams
from kvengine.core.sequence import Sequence
from kvengine.engine.intake import Intake
from kvengine.kv.buddy import BuddyArena
from kvengine.kv.free_list_arena import FreeListArena
from kvengine.registry import discover
from kvengine.telemetry.recorder import ColumnRecorder
from kvengine.testing.engines import TestEngine
from kvengine.testing.sources import checksum_output
from kvengine_plugins.allocators.contiguous import (
    Arena,
    ContiguousAllocator,
    ReserveName,
    next_power_of_two,
    reservation,
)

REGISTRY = discover()
FAST = settings(max_examples=100, stateful_step_count=40, deadline=None, derandomize=True)
ARENAS: dict[str, Callable[[int], Arena]] = {
    "buddy": BuddyArena,
    "first": partial(FreeListArena, fit="first"),
    "best": partial(FreeListArena, fit="best"),
}
RESERVES: tuple[ReserveName, ...] = ("max", "pow2", "oracle")
VARIANTS: list[tuple[str, dict[str, str]]] = [
    ("contiguous_max", {}),
    ("contiguous_pow2", {}),
    ("contiguous_oracle", {}),
    *((name, {"reserve": reserve}) for name in ("first_fit", "best_fit") for reserve in RESERVES),
]


# ---- the arena of gaps, by hand


def holed(fit: Any) -> FreeListArena:
    """Ten blocks with gaps of 3 at block 0, of 2 at block 4 and of 3 at block 7."""
    arena = FreeListArena(10, fit)
    assert [arena.take(count) for count in (3, 1, 2, 1, 3)] == [0, 3, 4, 6, 7]
    assert (arena.num_free, arena.largest_free) == (0, 0)
    assert [arena.give_back(start) for start in (0, 4, 7)] == [3, 2, 3]
    assert (arena.num_free, arena.largest_free, arena.largest_possible) == (8, 3, 10)
    return arena


@pytest.mark.parametrize(
    ("fit", "count", "start"),
    [("first", 2, 0), ("best", 2, 4), ("first", 1, 0), ("best", 1, 4), ("first", 3, 0), ("best", 3, 0)],
)
def test_first_fit_takes_the_lowest_gap_and_best_fit_the_smallest(fit, count, start):
    arena = holed(fit)
    assert arena.take(count) == start
    assert arena.num_free == 8 - count
    assert arena.regions[start] == count


@pytest.mark.parametrize("fit", ["first", "best"])
def test_a_gap_too_small_is_refused_without_a_trace(fit):
    arena = holed(fit)
    assert arena.take(4) is None
    assert (arena.num_free, arena.largest_free, arena.regions) == (8, 3, {3: 1, 6: 1})
    arena.check_integrity()


@pytest.mark.parametrize(("order", "largest"), [((3, 6), [6, 10]), ((6, 3), [6, 10])])
def test_gaps_merge_with_both_neighbours(order, largest):
    arena = holed("first")
    for start, merged in zip(order, largest, strict=True):
        assert arena.give_back(start) == 1
        assert arena.largest_free == merged
        arena.check_integrity()
    assert arena.take(10) == 0


@pytest.mark.parametrize("start", [-1, 0, 1, 4, 10])
def test_giving_back_what_is_no_region_in_use_changes_nothing(start):
    arena = holed("best")
    with pytest.raises(ValueError, match=f"starts at block {start}"):
        arena.give_back(start)
    assert arena.num_free == 8
    arena.check_integrity()


def test_an_arena_and_its_regions_have_at_least_one_block():
    for num_blocks in (0, -1):
        with pytest.raises(ValueError, match="at least one block"):
            FreeListArena(num_blocks, "first")
    for count in (0, -1):
        with pytest.raises(ValueError, match="at least one block"):
            FreeListArena(8, "first").take(count)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ({"_gaps": [(7, 3), (0, 3), (4, 2)]}, "out of order"),
        ({"_gaps": [(0, 3), (4, 1), (5, 1), (7, 3)]}, "touch"),
        ({"_gaps": [(0, 4), (4, 1), (7, 3)]}, "overlap"),
        ({"num_free": 7}, "add up"),
        ({"_taken": {3: 1}}, "overlap"),
        ({"num_blocks": 11}, "end at 10"),
    ],
)
def test_integrity_names_what_is_damaged(damage, says):
    arena = holed("first")
    for name, value in damage.items():
        setattr(arena, name, value)
    with pytest.raises(AssertionError, match=says):
        arena.check_integrity()


# ---- every arena against a list of slots


class ArenaAgainstSlots(RuleBasedStateMachine):
    """The model: one entry per block, the start of the region that holds it or None."""

    @initialize(kind=st.sampled_from(sorted(ARENAS)), num_blocks=st.integers(1, 48))
    def start(self, kind: str, num_blocks: int) -> None:
        self.kind = kind
        self.arena = ARENAS[kind](num_blocks)
        self.slots: list[int | None] = [None] * num_blocks

    def gaps(self) -> list[tuple[int, int]]:
        """(start, size) of all maximal free runs."""
        runs = groupby(range(len(self.slots)), key=lambda block: self.slots[block] is None)
        whole = [list(run) for free, run in runs if free]
        return [(run[0], len(run)) for run in whole]

    def buddy_runs(self, size: int) -> list[int]:
        """Starts of all free runs of `size`, aligned within the powers of two that make up the arena."""
        found, start = [], 0
        while start < len(self.slots):
            part = 1 << (len(self.slots) - start).bit_length() - 1
            found += range(start, start + part, size) if size <= part else []
            start += part
        return [at for at in found if not any(held is not None for held in self.slots[at : at + size])]

    def expected(self, count: int) -> int | None:
        """Where a region of `count` blocks goes."""
        fitting = [(start, size) for start, size in self.gaps() if size >= count]
        if self.kind == "first":
            return min(fitting, default=(None,))[0]
        if self.kind == "best":
            return min(((size, start) for start, size in fitting), default=(0, None))[1]
        size = next_power_of_two(count)
        for larger in (size << k for k in range(7)):
            doubles = self.buddy_runs(2 * larger)
            whole = [
                at for at in self.buddy_runs(larger) if not any(d <= at < d + 2 * larger for d in doubles)
            ]
            if whole:
                return min(whole)
        return None

    @rule(count=st.integers(1, 12) | st.integers(1, 50))
    def take(self, count: int) -> None:
        before = (self.arena.num_free, self.arena.largest_free, self.arena.regions)
        expected = self.expected(count)
        assert self.arena.take(count) == expected
        if expected is None:
            assert (self.arena.num_free, self.arena.largest_free, self.arena.regions) == before
            return
        size = self.arena.region_size(count)
        assert size == (next_power_of_two(count) if self.kind == "buddy" else count)
        assert self.slots[expected : expected + size] == [None] * size
        self.slots[expected : expected + size] = [expected] * size

    @precondition(lambda self: any(held is not None for held in self.slots))
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        held = sorted({start for start in self.slots if start is not None})
        self.give_back_region(data.draw(st.sampled_from(held)))

    def give_back_region(self, start: int) -> None:
        assert self.arena.give_back(start) == self.slots.count(start)
        self.slots = [None if held == start else held for held in self.slots]

    @rule(start=st.integers(-1, 48))
    def give_back_what_is_no_region(self, start: int) -> None:
        if start not in self.slots:
            with pytest.raises(ValueError):
                self.arena.give_back(start)

    @invariant()
    def counts_agree(self) -> None:
        self.arena.check_integrity()
        assert self.arena.num_free == self.slots.count(None)
        assert self.arena.regions == {
            start: self.slots.count(start) for start in self.slots if start is not None
        }
        if self.kind == "buddy":
            largest = max((1 << k for k in range(6) if self.buddy_runs(1 << k)), default=0)
        else:
            largest = max((size for _, size in self.gaps()), default=0)
        assert self.arena.largest_free == largest

    def teardown(self) -> None:
        """When all is given back the arena is whole again."""
        if hasattr(self, "arena"):
            for start in {start for start in self.slots if start is not None}:
                self.give_back_region(start)
            self.counts_agree()
            assert self.arena.largest_free == self.arena.largest_possible
            assert self.arena.take(self.arena.largest_possible) == 0


TestArenaAgainstSlots = ArenaAgainstSlots.TestCase
TestArenaAgainstSlots.settings = FAST


# ---- reservations


def sequence(num_prompt: int, num_new: int, max_model_len: int = 2048, known: bool = True) -> Sequence:
    """One of P prompt tokens and M new ones, as the engine makes it."""
    limits = EngineLimits(max_num_seqs=1, max_num_batched_tokens=1, max_model_len=max_model_len)
    intake = Intake(limits=limits, capacity=max_model_len, vocab_size=2, eos_token_ids=(), seed=0)
    request = Request(
        id=f"{num_prompt}+{num_new}",
        prompt_token_ids=(1,) * num_prompt,
        sampling=SamplingParams(max_tokens=num_new),
        known_output_tokens=num_new if known else None,
    )
    return intake.sequences(request)[0]


def freed(pool: ContiguousAllocator, seq: Sequence) -> int:
    """Free `seq`; the blocks that became free."""
    before = pool.num_free_blocks
    pool.free(seq)
    return pool.num_free_blocks - before


def allocator(
    arena: str = "first",
    reserve: ReserveName = "oracle",
    num_blocks: int = 10,
    block_size: int = 1,
    max_model_len: int = 2048,
) -> ContiguousAllocator:
    return ContiguousAllocator(
        "under_test", ARENAS[arena](num_blocks), block_size, reservation(reserve, max_model_len)
    )


@pytest.mark.parametrize(
    ("count", "power"), [(1, 1), (2, 2), (3, 4), (4, 4), (25, 32), (32, 32), (33, 64), (1025, 2048)]
)
def test_outputs_are_rounded_up_to_a_power_of_two(count, power):
    assert next_power_of_two(count) == power


@pytest.mark.parametrize(
    ("reserve", "num_prompt", "num_new", "slots"),
    [
        ("max", 10, 25, 2048),
        ("pow2", 10, 25, 10 + 32 - 1),
        ("oracle", 10, 25, 10 + 25 - 1),
        ("pow2", 10, 32, 10 + 32 - 1),
        ("pow2", 10, 1, 10),
        ("oracle", 1, 1, 1),
        ("pow2", 900, 1100, 2047),  # not 900 + 2048 - 1: nothing gets longer than max_model_len
        ("pow2", 1000, 1024, 1000 + 1024 - 1),
        ("pow2", 1024, 1024, 2047),
    ],
)
def test_what_is_reserved(reserve, num_prompt, num_new, slots):
    assert reservation(reserve, 2048).slots(sequence(num_prompt, num_new)) == slots


@given(num_prompt=st.integers(1, 300), num_new=st.integers(1, 300))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_every_reservation_holds_all_slots_and_oracle_wastes_none(num_prompt, num_new):
    seq = sequence(num_prompt, num_new, max_model_len=600)
    needed = seq.max_tokens_total - 1
    oracle, pow2, longest = (reservation(name, 600).slots(seq) for name in ("oracle", "pow2", "max"))
    assert oracle == needed <= pow2 < longest == 600
    assert pow2 < num_prompt + 2 * num_new


@pytest.mark.parametrize(
    ("arena", "reserve", "region"),
    [("first", "oracle", 9), ("best", "pow2", 11), ("buddy", "oracle", 16), ("buddy", "max", 16)],
)
def test_a_region_in_blocks_and_what_of_it_is_owned(arena, reserve, region):
    """10 prompt tokens and 25 new ones in blocks of 4."""
    pool = allocator(arena, reserve, num_blocks=40, block_size=4, max_model_len=64)
    seq = sequence(10, 25, max_model_len=64)
    slots = {"oracle": 34, "pow2": 41, "max": 64}[reserve]
    assert pool.blocks_needed(seq, 10) == region
    assert pool.allocate(seq, 10) is None
    assert seq.block_table.blocks == list(range(region))
    assert seq.block_table.num_slots == pool.num_owned_slots == slots
    assert pool.num_free_blocks == 40 - region
    assert pool.blocks_needed(seq, slots) == 0
    assert pool.allocate(seq, slots) is None
    pool.check_integrity([seq])
    with pytest.raises(AssertionError, match=f"{slots + 1} slots and has reserved {slots}"):
        pool.allocate(seq, slots + 1)
    assert freed(pool, seq) == region
    assert freed(pool, seq) == 0
    assert (pool.num_owned_slots, seq.block_table.num_slots, seq.block_table.blocks) == (0, 0, [])
    pool.check_integrity([])


def test_more_than_is_reserved_is_an_internal_error_of_a_new_sequence_too():
    pool, seq = allocator(), sequence(3, 2)
    with pytest.raises(AssertionError, match="5 slots and has reserved 4"):
        pool.allocate(seq, 5)
    assert pool.num_free_blocks == 10
    pool.check_integrity([seq])


@pytest.mark.parametrize(
    ("arena", "reserve", "capacity"),
    [("first", "max", 30), ("buddy", "max", 30), ("first", "pow2", 52), ("buddy", "oracle", 32)],
)
def test_capacity_is_what_one_sequence_can_own_in_an_empty_pool(arena, reserve, capacity):
    assert allocator(arena, reserve, num_blocks=13, block_size=4, max_model_len=30).capacity == capacity


# ---- refusals


def test_fragmentation_worked_out_by_hand():
    """Ten slots: A (3) B (3) C (3), one free; A and C end, so 3 + 4 are free. 5 fit nowhere, 8 are not there."""
    pool = allocator()
    a, b, c = live = [sequence(2, 2) for _ in range(3)]
    for seq in live:
        assert pool.allocate(seq, 2) is None
    assert [seq.block_table.blocks[0] for seq in live] == [0, 3, 6]
    assert (freed(pool, a), freed(pool, c)) == (3, 3)
    five, eight = sequence(3, 3), sequence(5, 4)
    detail = "5 needed, 7 free, the largest region is 4"
    assert pool.allocate(five, 3) == Refusal(Reason.FRAGMENTED, detail)
    assert pool.allocate(eight, 5) == Refusal(Reason.NO_BLOCKS, "8 needed, 7 free")
    assert (pool.num_free_blocks, pool.num_owned_slots) == (7, 3)
    assert five.block_table.blocks == eight.block_table.blocks == []
    pool.check_integrity([b, five, eight])
    pool.free(b)
    assert pool.allocate(five, 3) is None
    assert five.block_table.blocks == [0, 1, 2, 3, 4]


def test_rounding_fragments_a_buddy_arena():
    """Four regions of 2; the inner two end, but they are no buddies: 4 are free, and no region of 4."""
    pool = allocator("buddy", num_blocks=8)
    live = [sequence(1, 2) for _ in range(4)]
    for seq in live:
        assert pool.allocate(seq, 1) is None
    pool.free(live[1])
    pool.free(live[2])
    three = sequence(1, 3)
    assert pool.blocks_needed(three, 1) == 4
    detail = "4 needed, 4 free, the largest region is 2"
    assert pool.allocate(three, 1) == Refusal(Reason.FRAGMENTED, detail)
    pool.free(live[0])
    assert pool.allocate(three, 1) is None
    pool.check_integrity([live[3], three])


@pytest.mark.parametrize(
    ("arena", "reserve", "num_new", "numbers"),
    [
        ("first", "oracle", 11, None),  # 2 + 11 - 1 slots are 12 blocks of 1
        ("first", "oracle", 12, ("13 slots", "13 blocks", "is 12")),
        ("first", "pow2", 12, ("17 slots", "17 blocks", "is 12")),
        ("buddy", "oracle", 7, None),
        ("buddy", "oracle", 8, ("9 slots", "16 blocks", "is 8")),
        ("best", "max", 8, None),
    ],
)
def test_what_an_empty_arena_cannot_hold_is_refused_for_good(arena, reserve, num_new, numbers):
    pool = allocator(arena, reserve, num_blocks=12, max_model_len=12 if reserve == "max" else 20)
    seq = sequence(2, num_new, max_model_len=20)
    text = pool.refuses_for_good(seq)
    assert (text is None) == (numbers is None)
    for number in numbers or ():
        assert number in str(text)


@pytest.mark.parametrize("reserve", RESERVES)
def test_a_sequence_without_known_length_is_refused_by_those_that_need_it(reserve):
    pool = allocator(reserve=reserve, max_model_len=8)
    text = pool.refuses_for_good(sequence(2, 3, max_model_len=8, known=False))
    assert pool.needs_lengths == (text is not None) == (reserve != "max")
    assert text is None or "known_output_tokens" in text
    assert pool.refuses_for_good(sequence(2, 3, max_model_len=8)) is None


DAMAGES: list[tuple[Callable[[Any, list[Sequence]], object], str]] = [
    (lambda pool, live: live[0].block_table.blocks.reverse(), "not contiguous"),
    (lambda pool, live: setattr(live[0].block_table, "blocks", live[1].block_table.blocks), "share"),
    (lambda pool, live: setattr(live[0].block_table, "num_slots", 3), "owns 3 slots"),
    (lambda pool, live: live[0].block_table.blocks.pop(), "a region of 3 blocks"),
    (lambda pool, live: setattr(live[0].block_table, "blocks", [1, 2, 3, 4]), "differ"),
    (lambda pool, live: setattr(live[0].block_table, "blocks", []), "slots and no region"),
    (lambda pool, live: live.pop(), "differ"),
    (lambda pool, live: setattr(pool, "_num_owned_slots", 9), "8 slots are owned, 9 counted"),
    (lambda pool, live: setattr(pool._arena, "num_free", 3), "add up"),
]


@pytest.mark.parametrize(("damage", "says"), DAMAGES)
def test_integrity_of_tables(damage, says):
    pool = allocator()
    live = [sequence(2, 3), sequence(3, 2)]
    for seq in live:
        pool.allocate(seq, 2)
    pool.check_integrity(live)
    damage(pool, live)
    with pytest.raises(AssertionError, match=says):
        pool.check_integrity(live)


@given(
    arena=st.sampled_from(sorted(ARENAS)),
    reserve=st.sampled_from(RESERVES),
    block_size=st.sampled_from([1, 3, 4]),
    work=st.lists(
        st.tuples(st.integers(1, 20), st.integers(1, 20), st.integers(0, 3)), min_size=1, max_size=30
    ),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_histories_of_sequences_keep_the_books(arena, reserve, block_size, work):
    """Whoever is refused leaves no trace; a refusal's reason and numbers are those of the arena."""
    pool = allocator(arena, reserve, num_blocks=64, block_size=block_size, max_model_len=40)
    live: list[Sequence] = []
    for num_prompt, num_new, ends in work:
        for seq in live[:ends]:
            assert freed(pool, seq) > 0
        del live[:ends]
        seq = sequence(num_prompt, num_new, max_model_len=40)
        region, free = pool.blocks_needed(seq, num_prompt), pool.num_free_blocks
        owned = pool.num_owned_slots
        refusal = pool.allocate(seq, num_prompt)
        if refusal is None:
            live.append(seq)
            assert free - pool.num_free_blocks == region == len(seq.block_table.blocks)
            assert seq.block_table.num_slots <= region * block_size
        else:
            assert refusal.reason == (Reason.FRAGMENTED if free >= region else Reason.NO_BLOCKS)
            assert (pool.num_free_blocks, pool.num_owned_slots) == (free, owned)
            assert f"{region} needed, {free} free" in refusal.detail
        pool.check_integrity(live)
    for seq in live:
        pool.free(seq)
    assert pool.num_free_blocks == 64
    pool.check_integrity([])


# ---- whole runs


def engine_with(name: str, options: dict[str, str], **config: Any) -> TestEngine:
    policies = {"allocator": name, "scheduler": config.pop("scheduler", "chunked")}
    return TestEngine(registry=REGISTRY, policies=policies, settings={"allocator": options}, **config)


def add(engine: TestEngine, request_id: str, num_prompt: int, num_new: int, known: bool = True) -> list[int]:
    """Add a request; what the checksum model answers."""
    prompt = [(7 * i + num_prompt) % 251 for i in range(num_prompt)]
    engine.engine.add_request(
        Request(
            id=request_id,
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(max_tokens=num_new, temperature=0.0),
            known_output_tokens=num_new if known else None,
        )
    )
    return checksum_output(prompt, num_new)


@pytest.mark.parametrize("scheduler", ["chunked", "continuous", "static"])
@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_answers_are_right_under_every_contiguous_allocator(name, options, scheduler):
    engine = engine_with(
        name, options, scheduler=scheduler, num_blocks=40, block_size=4, max_model_len=60, max_num_seqs=5
    )
    lengths = [(3 + 11 * i % 29, 1 + 7 * i % 23) for i in range(14)]
    expected = {f"r{i}": add(engine, f"r{i}", *pair) for i, pair in enumerate(lengths)}
    assert engine.run() == expected
    assert engine.log.num_preemptions == 0
    pool = engine.engine.context.allocator
    assert (pool.num_free_blocks, pool.num_owned_slots) == (40, 0)
    assert max(step.pool.num_running for step in engine.log.steps) > 1


@pytest.mark.parametrize(
    ("name", "options", "at_once"),
    [("contiguous_max", {}, 1), ("contiguous_pow2", {}, 3), ("contiguous_oracle", {}, 6)],
)
def test_how_many_fit_at_once(name, options, at_once):
    """Eight of 4 + 4 slots: regions of 64, of 4 + 8 - 1 -> 16, of 4 + 5 - 1 = 8 in a pool of 55 = 32 + 16 + 4."""
    num_blocks = 100 if name == "contiguous_max" else 55
    engine = engine_with(name, options, num_blocks=num_blocks, block_size=1, max_model_len=60)
    for i in range(8):
        add(engine, f"r{i}", 4, 5)
    engine.run()
    assert max(step.pool.num_running for step in engine.log.steps) == at_once


@pytest.mark.parametrize(("name", "start"), [("first_fit", 0), ("best_fit", 4)])
def test_each_fit_goes_by_its_name(name, start):
    """Gaps of 3 at block 0 and of 2 at block 4; two blocks are wanted."""
    engine = engine_with(name, {"reserve": "oracle"}, num_blocks=7, block_size=1, max_model_len=7)
    pool = engine.engine.context.allocator
    live = [sequence(num_prompt, 1) for num_prompt in (3, 1, 2, 1)]
    for seq in live:
        assert pool.allocate(seq, 1) is None
    pool.free(live[0])
    pool.free(live[2])
    two = sequence(2, 1)
    assert pool.allocate(two, 2) is None
    assert two.block_table.blocks == [start, start + 1]


def test_a_request_is_refused_for_good_when_it_is_added():
    engine = engine_with("contiguous_oracle", {}, num_blocks=12, block_size=1, max_model_len=40)
    expected = add(engine, "fits", 4, 5)  # 8 slots, the largest region
    for num_prompt, num_new, says in ((4, 6, "NEVER_FITS: 4 prompt"), (20, 19, "NEVER_FITS: 20 prompt")):
        with pytest.raises(RequestError, match=says):
            add(engine, "refused", num_prompt, num_new)
    with pytest.raises(RequestError, match=r"NEVER_FITS: .*known_output_tokens"):
        add(engine, "unknown", 2, 2, known=False)
    pow2 = engine_with("first_fit", {"reserve": "pow2"}, num_blocks=12, block_size=1, max_model_len=40)
    assert add(pow2, "fits", 4, 8)
    with pytest.raises(RequestError, match=r"'refused': NEVER_FITS: 19 slots .* 19 blocks, .* pool is 12"):
        add(pow2, "refused", 4, 9)
    assert pow2.log.rejections
    assert engine.run() == {"fits": expected}


def test_an_allocator_that_is_asked_for_more_than_was_reserved_is_named():
    engine = engine_with("contiguous_oracle", {}, num_blocks=16, block_size=1, max_model_len=40)
    add(engine, "a", 4, 5)
    engine.step()
    (seq,) = engine.engine.context.running
    seq.max_tokens_total -= 5
    seq.block_table.num_slots = 4
    with pytest.raises(PolicyError, match=r"ContiguousAllocator.*5 slots and has reserved 3"):
        engine.step()


@pytest.mark.parametrize("name", ["contiguous_max", "first_fit", "best_fit"])
def test_a_pool_too_small_for_max_model_len_is_a_config_error(name):
    """12 blocks of 4 have a buddy region of 8 at most; 40 slots take 10 blocks, 52 take 13."""
    max_model_len, numbers = (33, ("16", "8;")) if name == "contiguous_max" else (49, ("13", "12;"))
    with pytest.raises(ConfigError) as error:
        engine_with(name, {}, num_blocks=12, block_size=4, max_model_len=max_model_len)
    assert (error.value.key, error.value.value) == ("allocator", name)
    assert f"reserves {numbers[0]} blocks" in error.value.problem
    assert f"12 blocks is {numbers[1]}" in error.value.problem
    assert ("rounded up" in error.value.problem) == (name == "contiguous_max")
    engine_with(name, {}, num_blocks=12, block_size=4, max_model_len=max_model_len - 1)


# ---- from the command line


@pytest.fixture
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "checkout", lambda: None)
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        "allocator=contiguous_oracle workload=prompts",
        "allocator=contiguous_pow2",
        "allocator=first_fit allocator.reserve=oracle",
        "allocator=best_fit allocator.reserve=pow2",
    ],
)
def test_unknown_lengths_are_one_line_and_exit_code_2(
    words: str, capsys: pytest.CaptureFixture[str], in_tmp: Path
) -> None:
    assert main(words.split()) == 2
    said = capsys.readouterr()
    name = words.split()[0]
    assert said.err.startswith(f"error: {name}: reserves by the true output length, which workload=prompts ")
    assert "workload=synthetic, or allocator=contiguous_max" in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""
    assert not list(in_tmp.iterdir())


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_it_runs_from_the_command_line(
    name: str, options: dict[str, str], capsys: pytest.CaptureFixture[str], in_tmp: Path
) -> None:
    words = [f"allocator.{key}={value}" for key, value in options.items()]
    base = ["executor=null", "model=checksum", "workload=synthetic", "workload.num_requests=6"]
    assert main([*base, f"allocator={name}", *words]) == 0
    assert "6 finished" in capsys.readouterr().out


def test_a_run_refuses_for_good_what_an_empty_pool_cannot_hold(
    capsys: pytest.CaptureFixture[str], in_tmp: Path
) -> None:
    """2 + 9 tokens would fit 12 slots, 2 + 16 - 1 do not."""
    words = "executor=null model=checksum block_size=1 num_blocks=12 max_model_len=20 allocator=first_fit"
    work = "workload=synthetic workload.num_requests=3"
    lengths = [
        f"workload.{which}.{key}={value}"
        for which, mean in (("prompt_len", 2), ("output_len", 9))
        for key, value in (("distribution", "fixed"), ("mean", mean))
    ]
    main([*words.split(), "allocator.reserve=pow2", *work.split(), *lengths])
    said = capsys.readouterr()
    assert "0 finished, 3 rejected" in said.out
    assert "NEVER_FITS: 17 slots to reserve take a region of 17 blocks" in said.out + said.err


def test_steps_refused_for_fragmentation_are_counted_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """Twenty slots: A (6), B (8), C (6), and D, which needs 8 and waits for B.

    step   running   free   largest gap
    0-1    A B C        0             0   too few are free
    2-7    B           12             6   enough are free, in two pieces: 6 steps
    8-     D           12            12
    """
    engine = engine_with("first_fit", {"reserve": "oracle"}, num_blocks=20, block_size=1, max_model_len=20)
    recorder = ColumnRecorder(None)
    engine.engine.recorder = recorder
    for request_id, num_prompt, num_new in (("a", 5, 2), ("b", 1, 8), ("c", 5, 2), ("d", 4, 5)):
        add(engine, request_id, num_prompt, num_new)
    engine.run()
    recorder.flush()
    tables = recorder.tables()
    summary = summarize(tables, PoolFacts(num_blocks=20, block_size=1, block_bytes=4, max_num_seqs=64))
    assert summary["fragmented_steps"] == 6
    (refused,) = [row for row in tables["decisions"].to_pylist() if row["reason"] == "FRAGMENTED"]
    assert (refused["first_step"], refused["last_step"]) == (2, 7)
    assert refused["detail"] == "8 needed, 12 free, the largest region is 6"
    print_summary(stdout(), summary, "title")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "enough was free" in line]
    assert line.startswith("refused though enough was free ")
    assert line.strip().endswith(" 6 steps (fragmentation)")
    print_summary(stdout(), {**summary, "fragmented_steps": 0}, "title")
    assert "enough was free" not in capsys.readouterr().out
