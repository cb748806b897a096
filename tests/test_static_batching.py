"""Static batching by hand: steps, idle rows, padding, delivery, forming, draining, memory."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvengine.core.errors import ConfigError
from kvengine.core.plan import Idle
from kvengine.core.shapes import PrefixCacheConfig
from kvengine.registry import discover
from kvengine.testing.cases import Case, cases, check_nothing_is_left, check_outputs, drive, steps_one_by_one
from kvengine.testing.engines import TestEngine
from kvengine.testing.sources import checksum_output

REGISTRY = discover()
STEP_NS = 10_000_000
SECOND_NS = 1_000_000_000


def static_engine(
    num_blocks: int = 64,
    block_size: int = 4,
    settings: dict | None = None,
    allocator: str = "paged",
    **config,
) -> TestEngine:
    return TestEngine(
        registry=REGISTRY,
        num_blocks=num_blocks,
        block_size=block_size,
        policies={"scheduler": "static", "allocator": allocator},
        settings={"scheduler": settings or {}},
        **config,
    )


def prompt_of(name: str, length: int) -> list[int]:
    return [ord(name) + i for i in range(length)]


def add(engine: TestEngine, name: str, length: int, max_tokens: int, n: int = 1) -> None:
    engine.add(name, prompt_of(name, length), max_tokens, n=n)


def scheduled(engine: TestEngine) -> list[dict[str, int]]:
    return [step.scheduled for step in engine.log.steps]


def idle_rows(engine: TestEngine) -> list[int]:
    return [step.num_idle_rows for step in engine.log.steps]


def padding(engine: TestEngine) -> list[int]:
    return [step.num_padding_tokens for step in engine.log.steps]


def wake_at(engine: TestEngine) -> int | None:
    """When a step that has nothing to do wants to be tried again."""
    idle = engine.engine.step()
    assert isinstance(idle, Idle)
    return idle.wake_at


def times_by_id(engine: TestEngine) -> dict:
    return {seq.id: seq.times for seq in engine.log.finished_sequences}


# ---- what a batch costs


def batch_of_four(**settings) -> TestEngine:
    """Prompts of 2, 5, 3, 4 tokens and outputs of 1, 2, 3, 10."""
    engine = static_engine(max_num_seqs=4, settings=settings)
    for name, length, new in [("a", 2, 1), ("b", 5, 2), ("c", 3, 3), ("d", 4, 10)]:
        add(engine, name, length, new)
    return engine


@pytest.mark.parametrize("deliver", ["batch_end", "token"])
def test_batch_runs_until_its_longest_member_ends(deliver):
    engine = batch_of_four(deliver=deliver)
    engine.run()
    assert scheduled(engine) == [
        {"a": 2, "b": 5, "c": 3, "d": 4},
        {"b": 1, "c": 1, "d": 1},
        {"c": 1, "d": 1},
        *[{"d": 1}] * 7,
    ]
    assert idle_rows(engine) == [0, 1, 2, *[3] * 7]  # 24 in all: 9 + 8 + 7 rows that a, b and c run too long
    assert padding(engine) == [6, *[0] * 9]  # 5-2, 5-5, 5-3, 5-4
    assert [step.pool.num_held for step in engine.log.steps] == [1, 2, *[3] * 7, 0]
    assert engine.log.steps[-1].pool.num_free_blocks == 64
    for name, length, new in [("a", 2, 1), ("b", 5, 2), ("c", 3, 3), ("d", 4, 10)]:
        assert engine.outputs[name] == checksum_output(prompt_of(name, length), new)


def test_answers_come_when_the_batch_has_drained():
    engine = batch_of_four(deliver="batch_end")
    for _ in range(9):
        engine.step()
        assert engine.outputs == {}
    engine.step()
    assert {name: len(output) for name, output in engine.outputs.items()} == {"a": 1, "b": 2, "c": 3, "d": 10}
    for times in times_by_id(engine).values():
        assert times.first_token_ns == times.last_token_ns == times.finished_ns == 10 * STEP_NS


def test_answers_come_token_by_token_if_asked_for():
    engine = batch_of_four(deliver="token")
    engine.run()
    times = times_by_id(engine)
    assert {name: t.first_token_ns for name, t in times.items()} == dict.fromkeys("abcd", STEP_NS)
    assert {name: t.finished_ns // STEP_NS for name, t in times.items()} == {"a": 1, "b": 2, "c": 3, "d": 10}


def test_answers_at_batch_end_are_the_default():
    assert static_engine().engine.context.scheduler.delivers_at_batch_end


def test_finished_rows_keep_their_blocks_until_the_batch_drains():
    engine = batch_of_four()
    engine.run()
    # Step 0: a 1, b 2, c 1, d 1. A second block for d's slot 4 in step 1 and for c's in step 2, a third for
    # d's slot 8 in step 5. The fourth, for slot 12 in step 9, is freed with all the rest in that step.
    in_use = [64 - step.pool.num_free_blocks for step in engine.log.steps]
    assert in_use == [5, 6, 7, 7, 7, 8, 8, 8, 8, 0]


@pytest.mark.parametrize(
    ("allocator", "prefills"), [("contiguous_max", ("a/0", "a/1", "a/2")), ("paged", ("a/0",))]
)
def test_choices_of_a_request_are_rows_of_their_own(allocator, prefills):
    """One prefill where blocks are shared, of which the others are forked; rows of the batch they are anyway."""
    engine = static_engine(max_num_seqs=4, max_model_len=16, allocator=allocator)
    add(engine, "a", 3, 2, n=3)
    add(engine, "b", 5, 4)
    engine.run()
    assert scheduled(engine)[0] == {**dict.fromkeys(prefills, 3), "b": 5}
    assert scheduled(engine)[1] == {"a/0": 1, "a/1": 1, "a/2": 1, "b": 1}
    assert idle_rows(engine) == [0, 0, 3, 3]
    assert padding(engine) == [2 * len(prefills), 0, 0, 0]
    assert [step.pool.num_held for step in engine.log.steps] == [0, 3, 3, 0]
    assert engine.outputs["a/2"] == checksum_output(prompt_of("a", 3), 2)


# ---- which requests make a batch


def test_next_batch_enters_only_after_the_last_has_drained():
    engine = static_engine(max_num_seqs=2)
    for name, length, new in [("a", 4, 1), ("b", 4, 4), ("c", 4, 2), ("d", 2, 2), ("e", 3, 1)]:
        add(engine, name, length, new)
    engine.run()
    assert scheduled(engine) == [
        {"a": 4, "b": 4},
        *[{"b": 1}] * 3,
        {"c": 4, "d": 2},
        {"c": 1, "d": 1},
        {"e": 3},
    ]
    assert idle_rows(engine) == [0, 1, 1, 1, 0, 0, 0]
    assert padding(engine) == [0, 0, 0, 0, 2, 0, 0]


def test_who_arrives_while_a_batch_runs_waits_for_the_next():
    engine = static_engine(max_num_seqs=4)
    add(engine, "a", 4, 3)
    engine.step()
    add(engine, "b", 4, 1)
    engine.run()
    assert scheduled(engine) == [{"a": 4}, {"a": 1}, {"a": 1}, {"b": 4}]
    assert times_by_id(engine)["b"].admitted_ns == 3 * STEP_NS


@pytest.mark.parametrize(("batch_size", "sizes"), [(1, [1] * 5), (2, [2, 2, 1]), (3, [3, 2]), (7, [4, 1])])
def test_batch_size_limits_a_batch_and_max_num_seqs_limits_both(batch_size, sizes):
    engine = static_engine(max_num_seqs=4, settings={"batch_size": batch_size})
    for name in "abcde":
        add(engine, name, 4, 1)
    engine.run()
    assert [len(rows) for rows in scheduled(engine)] == sizes


def test_forming_waits_for_the_oldest_at_most():
    engine = static_engine(settings={"batch_size": 3, "max_wait_s": 1.0})
    clock = engine.engine.clock
    add(engine, "a", 4, 1)
    clock.wait_until(SECOND_NS // 4)
    add(engine, "b", 4, 1)
    assert wake_at(engine) == SECOND_NS  # a second after a, not after b
    clock.wait_until(SECOND_NS - 1)
    assert wake_at(engine) == SECOND_NS
    clock.wait_until(SECOND_NS)
    engine.run()
    assert scheduled(engine) == [{"a": 4, "b": 4}]
    assert {t.first_token_ns for t in times_by_id(engine).values()} == {SECOND_NS + STEP_NS}


def test_a_full_batch_does_not_wait():
    engine = static_engine(settings={"batch_size": 2, "max_wait_s": 1.0})
    add(engine, "a", 4, 1)
    assert wake_at(engine) == SECOND_NS
    engine.engine.clock.wait_until(SECOND_NS // 2)
    add(engine, "b", 4, 1)
    add(engine, "c", 4, 1)
    engine.step()
    assert scheduled(engine) == [{"a": 4, "b": 4}]
    assert times_by_id(engine)["a"].first_token_ns == SECOND_NS // 2 + STEP_NS
    # c waits for a second row until a second after it came
    assert wake_at(engine) == SECOND_NS // 2 + SECOND_NS


def test_without_max_wait_nobody_waits_for_company():
    engine = static_engine(settings={"batch_size": 4})
    add(engine, "a", 4, 1)
    engine.step()
    assert scheduled(engine) == [{"a": 4}]


@pytest.mark.parametrize(
    ("setting", "value"),
    [("batch_size", 0), ("batch_size", -1), ("max_wait_s", -0.1), ("max_wait_s", float("inf"))],
)
def test_nonsense_settings_fail_by_name(setting, value):
    with pytest.raises(ConfigError) as error:
        static_engine(settings={setting: value})
    assert error.value.key == f"scheduler.{setting}"


# ---- a batch that is stopped for a newcomer

NO_CACHE = PrefixCacheConfig(mode="off")


def restarting(**config) -> TestEngine:
    chosen = {"mode": "restart", **config.pop("settings", {})}
    return static_engine(settings=chosen, **{"max_num_seqs": 4, "prefix_cache": NO_CACHE, **config})


def test_newcomer_has_the_batch_formed_again_and_everybody_pays():
    engine = restarting()
    add(engine, "a", 4, 5)
    engine.step()
    engine.step()
    add(engine, "b", 2, 2)
    engine.run()
    # a computes 4 + 2 tokens again, and b is padded to them. One step is the plan in which all were stopped.
    assert scheduled(engine) == [{"a": 4}, {"a": 1}, {}, {"a": 6, "b": 2}, {"a": 1, "b": 1}, {"a": 1}]
    assert [step.preempted for step in engine.log.steps] == [(), (), ("a",), (), (), ()]
    assert padding(engine) == [0, 0, 0, 4, 0, 0]
    assert idle_rows(engine) == [0, 0, 0, 0, 0, 1]
    assert engine.outputs == {
        "a": checksum_output(prompt_of("a", 4), 5),
        "b": checksum_output(prompt_of("b", 2), 2),
    }
    assert {seq.id: seq.num_recomputed_tokens for seq in engine.log.finished_sequences} == {"a": 5, "b": 0}


def test_finished_rows_are_handed_over_when_the_batch_restarts():
    engine = restarting()
    add(engine, "a", 4, 1)
    add(engine, "b", 4, 6)
    engine.step()
    engine.step()
    assert engine.outputs == {}
    add(engine, "c", 4, 1)
    engine.step()
    assert list(engine.outputs) == ["a"]
    assert [step.pool.num_held for step in engine.log.steps] == [1, 1, 0]
    engine.run()
    assert scheduled(engine)[3] == {"b": 6, "c": 4}


def test_no_restart_without_a_row_for_the_newcomer():
    engine = restarting(settings={"batch_size": 2})
    add(engine, "a", 4, 2)
    add(engine, "b", 4, 4)
    engine.step()
    add(engine, "c", 4, 1)
    engine.run()
    # The row of a is free when it has ended, in step 1.
    assert scheduled(engine)[:4] == [{"a": 4, "b": 4}, {"a": 1, "b": 1}, {}, {"b": 6, "c": 4}]


def test_newcomer_that_memory_refuses_stops_the_batch_only_once():
    engine = restarting(num_blocks=3, block_size=4)
    add(engine, "a", 4, 8)
    engine.step()
    add(engine, "b", 8, 1)
    engine.run()
    assert [step.preempted for step in engine.log.steps].count(("a",)) == 1
    assert list(scheduled(engine)[-1]) == ["b"]


def test_restarted_batch_does_not_wait_for_more():
    engine = restarting(settings={"batch_size": 3, "max_wait_s": 1.0})
    for name, new in [("a", 4), ("b", 1), ("c", 1)]:
        add(engine, name, 4, new)  # a full batch
    engine.step()
    add(engine, "d", 4, 2)
    engine.run()
    assert scheduled(engine)[1:3] == [{}, {"a": 5, "d": 4}]
    assert max(t.finished_ns for t in times_by_id(engine).values()) == 4 * STEP_NS


def test_no_restart_before_every_row_has_gained_a_token():
    engine = restarting(settings={"deliver": "token"})
    add(engine, "a", 4, 6)
    engine.step()
    engine.fork("branch", "a", [], 6)
    add(engine, "b", 4, 2)
    engine.run()
    assert scheduled(engine)[:3] == [{"a": 4}, {"a": 1, "branch": 1}, {}]
    assert engine.log.steps[2].preempted == ("a", "branch")


def test_who_was_aborted_stops_nobody():
    engine = restarting()
    add(engine, "a", 4, 4)
    engine.step()
    add(engine, "b", 4, 2)
    engine.engine.abort("b")
    engine.run()
    assert engine.log.num_preemptions == 0


@pytest.mark.parametrize("mode", ["collect", "restart"])
def test_only_the_mode_that_restarts_preempts(mode):
    assert static_engine(settings={"mode": mode}).engine.context.scheduler.preempts == (mode == "restart")


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases(False), deliver=st.sampled_from(["batch_end", "token"]), size=st.none() | st.integers(1, 4))
def test_restarts_cost_time_and_nothing_else(case: Case, deliver: str, size: int | None):
    engine = static_engine(
        settings={"mode": "restart", "deliver": deliver, "batch_size": size}, **case.limits
    )
    delivered = drive(engine, case, max_steps=30 + 4 * steps_one_by_one(case, chunks=False))
    check_outputs(engine, case, delivered)
    check_nothing_is_left(engine)


# ---- a batch larger than the budget


def test_prefill_of_a_batch_is_split_over_steps_and_decodes_wait_for_all():
    engine = static_engine(max_num_seqs=4, max_model_len=12, max_num_batched_tokens=12)
    for name, length, new in [("a", 5, 2), ("b", 3, 4), ("c", 4, 2), ("d", 1, 2)]:
        add(engine, name, length, new)
    engine.run()
    # Each padded prompt takes 5 of the 12 tokens, so two fit a step. Decodes begin in step 2.
    assert scheduled(engine) == [
        {"a": 5, "b": 3},
        {"c": 4, "d": 1},
        {"a": 1, "b": 1, "c": 1, "d": 1},
        {"b": 1},
        {"b": 1},
    ]
    assert padding(engine) == [2, 5, 0, 0, 0]
    assert idle_rows(engine) == [0, 0, 0, 3, 3]
    assert {t.first_token_ns for t in times_by_id(engine).values()} == {5 * STEP_NS}
    assert all(
        sum(rows.values()) + pad <= 12 for rows, pad in zip(scheduled(engine), padding(engine), strict=True)
    )


def test_a_batch_has_no_more_rows_than_the_budget_decodes_in_a_step():
    engine = static_engine(max_num_seqs=8, max_model_len=4, max_num_batched_tokens=4)
    for name in "abcdef":
        add(engine, name, 2, 2)
    engine.run()
    assert scheduled(engine) == [
        {"a": 2, "b": 2},
        {"c": 2, "d": 2},
        dict.fromkeys("abcd", 1),
        {"e": 2, "f": 2},
        dict.fromkeys("ef", 1),
    ]


def test_rows_that_end_with_their_prefill_wait_for_the_rest_of_the_split_batch():
    engine = static_engine(max_num_seqs=2, max_model_len=12, max_num_batched_tokens=12)
    add(engine, "a", 9, 1)
    add(engine, "b", 9, 3)
    engine.run()
    assert scheduled(engine) == [{"a": 9}, {"b": 9}, {"b": 1}, {"b": 1}]
    assert [step.pool.num_held for step in engine.log.steps] == [1, 1, 1, 0]
    assert {t.first_token_ns for t in times_by_id(engine).values()} == {4 * STEP_NS}


# ---- aborts


def test_nobody_gets_the_answer_of_an_aborted_held_row():
    engine = static_engine(max_num_seqs=2)
    add(engine, "a", 4, 1)
    add(engine, "b", 4, 4)
    engine.step()
    engine.engine.abort("a")
    engine.run()
    assert idle_rows(engine) == [0, 1, 1, 1]  # its row stays in the batch
    assert engine.outputs == {"b": checksum_output(prompt_of("b", 4), 4)}
    reasons = {seq.id: seq.finish_reason for seq in engine.log.finished_sequences}
    assert reasons == {"a": "abort", "b": "length"}
    assert len(engine.log.finished_sequences) == 2
    assert engine.log.steps[-1].pool.num_free_blocks == 64


def test_an_aborted_running_row_leaves_the_batch_at_once():
    engine = static_engine(max_num_seqs=2)
    add(engine, "a", 4, 9)
    add(engine, "b", 4, 3)
    engine.step()
    engine.engine.abort("a")
    engine.run()
    assert scheduled(engine) == [{"a": 4, "b": 4}, {"b": 1}, {"b": 1}]
    assert idle_rows(engine) == [0, 0, 0]
    assert engine.outputs == {"b": checksum_output(prompt_of("b", 4), 3)}


def test_id_of_an_aborted_held_row_can_be_used_again_at_once():
    engine = static_engine(max_num_seqs=2)
    add(engine, "a", 4, 1)
    add(engine, "b", 4, 3)
    engine.step()
    engine.engine.abort("a")
    engine.add("a", [9, 9, 9], 2)
    engine.run()
    assert engine.outputs == {
        "a": checksum_output([9, 9, 9], 2),
        "b": checksum_output(prompt_of("b", 4), 3),
    }


@pytest.mark.parametrize("deliver", ["batch_end", "token"])
def test_abort_of_the_last_running_row_ends_the_batch_before_the_next_begins(deliver):
    engine = static_engine(max_num_seqs=8, settings={"batch_size": 2, "deliver": deliver})
    add(engine, "a", 4, 1)
    add(engine, "b", 4, 30)
    add(engine, "c", 4, 3)
    add(engine, "d", 4, 3)
    engine.step()
    engine.engine.abort("b")
    engine.run()
    first_of_next = next(step for step in engine.log.steps if "c" in step.scheduled)
    assert first_of_next.pool.num_held == 0
    assert max(len(step.scheduled) + step.num_idle_rows for step in engine.log.steps) == 2
    assert times_by_id(engine)["a"].first_token_ns < times_by_id(engine)["c"].first_token_ns
    assert engine.outputs["a"] == checksum_output(prompt_of("a", 4), 1)


def test_abort_of_all_members_still_to_be_prefilled_does_not_stall_the_rest():
    engine = static_engine(max_model_len=12, max_num_batched_tokens=12, settings={"batch_size": 2})
    add(engine, "a", 9, 1)
    add(engine, "b", 9, 3)
    add(engine, "c", 9, 2)
    engine.step()  # the budget holds one prompt, so b is still to come
    engine.engine.abort("b")
    engine.run(max_steps=20)
    assert engine.outputs["c"] == checksum_output(prompt_of("c", 9), 2)


# ---- a pool too small for the batch


def test_refused_memory_closes_the_batch():
    engine = static_engine(num_blocks=3, block_size=4, max_num_seqs=4)
    for name in "abcd":
        add(engine, name, 4, 1)
    engine.run()
    assert scheduled(engine) == [{"a": 4, "b": 4, "c": 4}, {"d": 4}]


def test_pool_too_small_preempts_the_latest_which_joins_the_next_batch():
    engine = static_engine(num_blocks=3, block_size=4)
    add(engine, "a", 4, 5)  # 8 slots: 2 blocks
    add(engine, "b", 4, 5)
    engine.run()
    # In step 1 a takes the third block for its slot 4, so b gives way. a ends in step 4; b has 4 + 1 tokens,
    # and the block of the first 4 is still cached.
    assert scheduled(engine) == [{"a": 4, "b": 4}, *[{"a": 1}] * 4, {"b": 1}, *[{"b": 1}] * 3]
    assert [step.preempted for step in engine.log.steps] == [(), ("b",), *[()] * 7]
    assert idle_rows(engine) == [0] * 9
    assert times_by_id(engine)["a"].first_token_ns == 5 * STEP_NS
    assert times_by_id(engine)["b"].first_token_ns == 9 * STEP_NS
    assert engine.outputs == {name: checksum_output(prompt_of(name, 4), 5) for name in "ab"}


def test_held_row_gives_up_its_blocks_when_one_row_still_runs():
    engine = static_engine(num_blocks=3, block_size=4)
    add(engine, "a", 4, 1)
    add(engine, "b", 4, 9)  # 12 slots: the whole pool
    engine.run()
    # b's second block is free, its third (slot 8, step 5) is a's. a's row and seat stay.
    assert scheduled(engine) == [{"a": 4, "b": 4}, *[{"b": 1}] * 8]
    assert idle_rows(engine) == [0, *[1] * 8]
    assert [step.pool.num_held for step in engine.log.steps] == [*[1] * 8, 0]
    assert [step.pool.num_free_blocks for step in engine.log.steps] == [1, 0, 0, 0, 0, 0, 0, 0, 3]
    assert [step.pool.num_slots_held for step in engine.log.steps] == [8, 9, 10, 11, 12, 9, 10, 11, 0]
    assert engine.log.num_preemptions == 0
    assert engine.outputs == {
        "a": checksum_output(prompt_of("a", 4), 1),
        "b": checksum_output(prompt_of("b", 4), 9),
    }


def test_held_rows_keep_their_blocks_while_two_rows_run():
    engine = static_engine(num_blocks=3, block_size=4)
    add(engine, "a", 4, 1)
    add(engine, "b", 4, 2)
    add(engine, "c", 4, 2)
    engine.run()
    # In step 1 b needs a block: c is preempted, though a holds one for nothing.
    assert scheduled(engine) == [{"a": 4, "b": 4, "c": 4}, {"b": 1}, {"c": 5}]
    assert engine.log.steps[1].preempted == ("c",)
    assert idle_rows(engine) == [0, 1, 0]
    assert engine.outputs["c"] == checksum_output(prompt_of("c", 4), 2)


def test_the_richest_held_row_gives_first():
    engine = static_engine(num_blocks=4, block_size=4)
    add(engine, "a", 8, 1)  # 2 blocks
    add(engine, "b", 4, 1)
    add(engine, "c", 4, 9)  # 12 slots: 3 blocks
    engine.run()
    # Step 1 needs a second block: a gives two, one of which is left for step 5. b keeps its own throughout.
    assert [step.pool.num_free_blocks for step in engine.log.steps] == [0, 1, 1, 1, 1, 0, 0, 0, 4]
    assert engine.log.num_preemptions == 0
    assert engine.outputs["c"] == checksum_output(prompt_of("c", 4), 9)


def test_abort_of_a_held_row_that_gave_up_its_blocks():
    engine = static_engine(num_blocks=3, block_size=4)
    add(engine, "a", 4, 1)
    add(engine, "b", 4, 9)
    for _ in range(7):
        engine.step()
    engine.engine.abort("a")
    engine.run()
    assert engine.outputs == {"b": checksum_output(prompt_of("b", 4), 9)}
    assert engine.engine.context.num_free_blocks == 3
