"""One policy, two worlds: with equal step durations the null and the torch executor leave the same step log."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import pytest

from kvengine.assemble import blueprint, choose
from kvengine.compose import composer
from kvengine.core.plan import StepPlan, StepResult
from kvengine.core.reasons import Reason
from kvengine.engine.driver import Driver
from kvengine.engine.recording import PoolState
from kvengine.executors.config import TorchConfig
from kvengine.policies import Build, Executor
from kvengine.registry import Registry, discover
from kvengine.testing.step_log import StepLog

STEP_MS = 10.0
SCHEDULERS, ALLOCATORS = (discover().names(kind) for kind in ("scheduler", "allocator"))
WAITS = "static_that_waits"
SETTINGS: dict[str, dict[str, Any]] = {
    WAITS: {"name": "static", "batch_size": 4, "max_wait_s": 0.035},
    "static": {"name": "static", "deliver": "token"},
}


class FixedTime:
    """An executor whose every step is said to take STEP_MS."""

    virtual_time = True

    def __init__(self, inner: Executor) -> None:
        self._inner = inner

    def execute(self, plan: StepPlan) -> StepResult:
        return StepResult(self._inner.execute(plan).token_ids, round(STEP_MS * 1e6))

    def close(self) -> None:
        self._inner.close()


class EventLog(StepLog):
    """A StepLog that also keeps when each step ended, every decision, and when each sequence ended."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[Any, ...]] = []
        self.tokens: set[int] = set()
        self.reasons: set[str] = set()

    def step(self, plan: StepPlan, result: StepResult, pool: PoolState, end_ns: int) -> None:
        super().step(plan, result, pool, end_ns)
        self.tokens.update(*result.token_ids)
        self.reasons.update(d.reason for d in plan.decisions)
        decisions = [(d.action, d.seq and d.seq.id, *d[2:]) for d in plan.decisions]
        self.events.append((self.steps[-1], end_ns, plan.recomputed_tokens, decisions))

    def finished(self, seq: Any, now: int) -> None:
        super().finished(seq, now)
        self.events.append(
            (seq.id, now, seq.finish_reason, seq.num_output_tokens, tuple(map(tuple, seq.token_runs)))
        )


@pytest.fixture(scope="module")
def registry() -> Registry:
    """All there is, and `fixed_torch`: the torch executor on a clock that counts steps."""

    def fixed_torch(config: TorchConfig, build: Build) -> FixedTime:
        return FixedTime(known.get("executor", "torch").factory(config, build))

    known = discover()
    known.add("executor", "fixed_torch", fixed_torch, schema=TorchConfig, summary="torch, every step as long")
    return known


@pytest.fixture(scope="module")
def base() -> dict[str, Any]:
    """Twenty requests of known lengths that arrive while others run, for a pool that is short of blocks."""
    with composer() as compose:
        return compose(
            [
                "model=tiny",
                "workload=synthetic",
                "workload.num_requests=20",
                "workload.seed=3",
                "workload.prompt_len={distribution: uniform, min: 1, max: 60}",
                "workload.output_len={distribution: uniform, min: 1, max: 30}",
                "workload.arrival={process: poisson, rate: 40.0}",
                "kv.block_size=8",
                "engine.num_blocks=32",
                "engine.max_num_seqs=6",
                "engine.max_model_len=128",
            ]
        )


def events(config: Mapping[str, Any], registry: Registry, executor: Mapping[str, Any]) -> EventLog:
    """What one run of `config` in one of the worlds leaves."""
    plan = blueprint({**config, "executor": executor}, registry)
    log = EventLog()
    engine = plan.engine(log)
    assert engine.executor.virtual_time
    report = Driver(engine, plan.workload, on_outputs=lambda outputs: engine.context.check_integrity()).run()
    engine.close()
    assert not report.rejected
    assert len(log.finished_sequences) == plan.workload.num_requests
    return log


@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.parametrize("scheduler", [*SCHEDULERS, WAITS])
def test_step_logs_are_identical(
    scheduler: str, allocator: str, base: dict[str, Any], registry: Registry
) -> None:
    config = deepcopy(base)
    config["scheduler"] = SETTINGS.get(scheduler, {"name": scheduler})
    config["allocator"] = {"name": allocator}
    entry, settings = choose(registry, config, "scheduler")
    if entry.factory(settings, Build()).chunks:
        config["engine"]["max_num_batched_tokens"] = 24
    imagined = events(config, registry, {"name": "null", "step_ms": STEP_MS})
    computed = events(config, registry, {"name": "fixed_torch", "device": "cpu", "num_threads": 1})
    assert computed.events == imagined.events
    assert len(computed.tokens) > 10, "the torch executor computed nothing"
    assert len(imagined.tokens) == 1


def test_the_workload_makes_policies_work(base: dict[str, Any], registry: Registry) -> None:
    log = events(base, registry, {"name": "null", "step_ms": STEP_MS})
    assert log.num_preemptions
    assert {Reason.NO_BLOCKS, Reason.PREEMPTED_FOR} <= log.reasons
