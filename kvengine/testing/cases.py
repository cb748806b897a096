"""Random workloads (hypothesis) for any policies, and what must hold for each: outputs, limits, an end, no leak.

The checks say in one word what is wrong (starves, leaks, exceeds, corrupts), so that their messages can be read by
somebody who wrote a policy and not the test.
"""

from __future__ import annotations

from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from kvengine.core.errors import RequestError
from kvengine.core.request import Request, SamplingParams
from kvengine.testing.engines import TestEngine
from kvengine.testing.sources import checksum_output
from kvengine.testing.step_log import LoggedStep


@dataclass(frozen=True)
class Ask:
    """A request, the step before which it arrives, and the step before which it is aborted (None: never)."""

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    n: int
    arrival: int
    abort: int | None
    priority: int = 0
    tenant: str | None = None

    def request(self, now_ns: int) -> Request:
        sampling = SamplingParams(max_tokens=self.max_tokens, temperature=0.0, n=self.n)
        return Request(
            id=self.id,
            prompt_token_ids=self.prompt,
            sampling=sampling,
            known_output_tokens=self.max_tokens,
            arrival_ns=now_ns,
            priority=self.priority,
            tenant=self.tenant,
        )


@dataclass(frozen=True)
class Case:
    """A workload, and the limits under which every request of it can be served."""

    asks: tuple[Ask, ...]
    limits: dict[str, Any]


@st.composite
def cases(draw: st.DrawFn, chunks: bool) -> Case:
    """Small pools that hold one longest sequence (rounded up to a power of two blocks), and not many more."""
    block_size = draw(st.integers(1, 5))
    max_model_len = draw(st.integers(4, 20))
    one_sequence = 1 << (-(-max_model_len // block_size) - 1).bit_length()
    budget = st.integers(1, 12) if chunks else st.integers(max_model_len, 2 * max_model_len)
    limits = {
        "block_size": block_size,
        "max_model_len": max_model_len,
        "num_blocks": draw(st.integers(one_sequence, 3 * one_sequence)),
        "num_host_blocks": draw(st.sampled_from([1, 2, 4, 2 * one_sequence])),
        "max_num_seqs": draw(st.integers(1, 6)),
        "max_num_batched_tokens": draw(budget),
    }
    asks = draw(st.lists(_asks_within(max_model_len), min_size=1, max_size=6))
    return Case(tuple(_named(i, ask) for i, ask in enumerate(asks)), limits)


@st.composite
def _asks_within(draw: st.DrawFn, max_model_len: int) -> Ask:
    length = draw(st.integers(1, max_model_len - 1))
    max_tokens = draw(st.integers(1, max_model_len - length))
    arrival = draw(st.integers(0, 12))
    abort = draw(st.none() | st.integers(arrival, arrival + 15))
    n, priority = draw(st.integers(1, 3)), draw(st.integers(-1, 2))
    tenant = draw(st.sampled_from([None, "anna", "bert"]))
    return Ask("", tuple(range(length)), max_tokens, n, arrival, abort, priority, tenant)


def _named(ordinal: int, ask: Ask) -> Ask:
    """`ask` with an id and a prompt; every other one shares its beginning with the one before."""
    prompt = tuple((31 * (ordinal // 2) + 7 * i + 1) % 251 for i in range(len(ask.prompt)))
    rest = (ask.max_tokens, ask.n, ask.arrival, ask.abort, ask.priority, ask.tenant)
    return Ask(f"r{ordinal}", prompt, *rest)


def steps_one_by_one(case: Case, chunks: bool) -> int:
    """Steps of running one sequence after the other, each alone."""
    budget = case.limits["max_num_batched_tokens"]
    prefills = [-(-len(ask.prompt) // budget) if chunks else 1 for ask in case.asks]
    return sum(ask.n * (steps + ask.max_tokens - 1) for ask, steps in zip(case.asks, prefills, strict=True))


def drive(engine: TestEngine, case: Case, max_steps: int) -> dict[str, int]:
    """Run `case` to its end, checking every step; how many tokens each aborted sequence had delivered.

    AssertionError when it is not done after `max_steps`, and when it is idle although nobody is to arrive and no
    policy asked to be woken.
    """
    delivered_before_abort: dict[str, int] = {}
    last = max(max(ask.arrival, ask.abort or 0) for ask in case.asks)
    for now in range(max_steps):
        for ask in case.asks:
            if ask.arrival == now:
                _add(engine, ask)
            if ask.abort == now:
                engine.engine.abort(ask.id)
                sequence_ids = [ask.id] if ask.n == 1 else [f"{ask.id}/{i}" for i in range(ask.n)]
                delivered_before_abort |= {i: len(engine.outputs.get(i, [])) for i in sequence_ids}
        num_logged = len(engine.log.steps)
        worked = engine.step()
        for step in engine.log.steps[num_logged:]:
            check_step(step, case.limits)
        if worked:
            continue
        assert not engine.engine.has_unfinished, f"starves: {engine.engine.stalled()}"
        if now >= last:
            return delivered_before_abort
    raise AssertionError(f"starves: not done after {max_steps} steps: {engine.engine.stalled()}")


def _add(engine: TestEngine, ask: Ask) -> None:
    """Add it; refused it may be only where its choices would have to fit the pool together."""
    may_refuse = ask.n > 1 and not engine.engine.context.policies.preemption.preempts
    with suppress(RequestError) if may_refuse else nullcontext():
        engine.engine.add_request(ask.request(engine.engine.clock.now()))


def check_step(step: LoggedStep, limits: dict[str, Any]) -> None:
    """Limits are kept, and nobody is scheduled and preempted at once."""
    tokens = sum(step.scheduled.values()) + step.num_idle_rows + step.num_padding_tokens
    budget, seats = limits["max_num_batched_tokens"], limits["max_num_seqs"]
    assert tokens <= budget, f"exceeds the token budget in step {step.step}: {tokens} of {budget}"
    taken = step.pool.num_running + step.pool.num_held
    assert taken <= seats, f"exceeds max_num_seqs in step {step.step}: {taken} of {seats}"
    assert min(step.num_idle_rows, step.num_padding_tokens, *step.scheduled.values()) >= 0
    both = set(step.preempted) & set(step.scheduled)
    assert not both, f"schedules whom it preempted in step {step.step}: {both}"


def check_outputs(engine: TestEngine, case: Case, delivered_before_abort: dict[str, int]) -> None:
    """Whole where nobody aborted, a right beginning and nothing after the abort where somebody did."""
    finished = {seq.id: seq for seq in engine.log.finished_sequences}
    refused = {error.request_id for error in engine.log.rejections}
    expected_count = sum(ask.n for ask in case.asks if ask.id not in refused)
    assert len(finished) == len(engine.log.finished_sequences) == expected_count
    asks = {ask.id: ask for ask in case.asks}
    for seq_id, seq in finished.items():
        ask = asks[seq.request.id]
        expected = checksum_output(ask.prompt, ask.max_tokens)
        output = engine.outputs.get(seq_id, [])
        if seq.finish_reason == "abort":
            expected = expected[: delivered_before_abort[seq_id]]
        elif seq.finish_reason == "refused":
            expected = []
        else:
            assert engine.finish_reasons[seq_id] == "length"
        assert output == expected, f"corrupts the output of {seq_id}: {output}, alone it is {expected}"


def check_nothing_is_left(engine: TestEngine) -> None:
    """Every block and every seat is free, and nobody waits."""
    context = engine.engine.context
    free, blocks = context.num_free_blocks, context.allocator.num_blocks
    assert free == blocks, f"leaks: {free} of {blocks} blocks are free at the end"
    assert context.memory.num_tokens == context.memory.num_slots_held == 0
    assert context.num_running == len(context.held) == len(context.line) == 0
    assert len(context.waiting) == 0, f"leaks: {len(context.waiting)} ended sequences are still in the queue"
    assert not engine.engine.has_unfinished
