"""Every combination of policies and sizes that the registry offers, and one run of each on the torch executor."""

import json
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields
from itertools import combinations as choose
from itertools import product
from pathlib import Path
from typing import Any

from greedy_reference import Answer, Ask

from kvengine.assemble import blueprint
from kvengine.core.limits import EngineLimits
from kvengine.core.plan import RequestOutput
from kvengine.core.shapes import KvShape, PrefixCacheConfig
from kvengine.engine.driver import Driver
from kvengine.engine.engine import Engine
from kvengine.policies import Allocator, Build, Mechanism, Preemption
from kvengine.registry import Registry, discover
from kvengine.testing.step_log import StepLog


class SwapAlways(Preemption):
    """The preemption policy of shared combinations: to the host, as long as it fits."""

    def mechanism(self, victim: object) -> Mechanism:
        return Mechanism.SWAP


def registry_with_swap() -> Registry:
    registry = discover()
    registry.add("preemption", "swap_always", lambda config, build: SwapAlways(), summary="of these tests")
    return registry


REGISTRY = registry_with_swap()
BLOCK_SIZES = (1, 16)
TOKEN_BUDGETS = (None, 64, 7)
ATTENTIONS = ("torch", "sdpa")
UNLIMITED = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """One way to serve; `token_budget=None` is no limit, `scarce` a pool that just holds the longest request.

    `shared`: with the prefix cache, two choices of every request (forked, and copied on write), and victims that
    are swapped to a host pool of the same size; else nothing of it, and victims are recomputed.
    """

    scheduler: str
    allocator: str
    block_size: int
    token_budget: int | None
    scarce: bool
    attention: str
    shared: bool = False

    def __str__(self) -> str:
        budget = "any" if self.token_budget is None else self.token_budget
        pool = "scarce" if self.scarce else "ample"
        name = f"{self.scheduler}-{self.allocator}-block{self.block_size}-budget_{budget}-{pool}-{self.attention}"
        return name + ("-shared" if self.shared else "")

    @property
    def num_choices(self) -> int:
        return 2 if self.shared else 1

    def settings(self) -> set[tuple[str, Any]]:
        return {(field.name, getattr(self, field.name)) for field in fields(self)}


def scheduler_chunks(name: str, registry: Registry = REGISTRY) -> bool:
    """Whether the scheduler splits prefills."""
    entry = registry.get("scheduler", name)
    return entry.factory(entry.schema(), Build()).chunks


def allocator_grows(name: str, registry: Registry = REGISTRY) -> bool:
    """Whether sequences ask for more blocks as they get longer."""
    return _allocator(name, registry).grows


def _allocator(name: str, registry: Registry) -> Allocator:
    entry = registry.get("allocator", name)
    limits = EngineLimits(max_num_seqs=1, max_num_batched_tokens=16, max_model_len=16)
    cache = PrefixCacheConfig(mode="off")
    build = Build(kv=KvShape(num_blocks=16, block_size=16, dtype="fp32"), limits=limits, prefix_cache=cache)
    return entry.factory(entry.schema(), build)


def allocator_shares(name: str, registry: Registry = REGISTRY) -> bool:
    """Whether blocks can be shared."""
    return _allocator(name, registry).shares


def every_combination(attentions: Iterable[str] = ATTENTIONS) -> list[Combination]:
    """The full cross product; budgets only where prefills are split, scarce pools only where sequences grow."""
    found = []
    for scheduler, allocator in product(REGISTRY.names("scheduler"), REGISTRY.names("allocator")):
        budgets = TOKEN_BUDGETS if scheduler_chunks(scheduler) else TOKEN_BUDGETS[:1]
        pools = (False, True) if allocator_grows(allocator) else (False,)
        shared = (False, True) if allocator_shares(allocator) else (False,)
        found += [
            Combination(
                scheduler=scheduler,
                allocator=allocator,
                block_size=block_size,
                token_budget=budget,
                scarce=scarce,
                attention=attention,
                shared=share,
            )
            for block_size, budget, scarce, attention, share in product(
                BLOCK_SIZES, budgets, pools, attentions, shared
            )
        ]
    return found


def covering(every: Sequence[Combination], offset: int) -> list[Combination]:
    """Few of `every` that hold each pair of settings which one of them holds; `offset` varies which."""

    def pairs(combination: Combination) -> set[frozenset[tuple[str, Any]]]:
        return {frozenset(pair) for pair in choose(combination.settings(), 2)}

    rotated = [*every[offset % len(every) :], *every[: offset % len(every)]]
    missing = set().union(*map(pairs, rotated))
    chosen = []
    while missing:
        best = max(rotated, key=lambda combination: len(pairs(combination) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


@dataclass(frozen=True, slots=True)
class Outcome:
    """New tokens of each choice, and finish reason of the first one, by place of the request; and the steps."""

    choices: list[dict[int, list[int]]]
    finish_reasons: dict[int, str]
    log: StepLog
    windowed: bool
    """Whether blocks behind a sliding window were given up: then fewer are needed than the longest request has."""

    @property
    def ran_together(self) -> bool:
        """Whether any step computed more than one sequence."""
        return any(len(step.scheduled) > 1 for step in self.log.steps)

    def moved(self, kind: str) -> int:
        """Blocks copied: `copies`, `swap_outs` or `swap_ins`."""
        return sum(len(getattr(step, kind)) for step in self.log.steps)


def workload_file(path: Path, asks: Sequence[Ask]) -> Path:
    """`asks` as a file for workload=jsonl."""
    lines = [json.dumps({"prompt_token_ids": ask.prompt, "max_tokens": ask.max_tokens}) for ask in asks]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def configured(
    base: Mapping[str, Any], combination: Combination, asks: Sequence[Ask], max_model_len: int
) -> dict[str, Any]:
    """`base` (a whole configuration) with the combination's policies and a pool for `asks`."""
    config = deepcopy(dict(base))
    config |= {kind: {"name": getattr(combination, kind)} for kind in ("scheduler", "allocator", "attention")}
    config["kv"]["block_size"] = combination.block_size
    config["prefix_cache"] = {"mode": "auto" if combination.shared else "off"}
    longest = max(len(ask.prompt) + ask.max_tokens - 1 for ask in asks)
    slots = longest if combination.scarce else 8 * max_model_len
    config["engine"] |= {
        "max_num_batched_tokens": combination.token_budget or UNLIMITED,
        "max_model_len": max_model_len,
        "num_blocks": -(-slots // combination.block_size),
    }
    if combination.shared:
        config["preemption"] = {"name": "swap_always"}
        config["engine"]["num_host_blocks"] = -(-slots // combination.block_size)
        sampling = config["workload"].get("sampling", {"temperature": 0.0})
        config["workload"]["sampling"] = {**sampling, "n": combination.num_choices}
    return config


def with_lengths(
    config: dict[str, Any],
    combination: Combination,
    asks: Sequence[Ask],
    answers: Sequence[Answer],
    path: Path,
) -> dict[str, Any]:
    """`config`, with a workload of `asks` that says how long each answer is where the allocator wants to know."""
    if not _allocator(combination.allocator, REGISTRY).needs_lengths:
        return config
    lines = [
        json.dumps({"prompt_token_ids": ask.prompt, "output_tokens": len(answer.tokens)})
        for ask, answer in zip(asks, answers, strict=True)
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    return config | {"workload": {"name": "jsonl", "path": str(path)}}


def serve(config: Mapping[str, Any]) -> Outcome:
    """Run `config` to its end, every request served and every block accounted for after every step."""
    plan = blueprint(config, REGISTRY)
    num_choices = config["workload"].get("sampling", {}).get("n", 1)
    windowed = plan.kv.sliding_window is not None
    outcome = Outcome([{} for _ in range(num_choices)], {}, StepLog(), windowed)
    engine = plan.engine(outcome.log)
    report = Driver(engine, plan.workload, on_outputs=lambda outputs: _take(engine, outputs, outcome)).run()
    engine.close()
    assert not report.rejected
    assert len(outcome.finish_reasons) == plan.workload.num_requests
    assert engine.context.num_running == len(engine.context.waiting) == len(engine.context.held) == 0
    assert engine.context.num_free_blocks == engine.context.allocator.num_blocks
    return outcome


def _take(engine: Engine, outputs: list[RequestOutput], outcome: Outcome) -> None:
    engine.context.check_integrity()
    for output in outputs:
        place = output.sequence.request.ordinal
        assert place is not None
        outcome.choices[output.choice].setdefault(place, []).extend(output.token_ids)
        if output.choice:
            continue
        assert place not in outcome.finish_reasons, f"request {place} goes on after its end"
        if output.finish_reason is not None:
            outcome.finish_reasons[place] = output.finish_reason
