"""The prefix cache and the sliding window: cases B1 to B6 of known-failures.md, with variants of our own.

Hits are whole blocks, and never the block with the last token of a prompt, which must be computed to sample.
"""

from __future__ import annotations

import random

import pytest
from memory_support import (
    assert_idle,
    cached_tokens,
    compute,
    computed_tokens,
    index_of,
    paged,
    paged_with,
    registry_with,
    sequence,
)

from kvengine.core.errors import ConfigError
from kvengine.core.plan import StepPlan
from kvengine.core.sequence import SequenceState
from kvengine.core.shapes import PrefixCacheConfig
from kvengine.engine.memory import Memory
from kvengine.kv.host_pool import SwapPool
from kvengine.registry import discover
from kvengine.testing.engines import TestEngine
from kvengine.testing.sources import ChecksumSource, checksum_output

REGISTRY = discover()
SCHEDULERS = ("chunked", "continuous", "static")


def prompt_of(length: int, first: int = 1) -> list[int]:
    return [(7 * i + first) % 251 for i in range(length)]


def engine_with(scheduler: str = "chunked", **config) -> TestEngine:
    config = {"registry": REGISTRY, **config}
    return TestEngine(policies={"scheduler": scheduler, **config.pop("policies", {})}, **config)


# ---- B1: the whole prompt is cached


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize(
    ("block_size", "length", "hit"),
    [(16, 32, 16), (16, 33, 32), (16, 31, 16), (16, 16, 0), (1, 8, 7), (4, 1, 0), (5, 10, 5)],
)
def test_b1_a_cached_prompt_computes_at_least_its_last_token(scheduler, block_size, length, hit):
    engine = engine_with(scheduler, block_size=block_size, num_blocks=64)
    for name in ("first", "second"):
        engine.add(name, prompt_of(length), 4)
        engine.run()
    assert engine.outputs["first"] == engine.outputs["second"] == checksum_output(prompt_of(length), 4)
    assert cached_tokens(engine) == {"first": 0, "second": hit}
    assert computed_tokens(engine, "second") == length - hit + 3
    assert all(min(step.scheduled.values()) >= 1 for step in engine.log.steps)
    assert_idle(engine)


@pytest.mark.parametrize("budget", [1, 3, 15, 16, 17])
def test_b1_variant_under_every_chunk_and_while_the_first_still_runs(budget):
    """Ours: the blocks that are hit are held by a running sequence, and the rest comes in chunks."""
    engine = engine_with(block_size=16, num_blocks=64, max_num_batched_tokens=budget)
    engine.add("first", prompt_of(32), 40)
    while "first" not in engine.outputs:
        engine.step()
    engine.add("second", prompt_of(32), 4)
    engine.step()
    if budget > 1:
        # The one that was hit; under a budget of 17 the second block is computed in this step and given up for
        # the equal one of the first.
        assert engine.log.steps[-1].pool.num_saved_blocks == (2 if budget == 17 else 1)
    engine.run()
    assert engine.outputs["second"] == checksum_output(prompt_of(32), 4)
    assert engine.outputs["first"] == checksum_output(prompt_of(32), 40)
    assert cached_tokens(engine)["second"] == 16
    assert computed_tokens(engine, "second") == 16 + 3
    assert_idle(engine)


# ---- B2: a colliding hash is no hit, and the parts of a key do not mix


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_b2_a_hash_that_always_collides_hits_nothing_wrong(scheduler):
    registry = registry_with(allocator=paged_with(lambda data: 0))
    engine = engine_with(scheduler, registry=registry, block_size=4, policies={"allocator": "test"})
    prompts = {"first": range(1, 17), "second": range(101, 117)}
    for name, prompt in prompts.items():
        engine.add(name, prompt, 5)
        engine.run()
    assert cached_tokens(engine) == {"first": 0, "second": 0}
    assert engine.outputs == {name: checksum_output(list(prompt), 5) for name, prompt in prompts.items()}
    assert_idle(engine)


@pytest.mark.parametrize("num_keys", [1, 2, 3, 7])
def test_b2_variant_few_keys_and_many_prompts_at_once(num_keys):
    """Ours: a hash with so many values, prompts that share heads and tails, forks, and a pool that preempts."""
    registry = registry_with(allocator=paged_with(lambda data: sum(data) % num_keys))
    engine = engine_with(registry=registry, block_size=2, num_blocks=14, policies={"allocator": "test"})
    draw = random.Random(num_keys)
    prompts = {}
    for i in range(40):
        words = [draw.choice([[1, 2], [2, 1], [3, 3], [1, 2, 3], [9]]) for _ in range(draw.randint(1, 4))]
        prompts[f"r{i}"] = [token for word in words for token in word]
        engine.add(f"r{i}", prompts[f"r{i}"], draw.randint(1, 6), n=draw.choice([1, 1, 2]))
        engine.step()
    engine.run()
    assert engine.log.num_preemptions
    for seq_id, output in engine.outputs.items():
        assert output == checksum_output(prompts[seq_id.split("/")[0]], len(output))
    assert_idle(engine)


def test_b2_a_tenant_is_not_a_salt():
    """Request 1 has the namespace A and no salt, request 2 the salt A and no namespace: the same prompt."""
    cache = PrefixCacheConfig(isolate_tenants=True)
    engine = engine_with(block_size=4, prefix_cache=cache)
    parts = {
        "tenant": {"tenant": "A"},
        "salt": {"cache_salt": "A"},
        "both": {"tenant": "A", "cache_salt": "A"},
        "none": {},
    }
    for name, keys in parts.items():
        engine.add(name, prompt_of(12), 2, **keys)
        engine.run()
    assert cached_tokens(engine) == dict.fromkeys(parts, 0)
    for name, keys in parts.items():
        engine.add(f"{name} again", prompt_of(12), 2, **keys)
        engine.run()
    assert [cached_tokens(engine)[f"{name} again"] for name in parts] == [8] * 4
    assert set(map(tuple, engine.outputs.values())) == {tuple(checksum_output(prompt_of(12), 2))}


def test_b2_tenants_share_unless_they_are_isolated_and_salts_never():
    engine = engine_with(block_size=4)
    for name, keys in (("a", {"tenant": "A"}), ("b", {"tenant": "B"}), ("c", {"cache_salt": "C"})):
        engine.add(name, prompt_of(12), 2, **keys)
        engine.run()
    assert cached_tokens(engine) == {"a": 0, "b": 8, "c": 0}


ODD_PARTS = [None, "", "None", "A", "B", "A', 'B", "A\x00", "A|B", "('tenant', 'A')", "'), ('tenant', 'B"]


def test_b2_variant_no_two_pairs_of_key_parts_are_taken_for_each_other():
    """Ours: empty, quoted and separator-like names of tenants and salts."""
    cache = PrefixCacheConfig(isolate_tenants=True)
    engine = engine_with(block_size=4, prefix_cache=cache)
    pairs = [(tenant, salt) for tenant in ODD_PARTS for salt in ODD_PARTS]
    for i, (tenant, salt) in enumerate(pairs):
        engine.add(f"r{i}", prompt_of(8), 1, tenant=tenant, cache_salt=salt)
        engine.run()
    assert set(cached_tokens(engine).values()) == {0}


def test_b2_variant_tokens_that_python_or_a_short_hash_would_mix_up():
    """Ours: hash(-1) == hash(-2), and token lists whose digits or bytes run together."""
    engine = engine_with(block_size=2, vocab_size=2**40)
    prompts = [
        [1, 11, 5],
        [11, 1, 5],
        [111, 1, 5],
        [1, 111, 5],
        [256, 1, 5],
        [1, 256, 5],
        [0, 65536, 5],
        [2**32, 0, 5],
    ]
    for i, prompt in enumerate(prompts):
        engine.add(f"r{i}", prompt, 1)
        engine.run()
    assert set(cached_tokens(engine).values()) == {0}


# ---- B3: hits are counted at admission


@pytest.mark.parametrize("scheduler", ["chunked", "continuous"])
def test_b3_what_was_evicted_while_it_waited_is_no_hit(scheduler):
    """R1 leaves 3 cached blocks of 8, L holds 5, and its sixth takes the last of R1's while R2 waits."""
    engine = engine_with(scheduler, block_size=4, num_blocks=8)
    first, load, second = prompt_of(12), prompt_of(20, 100), prompt_of(12) + prompt_of(12, 50)
    engine.add("R1", first, 1)
    engine.run()
    engine.add("L", load, 5)
    engine.step()
    engine.add("R2", second, 1)
    engine.step()
    assert engine.log.steps[-1].scheduled == {"L": 1}, "R2 must wait"
    assert engine.engine.context.allocator.num_cached_blocks == 2
    engine.run()
    assert cached_tokens(engine) == {"R1": 0, "L": 0, "R2": 8}
    assert computed_tokens(engine, "R2") == 16
    assert engine.outputs["R2"] == checksum_output(second, 1)
    assert_idle(engine)


def test_b3_variant_what_was_published_while_it_waited_is_a_hit():
    """Ours: the other way round. R2 waits for a seat and finds at admission what came after it did."""
    engine = engine_with(block_size=4, num_blocks=32, max_num_seqs=1)
    engine.add("L", prompt_of(20), 6)
    engine.add("R2", [*prompt_of(20), *checksum_output(prompt_of(20), 6), 1], 2)
    engine.run()
    # L computes 20 + 5 tokens, 6 blocks; R2 has 27.
    assert cached_tokens(engine)["R2"] == 24
    assert computed_tokens(engine, "R2") == 3 + 1
    assert_idle(engine)


# ---- B4: a block can be hit once its KV is written


def test_b4_two_equal_prompts_of_one_step_hit_nothing_of_each_other():
    engine = engine_with(block_size=4, num_blocks=32, max_num_batched_tokens=16)
    for name in ("R1", "R2"):
        engine.add(name, prompt_of(12), 3)
    engine.step()
    assert engine.log.steps[0].scheduled == {"R1": 12, "R2": 4}
    engine.run()
    assert cached_tokens(engine) == {"R1": 0, "R2": 0}
    engine.add("R3", prompt_of(12), 3)
    engine.run()
    assert cached_tokens(engine)["R3"] == 8
    assert set(map(tuple, engine.outputs.values())) == {tuple(checksum_output(prompt_of(12), 3))}
    allocator = engine.engine.context.allocator
    assert allocator.num_cached_blocks == len(index_of(allocator)) == 3
    assert_idle(engine)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("copies", [2, 3, 5])
def test_b4_variant_several_whole_copies_of_one_step_become_one(scheduler, copies):
    """Ours: when all are computed, the equal full blocks are held once; partial tails stay apart."""
    engine = engine_with(scheduler, block_size=4, num_blocks=32)
    for i in range(copies):
        engine.add(f"r{i}", prompt_of(14), 3)
    engine.step()
    pool = engine.log.steps[0].pool
    assert 32 - pool.num_free_blocks == 3 + copies
    assert pool.num_saved_blocks == 3 * (copies - 1)
    assert pool.num_slots_held == 12 + 2 * copies
    engine.run()
    assert set(cached_tokens(engine).values()) == {0}
    assert set(map(tuple, engine.outputs.values())) == {tuple(checksum_output(prompt_of(14), 3))}
    assert_idle(engine)


def test_b4_variant_half_a_prefill_is_hit_up_to_what_is_written():
    """Ours: R2 enters while R1 has 8 of 20 tokens computed; it may share these and no more."""
    engine = engine_with(block_size=4, num_blocks=32, max_num_batched_tokens=8)
    engine.add("R1", prompt_of(20), 2)
    engine.step()
    engine.add("R2", prompt_of(20), 2)
    engine.run()
    assert engine.log.steps[1].scheduled == {"R1": 8}
    assert engine.log.steps[2].scheduled == {"R1": 4, "R2": 4}
    assert cached_tokens(engine) == {"R1": 0, "R2": 16}
    assert set(map(tuple, engine.outputs.values())) == {tuple(checksum_output(prompt_of(20), 2))}


# ---- B5: reuse of generated tokens


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_b5_the_last_generated_token_has_no_kv(scheduler):
    """12 tokens, KV of 11: two whole blocks."""
    engine = engine_with(scheduler, block_size=4, num_blocks=32)
    engine.add("turn 1", prompt_of(6), 6)
    engine.run()
    talk = prompt_of(6) + engine.outputs["turn 1"]
    engine.add("turn 2", [*talk, 1, 2, 3, 4], 3)
    engine.run()
    assert cached_tokens(engine) == {"turn 1": 0, "turn 2": 8}
    assert engine.outputs["turn 2"] == checksum_output([*talk, 1, 2, 3, 4], 3)
    assert_idle(engine)


@pytest.mark.parametrize(("new", "hit"), [(1, 4), (2, 4), (3, 8), (4, 8), (7, 12), (8, 12)])
def test_b5_variant_a_turn_that_ends_around_a_block(new, hit):
    """Ours: 6 + new - 1 slots are written, in blocks of 4, by a choice that was forked."""
    engine = engine_with(block_size=4, num_blocks=32)
    engine.add("turn 1", prompt_of(6), new, n=2)
    engine.run()
    talk = prompt_of(6) + engine.outputs["turn 1/1"]
    engine.add("turn 2", [*talk, *range(9)], 1)
    engine.run()
    assert cached_tokens(engine)["turn 2"] == hit == (6 + new - 1) // 4 * 4
    assert engine.outputs["turn 2"] == checksum_output([*talk, *range(9)], 1)


# ---- B6: a sliding window


def windowed(scheduler: str = "chunked", window: int = 8, **config) -> TestEngine:
    source = ChecksumSource(window=window)
    return engine_with(scheduler, block_size=4, sliding_window=window, source=source, **config)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("together", [True, False])
def test_b6_four_equal_prompts_have_the_output_of_the_window(scheduler, together):
    engine = windowed(scheduler, num_blocks=64)
    for i in range(4):
        engine.add(f"r{i}", prompt_of(30), 10)
        if not together:
            engine.run()
    engine.run()
    assert set(map(tuple, engine.outputs.values())) == {tuple(checksum_output(prompt_of(30), 10, window=8))}
    assert checksum_output(prompt_of(30), 10, window=8) != checksum_output(prompt_of(30), 10)
    assert set(cached_tokens(engine).values()) == {0}, "auto is off under a window"
    assert_idle(engine)


@pytest.mark.parametrize(
    "budget",
    [4, 512],
)
def test_b6_past_the_window_a_sequence_has_three_blocks(budget):
    """A window of 8 spans 3 blocks of 4 at most: once the prompt is computed nobody has more."""
    engine = windowed(num_blocks=64, max_num_batched_tokens=budget)
    engine.add("r", prompt_of(30), 20)
    while engine.engine.has_unfinished:
        engine.step()
        seq = next(engine.engine.context.running, None)
        if seq is not None and seq.num_computed_tokens >= 31:
            in_use = 64 - engine.engine.context.num_free_blocks
            assert in_use <= 3, seq
    assert engine.outputs["r"] == checksum_output(prompt_of(30), 20, window=8)


@pytest.mark.parametrize("scheduler", ["chunked", "continuous"])
def test_b6_after_every_step_past_the_window_a_sequence_has_three_blocks(scheduler):
    engine = windowed(scheduler, num_blocks=64)
    engine.add("r", prompt_of(30), 60)
    engine.run()
    in_use = [64 - step.pool.num_free_blocks for step in engine.log.steps]
    assert in_use[0] == 3  # of the 8 that the prompt's step needed, for all its tokens are computed together
    assert set(in_use[:-1]) <= {2, 3}
    assert engine.outputs["r"] == checksum_output(prompt_of(30), 60, window=8)
    assert_idle(engine)


def test_b6_a_block_is_given_up_as_soon_as_no_later_token_sees_it_and_can_be_used_at_once():
    """A window of 5 in a pool of 2 blocks of 4: token 8 sees 4..8, so that the first block is free for it."""
    allocator = paged(2, window=5)
    seq = sequence(range(20))
    compute(allocator, seq, 8)
    assert allocator.num_free_blocks == 1
    compute(allocator, seq, 9)
    assert (seq.block_table.num_dropped, allocator.num_free_blocks) == (1, 0)
    compute(allocator, seq, 12)
    compute(allocator, seq, 13)
    assert (seq.block_table.num_dropped, allocator.num_owned_slots) == (2, 8)
    assert allocator.num_saved_slots == 13 - 5
    allocator.check_integrity([seq])


def test_b6_a_victim_past_the_window_comes_back_from_the_host_with_the_window_only():
    """Both are past a window of 5 with 3 blocks of 4 at most; who gives way takes along what the window sees."""
    engine = windowed(
        window=5,
        num_blocks=9,
        num_host_blocks=8,
        registry=registry_with(),
        policies={"preemption": "swap"},
        max_num_batched_tokens=20,
    )
    engine.add("a", prompt_of(18), 16)
    engine.add("b", prompt_of(18, 90), 16)
    engine.run(max_steps=200)
    assert engine.outputs == {
        "a": checksum_output(prompt_of(18), 16, window=5),
        "b": checksum_output(prompt_of(18, 90), 16, window=5),
    }
    assert_idle(engine)


def test_b6_a_swapped_sequence_past_the_window_keeps_its_books():
    """Through Memory alone: out with 2 of its 4 blocks, and in again with as many."""
    allocator = paged(8, window=5)
    memory = Memory(allocator, SwapPool(8))
    memory.begin_plan(StepPlan(step=0, now_ns=0))
    seq = sequence(range(16))
    assert memory.enter(seq, 8) is None
    for end in (8, 13):
        assert memory.grow(seq, end) is None
        memory.computed(seq, end - seq.num_computed_tokens)
    assert seq.block_table.num_dropped == 2  # token 13 sees 9..13
    assert memory.swap_out(seq) is None
    assert len(seq.block_table.host_blocks) == 2
    seq.state = SequenceState.SWAPPED
    memory.check_integrity([], [seq])
    plan = StepPlan(step=1, now_ns=0)
    memory.begin_plan(plan)
    assert memory.enter(seq, 14) is None
    memory.finish_plan()
    assert seq.block_table.num_dropped == 2
    assert [block for _, block in plan.swap_ins] == seq.block_table.blocks[2:4]
    memory.executed()
    seq.state = SequenceState.RUNNING
    memory.check_integrity([seq], [])
    assert memory.num_slots_held == 13 - 8


@pytest.mark.parametrize("num_blocks", [8, 9, 64])
def test_b6_forks_past_the_window_free_without_a_double_free(num_blocks):
    engine = windowed(num_blocks=num_blocks)
    engine.add("r", prompt_of(6), 26)
    for _ in range(12):
        engine.step()
    trunk = prompt_of(6) + engine.outputs["r"]
    engine.fork("fork", "r", [], 12)
    engine.fork("other", "r", [77], 12)
    engine.run()
    assert engine.outputs == {
        "r": checksum_output(prompt_of(6), 26, window=8),
        "fork": checksum_output(trunk, 12, window=8),
        "other": checksum_output([*trunk, 77], 12, window=8),
    }
    assert_idle(engine)


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("window", [1, 2, 5, 8])
def test_b6_variant_windows_and_blocks_that_do_not_divide_each_other(window, block_size):
    """Ours: three choices under pressure, so that victims leave and come back past the window."""
    engine = TestEngine(
        block_size=block_size,
        num_blocks=-(-26 // block_size),
        sliding_window=window,
        source=ChecksumSource(window=window),
        max_num_batched_tokens=9,
    )
    engine.add("a", prompt_of(14), 12, n=3)
    engine.add("b", prompt_of(11, 90), 15, n=2)
    engine.run(max_steps=500)
    for name, prompt, new in (("a", prompt_of(14), 12), ("b", prompt_of(11, 90), 15)):
        expected = checksum_output(prompt, new, window=window)
        assert {tuple(out) for key, out in engine.outputs.items() if key[0] == name} == {tuple(expected)}
    assert_idle(engine)


@pytest.mark.parametrize("mode", ["on", "auto", "off"])
def test_b6_a_prefix_cache_and_a_window_are_refused_by_name(mode):
    cache = PrefixCacheConfig(mode=mode)
    if mode == "on":
        with pytest.raises(ConfigError) as error:
            windowed(prefix_cache=cache)
        assert error.value.key == "prefix_cache"
        assert "sliding window of 8 tokens" in str(error.value)
        assert "prefix_cache=off" in str(error.value)
        return
    engine = windowed(prefix_cache=cache)
    for name in "ab":
        engine.add(name, prompt_of(20), 2)
        engine.run()
    assert cached_tokens(engine) == {"a": 0, "b": 0}


def test_on_without_an_allocator_that_shares_is_refused_by_name():
    with pytest.raises(ConfigError) as error:
        engine_with(policies={"allocator": "contiguous_max"}, prefix_cache=PrefixCacheConfig(mode="on"))
    assert error.value.key == "prefix_cache"
    assert "contiguous_max" in str(error.value)
