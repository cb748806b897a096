"""Admission and scheduling: cases C1 to C7 of known-failures.md, with variants of our own."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from kvengine.assemble import Blueprint, blueprint
from kvengine.config import from_mapping
from kvengine.core.errors import ConfigError, RequestError
from kvengine.core.limits import EngineConfig
from kvengine.core.request import Request, SamplingParams
from kvengine.core.shapes import PrefixCacheConfig
from kvengine.kv.sizing import KvConfig
from kvengine.registry import discover
from kvengine.testing.engines import DEFAULT_POLICIES, TestEngine
from kvengine.testing.sources import checksum_output

REGISTRY = discover()
SCHEDULERS = REGISTRY.names("scheduler")
ALLOCATORS = REGISTRY.names("allocator")
STEP_NS = 10_000_000
NO_CACHE = PrefixCacheConfig(mode="off")


def engine_with(scheduler: str = "chunked", allocator: str = "paged", **config: Any) -> TestEngine:
    return TestEngine(registry=REGISTRY, policies={"scheduler": scheduler, "allocator": allocator}, **config)


def prompt_of(length: int) -> list[int]:
    return [(7 * i + 3) % 251 for i in range(length)]


def scheduler_named(name: str):
    return engine_with(name).engine.context.scheduler


CHUNKING = [name for name in SCHEDULERS if scheduler_named(name).chunks]
NOT_CHUNKING = [name for name in SCHEDULERS if name not in CHUNKING]


def add(engine: TestEngine, request_id: str, length: int, max_tokens: int | None, n: int = 1) -> None:
    """Add a request whose output length is known beforehand, which some allocators insist on."""
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, n=n)
    prompt = tuple(prompt_of(length))
    request = Request(
        id=request_id, prompt_token_ids=prompt, sampling=sampling, known_output_tokens=max_tokens
    )
    engine.engine.add_request(request)


def refusal(engine: TestEngine, length: int, max_tokens: int | None, n: int = 1) -> str:
    """The text with which a request is refused; nothing of it is left in the engine."""
    before = engine.engine.num_unfinished
    with pytest.raises(RequestError) as error:
        add(engine, "refused", length, max_tokens, n)
    assert engine.engine.num_unfinished == before
    assert engine.log.rejections[-1] is error.value
    return str(error.value)


def assert_next_request_completes(engine: TestEngine) -> None:
    """A small request right after it ends with its own output, and the pool is empty again."""
    name = f"next{len(engine.log.finished_sequences)}"
    add(engine, name, 5, 3)
    engine.run(max_steps=20)
    assert engine.outputs[name] == checksum_output(prompt_of(5), 3)
    assert_pool_is_free(engine)


def assert_pool_is_free(engine: TestEngine) -> None:
    context = engine.engine.context
    assert context.num_free_blocks == context.allocator.num_blocks


# ---- C1: what can never fit is refused at once


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_c1_prompt_larger_than_pool_is_refused_and_blocks_nobody(scheduler):
    engine = engine_with(scheduler, block_size=16, num_blocks=8, max_model_len=256)
    text = refusal(engine, 129, 1)
    assert "NEVER_FITS" in text
    assert "128" in text
    assert_next_request_completes(engine)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_c1_request_of_exactly_the_pool_runs(scheduler):
    engine = engine_with(scheduler, block_size=16, num_blocks=8, max_model_len=256)
    add(engine, "exact", 128, 1)
    assert engine.run(max_steps=5) == {"exact": checksum_output(prompt_of(128), 1)}
    assert_pool_is_free(engine)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_c1_one_new_token_too_many_is_refused(scheduler):
    engine = engine_with(scheduler, block_size=16, num_blocks=8, max_model_len=256)
    text = refusal(engine, 128, 2)
    assert "129 slots" in text
    assert "128" in text
    assert_next_request_completes(engine)


def test_c1_request_without_max_tokens_ends_where_the_pool_ends():
    engine = engine_with(block_size=16, num_blocks=8, max_model_len=256)
    add(engine, "open", 126, None)
    # 128 slots hold 126 prompt tokens and 2 new ones; the third new token is never fed back.
    assert engine.run(max_steps=10) == {"open": checksum_output(prompt_of(126), 3)}
    assert engine.finish_reasons == {"open": "length"}


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_c1_refusal_while_others_run_and_wait_changes_nothing_for_them(scheduler):
    engine = engine_with(scheduler, block_size=5, num_blocks=3, max_model_len=100)
    add(engine, "running", 6, 4)
    engine.step()
    add(engine, "waiting", 10, 6)  # 15 slots, which is the pool
    assert "15" in refusal(engine, 10, 7)
    assert "15" in refusal(engine, 16, 1, n=3)
    engine.run(max_steps=40)
    assert engine.outputs["running"] == checksum_output(prompt_of(6), 4)
    assert engine.outputs["waiting"] == checksum_output(prompt_of(10), 6)
    assert_next_request_completes(engine)


@pytest.mark.parametrize(
    "scheduler",
    SCHEDULERS,
)
def test_c1_choices_that_each_fill_the_pool_run_one_after_the_other(scheduler):
    engine = engine_with(scheduler, block_size=16, num_blocks=8, max_model_len=256)
    add(engine, "r", 120, 9, n=2)  # 128 slots each
    outputs = engine.run(max_steps=60)
    assert outputs == {"r/0": checksum_output(prompt_of(120), 9), "r/1": checksum_output(prompt_of(120), 9)}
    assert_pool_is_free(engine)


@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_c1_longest_possible_request_runs_under_every_allocator(scheduler, allocator):
    engine = engine_with(scheduler, allocator, block_size=16, num_blocks=8, max_model_len=128)
    refusal(engine, 120, 9)
    refusal(engine, 129, 1)
    add(engine, "longest", 120, 8)
    assert engine.run(max_steps=20) == {"longest": checksum_output(prompt_of(120), 8)}
    assert_next_request_completes(engine)


@pytest.mark.parametrize(
    ("num_blocks", "max_model_len", "capacity"),
    [
        (8, 100, 100),  # 7 blocks are rounded up to 8, which nobody owns
        (8, 64, 64),
        (12, 128, 128),  # the arena is 8 + 4
        (8, 17, 17),
    ],
)
def test_c1_contiguous_max_can_give_one_sequence_what_it_reserves(num_blocks, max_model_len, capacity):
    engine = engine_with(
        allocator="contiguous_max", block_size=16, num_blocks=num_blocks, max_model_len=max_model_len
    )
    assert engine.engine.context.allocator.capacity == capacity
    text = refusal(engine, max_model_len, 1)
    assert "NEVER_FITS" in text
    assert f"max_model_len={max_model_len}" in text
    add(engine, "longest", max_model_len - 1, 1)
    engine.run(max_steps=2)
    assert engine.outputs["longest"] == checksum_output(prompt_of(max_model_len - 1), 1)
    assert_next_request_completes(engine)


@pytest.mark.parametrize(
    ("num_blocks", "max_model_len", "region", "largest"),
    [(8, 129, 16, 8), (12, 129, 16, 8), (15, 256, 16, 8), (7, 65, 8, 4)],
)
def test_c1_contiguous_max_refuses_a_pool_without_one_region(num_blocks, max_model_len, region, largest):
    with pytest.raises(ConfigError) as error:
        engine_with(
            allocator="contiguous_max", block_size=16, num_blocks=num_blocks, max_model_len=max_model_len
        )
    assert error.value.key == "allocator"
    assert f"reserves {region} blocks" in str(error.value)
    assert f"{num_blocks} blocks is {largest};" in str(error.value)
    assert "max_model_len" in str(error.value)


# ---- C2: the edge of max_model_len


@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_c2_max_model_len_edge(scheduler, allocator):
    engine = engine_with(scheduler, allocator, block_size=4, num_blocks=32, max_model_len=64)
    add(engine, "one", 63, 1)
    engine.run(max_steps=2)
    assert engine.outputs["one"] == checksum_output(prompt_of(63), 1)
    assert engine.finish_reasons["one"] == "length"

    text = refusal(engine, 64, 1)
    assert "64 prompt tokens and 1 new ones exceed max_model_len=64" in text
    assert_next_request_completes(engine)

    text = refusal(engine, 60, 10)
    assert "60 prompt tokens and 10 new ones exceed max_model_len=64" in text
    assert_next_request_completes(engine)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize(("length", "new"), [(63, 1), (60, 4), (1, 63)])
def test_c2_without_max_tokens_it_ends_at_max_model_len(scheduler, length, new):
    engine = engine_with(scheduler, block_size=4, num_blocks=32, max_model_len=64)
    add(engine, "open", length, None)
    assert engine.run(max_steps=70) == {"open": checksum_output(prompt_of(length), new)}
    assert engine.finish_reasons == {"open": "length"}
    text = refusal(engine, 64, None)
    assert "64 prompt tokens and 1 new ones" in text
    assert_next_request_completes(engine)


def test_c2_known_length_counts_as_max_tokens():
    engine = engine_with(max_model_len=7)
    request = Request(id="known", prompt_token_ids=(1, 2, 3), known_output_tokens=5)
    with pytest.raises(RequestError, match="3 prompt tokens and 5 new ones exceed max_model_len=7"):
        engine.engine.add_request(request)
    add(engine, "fits", 3, 4)
    assert engine.run() == {"fits": checksum_output(prompt_of(3), 4)}


def test_c2_all_choices_of_a_refused_request_are_refused():
    engine = engine_with(max_model_len=64)
    refusal(engine, 60, 5, n=3)
    add(engine, "r", 60, 4, n=3)
    expected = checksum_output(prompt_of(60), 4)
    assert engine.run() == {"r/0": expected, "r/1": expected, "r/2": expected}


# ---- C3: the smallest requests


@pytest.mark.parametrize(
    ("length", "max_tokens", "n", "named"),
    [
        (0, 4, 1, "prompt is empty"),
        (0, None, 1, "prompt is empty"),
        (3, 0, 1, "max_tokens=0"),
        (3, -1, 1, "max_tokens=-1"),
        (3, 2, 0, "n=0"),
        (3, 2, -2, "n=-2"),
    ],
)
def test_c3_too_small_requests_are_refused_by_name(length, max_tokens, n, named):
    engine = engine_with()
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, n=n)
    request = Request(id="r", prompt_token_ids=tuple(prompt_of(length)), sampling=sampling)
    with pytest.raises(RequestError, match=named):
        engine.engine.add_request(request)
    assert not engine.engine.has_unfinished
    engine.add("r", prompt_of(5), 3)  # the refused id is free
    assert engine.run() == {"r": checksum_output(prompt_of(5), 3)}
    assert_pool_is_free(engine)


@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("n", [1, 3])
def test_c3_one_token_frees_its_blocks_in_the_step_that_prefilled_it(scheduler, allocator, n):
    engine = engine_with(scheduler, allocator, block_size=4, num_blocks=16, max_model_len=16)
    add(engine, "one", 6, 1, n=n)
    outputs = engine.run()
    assert list(outputs.values()) == [checksum_output(prompt_of(6), 1)] * n
    for step in engine.log.steps:
        assert step.sampled[0] in step.scheduled
        assert len(step.sampled) == (n if engine.engine.context.allocator.shares else len(step.scheduled))
        assert step.pool.num_free_blocks == 16
        assert step.pool.num_slots_held == 0


@pytest.mark.parametrize("scheduler", ["chunked", "continuous"])
def test_c3_one_token_in_a_mixed_batch_frees_its_blocks_in_its_step(scheduler):
    engine = engine_with(scheduler, block_size=4, num_blocks=16)
    add(engine, "long", 4, 8)
    engine.step()
    engine.step()
    add(engine, "one", 6, 1)
    engine.step()
    last = engine.log.steps[-1]
    assert "one" in last.sampled
    assert engine.outputs["one"] == checksum_output(prompt_of(6), 1)
    assert last.pool.num_free_blocks == 14  # the long one holds two blocks, as before
    assert last.pool.num_running == 1
    engine.run()
    assert engine.outputs["long"] == checksum_output(prompt_of(4), 8)


# ---- C4: chunked prefill samples once, at the right positions


@pytest.mark.parametrize(
    ("length", "chunks"), [(10, [4, 4, 2]), (8, [4, 4]), (9, [4, 4, 1]), (3, [3]), (4, [4]), (5, [4, 1])]
)
@pytest.mark.parametrize("n", [1, 2])
def test_c4_chunks_and_the_step_that_samples(length, chunks, n):
    """With one seat the second choice is not forked, and computes its prompt itself."""
    engine = engine_with(block_size=4, max_num_batched_tokens=4, max_num_seqs=1, prefix_cache=NO_CACHE)
    engine.add("r", prompt_of(length), 1, n=n)
    engine.run()
    ids = ["r"] if n == 1 else ["r/0", "r/1"]
    expected = [{seq_id: size} for seq_id in ids for size in chunks]
    assert [step.scheduled for step in engine.log.steps] == expected
    sampled = [step.step for step in engine.log.steps if step.sampled]
    assert sampled == [len(chunks) * (i + 1) - 1 for i in range(n)]
    first = next(seq for seq in engine.log.finished_sequences if seq.choice == 0)
    assert first.times.first_token_ns == len(chunks) * STEP_NS


@pytest.mark.parametrize(("length", "chunks"), [(10, [2]), (8, [4]), (9, [1]), (5, [1]), (4, [4]), (17, [1])])
def test_c4_chunks_after_a_hit(length, chunks):
    """The second choice begins after the whole blocks of 4 of the first length - 1 tokens."""
    engine = engine_with(block_size=4, max_num_batched_tokens=4, max_num_seqs=1)
    engine.add("r", prompt_of(length), 1, n=2)
    assert engine.run() == dict.fromkeys(("r/0", "r/1"), checksum_output(prompt_of(length), 1))
    second = [step for step in engine.log.steps if "r/1" in step.scheduled]
    assert [step.scheduled["r/1"] for step in second] == chunks
    assert [step.sampled for step in second] == [*[()] * (len(chunks) - 1), ("r/1",)]


@pytest.mark.parametrize("scheduler", CHUNKING)
@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("length", [2, 9, 10])
def test_c4_output_does_not_depend_on_the_chunk(scheduler, allocator, n, length):
    for budget in sorted({1, 3, length - 1, length, length + 1}):
        engine = engine_with(
            scheduler,
            allocator,
            block_size=4,
            num_blocks=16,
            max_model_len=16,
            max_num_batched_tokens=budget,
        )
        add(engine, "r", length, 5, n=n)
        outputs = engine.run()
        assert list(outputs.values()) == [checksum_output(prompt_of(length), 5)] * n, f"chunk {budget}"
        assert all(sum(step.scheduled.values()) <= budget for step in engine.log.steps)
        assert sum(len(step.sampled) for step in engine.log.steps) == 5 * n


def test_c4_chunks_of_two_prompts_share_the_budget():
    engine = engine_with(block_size=4, max_num_batched_tokens=4)
    engine.add("a", prompt_of(6), 2)
    engine.add("b", prompt_of(7)[2:], 2)
    engine.run()
    assert [step.scheduled for step in engine.log.steps] == [
        {"a": 4},
        {"a": 2, "b": 2},
        {"a": 1, "b": 3},  # a decodes first, b gets the rest: its prompt is done
        {"b": 1},
    ]
    assert [step.sampled for step in engine.log.steps] == [(), ("a",), ("a", "b"), ("b",)]
    assert engine.outputs == {
        "a": checksum_output(prompt_of(6), 2),
        "b": checksum_output(prompt_of(7)[2:], 2),
    }


# ---- C5: prefill does not starve decode


@pytest.mark.parametrize("scheduler", ["chunked", "prefill_budgeted"])
def test_c5_decoder_has_a_token_in_each_step_of_a_long_prefill(scheduler):
    engine = engine_with(scheduler, block_size=4, max_num_batched_tokens=16, prefix_cache=NO_CACHE)
    add(engine, "decoder", 4, 30)
    engine.step()
    add(engine, "long", 200, 1)
    engine.run()
    prefill = [step for step in engine.log.steps if "long" in step.scheduled]
    assert [step.scheduled["long"] for step in prefill] == [*[15] * 13, 5]
    assert all(step.scheduled["decoder"] == 1 and "decoder" in step.sampled for step in prefill)
    assert all(sum(step.scheduled.values()) <= 16 for step in engine.log.steps)
    assert engine.outputs["decoder"] == checksum_output(prompt_of(4), 30)


@pytest.mark.parametrize(("cap", "gap"), [(2, 3), (1, 2), (None, 11)])
def test_c5_a_cap_on_consecutive_prefills_bounds_the_gap_between_tokens(cap, gap):
    """Prefill first, ten prompts of a step each: without a cap the decoder waits for them all."""
    engine = TestEngine(
        registry=REGISTRY,
        policies={"scheduler": "continuous"},
        settings={"scheduler": {"max_consecutive_prefills": cap}},
        max_num_batched_tokens=256,
        prefix_cache=NO_CACHE,
    )
    add(engine, "decoder", 4, 30)
    engine.step()
    for i in range(10):
        add(engine, f"p{i}", 200, 2)
    engine.run()
    sampled = [step.step for step in engine.log.steps if "decoder" in step.sampled]
    assert max(later - earlier for earlier, later in pairwise(sampled)) == gap


# ---- C6: nonsense limits fail at start, by name


PARTS = {"model": "checksum", "attention": "torch", "executor": "null", "workload": "synthetic"}


def blueprint_with(scheduler: str = "chunked", **groups: Any) -> Blueprint:
    """A whole configuration that runs without weights, with `groups` changed."""
    names = DEFAULT_POLICIES | PARTS | {"scheduler": scheduler}
    config = {kind: {"name": name} for kind, name in names.items()}
    return blueprint({**config, **groups}, REGISTRY)


@pytest.mark.parametrize(
    ("group", "field", "value"),
    [
        ("engine", "max_num_seqs", 0),
        ("engine", "max_num_seqs", -1),
        ("engine", "max_num_batched_tokens", 0),
        ("engine", "max_num_batched_tokens", -1),
        ("engine", "num_blocks", 0),
        ("engine", "num_blocks", -3),
        ("engine", "num_host_blocks", -1),
        ("engine", "swap_space_bytes", -1),
        ("engine", "max_model_len", 0),
        ("engine", "kv_memory_bytes", 0),
        ("engine", "gpu_memory_utilization", 0.0),
        ("engine", "gpu_memory_utilization", 1.01),
        ("kv", "block_size", 0),
        ("kv", "block_size", -4),
    ],
)
def test_c6_nonsense_limits_fail_by_name(group, field, value):
    with pytest.raises(ConfigError) as error:
        blueprint_with("chunked", **{group: {field: value}})
    assert error.value.key == f"{group}.{field}"
    assert error.value.value == value
    assert str(error.value).startswith(f"{group}.{field}={value}: ")


@pytest.mark.parametrize("field", ["max_num_seqs", "max_num_batched_tokens", "num_blocks", "max_model_len"])
def test_c6_zero_is_not_unset(field):
    with pytest.raises(ConfigError, match=f"engine.{field}=0"):
        from_mapping(EngineConfig, {field: 0}, "engine")


@pytest.mark.parametrize("field", ["num_host_blocks", "swap_space_bytes"])
def test_c6_no_swap_space_is_a_size(field):
    assert blueprint_with(engine={field: 0}).kv.num_host_blocks == 0


@pytest.mark.parametrize("block_size", [0, -4])
def test_c6_block_size_in_the_dataclass_itself(block_size):
    with pytest.raises(ConfigError, match=f"kv.block_size={block_size}"):
        KvConfig(block_size=block_size)


@pytest.mark.parametrize("scheduler", NOT_CHUNKING)
def test_c6_budget_below_max_model_len_is_refused_without_chunking(scheduler):
    with pytest.raises(ConfigError) as error:
        blueprint_with(scheduler, engine={"max_num_batched_tokens": 127, "max_model_len": 128})
    assert error.value.key == "engine.max_num_batched_tokens"
    assert "max_model_len=128" in str(error.value)
    plan = blueprint_with(scheduler, engine={"max_num_batched_tokens": 128, "max_model_len": 128})
    assert plan.limits.max_num_batched_tokens == 128


@pytest.mark.parametrize("scheduler", CHUNKING)
def test_c6_chunking_lives_with_a_budget_of_one(scheduler):
    plan = blueprint_with(scheduler, engine={"max_num_batched_tokens": 1, "max_model_len": 128})
    assert plan.limits.max_num_batched_tokens == 1


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.parametrize("block_size", [1, 8])
def test_c6_valid_sizes_really_run(scheduler, allocator, block_size):
    engine = engine_with(
        scheduler, allocator, block_size=block_size, num_blocks=32, max_model_len=16, max_num_seqs=1
    )
    add(engine, "r", 9, 7, n=2)
    outputs = engine.run()
    assert outputs == {"r/0": checksum_output(prompt_of(9), 7), "r/1": checksum_output(prompt_of(9), 7)}
    assert_pool_is_free(engine)


# ---- C7: priority inversion at the slot limit


def priority_engine(scheduler: str, priorities: list[int], **config: Any) -> TestEngine:
    """Two seats, and a request `p0`, `p1`, ... of each priority, all in the engine from the start."""
    engine = TestEngine(
        registry=REGISTRY,
        policies={"scheduler": scheduler, "queue": "priority"},
        num_blocks=64,
        block_size=4,
        max_num_seqs=2,
        **config,
    )
    for i, priority in enumerate(priorities):
        add_urgent(engine, f"p{i}", priority, 9)
    return engine


def add_urgent(engine: TestEngine, name: str, priority: int, max_tokens: int) -> None:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    prompt = tuple(prompt_of(6 + len(engine.outputs)))
    now = engine.engine.clock.now()
    request = Request(id=name, prompt_token_ids=prompt, sampling=sampling, priority=priority, arrival_ns=now)
    engine.engine.add_request(request)


@pytest.mark.parametrize("cache", ["on", "off"])
@pytest.mark.parametrize("scheduler", ["chunked", "continuous"])
def test_c7_the_urgent_one_takes_the_seat_of_the_later_one(scheduler, cache):
    engine = priority_engine(scheduler, [5, 5], prefix_cache=PrefixCacheConfig(mode=cache))
    for _ in range(4):
        engine.step()
    add_urgent(engine, "urgent", 1, 3)
    engine.step()
    step = engine.log.steps[-1]
    assert "urgent" in step.scheduled
    assert "urgent" in step.sampled
    assert step.preempted == ("p1",)
    engine.run(max_steps=40)
    assert engine.log.num_preemptions == 1
    for seq in engine.log.finished_sequences:
        assert engine.outputs[seq.id] == checksum_output(seq.request.prompt_token_ids, seq.num_output_tokens)
        assert seq.num_output_tokens == (3 if seq.id == "urgent" else 9)
    assert_pool_is_free(engine)


@pytest.mark.parametrize("scheduler", ["chunked", "continuous"])
@pytest.mark.parametrize("newcomer", [5, 6])
def test_c7_only_a_strictly_higher_priority_takes_a_seat(scheduler, newcomer):
    engine = priority_engine(scheduler, [5, 5])
    for _ in range(4):
        engine.step()
    add_urgent(engine, "no more urgent", newcomer, 3)
    engine.run(max_steps=40)
    assert engine.log.num_preemptions == 0
    assert [seq.id for seq in engine.log.finished_sequences] == ["p0", "p1", "no more urgent"]


def test_c7_variant_ageing_moves_the_order_and_not_who_takes_a_seat():
    """Ours: one that has waited long is the head before an urgent one, but displaces nobody; and when it gets a seat
    its static priority counts again, so that the urgent one behind it takes that in the same plan."""
    engine = TestEngine(
        registry=REGISTRY,
        policies={"queue": "priority"},
        settings={"queue": {"ageing_s": 0.01}},  # a level for each step
        max_num_seqs=1,
    )
    add_urgent(engine, "runs", 2, 14)
    engine.step()
    add_urgent(engine, "old", 3, 3)  # from 10 ms on, which is worth as much as 0 from 40 ms on
    for _ in range(10):
        engine.step()
    add_urgent(engine, "young", 0, 2)
    engine.step()
    assert [seq.id for seq in engine.engine.context.waiting] == ["old", "young"]
    engine.run(max_steps=60)
    steps = engine.log.steps
    assert [name for step in steps[:14] for name in step.scheduled] == ["runs"] * 14
    assert [name for step in steps[14:] for name in step.scheduled] == ["young", "young", "old", "old", "old"]
    assert [step.step for step in steps if step.preempted == ("old",)] == [14]
    assert engine.finish_reasons == dict.fromkeys(("runs", "old", "young"), "length")


# ---- C8: request ids


def test_c8_a_live_id_is_refused_and_the_first_is_unaffected():
    engine = TestEngine()
    engine.add("x", [1, 2, 3], 3)
    engine.step()
    with pytest.raises(RequestError, match="this id is in use"):
        engine.add("x", [9, 9], 3)
    assert engine.run() == {"x": [20, 104, 127]}


@pytest.mark.parametrize("steps", [0, 1, 2], ids=["waiting", "prefilled", "decoding"])
def test_c8_an_abort_does_not_kill_who_takes_over_the_id(steps):
    engine = TestEngine(block_size=4, num_blocks=8)
    engine.add("x", range(1, 9), 8)
    for _ in range(steps):
        engine.step()
    engine.engine.abort("x")
    engine.outputs.clear()
    engine.add("x", [1, 2, 3], 3)
    assert engine.run() == {"x": [20, 104, 127]}
    assert [seq.finish_reason for seq in engine.log.finished_sequences] == ["abort", "length"]
    context = engine.engine.context
    assert context.num_free_blocks == 8
    assert context.num_running == len(context.line) == 0
