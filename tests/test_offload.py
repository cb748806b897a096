"""Evicted blocks on the host: they come back on a hit, are moved once, and give way to swapped sequences."""

from __future__ import annotations

from typing import Any

import pytest
from memory_model import MemoryModel
from memory_support import (
    assert_idle,
    cached_tokens,
    check_contents,
    compute,
    computed_tokens,
    finish,
    index_of,
    paged,
    registry_with,
    sequence,
)

from kvengine.core.errors import ConfigError
from kvengine.core.shapes import KvShape, PrefixCacheConfig
from kvengine.kv.host_pool import SwapPool
from kvengine.kv.offload import Offload
from kvengine.kv.prefix_index import Node, PrefixIndex, PrefixPath, root_of
from kvengine.policies import Build, SchedulingView
from kvengine.registry import discover
from kvengine.testing.engines import TestEngine
from kvengine.testing.sources import ChecksumSource, checksum_output
from kvengine_plugins.evictions.lru import LruEviction
from kvengine_plugins.schedulers.chunked import ChunkedScheduler

OFFLOAD = PrefixCacheConfig(offload=True)


def offloading(num_blocks: int, num_host_blocks: int, **config: Any) -> tuple[TestEngine, ChecksumSource]:
    source = ChecksumSource()
    sizes = {"num_blocks": num_blocks, "num_host_blocks": num_host_blocks, "block_size": 4}
    return TestEngine(prefix_cache=OFFLOAD, source=source, **{**sizes, **config}), source


def run(engine: TestEngine, source: ChecksumSource, name: str, prompt: list[int], new: int) -> None:
    """One request alone; its answer and all contents are right."""
    engine.add(name, prompt, new)
    while engine.engine.has_unfinished:
        engine.step()
        check_contents(engine, source)
    assert engine.outputs[name] == checksum_output(prompt, new)


def prompt_of(length: int, first: int = 1) -> list[int]:
    return [(first + 3 * i) % 251 for i in range(length)]


# ---- out and back


@pytest.mark.parametrize("scheduler", ["chunked", "continuous", "static"])
def test_what_was_evicted_comes_back_on_a_hit(scheduler):
    """A prompt of 3 full blocks and a filler of 4 blocks in a pool of 4: all three go out, and two come back, for
    which the filler's four go out in their turn, as many as are needed."""
    engine, source = offloading(4, 8, policies={"scheduler": scheduler})
    run(engine, source, "first", prompt_of(12), 1)
    run(engine, source, "filler", prompt_of(16, 100), 1)
    moved = [(len(step.swap_outs), len(step.swap_ins)) for step in engine.log.steps]
    assert moved == [(0, 0), (3, 0)]
    assert engine.log.steps[-1].pool.num_host_blocks == 3
    run(engine, source, "again", prompt_of(12), 1)
    assert cached_tokens(engine)["again"] == 8
    assert computed_tokens(engine, "again") == 4
    last = engine.log.steps[-1]
    # In: the first two blocks. Out: three of the filler's, for those two and the third, which is computed. That
    # frees the host blocks of all three of `first`.
    assert (len(last.swap_outs), len(last.swap_ins)) == (3, 2)
    assert last.pool.num_host_blocks == 3
    assert_idle(engine)


def test_a_chain_goes_out_from_its_tail_and_comes_back_whole():
    engine, source = offloading(6, 20)
    run(engine, source, "first", prompt_of(20), 1)
    for i in range(4):
        run(engine, source, f"filler{i}", prompt_of(8, 60 + 7 * i), 1)
    assert engine.engine.context.allocator.num_cached_blocks == 6
    run(engine, source, "longer", [*prompt_of(20), 9, 9, 9], 2)
    assert cached_tokens(engine)["longer"] == 20
    assert computed_tokens(engine, "longer") == 3 + 1
    assert_idle(engine)


def test_part_of_a_prefix_is_on_the_device_and_the_rest_on_the_host():
    engine, source = offloading(6, 20)
    run(engine, source, "first", prompt_of(20), 1)
    run(engine, source, "filler", prompt_of(12, 100), 1)  # a free block and the last two of `first`
    run(engine, source, "again", [*prompt_of(20), 5], 1)
    assert len(engine.log.steps[-1].swap_ins) == 2
    assert cached_tokens(engine)["again"] == 20
    assert_idle(engine)


def test_a_hit_on_the_host_counts_like_any_other():
    """So that lfu and lru know it: one hit, and used after everything before."""
    allocator = paged(2, host=SwapPool(4))
    for seq in (sequence(range(9)), sequence(range(50, 59))):
        compute(allocator, seq, 8)
        finish(allocator, seq)
    compute(allocator, sequence(range(9)), 8)
    nodes = index_of(allocator).match(PrefixPath(root_of({"kv_dtype": "fp32"})), list(range(9)), 2)
    assert [node.num_hits for node in nodes] == [1, 1]
    filler_nodes = [node for node in index_of(allocator)._by_key.values() if node not in nodes]
    assert len(filler_nodes) == 2
    assert min(node.last_used for node in nodes) > max(node.last_used for node in filler_nodes)


def test_bytes_are_moved_once_however_many_hit_the_same_blocks_in_a_step():
    engine, source = offloading(12, 20)
    run(engine, source, "first", prompt_of(12), 1)
    run(engine, source, "filler", prompt_of(48, 100), 1)
    for i in range(3):
        engine.add(f"user{i}", [*prompt_of(12), 200 + i], 2)
    engine.step()
    check_contents(engine, source)
    assert len(engine.log.steps[-1].swap_ins) == 3
    assert engine.log.steps[-1].pool.num_saved_blocks == 3 * 2
    engine.run()
    assert [cached_tokens(engine)[f"user{i}"] for i in range(3)] == [12] * 3
    for i in range(3):
        assert engine.outputs[f"user{i}"] == checksum_output([*prompt_of(12), 200 + i], 2)
    assert_idle(engine)


def test_what_is_computed_again_beside_its_copy_on_the_host_gives_the_host_block_back():
    """The whole prompt is cached, so that its last block is computed: it stands on the device, and on the host no
    more."""
    engine, source = offloading(4, 8)
    run(engine, source, "first", prompt_of(8), 1)
    run(engine, source, "filler", prompt_of(16, 100), 1)
    assert engine.log.steps[-1].pool.num_host_blocks == 2
    run(engine, source, "again", prompt_of(8), 1)
    assert len(engine.log.steps[-1].swap_ins) == 1
    assert engine.log.steps[-1].pool.num_host_blocks == len(engine.log.steps[-1].swap_outs) == 2
    assert_idle(engine)


# ---- the host is full


@pytest.mark.parametrize("num_host_blocks", [1, 2, 3, 5, 7])
def test_the_host_is_never_more_than_full(num_host_blocks):
    engine, source = offloading(5, num_host_blocks)
    for i in range(30):
        run(engine, source, f"r{i}", prompt_of(9 + i % 9, 1 + 40 * (i % 4)), 1 + i % 3)
    used = [step.pool.num_host_blocks for step in engine.log.steps]
    assert max(used) == num_host_blocks
    taken = {host for step in engine.log.steps for _, host in step.swap_outs}
    assert taken <= set(range(num_host_blocks))
    if num_host_blocks >= 5:  # below, a prefix is gone before its turn comes again
        assert any(step.swap_ins for step in engine.log.steps)
    assert_idle(engine)


def test_the_oldest_leaf_on_the_host_gives_way_first():
    """3 host blocks, and 4 evicted: a's tail, then a's head, then b's two. a's tail is forgotten first, so that
    a's head is still there."""
    host = SwapPool(3)
    allocator = paged(2, host=host)
    for first in (0, 100, 200):
        seq = sequence([*range(first, first + 8), 1])
        compute(allocator, seq, 8)
        finish(allocator, seq)
        allocator.check_integrity([])
    assert host.num_free == 0
    for first, cached in ((0, 4), (100, 8), (200, 8)):
        assert allocator.cached_tokens(sequence([*range(first, first + 8), 1])) == cached


def test_swapped_sequences_come_before_what_is_only_cached():
    host = SwapPool(4)
    allocator = paged(4, host=host)
    seq = sequence([*range(16), 1])
    compute(allocator, seq, 16)
    finish(allocator, seq)
    other = sequence(range(100, 117))
    compute(allocator, other, 16)
    assert (host.num_free, len(allocator.host_blocks)) == (0, 4)
    taken = host.take(3)
    assert taken is not None
    assert len(allocator.host_blocks) == 1
    host.check_integrity([taken, allocator.host_blocks])
    assert allocator.cached_tokens(sequence([*range(16), 1])) == 4
    assert host.take(2) is None, "one is there, and what it keeps stays"
    assert len(allocator.host_blocks) <= 1
    host.give_back(taken)
    host.check_integrity([allocator.host_blocks])


# ---- busy blocks


def test_host_blocks_of_a_plan_are_not_used_again_in_it():
    """Both are written by the plan being made, so that a third eviction finds no room: its node is forgotten."""
    host = SwapPool(2)
    index = PrefixIndex(4, LruEviction())
    offload = Offload(index, host)
    nodes = chain(index, [10, 11, 12])
    kept = []
    for _ in range(3):
        node, block = index.pop_leaf()
        kept.append(offload.keep(node, block))
        if not kept[-1]:
            offload.forget_below(node)
            index.forget(node)
    assert kept == [True, True, False]
    assert (len(index), offload.host_blocks) == (0, [0, 1]), "their parent is gone, and with it they"
    assert host.take(1) is None
    operations = offload.take_operations()
    assert [block for block, _ in operations.swap_outs] == [12, 11]
    assert nodes[0].block is None
    offload.done()
    assert (offload.host_blocks, host.num_free) == ([], 2)


def chain(index: PrefixIndex, blocks: list[int]) -> list[Node]:
    """A chain of idle nodes, one after the other, in these device blocks."""
    path = PrefixPath(b"")
    for block in blocks:
        index.publish(path, list(range(4 * len(blocks))), block)
    for node in reversed(path.nodes):
        index.leave(node)
    return path.nodes


@pytest.mark.parametrize("num_host_blocks", [2, 3, 4, 6])
def test_no_step_reads_a_host_block_that_it_writes(num_host_blocks):
    """Swap-outs are carried out before swap-ins: a block in both would be read too late."""
    engine, source = offloading(7, num_host_blocks, block_size=2)
    for i in range(40):
        run(engine, source, f"r{i}", prompt_of(6 + i % 5, 1 + 30 * (i % 3)), 1 + i % 4)
    for step in engine.log.steps:
        written, read = {host for _, host in step.swap_outs}, {host for host, _ in step.swap_ins}
        assert not written & read
        assert len(written) == len(step.swap_outs)
        assert len({block for _, block in step.swap_ins}) == len(step.swap_ins)
    assert any(step.swap_outs and step.swap_ins for step in engine.log.steps)
    assert_idle(engine)


class AdmitsFirst(ChunkedScheduler):
    """Admits before it lets anybody grow, so that whoever was just let in may have to leave in the same plan."""

    def schedule(self, view: SchedulingView) -> None:
        while len(view.waiting) and view.admit(view.waiting.peek(), view.token_budget_left):
            pass
        for seq in view.running:
            view.schedule(seq, view.token_budget_left)


def came_back_and_left(preemption: str) -> tuple[TestEngine, ChecksumSource]:
    """An engine whose last step brought 3 blocks back for x, which was then preempted for a in the same plan."""
    registry = registry_with(scheduler=lambda build: AdmitsFirst())
    policies = {"scheduler": "test", "preemption": preemption}
    engine, source = offloading(8, 20, block_size=1, registry=registry, policies=policies)
    run(engine, source, "p", [1, 2, 3], 1)
    run(engine, source, "filler", list(range(20, 28)), 1)
    engine.add("a", [10, 11, 12, 13], 5)
    engine.step()
    engine.add("x", [1, 2, 3, 4], 3)
    engine.step()
    assert engine.log.steps[-1].preempted == ("x",)
    assert len(engine.log.steps[-1].swap_ins) == 3
    return engine, source


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_victim_that_the_same_plan_brought_back_from_the_host(preemption):
    """Its blocks get their content by the plan's swap-ins, after the swap-outs."""
    engine, source = came_back_and_left(preemption)
    check_contents(engine, source)
    engine.run()
    assert engine.outputs["x"] == checksum_output([1, 2, 3, 4], 3)
    assert engine.outputs["a"] == checksum_output([10, 11, 12, 13], 5)
    assert_idle(engine)


def brought_back() -> MemoryModel:
    """Pools of 2 and 4 blocks: the plan being made let a sequence in for which it brings a block back."""
    model = MemoryModel(
        "paged", num_blocks=2, block_size=2, max_model_len=4, num_host_blocks=4, prefix_cache=OFFLOAD
    )
    for first in (0, 10, 0):
        model.execute()
        assert model.admit([first, 1, 2], 1, 3)
    return model


def test_nobody_is_swapped_out_whose_kv_the_same_plan_brings_back():
    """Seen as a wrong token (`-m slow`): the swap-out came before the swap-in that fills the block. `give_way`,
    which the engine calls, knew that; `swap_out`, which the model called, did not."""
    model = brought_back()
    with pytest.raises(AssertionError, match="before its KV has arrived"):
        model.memory.swap_out(model.live[0])
    model.preempt(model.live[0])
    model.execute()
    assert (model.num_brought_back, model.swapped, model.live) == (1, [], [])


def test_what_a_plan_brings_back_for_nobody_is_free_when_it_was_executed():
    """Seen as "blocks leaked" (`-m slow`): the model wanted it free at once, where nobody else lived."""
    model = brought_back()
    model.free(model.live[0])
    model.check()
    assert model.allocator.num_free_blocks == 1
    model.execute()
    assert model.allocator.num_free_blocks == 2


# ---- what is refused at the start


def build(**cache: Any) -> None:
    kv = KvShape(num_blocks=8, block_size=16, dtype="fp32", block_bytes=16_000_000, num_host_blocks=4)
    config = PrefixCacheConfig(offload=True, **cache)
    made = Build(kv=kv, prefix_cache=config, host_pool=SwapPool(4), eviction=LruEviction())
    discover().get("allocator", "paged").factory(None, made)


def test_offload_without_host_memory_is_refused_by_name():
    with pytest.raises(ConfigError, match="swap_space_bytes") as error:
        offloading(8, 0)
    assert error.value.key == "prefix_cache.offload"


@pytest.mark.parametrize(
    ("cache", "worth"),
    [
        # A block of 16 MB and 16 tokens: 1 ms a token at 1,000 tokens/s, so 16 ms to compute it.
        ({"host_bandwidth": 1e9, "recompute_rate": 1000.0}, False),  # 16 ms to move it
        ({"host_bandwidth": 1.01e9, "recompute_rate": 1000.0}, True),
        ({"host_bandwidth": 1e9, "recompute_rate": 999.0}, True),
        ({"host_bandwidth": 1e9, "recompute_rate": 10_000.0}, False),
    ],
)
def test_offload_that_would_never_pay_is_refused_by_name(cache, worth):
    if worth:
        build(**cache)
        return
    with pytest.raises(ConfigError, match="recompute_rate") as error:
        build(**cache)
    assert error.value.key == "prefix_cache.offload"
