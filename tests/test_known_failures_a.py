"""The block allocator: cases A1 to A4 of known-failures.md, with variants of our own."""

from __future__ import annotations

import random

import pytest
from memory_support import (
    assert_idle,
    cached_tokens,
    compute,
    computed_tokens,
    finish,
    index_of,
    paged,
    registry_with,
    sequence,
    state,
)

from kvengine.core.reasons import Reason
from kvengine.registry import discover
from kvengine.testing.engines import TestEngine
from kvengine.testing.sources import ChecksumSource, checksum_output

SCHEDULERS = ("chunked", "continuous", "static")
EVICTIONS = discover().names("eviction")

# ---- A1: double free never inflates the pool (of the pool itself: test_block_pool.py)


@pytest.mark.parametrize("cache", [True, False])
def test_a1_a_sequence_freed_twice_gives_its_blocks_once(cache):
    allocator = paged(8, cache=cache)
    seq = sequence(range(12))
    compute(allocator, seq, 12)
    assert allocator.num_free_blocks == 5
    assert finish(allocator, seq) == 3
    assert finish(allocator, seq) == 0
    assert allocator.num_free_blocks == 8
    allocator.check_integrity([])


@pytest.mark.parametrize("cache", [True, False])
def test_a1_a_table_that_lists_a_block_twice_is_refused_whole(cache):
    """The seen cause: each occurrence in one release was appended to the free list."""
    allocator = paged(8, cache=cache)
    seq = sequence(range(12))
    compute(allocator, seq, 12)
    good = seq.block_table.blocks
    seq.block_table.blocks = [*good, good[0]]
    with pytest.raises(ValueError, match="more than once"):
        allocator.free(seq)
    assert allocator.num_free_blocks == 5
    seq.block_table.blocks = good
    allocator.check_integrity([seq])
    assert finish(allocator, seq) == 3
    allocator.check_integrity([])


def test_a1_variant_forks_that_end_in_any_order_free_each_block_once():
    """Ours: the same blocks in four tables, each freed twice."""
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]):
        allocator = paged(8)
        family = [sequence(range(10), name=f"f{i}") for i in range(4)]
        compute(allocator, family[0], 10)
        for child in family[1:]:
            allocator.fork(family[0], child)
            child.num_computed_tokens = 10
        assert allocator.num_free_blocks == 5
        assert allocator.num_saved_blocks == 9
        left = list(family)
        for position, i in enumerate(order):
            freed = 3 if position == 3 else 0
            assert finish(allocator, family[i]) == freed
            assert finish(allocator, family[i]) == 0
            left.remove(family[i])
            allocator.check_integrity(left)
        assert allocator.num_free_blocks == 8


def test_a1_variant_a_request_aborted_twice_and_after_its_end():
    """Ours: through the engine, while it runs, in the step that ends it and afterwards."""
    engine = TestEngine(block_size=4, num_blocks=8)
    engine.add("a", range(6), 3, n=3)
    engine.step()
    engine.engine.abort("a")
    engine.engine.abort("a")
    engine.add("b", range(6), 1)
    engine.step()
    engine.engine.abort("b")
    engine.engine.abort("b")
    engine.run()
    assert engine.outputs["b"] == checksum_output(range(6), 1)
    assert_idle(engine)


# ---- A2: fork and copy-on-write of a partial tail


@pytest.mark.parametrize("first", ["parent", "child"])
@pytest.mark.parametrize("cache", [True, False])
def test_a2_the_first_writer_copies_and_the_second_writes_in_place(first, cache):
    allocator, source = paged(8, cache=cache), ChecksumSource()
    parent, child = sequence(range(1, 7), name="parent"), sequence(range(1, 7), name="child")
    compute(allocator, parent, 6)
    source.write(slots_of(parent), parent.token_ids, 0)
    in_use = [8 - allocator.num_free_blocks]
    allocator.fork(parent, child)
    child.num_computed_tokens = 6
    in_use.append(8 - allocator.num_free_blocks)
    tail = parent.block_table.blocks[1]
    assert child.block_table.blocks == parent.block_table.blocks
    writer, other = (parent, child) if first == "parent" else (child, parent)
    copies = []
    for seq, token in ((writer, 100), (other, 200)):
        seq.token_ids.append(token)
        assert allocator.blocks_needed(seq, 7) == (seq is writer)
        assert allocator.allocate(seq, 7) is None
        in_use.append(8 - allocator.num_free_blocks)
        operations = allocator.take_operations()
        copies += operations.copies
        for old, new in operations.copies:
            source.copy(list(range(4 * old, 4 * old + 4)), list(range(4 * new, 4 * new + 4)))
            assert [source._slots[4 * new + i] for i in (0, 1)] == [(5, 4), (6, 5)]
        allocator.operations_done(operations)
        source.write(slots_of(seq)[6:], [token], 6)
        seq.num_computed_tokens = 7
        allocator.publish(seq)
        allocator.check_integrity([parent, child])
    assert in_use == [2, 2, 3, 3]
    assert copies == [(tail, writer.block_table.blocks[1])]
    assert other.block_table.blocks[1] == tail
    for seq in (parent, child):
        assert source.next_token(slots_of(seq), seq) == checksum_output(seq.token_ids, 1)[0]
    assert finish(allocator, writer) == 1
    assert source.next_token(slots_of(other), other) == checksum_output(other.token_ids, 1)[0]
    assert finish(allocator, other) == 2
    assert allocator.num_free_blocks == 8
    allocator.check_integrity([])


def slots_of(seq) -> list[int]:
    return [4 * seq.block_table.blocks[i // 4] + i % 4 for i in range(len(seq.token_ids))]


@pytest.mark.parametrize("cache", [True, False])
def test_a2_without_a_free_block_the_first_append_is_refused_and_changes_nothing(cache):
    allocator = paged(2, cache=cache)
    parent, child = sequence(range(6)), sequence(range(6))
    compute(allocator, parent, 6)
    allocator.fork(parent, child)
    child.num_computed_tokens = 6
    before = [
        list(parent.block_table.blocks),
        list(child.block_table.blocks),
        state(allocator) if cache else 0,
    ]
    for seq in (parent, child):
        seq.token_ids.append(7)
        refusal = allocator.allocate(seq, 7)
        assert refusal is not None
        assert refusal.reason is Reason.NO_BLOCKS
    assert not any(allocator.take_operations())
    after = [parent.block_table.blocks, child.block_table.blocks, state(allocator) if cache else 0]
    assert after == before
    allocator.check_integrity([parent, child])
    allocator.free(child)
    assert allocator.allocate(parent, 7) is None, "alone it writes in place"
    assert not any(allocator.take_operations())


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a2_choices_share_the_prompt_and_copy_its_tail_once_each_but_one(scheduler):
    """A prompt of 6 in 2 blocks; n=3 copy the tail twice, and all are over before a third block is needed."""
    engine = TestEngine(block_size=4, num_blocks=8, policies={"scheduler": scheduler})
    engine.add("r", range(1, 7), 3, n=3)
    engine.step()
    in_use = [8 - engine.log.steps[-1].pool.num_free_blocks]
    assert engine.log.steps[-1].pool.num_saved_blocks == 4  # two blocks, three tables each
    engine.step()
    in_use.append(8 - engine.log.steps[-1].pool.num_free_blocks)
    engine.run()
    assert in_use == [2, 4]
    assert engine.log.num_copies == 2
    assert set(map(tuple, engine.outputs.values())) == {tuple(checksum_output(range(1, 7), 3))}
    assert computed_tokens(engine, "r/1") == 2  # its second token, and that after it
    assert_idle(engine)


def test_a2_variant_a_branch_with_tokens_of_its_own_leaves_its_parent_alone():
    """Ours: `fork` of a live request in the middle of a block, twice, and a branch of the branch."""
    engine = TestEngine(block_size=4, num_blocks=32)
    engine.add("trunk", range(1, 7), 12)
    for _ in range(4):
        engine.step()
    trunk = list(range(1, 7)) + engine.outputs["trunk"]  # 10 tokens, 9 of them computed
    assert len(trunk) == 10
    engine.fork("left", "trunk", [100, 101], 9)
    engine.fork("right", "trunk", [], 5)
    engine.step()
    left = [*trunk, 100, 101, *engine.outputs["left"]]
    engine.fork("leaf", "left", [200], 4)
    engine.run()
    assert engine.outputs == {
        "trunk": checksum_output(range(1, 7), 12),
        "left": checksum_output([*trunk, 100, 101], 9),
        "right": checksum_output(trunk, 5),
        "leaf": checksum_output([*left, 200], 4),
    }
    assert cached_tokens(engine) == {"trunk": 0, "left": 9, "right": 9, "leaf": 12}
    # The third block of the trunk has three owners, so two copy it; slot 12 of left begins a block.
    assert engine.log.num_copies == 2
    assert_idle(engine)


def test_a2_variant_a_writer_preempted_in_its_plan_takes_its_copy_back():
    """Ours: the copy asked for by a victim is dropped, the tail is shared again and nobody's slots changed."""
    allocator = paged(3)
    parent, child = sequence(range(6)), sequence(range(6))
    compute(allocator, parent, 6)
    allocator.fork(parent, child)
    child.num_computed_tokens = 6
    before = state(allocator)
    child.token_ids.append(9)
    assert allocator.allocate(child, 7) is None
    assert allocator.num_free_blocks == 0
    allocator.cancel_operations(child)
    assert child.block_table.blocks == parent.block_table.blocks
    assert child.block_table.num_slots == 4, "its next token does not go to the shared tail"
    after = state(allocator)
    assert {key: after[key] for key in after if key != "free list"} == {
        key: before[key] for key in before if key != "free list"
    }
    assert not any(allocator.take_operations())
    allocator.check_integrity([parent, child])


# ---- A3: a refused allocation leaves no trace


def test_a3_hits_are_subtracted_from_what_can_be_evicted():
    allocator = paged(5)
    x, z, y = sequence(range(8), "x"), sequence([99], "z"), sequence(range(20), "y")
    compute(allocator, x, 8)
    finish(allocator, x)
    compute(allocator, z, 1)
    assert (allocator.num_free_blocks, allocator.num_cached_blocks) == (4, 2)
    before = state(allocator)
    for _ in range(3):
        refusal = allocator.allocate(y, 20)
        assert refusal is not None
        assert (refusal.reason, refusal.detail) == (Reason.NO_BLOCKS, "5 needed, 4 free")
        assert state(allocator) == before
        assert y.block_table.blocks == []
        allocator.check_integrity([z])
    assert allocator.blocks_needed(y, 20) == 5
    finish(allocator, z)
    assert allocator.cached_tokens(y) == 8
    assert allocator.allocate(y, 20) is None
    assert len(y.block_table.blocks) == 5
    assert (allocator.num_free_blocks, allocator.num_cached_blocks) == (0, 0)
    y.num_computed_tokens = 8
    allocator.check_integrity([y])


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a3_the_refused_request_waits_and_hits_later(scheduler):
    """Z runs three steps on one block; Y comes meanwhile, and enters when Z has ended."""
    engine = TestEngine(block_size=4, num_blocks=5, policies={"scheduler": scheduler})
    engine.add("x", range(8), 1)
    engine.run()
    engine.add("z", [99], 3)
    engine.step()
    engine.add("y", range(20), 1)
    engine.run()
    assert [sorted(step.scheduled) for step in engine.log.steps] == [["x"], *[["z"]] * 3, ["y"]]
    assert cached_tokens(engine) == {"x": 0, "z": 0, "y": 8}
    assert computed_tokens(engine, "y") == 12
    assert engine.outputs["y"] == checksum_output(range(20), 1)
    assert_idle(engine)


def test_a3_variant_a_refused_growth_and_a_refused_branch_leave_no_trace():
    """Ours: the same for a running sequence whose tail is shared, and for hits that another table holds."""
    allocator = paged(4)
    held, other = sequence(range(8), "held"), sequence([*range(8), *range(50, 58)], "other")
    compute(allocator, held, 8)
    blocker = sequence(range(70, 74), "blocker")
    compute(allocator, blocker, 4)
    before = state(allocator)
    assert allocator.blocks_needed(other, 16) == 2, "two are hits that somebody holds"
    assert allocator.allocate(other, 16) is not None
    held.token_ids += range(8)
    assert allocator.allocate(held, 16) is not None
    assert state(allocator) == before
    assert (held.block_table.num_slots, len(held.block_table.blocks)) == (8, 2)
    finish(allocator, blocker)
    assert allocator.allocate(other, 16) is None
    other.num_computed_tokens = 8
    assert other.block_table.blocks[:2] == held.block_table.blocks
    allocator.check_integrity([held, other])


# ---- A4: chains die from their tail


@pytest.mark.parametrize("eviction", EVICTIONS)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a4_the_tail_goes_first_200_times(scheduler, eviction):
    engine = TestEngine(
        block_size=4, num_blocks=4, policies={"scheduler": scheduler, "eviction": eviction}, max_model_len=32
    )
    engine.add("first", range(16), 1)
    engine.run()
    assert engine.engine.context.allocator.num_cached_blocks == 4
    for i in range(200):
        engine.add(f"filler{i}", range(100, 104), 1)
        engine.run()
        engine.add(f"again{i}", range(16), 1)
        engine.run()
        assert engine.log.finished_sequences[-1].num_cached_tokens == 12, i
    assert {tuple(engine.outputs[f"again{i}"]) for i in range(200)} == {tuple(checksum_output(range(16), 1))}
    assert_idle(engine)


class HeadFirst:
    """Wants the heads of chains to die before their tails."""

    def rank(self, block) -> int:
        return block.depth


@pytest.mark.parametrize("seed", range(3))
def test_a4_variant_a_policy_that_wants_the_head_gets_the_tail(seed):
    """Ours: whatever is evicted, what is left of a chain can be hit."""
    engine = TestEngine(
        block_size=4,
        num_blocks=8,
        registry=registry_with(eviction=lambda build: HeadFirst()),
        policies={"eviction": "test"},
    )
    draw = random.Random(seed)
    engine.add("first", range(16), 1)
    engine.run()
    for i in range(60):
        length = draw.choice([4, 8, 12])
        engine.add(f"filler{i}", [100 + draw.randrange(20)] * length, 1)
        engine.run()
        cached = engine.engine.context.allocator.num_cached_blocks
        index = index_of(engine.engine.context.allocator)
        of_first = sum(node.content.endswith(tail_of(node.depth)) for node in index._by_key.values())
        engine.add(f"again{i}", range(16), 1)
        engine.run()
        assert engine.log.finished_sequences[-1].num_cached_tokens == 4 * min(of_first, 3), i
        assert cached <= 8
    assert_idle(engine)


def tail_of(depth: int) -> bytes:
    """What the block at `depth` of range(16) ends with."""
    return b"".join(token.to_bytes(8, "little") for token in range(4 * depth, 4 * depth + 4))
