"""Every pair of policies, whatever the workload: right outputs, limits kept, invariants after every step, an end.

Six kinds of policies have thousands of combinations; a covering array, made from the registry, holds every pair of
choices. Whatever is not in it is refused at assembly, by a rule of kvengine/combinations.py.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from kvengine.core.errors import ConfigError
from kvengine.registry import discover
from kvengine.testing.cases import Case, cases, check_nothing_is_left, check_outputs, drive, steps_one_by_one
from kvengine.testing.engines import TestEngine

REGISTRY = discover()
KINDS = ("scheduler", "queue", "admission", "victim", "preemption", "allocator")
Combination = tuple[str, ...]
"""A choice for each of KINDS."""

SLOWEST = 4
"""So many times the steps of running one by one may a workload take (and 30 more)."""


def policies(combination: Combination) -> dict[str, str]:
    return dict(zip(KINDS, combination, strict=True))


@cache
def refused(combination: Combination) -> str | None:
    """Why assembly refuses it; None if it does not."""
    try:
        TestEngine(registry=REGISTRY, policies=policies(combination), num_host_blocks=4)
    except ConfigError as error:
        return str(error)
    return None


def pairs_of(combination: Combination) -> set[tuple[tuple[int, str], tuple[int, str]]]:
    return set(combinations(enumerate(combination), 2))


@cache
def covering_array() -> tuple[list[Combination], set[Any]]:
    """Combinations that make sense and hold every pair of choices, and the pairs that no such one holds."""
    chance = random.Random(0)
    choices = [REGISTRY.names(kind) for kind in KINDS]
    every = list(all_pairs(choices))
    missing, rows, without = set(every), [], set()
    for pair in every:
        if pair not in missing:
            continue
        best = max(
            (row for row in filled(pair, choices, chance) if refused(row) is None),
            key=lambda row: len(pairs_of(row) & missing),
            default=None,
        )
        if best is None:
            without.add(pair)
            missing.discard(pair)
        else:
            rows.append(best)
            missing -= pairs_of(best)
    return rows, without


def all_pairs(choices: list[list[str]]) -> Iterator[tuple[tuple[int, str], tuple[int, str]]]:
    for i, j in combinations(range(len(choices)), 2):
        for a, b in product(choices[i], choices[j]):
            yield (i, a), (j, b)


def filled(pair: Any, choices: list[list[str]], chance: random.Random) -> Iterator[Combination]:
    """Combinations that hold `pair`, the rest drawn."""
    for _ in range(40):
        row = [chance.choice(names) for names in choices]
        for place, name in pair:
            row[place] = name
        yield tuple(row)


def serve(combination: Combination, case: Case, chunks: bool) -> None:
    engine = TestEngine(registry=REGISTRY, policies=policies(combination), **case.limits)
    delivered = drive(engine, case, max_steps=30 + SLOWEST * steps_one_by_one(case, chunks))
    check_outputs(engine, case, delivered)
    check_nothing_is_left(engine)


@cache
def chunks_under(scheduler: str) -> bool:
    engine = TestEngine(registry=REGISTRY, policies={"scheduler": scheduler})
    return engine.engine.context.scheduler.chunks


@pytest.mark.parametrize("combination", covering_array()[0], ids="-".join)
def test_every_pair_of_policies_serves_every_workload(combination: Combination) -> None:
    chunks = chunks_under(combination[0])

    @settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    @given(case=cases(chunks))
    def serves(case: Case) -> None:
        serve(combination, case, chunks)

    serves()


def test_pairs_without_meaning_are_those_that_a_rule_refuses() -> None:
    without = {tuple(f"{KINDS[place]}={name}" for place, name in pair) for pair in covering_array()[1]}
    assert without == meaningless_pairs()


def meaningless_pairs() -> set[tuple[str, str]]:
    """What the rules say about two choices alone, written down by hand."""
    pairs = set()
    if "mlfq" in REGISTRY.names("scheduler"):  # it orders the waiting, and preempts
        pairs |= {("scheduler=mlfq", f"queue={name}") for name in REGISTRY.names("queue") if name != "fcfs"}
        pairs.add(("scheduler=mlfq", "preemption=never"))
    if "longest_prefix" in REGISTRY.names("queue"):  # which needs what is cached
        contiguous = [name for name in REGISTRY.names("allocator") if name != "paged"]
        pairs |= {("queue=longest_prefix", f"allocator={name}") for name in contiguous}
    return pairs


@st.composite
def meaningful(draw: st.DrawFn) -> Combination:
    """Any combination that makes sense, all equally likely."""
    chance = random.Random(draw(st.integers(0, 2**48)))
    while True:
        combination = tuple(chance.choice(REGISTRY.names(kind)) for kind in KINDS)
        if refused(combination) is None:
            return combination


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_ten_thousand_random_combinations(part: int) -> None:
    @seed(part)
    @settings(max_examples=1000, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
    @given(combination=meaningful(), data=st.data())
    def serves(combination: Combination, data: st.DataObject) -> None:
        chunks = chunks_under(combination[0])
        serve(combination, data.draw(cases(chunks)), chunks)

    serves()
