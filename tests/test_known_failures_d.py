"""Preemption by recompute and by swap: cases D1 to D6, and I1 after D1, of known-failures.md, with variants of our
own."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from memory_support import registry_with

from kvengine.analysis.summary import PoolFacts, summarize
from kvengine.core.plan import StepPlan, StepResult
from kvengine.core.reasons import Reason, Refusal
from kvengine.core.sequence import Sequence
from kvengine.core.shapes import PrefixCacheConfig
from kvengine.policies import Admission, SchedulingView
from kvengine.registry import Registry, discover
from kvengine.telemetry.recorder import ColumnRecorder
from kvengine.testing.engines import TestEngine
from kvengine.testing.sources import ChecksumSource, checksum_output
from kvengine_plugins.schedulers.chunked import ChunkedScheduler

REGISTRY = discover()
SCHEDULERS = REGISTRY.names("scheduler")
VICTIMS = REGISTRY.names("victim")
PREEMPTIONS = [name for name in REGISTRY.names("preemption") if name != "never"]
BUILT = {
    name: TestEngine(registry=REGISTRY, policies={"scheduler": name}).engine.context.scheduler
    for name in SCHEDULERS
}
BATCHING = ("chunked", "continuous", "mlfq", "prefill_budgeted", "static")
"""Schedulers that let several enter as soon as their prompts fit, so that these loads must preempt."""

GOLDEN = {
    "a": ([1, 2, 3, 4, 5, 6, 7, 8], [240, 150, 154, 102, 83, 171, 69, 115]),
    "b": ([11, 12, 13, 14, 15, 16, 17, 18], [98, 236, 96, 159, 71, 3, 59, 206]),
}


def assert_whole_and_free(engine: TestEngine, num_sequences: int, num_new: int) -> None:
    """Every sequence has all its tokens, each delivered once, and nobody owns a block any more."""
    assert len(engine.log.finished_sequences) == num_sequences
    for seq in engine.log.finished_sequences:
        assert seq.num_output_tokens == num_new
        assert engine.outputs[seq.id] == seq.token_ids[seq.num_prompt_tokens :]
        sampled_in = [step.step for step in engine.log.steps if seq.id in step.sampled]
        assert len(sampled_in) == num_new
        runs = [step for first, length in seq.token_runs for step in range(first, first + length)]
        assert runs == sampled_in
    context = engine.engine.context
    assert context.num_free_blocks == context.allocator.num_blocks
    assert context.memory.num_tokens == context.memory.num_slots_held == 0
    assert context.memory.host_pool.num_free == context.memory.host_pool.num_blocks
    assert not context.num_running
    assert not context.held
    assert not len(context.waiting)


def assert_no_victim_is_scheduled(engine: TestEngine, budget: int) -> None:
    for step in engine.log.steps:
        assert not set(step.preempted) & set(step.scheduled)
        assert sum(step.scheduled.values()) + step.num_idle_rows + step.num_padding_tokens <= budget


# ---- D1: recompute preemption is invisible


@pytest.mark.parametrize(
    ("scheduler", "queue"),
    [
        (scheduler, queue)
        for scheduler, queue in product(SCHEDULERS, REGISTRY.names("queue"))
        if queue == "fcfs" or not BUILT[scheduler].orders
    ],
)
@pytest.mark.parametrize("victim", VICTIMS)
def test_d1_golden_outputs_under_preemption(scheduler, victim, queue):
    engine = TestEngine(
        registry=REGISTRY,
        block_size=4,
        num_blocks=6,
        policies={"scheduler": scheduler, "victim": victim, "queue": queue},
    )
    for name, (prompt, _) in GOLDEN.items():
        engine.add(name, prompt, 8)
    engine.run(max_steps=100)
    assert engine.outputs == {name: output for name, (_, output) in GOLDEN.items()}
    assert engine.finish_reasons == {"a": "length", "b": "length"}
    if scheduler in BATCHING:
        assert engine.log.num_preemptions >= 1
    assert_whole_and_free(engine, num_sequences=2, num_new=8)


@pytest.mark.parametrize(("cache", "recomputed"), [("off", 12), ("auto", 4)])
def test_d1_victim_keeps_its_first_token_time_and_counts_what_it_recomputes(cache, recomputed):
    engine = TestEngine(block_size=4, num_blocks=6, prefix_cache=PrefixCacheConfig(mode=cache))
    for name, (prompt, _) in GOLDEN.items():
        engine.add(name, prompt, 8)
    engine.run()
    a, b = sorted(engine.log.finished_sequences, key=lambda seq: seq.order)
    # Both take 2 blocks for the prompt and a third at step 1; at step 5 slot 12 needs a fourth, and b gives
    # way. a ends at step 7, so b resumes at step 8 with 8 + 5 tokens, 12 of them computed before. Of the three
    # blocks that b leaves a takes one, for which a cache gives up b's last: 8 tokens are left to be hit.
    assert [step.preempted for step in engine.log.steps] == [()] * 5 + [("b",)] + [()] * 5
    assert (a.num_preemptions, a.num_recomputed_tokens) == (0, 0)
    assert (b.num_preemptions, b.num_recomputed_tokens) == (1, recomputed)
    assert engine.log.steps[8].scheduled == {"b": 1 + recomputed}
    assert b.num_cached_tokens == 0, "nothing of its prompt was cached when it was first admitted"
    assert len(engine.log.steps) == 11
    assert b.times.first_token_ns == a.times.first_token_ns == 10_000_000
    assert b.times.last_token_ns == b.times.finished_ns == 110_000_000
    assert b.num_prompt_tokens == 8
    assert (a.token_runs, b.token_runs) == ([[0, 8]], [[0, 5], [8, 3]])


def decisions_of(recorder: ColumnRecorder) -> list[dict[str, Any]]:
    recorder.flush()
    return recorder.tables()["decisions"].to_pylist()


def test_i1_figures_after_d1():
    """16 tokens, 2 requests, 2 first tokens, and as many preemptions as the step log has."""
    engine, recorder = TestEngine(block_size=4, num_blocks=6), ColumnRecorder()
    tee: Any = Tee(engine.log, recorder)
    engine.engine.recorder = tee
    for name, (prompt, _) in GOLDEN.items():
        engine.add(name, prompt, 8)
    engine.run()
    facts = PoolFacts(num_blocks=6, block_size=4, block_bytes=1, max_num_seqs=64)
    recorder.flush()
    figures = summarize(recorder.tables(), facts)
    assert (figures["num_requests"], figures["num_finished"]) == (2, 2)
    assert (figures["output_tokens"], figures["prompt_tokens"]) == (16, 16)
    assert figures["num_preemptions"] == engine.log.num_preemptions == 1
    left = [row for row in decisions_of(recorder) if row["action"] == "preempt"]
    assert [(row["request_id"], row["reason"], row["detail"]) for row in left] == [
        ("b", "PREEMPTED_FOR", "a")
    ]
    for row in recorder.tables()["requests"].to_pylist():
        assert row["first_token_ns"] == 10_000_000, "of the first token delivered, whatever is computed again"
        assert row["arrival_ns"] <= row["admitted_ns"] <= row["first_token_ns"]
    for step in engine.log.steps:
        assert 0 <= step.pool.num_free_blocks <= 6
        assert 0 <= step.pool.num_slots_held <= step.pool.num_slots_owned <= 24


@pytest.mark.parametrize("preemption", PREEMPTIONS)
@pytest.mark.parametrize("victim", VICTIMS)
def test_d1_variant_every_victim_and_every_way_to_leave(victim, preemption):
    """Ours: four at once with prompts and outputs of other lengths, and a host pool that holds one of them."""
    engine = TestEngine(
        registry=REGISTRY,
        block_size=4,
        num_blocks=8,
        num_host_blocks=4,
        policies={"victim": victim, "preemption": preemption},
    )
    prompts = {f"r{i}": range(20 * i + 1, 20 * i + 4 + 2 * i) for i in range(4)}
    for i, (name, prompt) in enumerate(prompts.items()):
        engine.add(name, prompt, 14 - 2 * i)
    engine.run(max_steps=200)
    assert engine.outputs == {
        name: checksum_output(prompt, 14 - 2 * i) for i, (name, prompt) in enumerate(prompts.items())
    }
    assert engine.log.num_preemptions >= 2
    assert (sum(len(step.swap_outs) for step in engine.log.steps) > 0) == (preemption != "recompute")


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("block_size", [1, 2, 3, 5])
def test_d1_variant_three_requests_with_two_choices_each(scheduler, block_size):
    """Ours."""
    prompts = {"x": [5, 4, 3], "y": [250, 0, 17, 99, 3, 8, 21], "z": [7]}
    engine = TestEngine(
        registry=REGISTRY,
        block_size=block_size,
        num_blocks=-(-17 // block_size),
        policies={"scheduler": scheduler},
    )
    for name, prompt in prompts.items():
        engine.add(name, prompt, 9, n=2)
    engine.run(max_steps=300)
    expected = {name: checksum_output(prompt, 9) for name, prompt in prompts.items()}
    assert engine.outputs == {f"{name}/{choice}": expected[name] for name in prompts for choice in (0, 1)}
    if scheduler in BATCHING:
        assert engine.log.num_preemptions >= 1
    assert_whole_and_free(engine, num_sequences=6, num_new=9)


# ---- D2: no thrash from admitting by first chunk only


@pytest.mark.parametrize(("num_requests", "num_blocks"), [(2, 14), (3, 16), (3, 27)])
def test_d2_whole_prompt_admission_never_thrashes(num_requests, num_blocks):
    engine = TestEngine(block_size=4, num_blocks=num_blocks, max_num_batched_tokens=8)
    for i in range(num_requests):
        engine.add(f"r{i}", range(i, i + 40), 16)
    engine.run(max_steps=200)
    assert engine.log.num_preemptions == 0
    assert engine.outputs == {f"r{i}": checksum_output(range(i, i + 40), 16) for i in range(num_requests)}


class FirstChunk(Admission):
    """Lets in whose next chunk fits, whatever was promised to others."""

    def refuses(self, seq: Sequence, view: SchedulingView) -> Refusal | None:
        chunk = min(view.uncomputed(seq), view.token_budget_left)
        needed = view.blocks_needed(seq, seq.num_tokens - view.uncomputed(seq) + chunk)
        return Refusal(Reason.NO_BLOCKS) if needed > view.num_free_blocks else None


@pytest.mark.parametrize(("num_requests", "num_blocks", "num_preemptions"), [(2, 14, 4), (3, 16, 12)])
def test_d2_the_load_thrashes_where_only_the_first_chunk_must_fit(num_requests, num_blocks, num_preemptions):
    registry = discover()
    registry.add("admission", "test", lambda config, build: FirstChunk(), summary="")
    engine = TestEngine(
        registry=registry,
        block_size=4,
        num_blocks=num_blocks,
        max_num_batched_tokens=8,
        policies={"admission": "test"},
        prefix_cache=PrefixCacheConfig(mode="off"),
    )
    for i in range(num_requests):
        engine.add(f"r{i}", range(i, i + 40), 16)
    engine.run(max_steps=400)
    assert engine.log.num_preemptions == num_preemptions
    assert engine.outputs == {f"r{i}": checksum_output(range(i, i + 40), 16) for i in range(num_requests)}


class CappedChunks(ChunkedScheduler):
    """Several prefills at a time, each at most 4 tokens a step, so that most of a prompt is promised."""

    def schedule(self, view) -> None:
        for seq in view.running:
            view.schedule(seq, 4)
        while len(view.waiting) and view.admit(view.waiting.peek(), 4):
            pass


def test_d2_blocks_promised_to_prefills_in_progress_are_not_given_away():
    registry = discover()
    registry.add("scheduler", "capped", lambda config, build: CappedChunks(), summary="")
    engine = TestEngine(registry=registry, block_size=4, num_blocks=14, policies={"scheduler": "capped"})
    for i in range(3):
        engine.add(f"r{i}", range(i, i + 40), 2)
    engine.run(max_steps=100)
    # A prompt takes 10 blocks, one each in steps 0 to 9; slot 40 takes the eleventh in step 10, its last.
    first_steps = {
        f"r{i}": next(s.step for s in engine.log.steps if f"r{i}" in s.scheduled) for i in range(3)
    }
    assert first_steps == {"r0": 0, "r1": 11, "r2": 22}
    assert engine.log.num_preemptions == 0
    assert engine.outputs == {f"r{i}": checksum_output(range(i, i + 40), 2) for i in range(3)}


# ---- D3: progress under pressure


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize(("num_blocks", "max_steps", "max_preemptions"), [(6, 60, 20), (4, 80, 20)])
def test_d3_five_requests_end_under_pressure(scheduler, victim, num_blocks, max_steps, max_preemptions):
    engine = TestEngine(
        registry=REGISTRY,
        block_size=4,
        num_blocks=num_blocks,
        policies={"scheduler": scheduler, "victim": victim},
    )
    prompts = {f"r{i}": range(10 * i + 1, 10 * i + 9) for i in range(5)}
    for name, prompt in prompts.items():
        engine.add(name, prompt, 8)
    engine.run(max_steps=200)
    assert engine.outputs == {name: checksum_output(prompt, 8) for name, prompt in prompts.items()}
    assert len(engine.log.steps) <= max_steps
    assert engine.log.num_preemptions <= max_preemptions
    empty = [step for step in engine.log.steps if not step.scheduled]
    if BUILT[
        scheduler
    ].preempts:  # the last that ran gave way to who enters in the next plan; it takes no time
        empty = [step for step in empty if not step.preempted]
    assert not empty
    assert_whole_and_free(engine, num_sequences=5, num_new=8)


def test_d3_variant_two_half_pool_holders_do_not_wait_for_each_other():
    """Ours, after the sentence of the case."""
    engine = TestEngine(block_size=1, num_blocks=8)
    engine.add("a", [1, 2, 3, 4], 5)
    engine.add("b", [5, 6, 7, 8], 5)  # both fill half of the pool, and both need the whole of it
    engine.run(max_steps=20)
    assert engine.outputs == {"a": checksum_output([1, 2, 3, 4], 5), "b": checksum_output([5, 6, 7, 8], 5)}
    # a alone takes 5 steps; b gives way at once and, resumed with 5 tokens, takes 4 more.
    assert len(engine.log.steps) == 9
    assert [step.preempted for step in engine.log.steps] == [(), ("b",), *[()] * 7]


# ---- D4: a victim leaves the batch it was in


class FirstCandidate:
    """Preempts the first in order of admission, so that the victim is often scheduled already."""

    def choose(self, candidates: list[Sequence], needy: Sequence) -> Sequence:
        return candidates[0]


class AdmitsFirst(ChunkedScheduler):
    """Admits before it lets anybody grow, so that whoever was just let in may have to leave in the same plan."""

    def schedule(self, view) -> None:
        while len(view.waiting) and view.admit(view.waiting.peek(), view.token_budget_left):
            pass
        for seq in view.running:
            view.schedule(seq, view.token_budget_left)


class WatchedChunked(ChunkedScheduler):
    """The chunked scheduler; notes what is left of the budget when it is done."""

    def __init__(self) -> None:
        self.left: list[int] = []

    def schedule(self, view) -> None:
        super().schedule(view)
        self.left.append(view.token_budget_left)


def swapping_registry() -> Registry:
    registry = registry_with()
    registry.add("victim", "first_candidate", lambda config, build: FirstCandidate(), summary="")
    registry.add("scheduler", "admits_first", lambda config, build: AdmitsFirst(), summary="")
    return registry


SWAPPING = swapping_registry()


class Tee:
    """Tells several recorders the same."""

    def __init__(self, *recorders: Any) -> None:
        self._recorders = recorders

    def __getattr__(self, name: str) -> Any:
        calls = [getattr(recorder, name) for recorder in self._recorders]
        return lambda *told: [call(*told) for call in calls]


def watched_registry() -> Registry:
    registry = discover()
    registry.add("victim", "first_candidate", lambda config, build: FirstCandidate(), summary="")
    registry.add("scheduler", "watched", lambda config, build: WatchedChunked(), summary="")
    return registry


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("victim", [*VICTIMS, "first_candidate"])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("num_blocks", [4, 6, 9])
def test_d4_no_victim_is_scheduled_in_its_step(scheduler, victim, n, num_blocks):
    budget = 16
    engine = TestEngine(
        registry=watched_registry(),
        block_size=4,
        num_blocks=num_blocks,
        max_model_len=16,
        max_num_batched_tokens=budget,
        policies={"scheduler": scheduler, "victim": victim},
    )
    prompts = {f"r{i}": range(10 * i + 1, 10 * i + 9) for i in range(5)}
    for name, prompt in prompts.items():
        engine.add(name, prompt, 8, n=n)
    engine.run(max_steps=300)
    assert_no_victim_is_scheduled(engine, budget)
    for output_id, output in engine.outputs.items():
        assert output == checksum_output(prompts[output_id.split("/")[0]], 8)
    assert_whole_and_free(engine, num_sequences=5 * n, num_new=8)


def test_d4_tokens_of_a_victim_go_back_to_the_budget():
    engine = TestEngine(
        registry=watched_registry(),
        block_size=2,
        num_blocks=7,
        max_num_batched_tokens=10,
        policies={"scheduler": "watched", "victim": "first_candidate"},
    )
    for i, length in enumerate([2, 3, 2, 2]):
        engine.add(f"r{i}", range(i, i + length), 4)
    engine.run(max_steps=50)
    scheduler = engine.engine.context.scheduler
    assert isinstance(scheduler, WatchedChunked)
    used = [sum(step.scheduled.values()) for step in engine.log.steps]
    assert scheduler.left == [10 - tokens for tokens in used]
    # Step 0 gives r1 two blocks and the others one, 5 of 7. In step 1 r0 and then r2 take the last two for
    # their slot 2, r1 has room for its slot 3, and r3 needs a block: r1, already scheduled, is the first
    # candidate.
    assert engine.log.steps[1].scheduled == {"r0": 1, "r2": 1, "r3": 1}
    assert engine.log.steps[1].preempted == ("r1",)
    assert scheduler.left[1] == 7


def test_d4_the_latest_to_arrive_gives_way():
    engine = TestEngine(block_size=1, num_blocks=6)
    for i, name in enumerate("abc"):
        engine.add(name, [i, i + 1], 2)
    engine.run(max_steps=10)
    # The prompts fill the pool; in step 1 a needs a block and c gives its two, of which b takes the other.
    assert [step.scheduled for step in engine.log.steps] == [
        dict.fromkeys("abc", 2),
        {"a": 1, "b": 1},
        {"c": 3},
    ]
    assert engine.log.steps[1].preempted == ("c",)


def test_d4_a_victim_waits_before_those_who_came_after_it():
    engine = TestEngine(block_size=1, num_blocks=6, max_num_seqs=2)
    engine.add("a", [1, 2, 3], 4)
    engine.add("b", [4, 5, 6], 4)
    engine.add("c", [7], 1)
    engine.run(max_steps=20)
    # b gives way in step 1 and needs 4 blocks to come back; c needs only one of the two that are free then.
    assert [step.scheduled for step in engine.log.steps[:5]] == [
        {"a": 3, "b": 3},
        {"a": 1},
        {"a": 1},
        {"a": 1},
        {"b": 4, "c": 1},
    ]


# ---- D5: swap space runs out


class SwappedBytes(ChecksumSource):
    """Remembers what was moved to the host: it must come back, or stay, as it went out."""

    def __init__(self) -> None:
        super().__init__()
        self.out: dict[int, tuple[int, int] | None] = {}
        self.num_compared = 0

    def copy(self, source_slots: list[int], destination_slots: list[int]) -> None:
        super().copy(source_slots, destination_slots)
        for source, destination in zip(source_slots, destination_slots, strict=True):
            if destination < 0:  # out
                self.out[destination] = self._slots.get(source)
            elif source < 0:  # back in
                assert self._slots.get(destination) == self.out[source]
                self.num_compared += self.out[source] is not None


def swapping_engine(num_host_blocks: int, preemption: str = "swap", **config) -> TestEngine:
    """With a policy of our own where `swap` is refused, since there is no host pool."""
    if preemption == "swap" and not num_host_blocks:
        preemption = "hopeful"
    policies = {"preemption": preemption, **config.pop("policies", {})}
    return TestEngine(
        registry=SWAPPING, policies=policies, num_host_blocks=num_host_blocks, source=SwappedBytes(), **config
    )


def check_host(engine: TestEngine, num_host_blocks: int) -> None:
    """The host pool is never more than full, is empty when all is over, and what went out came back as it was."""
    assert max(step.pool.num_host_blocks for step in engine.log.steps) <= num_host_blocks
    assert engine.log.steps[-1].pool.num_host_blocks == 0
    assert engine.engine.context.memory.host_pool.num_free == num_host_blocks
    for step in engine.log.steps:
        taken = [host for _, host in step.swap_outs]
        assert len(set(taken)) == len(taken)
        assert all(0 <= host < num_host_blocks for host in taken)


def no_swap_space(recorder: ColumnRecorder) -> list[str]:
    return [row["detail"] for row in decisions_of(recorder) if row["reason"] == "NO_SWAP_SPACE"]


@pytest.mark.parametrize("cache", ["auto", "off"])
@pytest.mark.parametrize("num_host_blocks", [0, 1, 2, 3, 4, 8])
@pytest.mark.parametrize("scheduler", BATCHING)
def test_d5_golden_outputs_whatever_fits_the_host(scheduler, num_host_blocks, cache):
    engine = swapping_engine(
        num_host_blocks,
        block_size=4,
        num_blocks=6,
        policies={"scheduler": scheduler},
        prefix_cache=PrefixCacheConfig(mode=cache),
    )
    recorder = ColumnRecorder()
    tee: Any = Tee(engine.log, recorder)
    engine.engine.recorder = tee
    for name, (prompt, _) in GOLDEN.items():
        engine.add(name, prompt, 8)
    engine.run(max_steps=100)
    assert engine.outputs == {name: output for name, (_, output) in GOLDEN.items()}
    assert engine.log.num_preemptions >= 1
    check_host(engine, num_host_blocks)
    assert_whole_and_free(engine, num_sequences=2, num_new=8)
    # b has 12 computed tokens when it gives way: 3 blocks, all or none.
    out = sum(len(step.swap_outs) for step in engine.log.steps)
    if num_host_blocks < 3:
        assert out == 0
        assert no_swap_space(recorder) == [f"3 needed, {num_host_blocks} of {num_host_blocks} free"]
    else:
        assert out == 3
        assert no_swap_space(recorder) == []
        b = next(seq for seq in engine.log.finished_sequences if seq.id == "b")
        assert (b.num_preemptions, b.num_recomputed_tokens) == (1, 0)
    back = sum(len(step.swap_ins) for step in engine.log.steps)
    # Of the 3 blocks a cache still has two on the device: only the one that a took must come back.
    assert back == (0 if num_host_blocks < 3 else 1 if cache == "auto" else 3)
    source = engine.engine.executor._source  # pyright: ignore[reportAttributeAccessIssue]
    assert source.num_compared == 4 * back


def test_d5_a_victim_that_finds_no_room_is_computed_again_beside_one_that_did():
    """Three requests of 8 and 8 tokens in 7 blocks of 4: c leaves with 2 blocks, then b, for which none is left."""
    engine = swapping_engine(2, block_size=4, num_blocks=7, prefix_cache=PrefixCacheConfig(mode="off"))
    recorder = ColumnRecorder()
    tee: Any = Tee(engine.log, recorder)
    engine.engine.recorder = tee
    prompts = {name: range(20 * i, 20 * i + 8) for i, name in enumerate("abc")}
    for name, prompt in prompts.items():
        engine.add(name, prompt, 8)
    engine.run(max_steps=100)
    assert engine.outputs == {name: checksum_output(prompt, 8) for name, prompt in prompts.items()}
    # Step 1: a takes the seventh block for its slot 8; b needs one and c gives way, with 8 computed tokens.
    assert engine.log.steps[1].preempted == ("c",)
    assert len(engine.log.steps[1].swap_outs) == 2
    # Step 5: a takes the last block for its slot 12, b needs one and gives way itself, and 12 tokens do not fit.
    assert [step.preempted for step in engine.log.steps[2:6]] == [(), (), (), ("b",)]
    assert no_swap_space(recorder) == ["3 needed, 0 of 2 free"]
    recomputed = {seq.id: seq.num_recomputed_tokens for seq in engine.log.finished_sequences}
    assert recomputed == {"a": 0, "b": 12, "c": 0}
    check_host(engine, 2)


def test_d5_variant_a_victim_that_has_computed_nothing_yet():
    """Ours: b enters in the plan of step 1, in which a then needs one of its blocks."""
    engine = swapping_engine(8, block_size=1, num_blocks=4, policies={"scheduler": "admits_first"})
    engine.add("a", [1, 2], 3)
    engine.step()
    engine.add("b", [3, 4], 3)
    engine.run(max_steps=20)
    assert engine.log.steps[1].preempted == ("b",)
    assert engine.outputs == {"a": checksum_output([1, 2], 3), "b": checksum_output([3, 4], 3)}


@pytest.mark.parametrize("preemption", ["swap", "either"])
@pytest.mark.parametrize("victim", [*VICTIMS, "first_candidate"])
@pytest.mark.parametrize("scheduler", [*BATCHING, "admits_first"])
@pytest.mark.parametrize("num_host_blocks", [0, 3, 5, 40])
def test_d5_variant_both_mechanisms_and_victims_that_were_just_admitted(
    num_host_blocks, scheduler, victim, preemption
):
    """Ours: victims that are swapped out again in the plan that swaps them in, mixed with ones that are dropped."""
    engine = swapping_engine(
        num_host_blocks,
        preemption,
        block_size=3,
        num_blocks=9,
        max_num_seqs=5,
        policies={"scheduler": scheduler, "victim": victim},
    )
    prompts = {f"r{i}": [(17 * i + 5 * j) % 251 for j in range(3 + 2 * i)] for i in range(5)}
    for name, prompt in prompts.items():
        engine.add(name, prompt, 14, n=1 + (name == "r1"))
    engine.run(max_steps=600)
    for output_id, output in engine.outputs.items():
        assert output == checksum_output(prompts[output_id.split("/")[0]], 14)
    assert engine.log.num_preemptions >= 3
    if num_host_blocks == 40 and preemption == "swap":
        assert sum(seq.num_recomputed_tokens for seq in engine.log.finished_sequences) == 0
    check_host(engine, num_host_blocks)
    assert_whole_and_free(engine, num_sequences=6, num_new=14)


def test_d5_variant_an_abort_while_swapped_out_gives_the_host_blocks_back():
    """Ours: of the victim while it waits, and of everybody at once."""
    engine = swapping_engine(8, block_size=4, num_blocks=6)
    for name, (prompt, _) in GOLDEN.items():
        engine.add(name, prompt, 8)
    while not engine.log.num_preemptions:
        engine.step()
    assert engine.log.steps[-1].pool.num_host_blocks == 3
    engine.engine.abort("b")
    engine.step()
    assert engine.log.steps[-1].pool.num_host_blocks == 0
    engine.run()
    assert engine.outputs["a"] == GOLDEN["a"][1]
    check_host(engine, 8)


# ---- D6: several choices with preemption; where blocks are shared those of the prompt are counted once


D6_CASES = list(
    product(("chunked", "continuous", "static"), ("recompute", "swap", "either"), ("auto", "off"))
)


@pytest.mark.parametrize(("scheduler", "preemption", "cache"), D6_CASES)
@pytest.mark.parametrize("num_blocks", [7, 8, 10, 12])
def test_d6_three_choices_of_two_requests(num_blocks, scheduler, preemption, cache):
    engine = swapping_engine(
        6,
        preemption,
        block_size=4,
        num_blocks=num_blocks,
        policies={"scheduler": scheduler},
        prefix_cache=PrefixCacheConfig(mode=cache),
    )
    for name, (prompt, _) in GOLDEN.items():
        engine.add(name, prompt, 8, n=3)
    engine.run(max_steps=300)
    assert engine.outputs == {f"{name}/{i}": output for name, (_, output) in GOLDEN.items() for i in range(3)}
    # A request peaks at 2 blocks of its prompt and 2 of each choice; with a cache the third blocks of its equal
    # choices become one when they are full, so that it peaks at 2 + 1 + 3.
    peak = 2 * (6 if cache == "auto" else 8)
    assert (engine.log.num_preemptions >= 1) == (num_blocks < peak)
    check_host(engine, 6)
    assert_whole_and_free(engine, num_sequences=6, num_new=8)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("num_blocks", [4, 10])
def test_d6_three_choices_under_every_scheduler(scheduler, num_blocks):
    engine = TestEngine(
        registry=REGISTRY, block_size=4, num_blocks=num_blocks, policies={"scheduler": scheduler}
    )
    for name, (prompt, _) in GOLDEN.items():
        engine.add(name, prompt, 8, n=3)
    engine.run(max_steps=300)
    assert engine.outputs == {f"{name}/{i}": output for name, (_, output) in GOLDEN.items() for i in range(3)}
    assert_whole_and_free(engine, num_sequences=6, num_new=8)


@pytest.mark.parametrize("scheduler", BATCHING)
@pytest.mark.parametrize("cache", ["auto", "off"])
def test_d6_blocks_of_the_prompt_are_counted_once(scheduler, cache):
    """A prompt of 2 blocks and 3 choices of 8 tokens: 2 + 3 x 1 blocks after the second step, 2 + 3 x 2 at most."""
    engine = TestEngine(
        block_size=4,
        num_blocks=30,
        policies={"scheduler": scheduler},
        prefix_cache=PrefixCacheConfig(mode=cache),
    )
    engine.add("a", GOLDEN["a"][0], 8, n=3)
    engine.run()
    used = [30 - step.pool.num_free_blocks for step in engine.log.steps]
    saved = [step.pool.num_saved_blocks for step in engine.log.steps]
    held = [step.pool.num_slots_held for step in engine.log.steps]
    # The 7 new tokens that are fed back lie in slots 8..14. Greedy choices are equal, so that with a cache their
    # third blocks, full after step 4, become one.
    full = 1 if cache == "auto" else 3
    assert used == [2, 5, 5, 5, 2 + full, 5 + full, 5 + full, 0]
    assert saved == [4, 4, 4, 4, 4 + 3 - full, 4 + 3 - full, 4 + 3 - full, 0]
    assert held == [8, 11, 14, 17, 8 + 4 * full, *(8 + 4 * full + 3 * i for i in (1, 2)), 0]
    assert engine.log.num_copies == 0, "the prompt ends with its block"


@pytest.mark.parametrize("preemption", ["recompute", "swap", "either"])
@pytest.mark.parametrize("scheduler", BATCHING)
@pytest.mark.parametrize("cache", ["auto", "off"])
def test_d6_one_request_in_seven_blocks_runs(scheduler, preemption, cache):
    """It would peak at 8: its choices are scheduled singly, so one of them gives way."""
    engine = swapping_engine(
        4,
        preemption,
        block_size=4,
        num_blocks=7,
        policies={"scheduler": scheduler},
        prefix_cache=PrefixCacheConfig(mode=cache),
    )
    engine.add("a", GOLDEN["a"][0], 8, n=3)
    engine.run(max_steps=60)
    assert engine.outputs == {f"a/{i}": GOLDEN["a"][1] for i in range(3)}
    # With a cache the equal third blocks are one: 2 + 1 + 3 blocks at most.
    assert engine.log.num_preemptions == (0 if cache == "auto" else 1)
    check_host(engine, 4)
    assert_whole_and_free(engine, num_sequences=3, num_new=8)


@pytest.mark.parametrize("preemption", ["recompute", "swap", "either"])
@pytest.mark.parametrize("num_seqs", [1, 2, 3, 4])
def test_d6_variant_choices_without_a_seat_and_a_prompt_that_ends_inside_a_block(num_seqs, preemption):
    """Ours: a prompt of 10 tokens, so that tails are copied, five choices and fewer seats, all in 6 blocks."""
    engine = swapping_engine(3, preemption, block_size=4, num_blocks=6, max_num_seqs=num_seqs)
    prompt = [(3 * i + 1) % 251 for i in range(10)]
    engine.add("a", prompt, 9, n=5)
    engine.add("b", prompt[::-1], 9, n=2)
    engine.run(max_steps=400)
    expected = {"a": checksum_output(prompt, 9), "b": checksum_output(prompt[::-1], 9)}
    assert engine.outputs == {
        f"{name}/{i}": expected[name] for name, n in (("a", 5), ("b", 2)) for i in range(n)
    }
    assert max(step.pool.num_running for step in engine.log.steps) <= num_seqs
    assert engine.log.num_copies or num_seqs == 1
    check_host(engine, 3)
    assert_whole_and_free(engine, num_sequences=7, num_new=9)


# ---- D7: late results (the engine is synchronous, so "in flight" is while the executor computes)


class Interrupted:
    """The engine's own executor, which calls `meanwhile` while it computes step number `step`."""

    virtual_time = True

    def __init__(self, engine: TestEngine, step: int, meanwhile: Callable[[], None]) -> None:
        self._inner, self._step, self._meanwhile = engine.engine.executor, step, meanwhile
        engine.engine.executor = self

    def execute(self, plan: StepPlan) -> StepResult:
        result = self._inner.execute(plan)
        if plan.step == self._step:
            self._meanwhile()
        return result

    def close(self) -> None:
        self._inner.close()


@pytest.mark.parametrize("step", [0, 1, 2], ids=["prefill", "decode", "last token"])
def test_d7_what_an_aborted_request_gets_while_its_step_is_in_flight_is_dropped(step: int) -> None:
    engine = TestEngine(block_size=4, num_blocks=8)
    engine.add("x", [1, 2, 3], 3)
    engine.add("other", range(11, 19), 8)
    Interrupted(engine, step, lambda: engine.engine.abort("x"))
    engine.run()
    assert engine.outputs.get("x", []) == [20, 104, 127][:step]
    assert engine.outputs["other"] == [98, 236, 96, 159, 71, 3, 59, 206]
    reasons = {seq.id: seq.finish_reason for seq in engine.log.finished_sequences}
    assert reasons == {"x": "abort", "other": "length"}
    assert engine.engine.context.num_free_blocks == 8


def test_d7_variant_its_id_is_taken_over_in_the_same_flight() -> None:
    """Ours: the late token of the old one is not the first of the new."""
    engine = TestEngine(block_size=4, num_blocks=8)
    engine.add("x", range(1, 9), 8)

    def swap_places() -> None:
        engine.engine.abort("x")
        engine.outputs.clear()
        engine.add("x", [1, 2, 3], 3)

    Interrupted(engine, 1, swap_places)
    assert engine.run() == {"x": [20, 104, 127]}
    assert [seq.finish_reason for seq in engine.log.finished_sequences] == ["abort", "length"]


def test_d7_blocks_of_a_request_aborted_in_flight_are_reused_only_after_the_step() -> None:
    engine = TestEngine(block_size=4, num_blocks=3)
    engine.add("x", range(1, 9), 4)
    engine.add("next", [1, 2, 3], 3)
    Interrupted(engine, 0, lambda: engine.engine.abort("x"))
    engine.step()
    assert [step.pool.num_free_blocks for step in engine.log.steps] == [
        0
    ]  # of x still, though nobody wants it
    engine.run()
    assert engine.outputs == {"next": [20, 104, 127]}
