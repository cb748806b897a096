"""Where the pool goes: held + reserved + internal + external = pool in every step, from what a run records, against
recomputations that know nothing of the recorder: from the step log, and from the slots themselves."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import pyarrow as pa
import pytest
from memory_support import NO_CACHE, assert_idle, cached_tokens, registry_with

from kvengine.analysis.summary import PoolFacts, summarize
from kvengine.core.request import Request, SamplingParams
from kvengine.core.sequence import Sequence
from kvengine.core.shapes import PrefixCacheConfig
from kvengine.kv.block_pool import BlockPool
from kvengine.registry import discover
from kvengine.telemetry.recorder import ColumnRecorder
from kvengine.testing.engines import TestEngine
from kvengine.testing.sources import ChecksumSource
from kvengine_plugins.allocators import paged as paged_module

ALLOCATORS = discover().names("allocator")
SCHEDULERS = ("chunked", "continuous", "static")
BLOCK = 4
MAX_LEN = 32


class Tee:
    """Tells several recorders the same."""

    def __init__(self, *recorders: Any) -> None:
        self._recorders = recorders

    def __getattr__(self, name: str) -> Any:
        calls = [getattr(recorder, name) for recorder in self._recorders]
        return lambda *told: [call(*told) for call in calls]


def recorded(**settings: Any) -> tuple[TestEngine, ColumnRecorder]:
    engine, recorder = TestEngine(**settings), ColumnRecorder()
    tee: Any = Tee(engine.log, recorder)
    engine.engine.recorder = tee
    return engine, recorder


def add(engine: TestEngine, name: str, prompt: list[int], new: int, n: int = 1) -> None:
    """A request whose length is known, as some allocators want it."""
    sampling = SamplingParams(temperature=0.0, n=n)
    now = engine.engine.clock.now()
    request = Request(
        id=name, prompt_token_ids=tuple(prompt), sampling=sampling, known_output_tokens=new, arrival_ns=now
    )
    engine.engine.add_request(request)


def prompt_of(ordinal: int, length: int) -> list[int]:
    return [ordinal + 1, *((7 * i + 100) % 251 for i in range(length - 1))]


def tables_of(recorder: ColumnRecorder) -> dict[str, pa.Table]:
    recorder.flush()
    return recorder.tables()


@dataclass
class Parts:
    """Of one step, in slots."""

    held: int
    reserved: int
    internal: int
    external: int
    cached: int


def parts_of(tables: dict[str, pa.Table], num_blocks: int, block_size: int) -> list[Parts]:
    """From the recorded tables, with internal spread over the steps row by row."""
    found = []
    for row in tables["steps"].to_pylist():
        inside = [
            u["num_slots"]
            for u in tables["unwritten"].to_pylist()
            if u["first_step"] <= row["step"] <= u["last_step"]
        ]
        held, owned, internal = row["num_slots_held"], row["num_slots_owned"], sum(inside)
        external = num_blocks * block_size - owned
        cached = row["num_cached_blocks"] * block_size
        found.append(Parts(held, owned - held - internal, internal, external, cached))
    return found


def check_parts(parts: list[Parts], engine: TestEngine) -> None:
    """They make up the pool, none is negative, and what is cached is external."""
    allocator = engine.engine.context.allocator
    size = allocator.num_blocks * allocator.block_size
    for step, p in zip(engine.log.steps, parts, strict=True):
        assert p.held + p.reserved + p.internal + p.external == size
        assert min(p.held, p.reserved, p.internal, p.external, p.cached) >= 0, step
        assert p.cached <= p.external
        assert p.held == step.pool.num_slots_held
    last = parts[-1]
    assert (last.held, last.reserved, last.internal, last.external) == (0, 0, 0, size)


# ---- every allocator, from the step log and the final lengths


def reserved_slots(allocator: str, prompt: int, new: int) -> int | None:
    """What a sequence owns for life; None where it grows."""
    power = 1 << (new - 1).bit_length()
    return {
        "contiguous_max": MAX_LEN,
        "contiguous_pow2": min(prompt + power, MAX_LEN) - 1,
        "contiguous_oracle": prompt + new - 1,
        "first_fit": MAX_LEN,
        "best_fit": MAX_LEN,
        "paged": None,
    }[allocator]


@dataclass
class Stay:
    """A sequence from an admission until it ended or was preempted."""

    owned_for_life: int | None
    final: int
    """Tokens that it computed in all."""
    computed: dict[int, int]
    """After each step at whose end it was there."""

    def owned(self, step: int) -> int:
        return self.owned_for_life or math.ceil(self.computed[step] / BLOCK) * BLOCK

    def internal(self, step: int) -> int:
        """Slots that it owns after `step` and never writes: beyond its last computed token."""
        return max(0, self.owned(step) - self.final)


def stays(engine: TestEngine, allocator: str) -> list[Stay]:
    """From what the log says was scheduled, sampled and preempted, and from when a static batch let go."""
    found = []
    for seq in engine.log.finished_sequences:
        new = seq.max_tokens_total - seq.num_prompt_tokens
        stay, sampled = None, 0
        for step in engine.log.steps:
            if seq.id in step.preempted:
                stay = None
            if seq.id in step.scheduled:
                if stay is None:
                    stay = Stay(reserved_slots(allocator, seq.num_prompt_tokens, new), 0, {})
                    found.append(stay)
                stay.final += step.scheduled[seq.id]
                sampled += seq.id in step.sampled
            if sampled == new and not step.pool.num_held:
                break
            if stay is not None:
                stay.computed[step.step] = stay.final
    return found


@pytest.mark.parametrize(("allocator", "scheduler"), list(product(ALLOCATORS, SCHEDULERS)))
def test_every_step_is_what_the_log_and_the_final_lengths_say(allocator, scheduler):
    """Without sharing: outputs of 1 to 12 tokens, half of them in mid-block, in pools that are scarce."""
    engine, recorder = recorded(
        num_blocks=22,
        block_size=BLOCK,
        max_model_len=MAX_LEN,
        max_num_seqs=4,
        max_num_batched_tokens=9 if scheduler == "chunked" else MAX_LEN,
        policies={"allocator": allocator, "scheduler": scheduler},
        prefix_cache=NO_CACHE,
    )
    for i in range(10):
        add(engine, f"r{i}", prompt_of(i, 3 + 2 * (i % 7)), 1 + (5 * i) % 12)
        if i % 3 == 2:
            engine.step()
    engine.run()
    parts = parts_of(tables_of(recorder), 22, BLOCK)
    check_parts(parts, engine)
    by_log = stays(engine, allocator)
    for step, p in zip(engine.log.steps, parts, strict=True):
        there = [stay for stay in by_log if step.step in stay.computed]
        assert p.held == sum(stay.computed[step.step] for stay in there), step
        assert p.internal == sum(stay.internal(step.step) for stay in there), step
        assert 22 * BLOCK - p.external == sum(stay.owned(step.step) for stay in there), step
    assert (max(p.internal for p in parts) == 0) == (allocator == "contiguous_oracle")


# ---- paged, from the slots themselves


class Slots:
    """Watches the pool and the tables: which slots are owned after each step, and which of them are ever filled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.taken: Counter[int] = Counter()
        self.written: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
        """(block, how often it had been taken) -> the places that held the KV of a token."""
        self.owned: list[dict[tuple[int, int], int]] = []
        """After each step: the blocks that somebody holds, and how many of their places are filled."""
        watcher = self

        class WatchedPool(BlockPool):
            def take(self, count: int) -> list[int]:
                blocks = super().take(count)
                watcher.taken.update(blocks)
                return blocks

        monkeypatch.setattr(paged_module, "BlockPool", WatchedPool)

    def source(self, window: int | None) -> ChecksumSource:
        """A model that tells which slots it writes."""
        watcher = self

        class WatchedSource(ChecksumSource):
            def write(self, slots: list[int], token_ids: list[int], first_position: int) -> None:
                super().write(slots, token_ids, first_position)
                for slot in slots:
                    watcher.written[slot // BLOCK, watcher.taken[slot // BLOCK]].add(slot % BLOCK)

        return WatchedSource(window)

    def look_at(self, seq: Sequence) -> dict[tuple[int, int], int]:
        table, found = seq.block_table, {}
        for place in range(table.num_dropped, len(table.blocks)):
            filled = min(max(seq.num_computed_tokens - place * BLOCK, 0), BLOCK)
            key = table.blocks[place], self.taken[table.blocks[place]]
            self.written[key] |= set(range(filled))  # also what was copied
            found[key] = filled
        return found

    def look(self, engine: TestEngine) -> None:
        """After a step."""
        context = engine.engine.context
        owned: dict[tuple[int, int], int] = {}
        for seq in [*context.running, *context.held]:
            for key, filled in self.look_at(seq).items():
                owned[key] = max(owned.get(key, 0), filled)
        self.owned.append(owned)

    def parts(self, num_blocks: int) -> list[Parts]:
        found = []
        for owned in self.owned:
            held, size = sum(owned.values()), len(owned) * BLOCK
            internal = sum(BLOCK - len(self.written[key]) for key in owned)
            found.append(Parts(held, size - held - internal, internal, num_blocks * BLOCK - size, 0))
        return found


LOADS: dict[str, dict[str, Any]] = {
    "choices": {},
    "no cache": {"prefix_cache": NO_CACHE},
    "swapped": {"num_host_blocks": 12, "policies": {"preemption": "swap"}},
    "offloaded": {"num_host_blocks": 6, "prefix_cache": PrefixCacheConfig(offload=True)},
    "window": {"sliding_window": 6},
}


def load(engine: TestEngine, kind: str) -> Callable[[int], None]:
    """Requests of one to three choices, half of them with a common beginning; branches and aborts if `kind` is
    so."""

    def act(step: int) -> None:
        if step < 8:
            common = prompt_of(0, 9) if step % 2 else prompt_of(step, 6)
            n = 1 if kind == "aborts" else 1 + step % 3
            engine.add(f"r{step}", [*common, *range(step, 2 * step)], 1 + (5 * step) % 9, n=n)
        if kind == "branches" and step in (4, 7, 9):
            live = [seq for seq in engine.engine.live_sequences() if not (seq.choice or seq.finish_reason)]
            engine.fork(f"branch{step}", live[-1].request.id, [step] * (step % 3), 6)
        if kind == "aborts" and step in (3, 5, 8, 9):
            engine.engine.abort(f"r{step - 2}")

    return act


@pytest.mark.parametrize("kind", ["plain", "branches", "aborts"])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("name", LOADS)
def test_every_step_is_what_the_slots_say(monkeypatch, name, scheduler, kind):
    slots, settings = Slots(monkeypatch), dict(LOADS[name])
    policies = {**settings.pop("policies", {}), "scheduler": scheduler}
    engine, recorder = recorded(
        registry=registry_with(),
        num_blocks=16,
        block_size=BLOCK,
        max_num_seqs=5,
        max_num_batched_tokens=9 if scheduler == "chunked" else 256,
        policies=policies,
        source=slots.source(settings.get("sliding_window")),
        **settings,
    )
    act = load(engine, kind)
    for step in range(400):
        act(step)
        logged = len(engine.log.steps)
        if not engine.step() and not engine.engine.has_unfinished and step > 9:
            break
        if len(engine.log.steps) > logged:
            slots.look(engine)
    assert_idle(engine)
    parts = parts_of(tables_of(recorder), 16, BLOCK)
    check_parts(parts, engine)
    for step, ours, told in zip(engine.log.steps, slots.parts(16), parts, strict=True):
        told.cached = 0
        assert told == ours, step


@pytest.mark.parametrize("kind", ["ended", "aborted"])
def test_slots_of_a_shared_tail_that_nobody_writes_are_internal(kind):
    """6 slots of a block of 16 are owned from the first chunk of 8 tokens on, and the two choices end, or are
    aborted, before one of them writes a token of its own."""
    engine, recorder = recorded(block_size=16, num_blocks=4, max_num_batched_tokens=8)
    engine.add("r", prompt_of(0, 10), 1 if kind == "ended" else 5, n=2)
    engine.step()
    engine.step()
    engine.engine.abort("r")
    engine.add("other", prompt_of(1, 3), 1)
    engine.run()
    parts = parts_of(tables_of(recorder), 4, 16)
    assert [p.held for p in parts][:2] == [8, 0 if kind == "ended" else 10]
    assert parts[0].internal == 6


# ---- sharing, by hand


def figures(engine: TestEngine, recorder: ColumnRecorder, block_bytes: int) -> dict[str, Any]:
    num_blocks = engine.engine.context.allocator.num_blocks
    facts = PoolFacts(num_blocks=num_blocks, block_size=BLOCK, block_bytes=block_bytes, max_num_seqs=64)
    return summarize(tables_of(recorder), facts)


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_choices_save_the_whole_blocks_of_their_prompt(n):
    """10 tokens in 3 blocks, of which 2 stay shared by all n; 4 new tokens.

    step  computes   in use       saved
      0   prompt     3            3 (n - 1)   the tail is shared, too, until somebody writes into it
      1   slot 10    2 + n        2 (n - 1)
      2   slot 11    2 + n        2 (n - 1)   equal third blocks are full now, and become one:
                     3            3 (n - 1)
      3   slot 12, its last       0           freed in the step
    """
    engine, recorder = recorded(num_blocks=40, block_size=BLOCK)
    engine.add("r", prompt_of(0, 10), 4, n=n)
    engine.run()
    saved = [step.pool.num_saved_blocks for step in engine.log.steps]
    in_use = [40 - step.pool.num_free_blocks for step in engine.log.steps]
    assert in_use == [3, 2 + n, 3, 0]
    assert saved == [3 * (n - 1), 2 * (n - 1), 3 * (n - 1), 0]
    assert [step.pool.num_slots_held for step in engine.log.steps] == [10, 8 + 3 * n, 12, 0]
    found = figures(engine, recorder, block_bytes=1000)
    mean = 8 * (n - 1) / 4
    assert found["kv_saved_bytes"] == pytest.approx({"mean": 1000 * mean, "peak": 3000 * (n - 1)})
    shares = [s / max(s + b, 1) for s, b in zip(saved, in_use, strict=True)]
    assert found["kv_shared_share"] == pytest.approx(sum(shares) / 4)
    assert found["copied_blocks"] == n - 1
    assert found["reused_tokens"] == 10 * (n - 1)
    assert found["reused_token_share"] == pytest.approx((n - 1) / n)
    assert_idle(engine)


@pytest.mark.parametrize("num_users", [1, 2, 4])
def test_a_shared_prefix_saves_a_block_per_user_and_block(num_users):
    """A first request leaves 3 blocks of its 12 tokens cached. So many then come at once, each with the same 12
    tokens and 2 of its own, which take a block each; all are at 14 + 3 slots before the last step."""
    engine, recorder = recorded(num_blocks=40, block_size=BLOCK)
    engine.add("first", prompt_of(0, 12), 1)
    engine.run()
    assert engine.log.steps[-1].pool.num_cached_blocks == 3
    for i in range(num_users):
        engine.add(f"r{i}", [*prompt_of(0, 12), 200 + i, 7], 4)
    engine.run()
    steps = engine.log.steps[1:]
    assert [step.pool.num_saved_blocks for step in steps] == [3 * (num_users - 1)] * 3 + [0]
    in_use = [40 - step.pool.num_free_blocks for step in steps]
    assert in_use == [3 + num_users] * 3 + [0]
    assert [step.pool.num_cached_blocks for step in steps[:3]] == [0, 0, 0]
    # Each leaves its fourth block, which is full with slot 15, beside the 3 in common.
    assert steps[-1].pool.num_cached_blocks == 3 + num_users
    assert [step.pool.num_slots_held for step in steps] == [12 + num_users * k for k in (2, 3, 4)] + [0]
    assert cached_tokens(engine) == {"first": 0, **{f"r{i}": 12 for i in range(num_users)}}
    found = figures(engine, recorder, block_bytes=64)
    assert found["kv_saved_bytes"] == pytest.approx(
        {"mean": 64 * 3 * 3 * (num_users - 1) / 5, "peak": 64 * 3 * (num_users - 1)}
    )
    assert found["reused_tokens"] == 12 * num_users
    cached = [3, 0, 0, 0, 3 + num_users]
    assert found["kv_cached_of_pool"] == pytest.approx(
        {"mean": sum(cached) / 5 / 40, "peak": max(cached) / 40}
    )


def test_what_is_swapped_is_counted_in_bytes_and_not_held():
    """Two sequences of 8 tokens that need 4 blocks each, in 6: one gives 3 blocks away, and gets them back."""
    engine, recorder = recorded(
        registry=registry_with(),
        num_blocks=6,
        block_size=BLOCK,
        num_host_blocks=4,
        prefix_cache=NO_CACHE,
        policies={"preemption": "swap"},
    )
    for i in range(2):
        engine.add(f"r{i}", prompt_of(i, 8), 8)
    engine.run()
    found = figures(engine, recorder, block_bytes=100)
    assert (found["swapped_out_blocks"], found["swapped_in_blocks"]) == (3, 3)
    assert found["swapped_bytes"] == 600
    assert found["recomputed_tokens"] == 0
    # r1 leaves at step 5 with 12 computed tokens and is back at step 8, when r0 has ended.
    assert [step.pool.num_host_blocks for step in engine.log.steps] == [0] * 5 + [3] * 3 + [0] * 3
    held = [step.pool.num_slots_held for step in engine.log.steps]
    assert held == [16, 18, 20, 22, 24, 13, 14, 0, 13, 14, 0]


def test_i1_usage_is_what_is_in_use_of_the_pool():
    """Two choices that share 2 blocks and have 1 each, of 10: 0.4 (case I1 of known-failures.md)."""
    engine, recorder = recorded(num_blocks=10, block_size=BLOCK)
    engine.add("r", prompt_of(0, 8), 3, n=2)
    engine.run()
    external = [p.external / 40 for p in parts_of(tables_of(recorder), 10, BLOCK)]
    assert [1 - share for share in external] == pytest.approx([0.2, 0.4, 0])
