"""One sequence's life as phases: queued, prefill, decode, preempted; and the steps it was in."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from kvengine.core.decision import Action

Key = tuple[str, int]
"""Request id and choice."""


@dataclass(slots=True)
class Life:
    """`phases` are (name, start_ns, end_ns) in order, without gaps; `steps` are [first, last] step numbers."""

    request: dict[str, Any]
    phases: list[tuple[str, int, int]] = field(default_factory=list)
    steps: list[tuple[int, int]] = field(default_factory=list)


def lives(tables: dict[str, pa.Table]) -> dict[Key, Life]:
    """Every sequence that was not rejected, from the tables `requests`, `tokens`, `decisions` and `steps`."""
    found = {}
    events, runs = _events(tables["decisions"]), _token_runs(tables["tokens"])
    numbers, ends = tables["steps"]["step"].to_numpy(), tables["steps"]["end_ns"].to_numpy()
    for row in tables["requests"].to_pylist():
        if row["status"] == "rejected":
            continue
        key = (row["request_id"], row["choice"])
        found[key] = _life(row, events[key], runs[key], numbers, ends)
    return found


def _events(decisions: pa.Table) -> dict[Key, list[tuple[str, int, int]]]:
    """(action, time, step) of every admission, resumption and preemption, by sequence."""
    events: dict[Key, list[tuple[str, int, int]]] = defaultdict(list)
    wanted = (Action.ADMIT, Action.RESUME, Action.PREEMPT)
    for row in decisions.to_pylist():
        if row["action"] in wanted:
            events[row["request_id"], row["choice"]].append((row["action"], row["time_ns"], row["first_step"]))
    return events


def _token_runs(tokens: pa.Table) -> dict[Key, list[tuple[int, int]]]:
    """[first, last] step of every run of tokens, by sequence."""
    runs: dict[Key, list[tuple[int, int]]] = defaultdict(list)
    for row in tokens.to_pylist():
        last = row["first_step"] + row["num_steps"] - 1
        runs[row["request_id"], row["choice"]].append((row["first_step"], last))
    return runs


def _life(
    row: dict[str, Any],
    events: list[tuple[str, int, int]],
    runs: list[tuple[int, int]],
    numbers: np.ndarray,
    ends: np.ndarray,
) -> Life:
    life = Life(row)
    over_ns = row["finished_ns"] if row["finished_ns"] is not None else int(ends[-1]) if len(ends) else row["arrival_ns"]
    if not events:
        life.phases.append(("queued", row["arrival_ns"], over_ns))
        return life
    life.phases.append(("queued", row["arrival_ns"], events[0][1]))
    for i, (action, time_ns, step) in enumerate(events):
        until_ns, until_step = (events[i + 1][1], events[i + 1][2]) if i + 1 < len(events) else (over_ns, None)
        if action == Action.PREEMPT:
            life.phases.append(("preempted", time_ns, until_ns))
            continue
        inside = [r for r in runs if r[0] >= step and (until_step is None or r[0] < until_step)]
        if not inside:
            life.phases.append(("prefill", time_ns, until_ns))
            life.steps.append((step, (until_step or step + 1) - 1))
            continue
        first_ns = int(ends[np.searchsorted(numbers, inside[0][0])])
        life.phases.append(("prefill", time_ns, first_ns))
        if until_ns > first_ns:
            life.phases.append(("decode", first_ns, until_ns))
        life.steps += [(step, inside[0][0]), *inside]
    return life
