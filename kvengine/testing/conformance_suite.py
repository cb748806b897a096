"""What every policy must do, whatever it decides: collected by kvengine.testing.conformance, a test per plug-in."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvengine.core.errors import ConfigError, EngineStalledError, KvEngineError
from kvengine.core.request import Request
from kvengine.core.sequence import Sequence, SequenceState
from kvengine.core.shapes import PrefixCacheConfig
from kvengine.registry import Entry
from kvengine.testing.cases import Case, cases, check_nothing_is_left, check_outputs, drive, steps_one_by_one
from kvengine.testing.engines import DEFAULT_POLICIES, TestEngine

MANY = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
SLOWEST = 4
"""So many times the steps of running one by one may a workload take, and 30 more."""

FAULTS = ("starves", "leaks", "exceeds", "corrupts", "schedules", "refuses", "is not", "computes")
"""How the checks of this package begin to say what is wrong."""

POLICIES = tuple(DEFAULT_POLICIES)
KINDS_OF = {
    "test_it_is_deterministic": POLICIES,
    "test_it_serves_every_workload": POLICIES,
    "test_it_keeps_nothing_of_what_has_ended": POLICIES,
    "test_it_computes_what_the_reference_computes": ("attention",),
}
NEEDS: dict[str, dict[str, str]] = {"predictor": {"queue": "shortest_job"}}
"""The policies without which one of that kind is never asked."""


def policies_with(plugin: Entry, scheduler: str) -> dict[str, str]:
    """The defaults with `plugin`, and what it takes for it to matter; `scheduler` unless it is one itself."""
    return {
        **DEFAULT_POLICIES,
        "scheduler": scheduler,
        **NEEDS.get(plugin.kind, {}),
        plugin.kind: plugin.name,
    }


def build(plugin: Entry, case: Case, scheduler: str = "chunked") -> TestEngine:
    """An engine with `plugin` and a prefix cache; fails by name where it cannot be built."""
    try:
        return TestEngine(
            policies=policies_with(plugin, scheduler),
            prefix_cache=PrefixCacheConfig(mode="auto"),
            **case.limits,
        )
    except ConfigError as error:
        pytest.fail(f"{name(plugin)} cannot be built with its defaults: {error}", pytrace=False)


def name(plugin: Entry) -> str:
    return f"{plugin.kind}={plugin.name}"


def splits(plugin: Entry, scheduler: str) -> bool:
    """Whether prefills are split under `plugin` and `scheduler`."""
    limits: dict[str, Any] = {"max_model_len": 16, "num_host_blocks": 1}
    return build(plugin, Case((), limits), scheduler).engine.context.scheduler.chunks


@contextmanager
def faults_named(plugin: Entry) -> Iterator[None]:
    """What goes wrong inside is a fault of `plugin`, said in one line."""
    try:
        yield
    except AssertionError as error:
        said = str(error).splitlines()[0] if str(error) else "of the engine"
        if not said.startswith(FAULTS):
            said = f"breaks an invariant: {said}"
        raise AssertionError(f"{name(plugin)} {said}") from error
    except EngineStalledError as error:
        raise AssertionError(f"{name(plugin)} starves: {error}") from error
    except KvEngineError as error:
        raise AssertionError(f"{name(plugin)} breaks its contract: {error}") from error


def for_schedulers(plugin: Entry, check: Callable[[str], None]) -> None:
    """Run `check` under both ways of scheduling; once where `plugin` is a scheduler."""
    for scheduler in (plugin.name,) if plugin.kind == "scheduler" else ("chunked", "continuous"):
        check(scheduler)


def test_it_is_deterministic(plugin: Entry) -> None:
    """Two runs of one workload decide the same in every step."""

    def check(scheduler: str) -> None:
        @MANY
        @given(case=cases(splits(plugin, scheduler)))
        def repeats(case: Case) -> None:
            with faults_named(plugin):
                first, second = (log_of(plugin, case, scheduler) for _ in range(2))
                for before, after in zip(first, second, strict=False):
                    assert before == after, f"is not deterministic: step {before[0]} differs between two runs"
                assert len(first) == len(second), (
                    "is not deterministic: two runs take different numbers of steps"
                )

        repeats()

    for_schedulers(plugin, check)


def log_of(plugin: Entry, case: Case, scheduler: str) -> list[tuple]:
    """Every step's decisions, as far as the run goes."""
    engine = build(plugin, case, scheduler)
    with suppress(AssertionError, KvEngineError):  # what is wrong with it is for the other tests to say
        drive(
            engine,
            case,
            max_steps=30 + SLOWEST * steps_one_by_one(case, engine.engine.context.scheduler.chunks),
        )
    return [
        (step.step, step.scheduled, step.preempted, step.copies, step.swap_outs) for step in engine.log.steps
    ]


def test_it_serves_every_workload(plugin: Entry) -> None:
    """All requests end with the output each has alone, limits kept, nothing left, in bounded time."""

    def check(scheduler: str) -> None:
        chunks = splits(plugin, scheduler)

        @MANY
        @given(case=cases(chunks))
        def serves(case: Case) -> None:
            engine = build(plugin, case, scheduler)
            with faults_named(plugin):
                delivered = drive(engine, case, max_steps=30 + SLOWEST * steps_one_by_one(case, chunks))
                check_outputs(engine, case, delivered)
                check_nothing_is_left(engine)

        serves()

    for_schedulers(plugin, check)


def test_it_keeps_nothing_of_what_has_ended(plugin: Entry) -> None:
    """After many requests, no policy still refers to more than a few of them."""
    limits: dict[str, Any] = {"block_size": 4, "num_blocks": 7, "num_host_blocks": 4, "max_model_len": 64}
    engine = build(plugin, Case((), {**limits, "max_num_seqs": 4}))
    with faults_named(plugin):
        for i in range(200):
            prompt, num_tokens = (i % 200, i % 7, 3, i % 11), 1 + i % 5
            engine.engine.add_request(
                Request(id=f"r{i}", prompt_token_ids=prompt, known_output_tokens=num_tokens)
            )
            if i % 3 == 0:
                engine.step()
        engine.run()
    engine.log.finished_sequences.clear()
    gc.collect()
    ended = sum(
        isinstance(thing, Sequence) and thing.state is SequenceState.FINISHED for thing in gc.get_objects()
    )
    assert ended <= KEEPS_AT_MOST, (
        f"{name(plugin)} leaks: {ended} sequences that have ended are still referred to"
    )


KEEPS_AT_MOST = 20
"""The last plan and its rows, and what a policy may keep for a step."""


@given(seed=st.integers(0, 2**31))
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
def test_it_computes_what_the_reference_computes(plugin: Entry, seed: int) -> None:
    """Attention over random batches, shapes and a poisoned pool, against kvengine_kernels.reference."""
    from kvengine.testing.attention_cases import check_backend

    with faults_named(plugin):
        check_backend(plugin.factory(plugin.schema(), None).backend(), seed)
