"""Which choices make no sense together: the rules that assembly checks, listed once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvengine.core.errors import ConfigError
from kvengine.engine.policy_set import PolicySet
from kvengine.policies import Workload


@dataclass(frozen=True, slots=True)
class Rule:
    """`broken(policies)` says whether the choice of `kind` makes no sense with the others; `problem` why, with
    the names of choices in braces, and what to take instead."""

    kind: str
    broken: Callable[[PolicySet], bool]
    problem: str


@dataclass(frozen=True, slots=True)
class WorkloadRule:
    """The same between a policy and the workload that it is to serve."""

    kind: str
    broken: Callable[[PolicySet, Workload], bool]
    problem: str


RULES = (
    Rule(
        "preemption",
        lambda of: not of.preemption.preempts and of.allocator.grows and not of.admission.reserves_worst_case,
        "admission={admission} lets in who may not be able to grow under allocator={allocator}, and nobody would "
        "give way; take admission=reserve_worst_case, an allocator that reserves, or preemption=recompute",
    ),
    Rule(
        "preemption",
        lambda of: not of.preemption.preempts and of.scheduler.preempts,
        "scheduler={scheduler} preempts by itself; take preemption=recompute",
    ),
    Rule(
        "queue",
        lambda of: of.scheduler.orders and of.names["queue"] != "fcfs",
        "scheduler={scheduler} orders the waiting by itself; take queue=fcfs",
    ),
    Rule(
        "queue",
        lambda of: of.queue.needs_cache and not of.allocator.caches,
        "orders by what is cached, and there is no prefix cache with allocator={allocator} and this prefix_cache; "
        "take allocator=paged prefix_cache=on, or queue=fcfs",
    ),
)

WORKLOAD_RULES = (
    WorkloadRule(
        "allocator",
        lambda of, workload: of.allocator.needs_lengths and not workload.knows_lengths,
        "reserves by the true output length, which workload={workload} does not know; "
        "take workload=synthetic, or allocator=contiguous_max",
    ),
    WorkloadRule(
        "queue",
        lambda of, workload: of.queue.needs_lengths and not workload.knows_lengths,
        "orders by the true output length (predictor={predictor}), which workload={workload} does not know; "
        "take workload=synthetic, or another predictor",
    ),
    WorkloadRule(
        "workload",
        lambda of, workload: workload.forks and not of.allocator.shares,
        "branches live requests, and allocator={allocator} does not share blocks; take allocator=paged",
    ),
    WorkloadRule(
        "workload",
        lambda of, workload: workload.forks and of.scheduler.delivers_at_batch_end,
        "branches live requests, and scheduler={scheduler} delivers when they have ended; "
        "take scheduler.deliver=token",
    ),
    WorkloadRule(
        "workload",
        lambda of, workload: workload.forks and not of.preemption.preempts,
        "branches live requests, for which nobody reserved, and preemption={preemption}; "
        "take preemption=recompute",
    ),
)


def check_policies(policies: PolicySet) -> None:
    """ConfigError for the first rule between policies that is broken."""
    for rule in RULES:
        if rule.broken(policies):
            raise ConfigError(rule.kind, policies.names[rule.kind], rule.problem.format(**policies.names))


def check_workload(policies: PolicySet, workload: Workload, name: str) -> None:
    """ConfigError for the first rule that the workload of that `name` breaks with the policies."""
    names = {**policies.names, "workload": name}
    for rule in WORKLOAD_RULES:
        if rule.broken(policies, workload):
            raise ConfigError(rule.kind, names[rule.kind], rule.problem.format(**names))
