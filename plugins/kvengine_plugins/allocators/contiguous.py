"""Contiguous allocation, as engines had it before paging: one region per sequence, reserved when it is admitted.

Source: the baselines Orca (Max), (Pow2) and (Oracle) of Kwon et al., "Efficient Memory Management for Large
Language Model Serving with PagedAttention", SOSP 2023, section 6.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

from kvengine.core.errors import ConfigError
from kvengine.core.reasons import Reason, Refusal
from kvengine.core.sequence import Sequence
from kvengine.policies import Allocator, Build


class Arena(Protocol):
    """Blocks 0..num_blocks-1 that are given out as regions (kvengine.kv.buddy, kvengine.kv.free_list_arena)."""

    num_blocks: int
    num_free: int

    def region_size(self, count: int) -> int:
        """The blocks that a demand of `count` takes."""
        ...

    @property
    def largest_possible(self) -> int:
        """The largest region of an empty arena, in blocks."""
        ...

    @property
    def largest_free(self) -> int: ...

    @property
    def regions(self) -> dict[int, int]:
        """The regions in use: first block and size in blocks."""
        ...

    def take(self, count: int) -> int | None:
        """The first block of a region for `count` blocks, None when no free one is large enough."""
        ...

    def give_back(self, start: int) -> int: ...

    def check_integrity(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """How many slots a sequence is given for its whole life: `slots(seq)`, or `fixed` where all get as many."""

    slots: Callable[[Sequence], int]
    fixed: int | None = None

    @property
    def needs_lengths(self) -> bool:
        """Whether it depends on the true output length."""
        return self.fixed is None


ReserveName = Literal["max", "pow2", "oracle"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FitConfig:
    """`reserve`: `max` (max_model_len slots), `pow2` (the true output rounded up to a power of two), `oracle`."""

    reserve: ReserveName = "max"


def reservation(name: ReserveName, max_model_len: int) -> Reservation:
    """For P prompt tokens and M new ones: max_model_len slots; P + M' - 1, where M' is M rounded up to a power of
    two as far as max_model_len goes; or P + M - 1.

    The last new token is never fed back, so that P + M - 1 slots hold everything. Without that limit pow2 would
    reserve more than max for long sequences.
    """
    if name == "max":
        return Reservation(slots=lambda seq: max_model_len, fixed=max_model_len)
    if name == "pow2":
        return Reservation(slots=partial(_pow2_slots, max_model_len))
    return Reservation(slots=lambda seq: seq.num_prompt_tokens + _new_tokens(seq) - 1)


def _pow2_slots(max_model_len: int, seq: Sequence) -> int:
    return min(seq.num_prompt_tokens + next_power_of_two(_new_tokens(seq)), max_model_len) - 1


def next_power_of_two(count: int) -> int:
    """The smallest power of two that is not below `count` (25 becomes 32)."""
    return 1 << (count - 1).bit_length()


def _new_tokens(seq: Sequence) -> int:
    """How many tokens `seq` will generate, which its workload knows."""
    assert seq.request.known_output_tokens is not None, f"{seq} has no known length"
    return seq.max_tokens_total - seq.num_prompt_tokens


class ContiguousAllocator(Allocator):
    """One region of `arena` per sequence, never moved and never grown.

    The sequence owns the slots it reserved; what rounding adds to its region belongs to nobody (external).
    """

    shares = False
    grows = False

    def __init__(self, name: str, arena: Arena, block_size: int, reserve: Reservation) -> None:
        self.num_blocks = arena.num_blocks
        self.block_size = block_size
        self.needs_lengths = reserve.needs_lengths
        self._arena = arena
        self._reserve = reserve
        self._num_owned_slots = 0
        if reserve.fixed is not None:
            self._check_fixed(name, reserve.fixed)

    def _check_fixed(self, name: str, slots: int) -> None:
        """ConfigError when the region that every sequence gets is never free."""
        blocks, region, largest = (
            -(-slots // self.block_size),
            self._region(slots),
            self._arena.largest_possible,
        )
        if region > largest:
            rounded = ", rounded up to a power of two" if region > blocks else ""
            raise ConfigError(
                "allocator",
                name,
                f"reserves {region} blocks per sequence (max_model_len={slots} in blocks of "
                f"{self.block_size}{rounded}), but the largest region of a pool of {self.num_blocks} "
                f"blocks is {largest}; lower engine.max_model_len or enlarge the pool",
            )

    def _region(self, slots: int) -> int:
        """The size in blocks of the region that holds `slots`."""
        return self._arena.region_size(-(-slots // self.block_size))

    @property
    def num_free_blocks(self) -> int:
        return self._arena.num_free

    @property
    def num_owned_slots(self) -> int:
        return self._num_owned_slots

    @property
    def capacity(self) -> int:
        return self._reserve.fixed or self._arena.largest_possible * self.block_size

    def refuses_for_good(self, seq: Sequence) -> str | None:
        if self.needs_lengths and seq.request.known_output_tokens is None:
            return "the allocator reserves by the true output length, and known_output_tokens is not given"
        slots = self._reserve.slots(seq)
        region, largest = self._region(slots), self._arena.largest_possible
        if region > largest:
            return (
                f"{slots} slots to reserve take a region of {region} blocks, "
                f"the largest of an empty pool is {largest}"
            )
        return None

    def blocks_needed(self, seq: Sequence, num_tokens: int) -> int:
        return 0 if seq.block_table.blocks else self._region(self._reserve.slots(seq))

    def allocate(self, seq: Sequence, num_tokens: int) -> Refusal | None:
        slots = self._reserve.slots(seq)
        assert num_tokens <= slots, f"{seq} asks for {num_tokens} slots and has reserved {slots}"
        table = seq.block_table
        if table.blocks:
            return None
        start = self._arena.take(-(-slots // self.block_size))
        region = self._region(slots)
        if start is None:
            free, largest = self._arena.num_free, self._arena.largest_free
            if free < region:
                return Refusal(Reason.NO_BLOCKS, f"{region} needed, {free} free")
            return Refusal(
                Reason.FRAGMENTED, f"{region} needed, {free} free, the largest region is {largest}"
            )
        table.blocks = list(range(start, start + region))
        table.num_slots = slots
        self._num_owned_slots += slots
        return None

    def fork(self, parent: Sequence, child: Sequence) -> None:
        raise AssertionError("a region has one owner")

    def free(self, seq: Sequence) -> None:
        table = seq.block_table
        if table.blocks:
            self._arena.give_back(table.blocks[0])
            self._num_owned_slots -= table.num_slots
        table.blocks, table.num_slots = [], 0

    def check_integrity(self, sequences: Iterable[Sequence], *, thorough: bool = True) -> None:
        self._arena.check_integrity()
        regions, owned = {}, 0
        for seq in sequences:
            table = seq.block_table
            if not table.blocks:
                assert table.num_slots == 0, f"{seq} has slots and no region"
                continue
            start, size = table.blocks[0], len(table.blocks)
            assert table.blocks == list(range(start, start + size)), f"the region of {seq} is not contiguous"
            assert start not in regions, f"two sequences share the region at block {start}"
            assert table.num_slots == self._reserve.slots(seq), f"{seq} owns {table.num_slots} slots"
            assert size == self._region(table.num_slots), f"{seq} has a region of {size} blocks"
            regions[start] = size
            owned += table.num_slots
        assert regions == self._arena.regions, "the tables and the regions in use differ"
        free = self.num_blocks - sum(regions.values())
        assert free == self._arena.num_free, f"{free} blocks are free, {self._arena.num_free} counted"
        assert owned == self._num_owned_slots, f"{owned} slots are owned, {self._num_owned_slots} counted"


def build_contiguous(
    name: str, reserve: ReserveName, arena: Callable[[int], Arena], build: Build
) -> Allocator:
    """The allocator of that name over `arena(num_blocks)`; ConfigError when nothing could ever enter."""
    assert build.kv is not None
    assert build.limits is not None
    reserved = reservation(reserve, build.limits.max_model_len)
    return ContiguousAllocator(name, arena(build.kv.num_blocks), build.kv.block_size, reserved)
