"""Admission policies: what each lets in and refuses by hand calculation, and what they promise for any workload."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvengine.core.decision import Action, Decision
from kvengine.core.errors import ConfigError, RequestError
from kvengine.core.plan import StepPlan
from kvengine.core.reasons import Reason
from kvengine.core.request import Request, SamplingParams
from kvengine.core.sequence import Sequence
from kvengine.core.shapes import PrefixCacheConfig
from kvengine.registry import discover
from kvengine.testing.cases import cases, check_nothing_is_left, check_outputs, drive, steps_one_by_one
from kvengine.testing.engines import TestEngine
from kvengine.testing.sources import checksum_output
from kvengine.testing.step_log import StepLog
from kvengine_plugins.admissions.growth_ratio import GrowthRatioAdmission, GrowthRatioConfig
from kvengine_plugins.admissions.slo import SloConfig
from kvengine_plugins.admissions.watermark import WatermarkAdmission, WatermarkConfig

REGISTRY = discover()
NO_CACHE = PrefixCacheConfig(mode="off")
MS = 1_000_000
STEP_MS = 10
BATCHING = ["chunked", "continuous", "static"]


class DecisionLog(StepLog):
    """Keeps the decisions of every plan too, those of idle ones included."""

    def __init__(self) -> None:
        super().__init__()
        self.plans: list[list[Decision]] = []

    def step(self, plan: StepPlan, result: Any, pool: Any, end_ns: int) -> None:
        super().step(plan, result, pool, end_ns)
        self.plans.append(plan.decisions)

    def idle(self, plan: StepPlan) -> None:
        self.plans.append(plan.decisions)

    def refusals(self, seq_id: str) -> list[tuple[Reason, str]]:
        """Reasons and details of those who wait, in order, without repetitions."""
        found: list[tuple[Reason, str]] = []
        for decision in (decision for plan in self.plans for decision in plan):
            if decision.action is Action.REFUSE and decision.seq is not None and decision.seq.id == seq_id:
                said = (Reason(decision.reason), decision.detail)
                found += [said] if said not in found[-1:] else []
        return found

    def acts(self, action: Action) -> list[str]:
        """The ids of those to whom `action` happened."""
        return [d.seq.id for plan in self.plans for d in plan if d.action is action and d.seq is not None]


def engine_with(
    admission: str, scheduler: str = "chunked", options: dict[str, Any] | None = None, **config: Any
) -> tuple[TestEngine, DecisionLog]:
    config = {"prefix_cache": NO_CACHE, **config}
    engine = TestEngine(
        registry=REGISTRY,
        policies={"admission": admission, "scheduler": scheduler, **config.pop("policies", {})},
        settings={"admission": options or {}},
        **config,
    )
    log = DecisionLog()
    engine.log = engine.engine.recorder = log
    return engine, log


def prompt_of(length: int, first: int = 0) -> list[int]:
    return [(first + i) % 251 for i in range(length)]


def entered_in(log: StepLog, seq_id: str) -> int:
    return next(step.step for step in log.steps if seq_id in step.scheduled)


# ---- first_chunk


@pytest.mark.parametrize(("num_requests", "num_blocks", "num_preemptions"), [(2, 14, 4), (3, 16, 12)])
def test_first_chunk_thrashes_where_whole_prompt_does_not(num_requests, num_blocks, num_preemptions):
    """The figures of known failure D2, after vLLM issue 25538."""
    seen = {}
    for admission in ("first_chunk", "whole_prompt"):
        engine, log = engine_with(admission, block_size=4, num_blocks=num_blocks, max_num_batched_tokens=8)
        for i in range(num_requests):
            engine.add(f"r{i}", prompt_of(40, first=i), 16)
        engine.run(max_steps=400)
        seen[admission] = log.num_preemptions
        assert engine.outputs == {f"r{i}": checksum_output(prompt_of(40, i), 16) for i in range(num_requests)}
    assert seen == {"first_chunk": num_preemptions, "whole_prompt": 0}


def test_first_chunk_is_refused_by_the_allocator_when_that_does_not_fit():
    engine, log = engine_with("first_chunk", block_size=4, num_blocks=4, max_num_batched_tokens=16)
    engine.add("a", prompt_of(13), 2)
    engine.add("b", prompt_of(8), 2)
    engine.step()
    assert log.steps[0].scheduled == {"a": 13}
    assert log.refusals("b") == [
        (Reason.NO_BLOCKS, "1 needed, 0 free")
    ]  # for the 3 tokens left of the budget
    engine.run(max_steps=10)
    assert engine.outputs["b"] == checksum_output(prompt_of(8), 2)


# ---- watermark


@pytest.mark.parametrize(
    ("watermark", "free_after", "reason"),
    [
        (0.0, 0, None),  # without one it is whole_prompt
        (0.0, -1, Reason.NO_BLOCKS),
        (0.01, 1, None),  # 1% of 100 blocks
        (0.01, 0, Reason.WATERMARK),
        (0.01, -1, Reason.NO_BLOCKS),
        (0.15, 15, None),
        (0.15, 14, Reason.WATERMARK),
        (0.07, 7, None),  # in floats 0.07 * 100 is above 7
        (0.07, 6, Reason.WATERMARK),
        (0.005, 1, None),  # half a block is rounded up
        (0.005, 0, Reason.WATERMARK),
    ],
)
def test_watermark_keeps_its_share_free(watermark: float, free_after: int, reason: Reason | None) -> None:
    """A pool of 100 blocks of one token, of which 10 are taken and stay so in the second step."""
    engine, log = engine_with(
        "watermark", options={"watermark": watermark}, block_size=1, num_blocks=100, max_model_len=120
    )
    engine.add("runs", prompt_of(9), 2)
    engine.step()
    engine.add("comes", prompt_of(90 - free_after), 1)
    engine.step()
    said = [(why, detail) for why, detail in log.refusals("comes")]
    assert [why for why, _ in said] == ([reason] if reason else [])
    if reason is Reason.WATERMARK:
        kept = math.ceil(round(watermark * 100, 6))
        assert said[0][1] == f"{free_after} blocks would stay free, {kept} must"
    engine.run(max_steps=10)
    assert engine.outputs["comes"] == checksum_output(prompt_of(90 - free_after), 1)


@pytest.mark.parametrize("scheduler", BATCHING)
def test_watermark_lets_in_who_finds_nothing_running(scheduler: str) -> None:
    engine, _ = engine_with(
        "watermark", scheduler, {"watermark": 0.9}, block_size=1, num_blocks=16, max_model_len=17
    )
    engine.add("all of it", prompt_of(16), 1)
    engine.add("next", prompt_of(16, 7), 1)
    engine.run(max_steps=10)
    assert engine.outputs["next"] == checksum_output(prompt_of(16, 7), 1)


def test_watermark_does_not_count_promised_blocks_as_free() -> None:
    """20 free, 10 of them promised, 5 needed: 5 would stay free, of the 10 that must."""
    policy = WatermarkAdmission(WatermarkConfig(watermark=0.1), 100)
    running = Sequence(
        Request(id="r", prompt_token_ids=(1,)),
        choice=0, order=0, max_tokens_total=9, stop_ids=frozenset(), seed=0,
    )  # fmt: skip
    view: Any = SimpleNamespace(
        running=[running], num_free_blocks=20, num_promised_blocks=10, blocks_needed=lambda seq, num_tokens: 5
    )
    refusal = policy.refuses(running, view)
    assert refusal is not None
    assert refusal.reason is Reason.WATERMARK
    view.num_promised_blocks = 5
    assert policy.refuses(running, view) is None


# ---- reserve_worst_case


def test_worst_case_reserves_full_lengths_for_all() -> None:
    """Prompts of 4 and 5 new tokens end with 8 slots: 2 blocks of 4. Five blocks hold two, not three."""
    engine, log = engine_with("reserve_worst_case", block_size=4, num_blocks=5)
    for i in range(3):
        engine.add(f"r{i}", prompt_of(4, i), 5)
    engine.run(max_steps=40)
    assert [entered_in(log, f"r{i}") for i in range(3)] == [0, 0, 5]
    assert log.refusals("r2")[0] == (Reason.NO_BLOCKS, "2 needed, 3 free, 2 of them reserved")
    assert log.num_preemptions == 0


def test_worst_case_counts_choices_in_full() -> None:
    """Two choices of 8 slots take 4 blocks; with the 2 blocks of who runs that is one more than there are."""
    engine, log = engine_with("reserve_worst_case", block_size=4, num_blocks=5)
    engine.add("runs", prompt_of(4), 5)
    engine.add("two", prompt_of(4, 9), 5, n=2)
    engine.run(max_steps=40)
    assert entered_in(log, "two/0") == 5
    assert log.refusals("two/0")[0] == (Reason.NO_BLOCKS, "4 needed, 4 free, 1 of them reserved")
    assert log.num_preemptions == 0


def test_worst_case_counts_a_cached_block_that_is_held_once() -> None:
    """Each ends with 4 blocks, and both begin with the same 2 full ones: 6 together."""
    cache = PrefixCacheConfig(mode="on")
    for num_blocks, together in ((6, True), (5, False)):
        engine, log = engine_with(
            "reserve_worst_case", block_size=4, num_blocks=num_blocks, prefix_cache=cache
        )
        engine.add("a", prompt_of(10), 7)  # 16 slots
        engine.step()
        engine.add("b", prompt_of(10), 7)
        engine.run(max_steps=40)
        assert (entered_in(log, "b") == 1) == together
        assert engine.outputs == dict.fromkeys("ab", checksum_output(prompt_of(10), 7))


def forbid_failing_growth(engine: TestEngine) -> None:
    """Make it an error that a running sequence gets no blocks."""
    memory = engine.engine.context.memory
    grow: Callable[[Sequence, int], Any] = memory.grow

    def grows(seq: Sequence, num_tokens: int) -> None:
        refusal = grow(seq, num_tokens)
        assert refusal is None, f"{seq} cannot grow: {refusal}"

    memory.grow = grows  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("cache", ["on", "off"])
@pytest.mark.parametrize("scheduler", BATCHING)
def test_nobody_fails_to_grow_where_the_worst_case_is_reserved(scheduler, cache) -> None:
    chunks = scheduler == "chunked"

    @settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    @given(case=cases(chunks), preemption=st.sampled_from(["never", "recompute"]))
    def serves(case, preemption) -> None:
        engine, log = engine_with(
            "reserve_worst_case",
            scheduler,
            policies={"preemption": preemption},
            prefix_cache=PrefixCacheConfig(mode=cache),
            **case.limits,
        )
        fits_together = not any(
            ask.n * -(-(len(ask.prompt) + ask.max_tokens - 1) // case.limits["block_size"])
            > case.limits["num_blocks"]
            for ask in case.asks
        )
        if (
            fits_together or preemption == "never"
        ):  # where its choices need not fit, they are let in all the same
            forbid_failing_growth(engine)
        delivered = drive(engine, case, max_steps=30 + 4 * steps_one_by_one(case, chunks))
        check_outputs(engine, case, delivered)
        check_nothing_is_left(engine)
        if preemption == "never":
            assert log.num_preemptions == 0

    serves()


@pytest.mark.parametrize(("num_blocks", "fits"), [(6, True), (5, False)])
def test_choices_that_never_give_way_must_fit_together_in_whole_blocks(num_blocks: int, fits: bool) -> None:
    """Three choices of 5 slots, which share less than a block: 2 blocks of 4 each, though it is but 15 slots."""
    engine, _ = engine_with(
        "reserve_worst_case", policies={"preemption": "never"}, block_size=4, num_blocks=num_blocks
    )
    if fits:
        engine.add("r", [7], 5, n=3)
        engine.run(max_steps=10)
        assert list(engine.outputs.values()) == [checksum_output([7], 5)] * 3
    else:
        with pytest.raises(RequestError, match=r"n=3 choices of up to 6 tokens need 24 slots .* pool has 20"):
            engine.add("r", [7], 5, n=3)


# ---- growth_ratio


def test_the_ratio_falls_evenly_and_a_preemption_sets_it_back() -> None:
    policy = GrowthRatioAdmission(GrowthRatioConfig(init_ratio=0.7, min_ratio=0.1, decay_steps=6))
    plan = StepPlan(step=0, now_ns=0)
    seen = []
    for _ in range(8):
        seen.append(round(policy.ratio, 9))
        policy.committed(plan)
    assert seen == [0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.1]
    policy.preempted()
    assert policy.ratio == 0.7
    policy.committed(plan)
    assert round(policy.ratio, 9) == 0.6


def ratio_engine(ratio: float, num_blocks: int, **config: Any) -> tuple[TestEngine, DecisionLog]:
    options = {"init_ratio": ratio, "min_ratio": ratio}
    config = {"block_size": 1, "max_num_batched_tokens": 64, "max_model_len": 64, **config}
    return engine_with("growth_ratio", options=options, num_blocks=num_blocks, **config)


@pytest.mark.parametrize(
    ("num_blocks", "n", "together"), [(28, 1, True), (27, 1, False), (32, 2, True), (31, 2, False)]
)
def test_growth_ratio_by_hand(num_blocks: int, n: int, together: bool) -> None:
    """Ratio 0.5, prompts of 10, blocks of one token. In step 1 `a` has 11 tokens and 7 to come: 11 + ceil(3.5) = 15
    slots, of which it has 11 by then, so 4 are reserved. `b` has 6 to come: 10 + ceil(3) = 13. 11 + 4 + 13 = 28.
    Its second choice takes 3 more to grow, and one for a tail of its own."""
    engine, log = ratio_engine(0.5, num_blocks)
    engine.add("a", prompt_of(10), 8)
    engine.step()
    engine.add("b", prompt_of(10, 5), 6, n=n)
    engine.step()
    name = "b" if n == 1 else "b/0"
    assert (name in log.steps[1].scheduled) == together
    if not together:
        needed = 13 if n == 1 else 17
        room = f"{needed} needed, {num_blocks - 11} free, 4 of them reserved at ratio 0.500"
        assert log.refusals(name) == [(Reason.NO_BLOCKS, room)]
    engine.run(max_steps=60)
    assert engine.outputs[name] == checksum_output(prompt_of(10, 5), 6)


@pytest.mark.parametrize(("ratio", "admission"), [(0.0, "whole_prompt"), (1.0, "reserve_worst_case")])
@pytest.mark.parametrize("scheduler", ["chunked", "continuous"])
def test_the_ends_of_the_ratio_are_other_policies(ratio: float, admission: str, scheduler: str) -> None:
    """With ratio 1 it reserves the worst case, with 0 it looks at what is known."""

    @settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    @given(case=cases(scheduler == "chunked"))
    def same(case) -> None:
        options = {"growth_ratio": {"init_ratio": ratio, "min_ratio": ratio}}
        steps = []
        for name in ("growth_ratio", admission):
            engine, log = engine_with(name, scheduler, options.get(name), **case.limits)
            for ask in case.asks:
                sampling = SamplingParams(max_tokens=ask.max_tokens, temperature=0.0)
                request = Request(id=ask.id, prompt_token_ids=ask.prompt, sampling=sampling)
                engine.engine.add_request(request)
            engine.run()
            steps.append([(step.scheduled, step.preempted) for step in log.steps])
        assert steps[0] == steps[1]

    same()


def test_of_a_long_rest_only_4096_tokens_count() -> None:
    engine, log = ratio_engine(1.0, 4_200, max_model_len=20_000, max_num_batched_tokens=100)
    engine.add("a", prompt_of(10), 1)
    engine.add("b", prompt_of(90), 3)
    engine.add("long", prompt_of(10), 4_150)
    engine.step()
    engine.step()
    # b has 91 tokens and 2 to come: 92 slots in the end, of which it has 91 in this step, so 1 is reserved.
    assert "long" in log.steps[1].scheduled, log.refusals("long")  # 10 + 4,096 of the 4,109 that are free


@pytest.mark.parametrize("scheduler", BATCHING)
def test_growth_ratio_serves_under_preemption(scheduler: str) -> None:
    options = {"init_ratio": 0.1, "min_ratio": 0.0, "decay_steps": 2}
    engine, log = engine_with("growth_ratio", scheduler, options, block_size=4, num_blocks=6)
    prompts = {f"r{i}": prompt_of(8, 10 * i) for i in range(5)}
    for name, prompt in prompts.items():
        engine.add(name, prompt, 8)
    engine.run(max_steps=100)
    assert engine.outputs == {name: checksum_output(prompt, 8) for name, prompt in prompts.items()}
    assert log.num_preemptions > 0


# ---- slo


def slo_engine(scheduler: str, late: str, **config: Any) -> tuple[TestEngine, DecisionLog]:
    """Deadlines of 45 ms; a step takes 10 ms."""
    options = {"ttft_ms": 45.0, "late": late, **config.pop("options", {})}
    config = {"max_num_seqs": 1, "num_blocks": 64, "block_size": 4, **config}
    return engine_with("slo", scheduler, options, **config)


def first_token_ms(log: StepLog) -> dict[str, float]:
    """From its arrival to its first token, of all that have one."""
    return {
        seq.id: (seq.times.first_token_ns - seq.arrival_ns) / MS
        for seq in log.finished_sequences
        if seq.times.first_token_ns is not None
    }


@pytest.mark.parametrize("scheduler", BATCHING)
def test_late_requests_are_refused_for_good_and_the_others_are_in_time(scheduler: str) -> None:
    """One runs at a time, for three steps, and six arrive at once: r0 at 0 ms, r1 at 30 ms, and r2, at 60 ms, is too
    late for its 45 ms, as are all after it, except who comes later."""
    engine, log = slo_engine(scheduler, "refuse")
    for i in range(6):
        engine.add(f"r{i}", prompt_of(5, i), 3)
    for _ in range(3):
        engine.step()
    engine.add("later", prompt_of(5, 77), 3)  # at 30 ms, due at 75 ms
    outputs = engine.run(max_steps=60)
    served = {"r0": prompt_of(5, 0), "r1": prompt_of(5, 1), "later": prompt_of(5, 77)}
    refused = ["r2", "r3", "r4", "r5"]
    assert {name: out for name, out in outputs.items() if out} == {
        name: checksum_output(prompt, 3) for name, prompt in served.items()
    }
    assert engine.finish_reasons == {**dict.fromkeys(served, "length"), **dict.fromkeys(refused, "refused")}
    assert log.acts(Action.REJECT) == refused
    details = {d.detail for plan in log.plans for d in plan if d.action is Action.REJECT}
    assert details == {"its first token would be 15.0 ms late"}
    if scheduler != "static":  # which delivers at the end of a batch
        assert first_token_ms(log) == {"r0": 10, "r1": 40, "later": 40}
    check_nothing_is_left(engine)


@pytest.mark.parametrize("scheduler", BATCHING)
def test_late_requests_are_deferred_and_run_last(scheduler: str) -> None:
    engine, log = slo_engine(scheduler, "defer")
    for i in range(4):
        engine.add(f"r{i}", prompt_of(5, i), 3)
    for _ in range(3):
        engine.step()
    engine.add(
        "later", prompt_of(5, 77), 3
    )  # at 30 ms: after r0, r1 it goes before r2 and r3, which are late at 60 ms
    engine.run(max_steps=60)
    order = ["r0", "r1", "later", "r2", "r3"]
    assert [seq.id for seq in log.finished_sequences] == order
    assert log.acts(Action.DEFER) == ["r2", "r3"]
    assert set(engine.finish_reasons.values()) == {"length"}
    if scheduler != "static":
        assert first_token_ms(log) == {"r0": 10, "r1": 40, "later": 40, "r2": 100, "r3": 130}
    check_nothing_is_left(engine)


@pytest.mark.parametrize("scheduler", BATCHING)
@pytest.mark.parametrize("late", ["refuse", "defer"])
@pytest.mark.parametrize("allocator", ["paged", "contiguous_max"])
def test_late_choices_leave_nothing_behind(scheduler: str, late: str, allocator: str) -> None:
    engine, log = slo_engine(
        scheduler, late, max_num_seqs=3, max_model_len=32, policies={"allocator": allocator}
    )
    engine.add("first", prompt_of(5), 6, n=3)
    engine.add("second", prompt_of(5, 9), 2, n=3)  # at 60 ms, 15 ms late
    engine.run(max_steps=60)
    reason = "refused" if late == "refuse" else "length"
    outputs = [] if late == "refuse" else checksum_output(prompt_of(5, 9), 2)
    for i in range(3):
        assert engine.finish_reasons[f"second/{i}"] == reason
        assert engine.outputs[f"second/{i}"] == outputs
        assert engine.outputs[f"first/{i}"] == checksum_output(prompt_of(5), 6)
    assert len(log.finished_sequences) == 6
    check_nothing_is_left(engine)


@pytest.mark.parametrize(("rate", "refused"), [(None, False), (1000.0, False), (999.0, True), (500.0, True)])
def test_the_time_of_the_prefill_counts(rate: float | None, refused: bool) -> None:
    """45 tokens take 45 ms at 1,000 tokens/s, which is just in time."""
    engine, _ = slo_engine("chunked", "refuse", options={"prefill_tokens_per_s": rate})
    engine.add("r", prompt_of(45), 2)
    engine.run(max_steps=20)
    assert engine.finish_reasons == {"r": "refused" if refused else "length"}


def test_cached_tokens_take_no_time() -> None:
    engine, _ = slo_engine(
        "chunked",
        "refuse",
        options={"prefill_tokens_per_s": 200.0},
        prefix_cache=PrefixCacheConfig(mode="on"),
    )
    engine.add("short", prompt_of(8), 1)  # 40 ms
    engine.run(max_steps=20)
    engine.add("hit", prompt_of(16), 1)  # 8 of 16 are cached: 40 ms
    engine.add("miss", prompt_of(16, 50), 1)  # 80 ms
    engine.run(max_steps=20)
    assert engine.finish_reasons == {"short": "length", "hit": "length", "miss": "refused"}


@pytest.mark.parametrize("scheduler", BATCHING)
def test_who_ran_already_is_never_late(scheduler: str) -> None:
    """Both are preempted at times; when they come back their deadlines have long passed."""
    engine, log = slo_engine(scheduler, "refuse", max_num_seqs=4, num_blocks=6, options={"ttft_ms": 15.0})
    for i in range(2):
        engine.add(f"r{i}", prompt_of(8, 10 * i), 8)
    engine.run(max_steps=60)
    assert log.num_preemptions > 0
    assert engine.outputs == {f"r{i}": checksum_output(prompt_of(8, 10 * i), 8) for i in range(2)}


def test_choices_without_a_seat_have_begun_with_the_first() -> None:
    """The second choice gets a seat at 60 ms, long after the request had its first token."""
    engine, log = slo_engine("chunked", "refuse")
    engine.add("r", prompt_of(5), 6, n=2)
    engine.run(max_steps=30)
    assert engine.outputs == dict.fromkeys(("r/0", "r/1"), checksum_output(prompt_of(5), 6))
    assert log.acts(Action.REJECT) == []


# ---- settings


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: WatermarkConfig(watermark=1.0), "admission.watermark"),
        (lambda: WatermarkConfig(watermark=-0.1), "admission.watermark"),
        (lambda: WatermarkConfig(watermark=math.nan), "admission.watermark"),
        (lambda: GrowthRatioConfig(init_ratio=1.1), "admission.init_ratio"),
        (lambda: GrowthRatioConfig(min_ratio=0.8), "admission.min_ratio"),
        (lambda: GrowthRatioConfig(min_ratio=-0.1), "admission.min_ratio"),
        (lambda: GrowthRatioConfig(decay_steps=0), "admission.decay_steps"),
        (lambda: SloConfig(ttft_ms=0.0), "admission.ttft_ms"),
        (lambda: SloConfig(ttft_ms=math.inf), "admission.ttft_ms"),
        (lambda: SloConfig(prefill_tokens_per_s=0.0), "admission.prefill_tokens_per_s"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_key(make: Callable[[], object], key: str) -> None:
    with pytest.raises(ConfigError) as error:
        make()
    assert error.value.key == key
