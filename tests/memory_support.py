"""Sequences and allocators by hand, and engines whose parts are made for a test."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable
from itertools import count
from typing import Any

from kvengine.core.request import Request, SamplingParams
from kvengine.core.sequence import Sequence
from kvengine.core.shapes import KvShape, PrefixCacheConfig
from kvengine.kv.host_pool import SwapPool
from kvengine.kv.offload import Offload
from kvengine.kv.prefix_index import PrefixIndex, sha256
from kvengine.policies import Allocator, Build, Eviction, Mechanism, Preemption
from kvengine.registry import Registry, discover
from kvengine.testing.engines import TestEngine
from kvengine.testing.sources import ChecksumSource
from kvengine_plugins.allocators.paged import PagedAllocator
from kvengine_plugins.evictions.lru import LruEviction

NO_CACHE = PrefixCacheConfig(mode="off")
_ORDERS = count()


def sequence(tokens: Iterable[int], name: str = "r", **request: Any) -> Sequence:
    """A sequence that waits, of nobody's engine."""
    ask = Request(id=name, prompt_token_ids=tuple(tokens), sampling=SamplingParams(), **request)
    return Sequence(ask, choice=0, order=next(_ORDERS), max_tokens_total=10**6, stop_ids=frozenset(), seed=0)


def paged(
    num_blocks: int,
    block_size: int = 4,
    *,
    cache: bool = True,
    eviction: Eviction | None = None,
    hasher: Any = sha256,
    host: SwapPool | None = None,
    window: int | None = None,
) -> PagedAllocator:
    """A paged allocator; with `host` evicted blocks go there."""
    kv = KvShape(num_blocks=num_blocks, block_size=block_size, dtype="fp32", sliding_window=window)
    if not cache or window is not None:
        return PagedAllocator(kv)
    index = PrefixIndex(block_size, eviction or LruEviction(), hasher=hasher)
    return PagedAllocator(kv, index, Offload(index, host) if host else None)


def compute(allocator: PagedAllocator, seq: Sequence, num_tokens: int) -> None:
    """A step that computes `seq` up to its first `num_tokens` tokens; its copies are carried out."""
    start = allocator.cached_tokens(seq) if not seq.block_table.blocks else seq.num_computed_tokens
    assert allocator.allocate(seq, num_tokens) is None
    assert start <= num_tokens
    allocator.operations_done(allocator.take_operations())
    seq.num_computed_tokens = num_tokens
    allocator.publish(seq)


def finish(allocator: PagedAllocator, seq: Sequence) -> int:
    """`seq` ended; the blocks that this gave back."""
    before = allocator.num_free_blocks
    allocator.free(seq)
    seq.num_computed_tokens = 0
    return allocator.num_free_blocks - before


def index_of(allocator: Allocator) -> PrefixIndex:
    """The index of a paged allocator that has one."""
    assert isinstance(allocator, PagedAllocator)
    assert allocator._cache is not None
    return allocator._cache.index


def state(allocator: PagedAllocator) -> dict[str, Hashable]:
    """All that an allocation may change: counts, references, the order in which blocks would be evicted."""
    pool, index = allocator._pool, index_of(allocator)
    leaves: list[Any] = [*index._leaves]
    if index._first:
        leaves.append(index._first)
    leaves.sort()
    ranks = [(rank, node.block) for rank, ticket, node in leaves if ticket == node.ticket]
    nodes = [(node.key, node.block, node.last_used, node.num_hits) for node in index._by_key.values()]
    return {
        "free": allocator.num_free_blocks,
        "cached": allocator.num_cached_blocks,
        "saved": (allocator.num_saved_blocks, allocator.num_saved_slots),
        "references": tuple(pool._ref_counts),
        "free list": (tuple(pool._stack), pool._next_fresh),
        "eviction": tuple(ranks),
        "nodes": tuple(sorted(nodes, key=repr)),
    }


class HopefulPreemption(Preemption):
    """Every victim goes to the host, also where there is none, for which `swap` is refused."""

    def mechanism(self, victim: Sequence) -> Mechanism:
        return Mechanism.SWAP


class EitherPreemption(Preemption):
    """Victims of even order go to the host, the others are computed again."""

    def mechanism(self, victim: Sequence) -> Mechanism:
        return Mechanism.RECOMPUTE if victim.order % 2 else Mechanism.SWAP


def registry_with(**parts: Any) -> Registry:
    """All plug-ins, `hopeful` and `either` as preemptions, and each of `parts`, made anew by calling it with the
    build, as the plug-in `test` of its kind."""
    registry = discover()
    for name, policy in (("hopeful", HopefulPreemption), ("either", EitherPreemption)):
        registry.add("preemption", name, lambda config, build, policy=policy: policy(), summary="for tests")
    for kind, make in parts.items():
        registry.add(kind, "test", lambda config, build, make=make: make(build), summary="for tests")
    return registry


def paged_with(hasher: Any, *, isolate_tenants: bool = False) -> Any:
    """A maker of paged allocators whose blocks are found by `hasher`."""

    def make(build: Build) -> PagedAllocator:
        assert build.kv is not None
        assert build.eviction is not None
        index = PrefixIndex(build.kv.block_size, build.eviction, hasher=hasher)
        return PagedAllocator(build.kv, index, isolate_tenants=isolate_tenants)

    return make


def cached_tokens(engine: TestEngine) -> dict[str, int]:
    """Of the prompts of sequences that ended."""
    return {seq.id: seq.num_cached_tokens for seq in engine.log.finished_sequences}


def computed_tokens(engine: TestEngine, seq_id: str) -> int:
    """Tokens that were really scheduled for a sequence."""
    return sum(step.scheduled.get(seq_id, 0) for step in engine.log.steps)


def assert_idle(engine: TestEngine) -> None:
    """Nobody holds a block or a token, on the device or on the host, and all counts add up."""
    context = engine.engine.context
    memory = context.memory
    assert not engine.engine.has_unfinished
    assert context.num_free_blocks == context.allocator.num_blocks
    assert memory.num_tokens == memory.num_slots_held == 0
    assert context.allocator.num_saved_blocks == context.allocator.num_saved_slots == 0
    assert context.allocator.num_owned_slots == 0
    in_use = memory.host_pool.num_blocks - memory.host_pool.num_free
    assert in_use == len(context.allocator.host_blocks)
    context.check_integrity()


def check_contents(engine: TestEngine, source: ChecksumSource) -> None:
    """After a step: what is cached on the device or the host, and what is swapped out, is what it should be."""
    context, slots = engine.engine.context, source._slots
    size = context.allocator.block_size
    for seq in context.waiting:
        blocks = seq.block_table.host_blocks
        first = -(-seq.num_computed_tokens // size) - len(blocks)
        for place, block in enumerate(blocks, first):
            filled = min(seq.num_computed_tokens - place * size, size)
            there = [slots.get(-1 - (block * size + i)) for i in range(filled)]
            positions = range(place * size, place * size + filled)
            assert there == [(seq.token_ids[i], i) for i in positions], f"{seq}: place {place} on the host"
    allocator = context.allocator
    if not isinstance(allocator, PagedAllocator) or allocator._cache is None:
        return
    for node in allocator._cache.index._by_key.values():
        tokens = array("q", node.content[-8 * size :])
        expected = [(token, node.depth * size + i) for i, token in enumerate(tokens)]
        if node.block is not None:
            there = [slots.get(node.block * size + i) for i in range(size)]
        else:
            assert node.host_block is not None
            there = [slots.get(-1 - (node.host_block * size + i)) for i in range(size)]
        assert there == expected, f"the cached block at depth {node.depth}"
