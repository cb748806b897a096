"""How unequally tenants were served while they all had work waiting."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations

import numpy as np
import pyarrow as pa

from kvengine.core.decision import Action
from kvengine.telemetry.phases import LEAVES, Key, actions

OUTPUT_WEIGHT = 2
"""What an output token counts as service; a prompt token counts 1."""

MAX_TENANTS = 32
"""The gap is that between so many tenants at most: those who had requests waiting for the longest time."""

Interval = tuple[int, int]
"""[begin, end) in ns."""


def fairness_gap(tables: dict[str, pa.Table]) -> int | None:
    """The largest difference between the service that two tenants got in an interval throughout which both had a
    request waiting, in tokens; None with fewer than two tenants.

    Service is the prompt tokens that are to be computed when a request is first admitted, and twice the output
    tokens when the step that computed them ends; an interval contains what happens at its beginning, not at its
    end. Source: Sheng et al. (VTC), OSDI 2024; under their scheduler it is at most twice the larger of the longest
    prompt and OUTPUT_WEIGHT times the tokens that a batch holds.
    """
    rows = [row for row in tables["requests"].to_pylist() if row["status"] != "rejected"]
    if len({row["tenant"] for row in rows}) < 2 or not len(tables["steps"]):
        return None
    waiting = _waiting(rows, tables)
    longest = sorted(waiting, key=lambda name: sum(begin - end for begin, end in waiting[name]))[:MAX_TENANTS]
    service = _Service(rows, tables)
    given = {tenant: service.of(tenant) for tenant in longest}
    gap = 0
    for one, other in combinations(longest, 2):
        difference = given[one] - given[other]
        for begin, end in _common(waiting[one], waiting[other]):
            gap = max(gap, service.spread(difference, begin, end))
    return gap


class _Service:
    """The service that tenants got up to every moment at which any was given."""

    def __init__(self, rows: list[dict], tables: dict[str, pa.Table]) -> None:
        self._begins, self._ends = (tables["steps"][name].to_numpy() for name in ("start_ns", "end_ns"))
        self._admissions: dict[str | None, list[tuple[int, int]]] = defaultdict(list)
        tenants: dict[Key, str | None] = {}
        for row in rows:
            tenants[row["request_id"], row["choice"]] = row["tenant"]
            if row["admitted_ns"] is not None:
                tokens = row["num_prompt_tokens"] - row["num_cached_tokens"]
                self._admissions[row["tenant"]].append((row["admitted_ns"], tokens))
        admitted = [moment for given in self._admissions.values() for moment, _ in given]
        self._moments = np.unique(np.concatenate([np.array(admitted, np.int64), self._ends]))
        self._runs: dict[str | None, list[tuple[int, int]]] = defaultdict(list)
        names = ("request_id", "choice", "first_step", "num_steps")
        for request_id, choice, first, count in zip(
            *(tables["tokens"][name].to_pylist() for name in names), strict=True
        ):
            if (request_id, choice) in tenants and first < len(self._ends):
                self._runs[tenants[request_id, choice]].append((first, min(first + count, len(self._ends))))

    def of(self, tenant: str | None) -> np.ndarray:
        """Tokens given to `tenant` up to and with every moment."""
        given = np.zeros(len(self._moments), np.int64)
        admissions = np.array(self._admissions[tenant], np.int64).reshape(-1, 2)
        np.add.at(given, np.searchsorted(self._moments, admissions[:, 0]), admissions[:, 1])
        runs = np.array(self._runs[tenant], np.int64).reshape(-1, 2)
        change = np.zeros(len(self._ends) + 1, np.int64)
        np.add.at(change, runs[:, 0], OUTPUT_WEIGHT)
        np.subtract.at(change, runs[:, 1], OUTPUT_WEIGHT)
        np.add.at(given, np.searchsorted(self._moments, self._ends), np.cumsum(change)[:-1])
        return np.cumsum(given)

    def spread(self, values: np.ndarray, begin: int, end: int) -> int:
        """The largest change of `values`, one for each moment, within any part of [begin, end)."""
        low, high = np.searchsorted(self._moments, [begin, end])
        inside = values[max(low - 1, 0) : high]
        if not low:
            inside = np.concatenate([[0], inside])
        return int(inside.max() - inside.min())


def _waiting(rows: list[dict], tables: dict[str, pa.Table]) -> dict[str | None, list[Interval]]:
    """For every tenant the intervals in which it has a request waiting, its preempted ones among them."""
    over = int(tables["steps"]["end_ns"].to_numpy().max())
    found: dict[str | None, list[Interval]] = {row["tenant"]: [] for row in rows}
    owners = {(row["request_id"], row["choice"]): row for row in rows}
    for row in rows:
        ends = (row["admitted_ns"], row["finished_ns"], max(over, row["arrival_ns"]))
        end = next(moment for moment in ends if moment is not None)
        found[row["tenant"]].append((row["arrival_ns"], end))
    left: dict[Key, int] = {}
    moves = actions(tables["decisions"], *LEAVES, Action.RESUME)
    for move in sorted(moves, key=lambda row: row["first_step"]):
        key = (move["request_id"], move["choice"])
        if move["action"] in LEAVES:
            left[key] = move["time_ns"]
        elif key in left and key in owners:
            found[owners[key]["tenant"]].append((left.pop(key), move["time_ns"]))
    for key, begin in left.items():
        if key in owners:
            end = owners[key]["finished_ns"]
            found[owners[key]["tenant"]].append((begin, over if end is None else end))
    return {tenant: _merged(intervals) for tenant, intervals in found.items()}


def _merged(intervals: list[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > begin:
            merged.append((begin, end))
    return merged


def _common(one: list[Interval], other: list[Interval]) -> Iterator[Interval]:
    """Where both of two lists of intervals, each in order and without overlaps, hold."""
    i = j = 0
    while i < len(one) and j < len(other):
        begin, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if begin < end:
            yield begin, end
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
