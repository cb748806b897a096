"""A random user of KV memory, and a naive model of it: a dict from slot to the token whose KV it holds.

The model knows nothing of blocks that are shared, cached or copied. It writes tokens where the block tables say,
obeys the copies that a plan lists, and reads every sequence back: whatever was lost, overwritten or mixed up shows
as a wrong token.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvengine.assemble import choose, make
from kvengine.core.limits import EngineLimits
from kvengine.core.plan import StepPlan
from kvengine.core.request import Request, SamplingParams
from kvengine.core.sequence import Sequence, SequenceState
from kvengine.core.shapes import KvShape, PrefixCacheConfig
from kvengine.engine.memory import Memory
from kvengine.kv.host_pool import SwapPool
from kvengine.policies import Build
from kvengine.registry import Registry, discover

REGISTRY = discover()
Slot = tuple[str, int]


class MemoryModel:
    """Drives `Memory` over one allocator; every public method is one operation, and `check` compares."""

    def __init__(
        self,
        allocator: str,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        num_host_blocks: int = 0,
        prefix_cache: PrefixCacheConfig | None = None,
        eviction: str = "lru",
        sliding_window: int | None = None,
        settings: dict[str, Any] | None = None,
        registry: Registry = REGISTRY,
    ) -> None:
        kv = KvShape(
            num_blocks=num_blocks,
            block_size=block_size,
            dtype="fp32",
            num_host_blocks=num_host_blocks,
            sliding_window=sliding_window,
        )
        limits = EngineLimits(max_num_seqs=64, max_num_batched_tokens=4096, max_model_len=max_model_len)
        host_pool = SwapPool(num_host_blocks)
        cache = prefix_cache or PrefixCacheConfig()
        build = Build(kv=kv, limits=limits, prefix_cache=cache, host_pool=host_pool)
        ranks = make(choose(registry, {"eviction": {"name": eviction}}, "eviction"), build)
        build = replace(build, eviction=ranks)
        chosen = choose(registry, {"allocator": {"name": allocator, **(settings or {})}}, "allocator")
        self.allocator = make(chosen, build)
        self.memory = Memory(self.allocator, host_pool)
        self.live: list[Sequence] = []
        self.swapped: list[Sequence] = []
        self.window = sliding_window
        self.max_model_len = max_model_len
        self.num_refused = 0
        self.num_hits = 0
        self.num_copies = 0
        self.num_brought_back = 0
        """Cached blocks that came back from the host."""
        self._kv: dict[Slot, tuple[int, int]] = {}
        self._block_size = block_size
        self._num_made = 0
        self._num_plans = 0
        self._new_plan()

    # ---- operations

    def admit(self, tokens: list[int], num_output: int, count: int) -> bool:
        """A new sequence of `tokens`, its first `count` tokens that are not cached computed."""
        request = Request(
            id=f"r{self._num_made}",
            prompt_token_ids=tuple(tokens),
            sampling=SamplingParams(max_tokens=num_output),
            known_output_tokens=num_output,
        )
        seq = Sequence(
            request,
            choice=0,
            order=self._num_made,
            max_tokens_total=len(tokens) + num_output,
            stop_ids=frozenset(),
            seed=0,
        )
        self._num_made += 1
        if self.allocator.refuses_for_good(seq) or len(tokens) + num_output - 1 > self.allocator.capacity:
            return False
        return self._enter(seq, count)

    def grow(self, seq: Sequence, new_tokens: list[int]) -> bool:
        """`new_tokens` are accepted, and all tokens but the last are computed in the plan."""
        room = seq.max_tokens_total - 1 - seq.num_tokens
        tokens = new_tokens[:room]
        seq.token_ids += tokens
        end = len(seq.token_ids) - 1
        if end <= seq.num_computed_tokens:
            return True
        before = self._state()
        if self.memory.grow(seq, end) is not None:
            self.num_refused += 1
            assert self._state() == before, "a refusal left a trace"
            del seq.token_ids[len(seq.token_ids) - len(tokens) :]
            return False
        self._compute(seq, end)
        return True

    def fork(self, parent: Sequence) -> bool:
        if not self.allocator.shares:
            return False
        child = Sequence(
            parent.request,
            choice=parent.choice + 1,
            order=self._num_made,
            max_tokens_total=parent.max_tokens_total,
            stop_ids=frozenset(),
            seed=0,
        )
        self._num_made += 1
        child.token_ids = list(parent.token_ids)
        free = self.allocator.num_free_blocks
        self.memory.fork(parent, child)
        assert self.allocator.num_free_blocks == free, "a fork took blocks"
        child.state = SequenceState.RUNNING
        self.live.append(child)
        return True

    def free(self, seq: Sequence) -> None:
        before = self.allocator.num_free_blocks
        freed = self.memory.free(seq)
        assert self.allocator.num_free_blocks == before + freed
        self._leave(seq)
        seq.state = SequenceState.FINISHED

    def preempt(self, seq: Sequence) -> None:
        """By swap if it fits and the plan lets it, else it is gone."""
        swapped, _ = self.memory.give_way(seq, swap=True)
        self._leave(seq)
        seq.state = SequenceState.SWAPPED if swapped else SequenceState.FINISHED
        if swapped:
            self.swapped.append(seq)

    def resume(self, seq: Sequence) -> bool:
        self.swapped.remove(seq)
        if not self._enter(seq, 1):
            self.swapped.append(seq)
            return False
        return True

    def abort_swapped(self, seq: Sequence) -> None:
        self.memory.drop_host(seq)
        self.swapped.remove(seq)

    def execute(self) -> None:
        """End the plan: copy as it says, write what was computed, commit, publish."""
        plan = self._plan
        self.memory.finish_plan()
        self.num_copies += len(plan.copies)
        self.num_brought_back += len({block for block, _ in plan.swap_ins} & set(self.allocator.host_blocks))
        for source_kind, destination_kind, pairs in (
            ("device", "host", plan.swap_outs),
            ("host", "device", plan.swap_ins),
            ("device", "device", plan.copies),
        ):
            self._copy(source_kind, destination_kind, pairs)
        for seq, (start, end) in self._scheduled.items():
            for place in range(start, end):
                self._kv[self._slot(seq, place)] = (seq.token_ids[place], place)
        self.memory.executed()
        for seq, (start, end) in list(self._scheduled.items()):
            seq.num_scheduled_tokens = 0
            self.memory.computed(seq, end - start)
            if seq.num_computed_tokens == len(seq.token_ids):
                self._sample(seq)
        self._new_plan()
        self._read_back()
        self._check_free()

    def check(self) -> None:
        """The books agree, also in the middle of a plan."""
        self.memory.check_integrity(self.live, self.swapped)
        allocator = self.allocator
        assert 0 <= allocator.num_cached_blocks <= allocator.num_free_blocks <= allocator.num_blocks
        if not self.live:
            assert not allocator.num_saved_blocks
            assert not allocator.num_saved_slots

    # ---- inside

    def _read_back(self) -> None:
        """Every computed token of every live or swapped sequence is where its table says."""
        for seq in (*self.live, *self.swapped):
            first = 0 if self.window is None else max(0, seq.num_computed_tokens + 1 - self.window)
            for place in range(first, seq.num_computed_tokens):
                held = self._kv.get(self._slot(seq, place))
                assert held == (seq.token_ids[place], place), f"{seq} token {place}: {held}"

    def _check_free(self) -> None:
        """Between plans, in which blocks may have to stay as they are, all but those of live sequences are free."""
        allocator = self.allocator
        if allocator.shares or not self.live:  # else a sequence may own more than its table lists
            tables = [seq.block_table for seq in self.live]
            held = {block for table in tables for block in table.blocks[table.num_dropped :]}
            assert allocator.num_free_blocks == allocator.num_blocks - len(held), "blocks leaked"

    def _sample(self, seq: Sequence) -> None:
        """The step gave `seq` its next token, or its last."""
        if len(seq.token_ids) + 1 < seq.max_tokens_total:
            seq.token_ids.append(len(seq.token_ids) % 3)
        else:
            self.free(seq)

    def _enter(self, seq: Sequence, count: int) -> bool:
        start = self.memory.num_computed(seq)
        end = min(start + count, len(seq.token_ids))
        before = self._state()
        if self.memory.enter(seq, end) is not None:
            self.num_refused += 1
            assert self._state() == before, "a refusal left a trace"
            return False
        assert seq.num_computed_tokens == start < len(seq.token_ids), "no token is left to compute"
        self.num_hits += seq.num_cached_tokens
        seq.state = SequenceState.RUNNING
        self.live.append(seq)
        self._compute(seq, end)
        return True

    def _compute(self, seq: Sequence, end: int) -> None:
        assert seq.block_table.num_slots >= end, "too few slots"
        start = self._scheduled.get(seq, (seq.num_computed_tokens, 0))[0]
        seq.num_scheduled_tokens = end - start
        self._scheduled[seq] = (start, end)

    def _leave(self, seq: Sequence) -> None:
        self.live.remove(seq)
        self._scheduled.pop(seq, None)
        seq.num_scheduled_tokens = 0

    def _new_plan(self) -> None:
        self._plan = StepPlan(step=self._num_plans, now_ns=0)
        self._num_plans += 1
        self._scheduled: dict[Sequence, tuple[int, int]] = {}
        self.memory.begin_plan(self._plan)

    def _slot(self, seq: Sequence, place: int) -> Slot:
        size, table = self._block_size, seq.block_table
        if seq.state is SequenceState.SWAPPED:
            first = -(-seq.num_computed_tokens // size) - len(table.host_blocks)
            return "host", table.host_blocks[place // size - first] * size + place % size
        return "device", table.blocks[place // size] * size + place % size

    def _copy(self, source: str, destination: str, pairs: list[tuple[int, int]]) -> None:
        """All sources are read before any destination is written, as one kernel call does it."""
        size = self._block_size
        assert len({to for _, to in pairs}) == len(pairs), "two copies into one block"
        read = {
            (destination, to * size + i): self._kv.get((source, block * size + i))
            for block, to in pairs
            for i in range(size)
        }
        for slot, value in read.items():
            self._kv.pop(slot, None)
            if value is not None:
                self._kv[slot] = value

    def _state(self) -> tuple[Any, ...]:
        """What a refusal must not change."""
        allocator = self.allocator
        return (
            allocator.num_free_blocks,
            allocator.num_cached_blocks,
            allocator.num_owned_slots,
            allocator.num_saved_blocks,
            allocator.num_saved_slots,
            self.memory.num_tokens,
            self.memory.host_pool.num_free,
            [(list(seq.block_table.blocks), seq.block_table.num_slots) for seq in self.live],
        )


def prompt_pool(rng: random.Random, max_len: int) -> list[list[int]]:
    """Prompts that share prefixes with one another."""
    stems = [[rng.randrange(3) for _ in range(rng.randrange(1, max_len))] for _ in range(4)]
    return [[*stem[: rng.randrange(1, len(stem) + 1)], rng.randrange(3)] for stem in stems for _ in range(4)]


def random_operation(model: MemoryModel, rng: random.Random, prompts: list[list[int]]) -> None:
    """One operation, chosen and sized by `rng`; most plans hold several."""
    running = [seq for seq in model.live if not seq.num_scheduled_tokens]
    choices: list[tuple[int, Callable[[], object]]] = [(4, model.execute)]
    choices.append((3, lambda: _admit(model, rng, prompts)))
    if running:
        choices += [
            (
                8,
                lambda: model.grow(
                    rng.choice(running), [rng.randrange(3) for _ in range(rng.randrange(1, 7))]
                ),
            ),
            (2, lambda: model.fork(rng.choice(running))),
        ]
    if model.live:
        choices += [(2, lambda: model.free(rng.choice(model.live)))]
        choices += [(2, lambda: model.preempt(rng.choice(model.live)))]
    if model.swapped:
        choices += [(3, lambda: model.resume(rng.choice(model.swapped)))]
        choices += [(1, lambda: model.abort_swapped(rng.choice(model.swapped)))]
    weights = [weight for weight, _ in choices]
    rng.choices([action for _, action in choices], weights)[0]()


def _admit(model: MemoryModel, rng: random.Random, prompts: list[list[int]]) -> None:
    tokens = rng.choice(prompts)
    if rng.random() < 0.2 and model.live:  # a follow-up of what somebody has so far
        tokens = [*rng.choice(model.live).token_ids, rng.randrange(3)]
    tokens = tokens[: model.max_model_len - 1]
    room = model.max_model_len - len(tokens)
    model.admit(list(tokens), rng.randrange(1, min(room, 20) + 1), rng.randrange(1, 12))
