"""The feedback queue by hand: levels that prefills skip, quanta, who gives way, starvation, what is remembered."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from memory_support import registry_with

from kvengine.core.errors import ConfigError
from kvengine.core.shapes import PrefixCacheConfig
from kvengine.registry import discover
from kvengine.testing.cases import Case, cases, check_nothing_is_left, check_outputs, drive, steps_one_by_one
from kvengine.testing.engines import TestEngine
from kvengine.testing.sources import checksum_output
from kvengine_plugins.queues.fcfs import FcfsQueue
from kvengine_plugins.schedulers.mlfq import MlfqScheduler

SWAPPING = registry_with()
STEP_NS = 10_000_000
NO_CACHE = PrefixCacheConfig(mode="off")


def mlfq_engine(scheduler: str = "mlfq", policies: dict | None = None, **config: Any) -> TestEngine:
    """Quanta of 4, 8, 16 and 32 iterations, one seat; settings of the scheduler among `config`."""
    names = ("levels", "quantum", "ratio", "prefill_tokens_per_iteration", "starvation_s")
    chosen = {name: config.pop(name) for name in names if name in config}
    return TestEngine(
        policies={"scheduler": scheduler, **(policies or {})},
        settings={"scheduler": chosen},
        **{"max_num_seqs": 1, "max_model_len": 512, "prefix_cache": NO_CACHE, **config},
    )


def prompt_of(length: int) -> list[int]:
    return [(7 * i + 3) % 251 for i in range(length)]


def scheduled(engine: TestEngine) -> list[dict[str, int]]:
    return [step.scheduled for step in engine.log.steps]


def finished_at(engine: TestEngine) -> dict[str, int]:
    """The number of executed steps after which each ended."""
    return {seq.id: (seq.times.finished_ns or 0) // STEP_NS for seq in engine.log.finished_sequences}


# ---- levels


@pytest.mark.parametrize(
    ("earlier", "later", "overtakes"),
    [
        (41, 40, True),  # 5 iterations of 10 tokens exceed the first quantum, 4 do not
        (40, 1, False),  # the same level: first come, first served
        (80, 41, False),  # 8 and 5 iterations: the second level
        (81, 80, True),
        (161, 160, True),
        (320, 161, False),
        (321, 320, False),  # no quantum is as long: the last level, as for 32 iterations
        (321, 160, True),
    ],
)
def test_prefill_joins_the_first_level_whose_quantum_it_fits(earlier, later, overtakes):
    engine = mlfq_engine(prefill_tokens_per_iteration=10)
    engine.add("earlier", prompt_of(earlier), 1)
    engine.add("later", prompt_of(later), 1)
    engine.run()
    first, second = ("later", "earlier") if overtakes else ("earlier", "later")
    assert [list(step) for step in scheduled(engine)] == [[first], [second]]


def test_quantum_used_up_gives_the_seat_to_who_waits_in_a_higher_level():
    engine = mlfq_engine()
    engine.add("a", prompt_of(10), 14)
    engine.step()
    engine.add("b", prompt_of(5), 2)
    engine.run()
    # The prefill of a is an iteration, and so are three decodes: a quantum of 4. Then b takes the seat, in the
    # plan that preempts; a comes back with 10 + 4 tokens and has 8 iterations to go in its level.
    assert scheduled(engine) == [
        {"a": 10},
        *[{"a": 1}] * 3,
        {"b": 5},
        {"b": 1},
        {"a": 14},
        *[{"a": 1}] * 9,
    ]
    assert [step.preempted for step in engine.log.steps].index(("a",)) == 4
    assert engine.log.num_preemptions == 1
    assert engine.outputs == {"a": checksum_output(prompt_of(10), 14), "b": checksum_output(prompt_of(5), 2)}


@pytest.mark.parametrize(("length", "before"), [(10, 4), (30, 2), (40, 1), (41, 4), (80, 1)])
def test_first_prefill_counts_against_the_quantum(length, before):
    """1, 3, 4, 5 and 8 iterations, the last of which yields a token: 4, 2, 1, and of the second quantum 4 and 1."""
    engine = mlfq_engine(prefill_tokens_per_iteration=10)
    engine.add("a", prompt_of(length), 30)
    engine.step()
    engine.add("b", prompt_of(41 if length > 40 else 1), 1)
    engine.run()
    ids = [next(iter(step), "") for step in scheduled(engine)]
    assert ids.index("b") == before


def test_recomputation_counts_nothing():
    engine = mlfq_engine(prefill_tokens_per_iteration=10)
    engine.add("a", prompt_of(10), 13)  # 4 in the first level, 8 in the second, 1 in the third
    for name in ("b", "c"):
        for _ in range(5):
            engine.step()
        engine.add(name, prompt_of(1), 1)
    engine.run()
    ids = [next(iter(step), "") for step in scheduled(engine)]
    # b comes when a is in the second level already and takes its seat at once, c also.
    assert ids == ["a"] * 5 + ["b"] + ["a"] * 4 + ["c"] + ["a"] * 4


def test_equals_do_not_preempt_each_other():
    engine = mlfq_engine(levels=1)
    engine.add("a", prompt_of(3), 20)
    engine.add("b", prompt_of(3), 20)
    engine.run()
    assert engine.log.num_preemptions == 0
    assert finished_at(engine) == {"a": 20, "b": 40}


# ---- short jobs overtake long ones


@pytest.mark.parametrize(
    ("scheduler", "ends"),
    [
        ("continuous", {"long": 40, "s0": 43, "s1": 46, "s2": 49, "s3": 52}),
        ("mlfq", {"long": 52, "s0": 7, "s1": 10, "s2": 13, "s3": 16}),
    ],
)
def test_short_jobs_overtake_a_long_one(scheduler, ends):
    """Mean completion 46 steps first come, first served, and 19.6 with feedback; the last ends at the same time."""
    engine = mlfq_engine(scheduler)
    engine.add("long", prompt_of(8), 40)
    engine.step()
    for i in range(4):
        engine.add(f"s{i}", prompt_of(3), 3)
    engine.run()
    assert finished_at(engine) == ends


@pytest.mark.parametrize(("length", "victims"), [(8, ("a",)), (21, ("a", "c"))])
def test_blocks_are_taken_from_the_lowest_level_and_there_from_the_last_to_arrive(length, victims):
    engine = mlfq_engine(max_num_seqs=8, block_size=4, num_blocks=9, quantum=3)
    engine.add("a", prompt_of(4), 30)
    for _ in range(9):
        engine.step()
    engine.add("b", prompt_of(4), 30)
    engine.add("c", prompt_of(4), 30)
    for _ in range(3):
        engine.step()
    # a has 3 + 6 tokens behind it and is in the third level, with 4 blocks; b and c have just used up their 3, with
    # 2 blocks each. One is free, and 8 tokens take 2: a gives way. 21 take 6: then c does, and that is enough.
    engine.add("d", prompt_of(length), 1)
    engine.step()
    assert engine.log.steps[-1].preempted == victims
    assert engine.log.steps[-1].scheduled == {"d": length}
    engine.run()
    assert (
        engine.outputs["a"] == engine.outputs["b"] == engine.outputs["c"] == checksum_output(prompt_of(4), 30)
    )


# ---- starvation


def longest_wait(starvation_s: float | None) -> int:
    """Steps between two tokens of a long job among short ones, of which there is always one waiting."""
    engine = mlfq_engine(starvation_s=starvation_s)
    engine.add("long", prompt_of(4), 20)
    for i in range(200):
        if len(engine.engine.context.waiting) < 2 and i < 100:
            engine.add(f"s{i}", prompt_of(2), 4)
        engine.step()
    (runs,) = [seq.token_runs for seq in engine.log.finished_sequences if seq.id == "long"]
    return max(later - (first + length) for (first, length), (later, _) in pairwise(runs))


def test_starving_sequence_is_promoted():
    """Ten steps of 10 ms, the short one that runs then, and one that waits already."""
    assert longest_wait(None) > 90
    assert 10 < longest_wait(0.1) <= 10 + 4 + 4


def test_promotion_gives_a_quantum_of_the_first_level():
    engine = mlfq_engine(starvation_s=0.05)
    engine.add("long", prompt_of(4), 20)
    for i in range(60):
        engine.step()
        engine.add(f"s{i}", prompt_of(2), 4)
    engine.run()
    (seq,) = [seq for seq in engine.log.finished_sequences if seq.id == "long"]
    assert [length for _, length in seq.token_runs][:3] == [4] * 3


# ---- whatever happens


@pytest.mark.parametrize(
    "chosen",
    [
        {"quantum": 1, "ratio": 1},
        {"quantum": 1, "levels": 3, "prefill_tokens_per_iteration": 2},
        {"quantum": 2, "levels": 32, "starvation_s": 0.02},
        {"quantum": 3, "prefill_tokens_per_iteration": 1, "starvation_s": 1e-9},
    ],
)
def test_outputs_are_those_of_each_alone(chosen):
    @settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    @given(case=cases(False), preemption=st.sampled_from(["recompute", "swap", "either"]))
    def serves(case: Case, preemption: str) -> None:
        policies = {"preemption": preemption}
        engine = mlfq_engine(policies=policies, registry=SWAPPING, **chosen, **case.limits)
        delivered = drive(engine, case, max_steps=30 + 4 * steps_one_by_one(case, chunks=False))
        check_outputs(engine, case, delivered)
        check_nothing_is_left(engine)

    serves()


def test_who_was_aborted_while_waiting_is_forgotten():
    engine = mlfq_engine(levels=1)
    engine.add("runs", prompt_of(3), 200)
    engine.add("waits", prompt_of(3), 200)  # in front of all who come after it
    for i in range(500):
        engine.add(f"r{i}", prompt_of(3), 5)
        engine.engine.abort(f"r{i}")
        if i % 10 == 0:
            engine.step()
    scheduler = engine.engine.context.scheduler
    assert isinstance(scheduler, MlfqScheduler)
    assert sum(len(level) for level in scheduler._waiting._levels) <= 30


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("levels", 0), ("levels", 33), ("quantum", 0), ("ratio", 0), ("prefill_tokens_per_iteration", 0),
        ("starvation_s", 0.0), ("starvation_s", -1.0), ("starvation_s", float("inf")),
    ],
)  # fmt: skip
def test_nonsense_settings_fail_by_name(setting, value):
    with pytest.raises(ConfigError) as error:
        mlfq_engine(**{setting: value})
    assert error.value.key == f"scheduler.{setting}"


def test_another_order_of_the_waiting_is_refused():
    registry = discover()
    registry.add("queue", "other", lambda config, build: FcfsQueue(), summary="of this test")
    with pytest.raises(ConfigError, match="scheduler=mlfq orders the waiting by itself; take queue=fcfs"):
        TestEngine(registry=registry, policies={"scheduler": "mlfq", "queue": "other"})
