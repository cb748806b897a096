"""What every policy must do, whatever it decides: collected by kvengine.testing.conformance, a test per plug-in."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, replace
from functools import cache
from itertools import zip_longest
from textwrap import indent
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky

from kvengine.compose import settings_file
from kvengine.config import from_mapping
from kvengine.core.errors import ConfigError, KvEngineError
from kvengine.core.request import Request
from kvengine.core.sequence import Sequence, SequenceState
from kvengine.policies import Build
from kvengine.registry import Entry, Registry, discover
from kvengine.testing.cases import Case, cases, check_nothing_is_left, check_outputs, drive, steps_one_by_one
from kvengine.testing.engines import DEFAULT_POLICIES, TestEngine
from kvengine.testing.faults import Fault, faults_named, script
from kvengine.testing.watch import WatchedEngine, check_predictions, check_queue, lines_per_step

MANY = settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    database=None,
    report_multiple_bugs=False,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.too_slow],
)
"""The workloads that a plug-in is shown, and how they are drawn."""
SLOWEST = 4
"""So many times the steps of running one by one may a workload take, and 30 more."""
KEEPS_AT_MOST = 20
"""Ended sequences: the last plan and its rows, and what a policy may keep for a step."""

POLICIES = tuple(DEFAULT_POLICIES)
KINDS_OF = {
    "test_it_is_deterministic": POLICIES,
    "test_it_serves_every_workload": POLICIES,
    "test_it_keeps_nothing_of_what_has_ended": POLICIES,
    "test_a_step_costs_the_same_however_many_wait": POLICIES,
    "test_it_keeps_the_order_and_everybody_in_it": ("queue",),
    "test_it_accounts_for_every_block": ("allocator",),
    "test_it_predicts_numbers": ("predictor",),
    "test_it_computes_what_the_reference_computes": ("attention",),
}
"""The kinds that a test is for; all where it is not named."""
NEEDS: dict[str, dict[str, str]] = {"predictor": {"queue": "shortest_job"}}
"""The policies without which one of that kind is never asked."""
BESIDE: dict[str, str] = {}
"""The policies that the author wants beside it."""
Check = Callable[[Case, str, int], None]
"""Raises over a workload, under that scheduler and within so many steps, what is wrong."""


def configure(num_examples: int | None, beside: dict[str, str]) -> None:
    """So many workloads from now on, and these policies beside every plug-in."""
    global MANY
    if num_examples is not None:
        MANY = settings(MANY, max_examples=num_examples)
    BESIDE.update(beside)


@cache
def registry() -> Registry:
    """What is installed, looked up once."""
    return discover()


def policies_with(plugin: Entry, scheduler: str) -> dict[str, str]:
    """`plugin`, what it takes for it to matter, and `scheduler` unless it is one itself; the rest are defaults."""
    return {"scheduler": scheduler, **NEEDS.get(plugin.kind, {}), **BESIDE, plugin.kind: plugin.name}


def build(plugin: Entry, limits: dict[str, Any], scheduler: str, of: type[TestEngine] = TestEngine) -> Any:
    """An engine with `plugin` and a prefix cache; a Fault where it cannot be built."""
    with faults_named(plugin):
        try:
            policies = policies_with(plugin, scheduler)
            return of(policies=policies, registry=registry(), **{"num_host_blocks": 4, **limits})
        except ConfigError as error:
            problem = f"cannot be built with its defaults: {error} (--kvengine-with KIND=NAME sets others)"
            raise AssertionError(problem) from error


def schedulers(plugin: Entry) -> tuple[str, ...]:
    """Both ways of scheduling; itself where `plugin` is a scheduler."""
    if plugin.kind == "scheduler":
        return (plugin.name,)
    return (BESIDE["scheduler"],) if "scheduler" in BESIDE else ("chunked", "continuous")


def for_random_workloads(plugin: Entry, check: Check) -> None:
    """`check` on many; fails with a small one that shows a fault, as a script."""
    for scheduler in schedulers(plugin):
        chunks = splits(plugin, scheduler)

        def examine(case: Case, scheduler: str = scheduler, chunks: bool = chunks) -> None:
            with faults_named(plugin):
                check(case, scheduler, bound(case, chunks))

        found = small_fault(cases(chunks), examine)
        if found:
            fault, case = found
            program = indent(script(policies_with(plugin, scheduler), case, bound(case, chunks)), "    ")
            pytest.fail(f"{fault}\n\nA small workload that shows it:\n\n{program}", pytrace=False)


def splits(plugin: Entry, scheduler: str) -> bool:
    """Whether prefills are split under `plugin` and `scheduler`; fails where no engine can be built of them."""
    engines: list[TestEngine] = []
    fails_plainly(lambda: engines.append(build(plugin, {"max_model_len": 16}, scheduler)))
    return engines[0].engine.context.scheduler.chunks


def bound(case: Case, chunks: bool) -> int:
    """The steps that `case` may take."""
    return 30 + SLOWEST * steps_one_by_one(case, chunks)


def small_fault(some: st.SearchStrategy[Case], examine: Callable[[Case], None]) -> tuple[Fault, Case] | None:
    """A Fault that `examine` raises on one of `some`, and a workload from which no request can be left out."""
    faults: list[tuple[Fault, Case]] = []

    def note(case: Case) -> None:
        try:
            examine(case)
        except Fault as fault:
            faults.append((fault, case))
            raise

    try:
        MANY(given(some)(note))()
    except (Fault, Flaky):  # Flaky: a policy that tosses coins did not do it again
        for ask in faults[-1][1].asks:
            asks = tuple(other for other in faults[-1][1].asks if other is not ask)
            with suppress(Fault):
                note(replace(faults[-1][1], asks=asks or (ask,)))
        return faults[-1]
    return None


def fails_plainly(check: Callable[[], None]) -> None:
    """`check()`; what is wrong is for the author, and the frames of this suite are not."""
    said = ""
    try:
        check()
    except Fault as fault:
        said = str(fault)
    if said:
        pytest.fail(said, pytrace=False)


def test_its_yaml_holds_its_settings(plugin: Entry) -> None:
    """The file by which Hydra finds it names it, and every setting with its default."""

    def check() -> None:
        with faults_named(plugin):
            content = yaml.safe_load(settings_file(plugin.kind, plugin.name))
            file = f"conf/{plugin.kind}/{plugin.name}.yaml"
            said = content.pop("name", None)
            assert said == plugin.name, f"is not named in its {file}: name is {said}"
            defaults = plugin.schema()
            missing = {field.name for field in fields(plugin.schema)} - content.keys()
            assert not missing, f"is not whole in its {file}: {', '.join(sorted(missing))} is missing"
            assert from_mapping(plugin.schema, content, plugin.kind) == defaults, (
                f"is not the same in its {file}: that has {content}, its class {defaults}"
            )

    fails_plainly(check)


def test_it_is_deterministic(plugin: Entry) -> None:
    """Two runs of one workload decide the same in every step."""

    def check(case: Case, scheduler: str, max_steps: int) -> None:
        runs = (log_of(plugin, case, scheduler, max_steps) for _ in range(2))
        for number, (before, after) in enumerate(zip_longest(*runs)):
            assert before == after, f"is not deterministic: step {number} differs between two runs"

    for_random_workloads(plugin, check)


def log_of(plugin: Entry, case: Case, scheduler: str, max_steps: int) -> list[tuple]:
    """Every step's decisions, as far as the run goes."""
    engine = build(plugin, case.limits, scheduler)
    with suppress(AssertionError, KvEngineError):  # what is wrong with it is for the other tests to say
        drive(engine, case, max_steps)
    return [
        (step.step, step.scheduled, step.preempted, step.copies, step.swap_outs) for step in engine.log.steps
    ]


def test_it_serves_every_workload(plugin: Entry) -> None:
    """All requests end with the output each has alone, limits kept, nothing left, in bounded time."""

    def check(case: Case, scheduler: str, max_steps: int) -> None:
        engine = build(plugin, case.limits, scheduler)
        check_outputs(engine, case, drive(engine, case, max_steps))
        check_nothing_is_left(engine)

    for_random_workloads(plugin, check)


def test_it_accounts_for_every_block(plugin: Entry) -> None:
    """What it says of free blocks, slots and needs is so, by a count of the tables, and a refusal changes nothing."""

    def check(case: Case, scheduler: str, max_steps: int) -> None:
        drive(build(plugin, case.limits, scheduler, WatchedEngine), case, max_steps)

    for_random_workloads(plugin, check)


def test_it_keeps_nothing_of_what_has_ended(plugin: Entry) -> None:
    """After many requests, no policy still refers to more than a few of them."""
    limits: dict[str, Any] = {"block_size": 4, "num_blocks": 5, "num_host_blocks": 4, "max_model_len": 16}

    def check() -> None:
        before = num_ended()
        engine = build(plugin, {**limits, "max_num_seqs": 4}, schedulers(plugin)[-1])
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
            kept = num_ended() - before
            assert kept <= KEEPS_AT_MOST, (
                f"leaks: {kept} of 200 sequences that have ended are still referred to"
            )

    fails_plainly(check)


def num_ended() -> int:
    """Sequences in memory that have ended."""
    gc.collect()
    return sum(
        type(thing) is Sequence and thing.state is SequenceState.FINISHED for thing in gc.get_objects()
    )


def test_a_step_costs_the_same_however_many_wait(plugin: Entry) -> None:
    """With many more waiting, a step runs hardly more lines of Python: it does not look at each of them."""

    def check() -> None:
        few, many = 64, 1024
        with faults_named(plugin):
            for scheduler in schedulers(plugin):
                engines = (build(plugin, {"max_num_seqs": 4}, scheduler) for _ in range(2))
                small, large = (lines_per_step(*pair) for pair in zip(engines, (few, many), strict=True))
                assert large - small < (many - few) / 4, (
                    f"visits everybody who waits: a step runs {small} lines of Python with {few} waiting, "
                    f"{large} with {many}"
                )

    fails_plainly(check)


def test_it_keeps_the_order_and_everybody_in_it(plugin: Entry) -> None:
    """peek, len and iteration agree, whatever comes and goes; what is not there is an error."""

    @MANY
    @given(moves=st.lists(st.integers(0, 99), max_size=40))
    def check(moves: list[int]) -> None:
        with faults_named(plugin):
            check_queue(build(plugin, {}, "chunked").engine.context.waiting, moves)

    fails_plainly(check)


def test_it_predicts_numbers(plugin: Entry) -> None:
    """Whatever it has seen, a prediction is a finite number of tokens."""

    def check() -> None:
        with faults_named(plugin):
            check_predictions(build(plugin, {}, "chunked").engine.context.policies.predictor)

    fails_plainly(check)


def test_it_computes_what_the_reference_computes(plugin: Entry) -> None:
    """Attention over random batches, shapes and a poisoned pool, against kvengine_kernels.reference."""
    from kvengine.testing.attention_cases import check_backend

    @settings(MANY, max_examples=-(-MANY.max_examples // 8))
    @given(seed=st.integers(0, 2**31))
    def check(seed: int) -> None:
        with faults_named(plugin):
            check_backend(plugin.factory(plugin.schema(), Build()).backend(), seed)

    fails_plainly(check)
