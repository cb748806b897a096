"""One sequence's life as phases: queued, prefill, decode, preempted; and the steps it was in."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from kvengine.core.decision import Action

Key = tuple[str, int]
"""Request id and choice."""


@dataclass(slots=True)
class Life:
    """`phases` are (name, start_ns, end_ns) in order, without gaps; `steps` are [first, last] step numbers.

    Of a prefill in several chunks, the tables hold the first and the last step; of those between, `steps` has
    the ones that computed prefill tokens, which is exact while one prefill at a time is unfinished (as under
    every built-in scheduler).
    """

    request: dict[str, Any]
    phases: list[tuple[str, int, int]] = field(default_factory=list)
    steps: list[tuple[int, int]] = field(default_factory=list)


class _Event(NamedTuple):
    """A sequence entered (`enters`) or was preempted, in the plan of `step` at `time_ns`."""

    enters: bool
    time_ns: int
    step: int


class _Steps:
    """What phases need of the table `steps`, whose rows are numbered from 0 without gaps."""

    def __init__(self, steps: pa.Table) -> None:
        self._ends = steps["end_ns"].to_numpy()
        self._prefills = steps["num_prefill_tokens"].to_numpy() > 0

    @property
    def last_end_ns(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def knows(self, step: int) -> bool:
        """Whether the table holds `step`: that of a killed run may lack the last ones."""
        return step < len(self._ends)

    def end_ns(self, step: int) -> int:
        return int(self._ends[step])

    def number_after(self, time_ns: int) -> int:
        """The first step that ended after `time_ns`, or the number that one would have."""
        return int(np.searchsorted(self._ends, time_ns, side="right"))

    def of_prefill(self, first: int, stop: int) -> list[tuple[int, int]]:
        """The steps from `first` until before `stop` that a prefill which entered in `first` was in."""
        if first >= stop:  # preempted by the plan that admitted it
            return []
        between = np.flatnonzero(self._prefills[first + 1 : stop]) + first + 1
        return [(step, step) for step in (first, *between.tolist())]


def lives(tables: dict[str, pa.Table]) -> dict[Key, Life]:
    """Every sequence that was not rejected, from the tables `requests`, `tokens`, `decisions` and `steps`."""
    steps = _Steps(tables["steps"])
    events, runs = _events(tables["decisions"]), _token_runs(tables["tokens"])
    found = {}
    for row in tables["requests"].to_pylist():
        if row["status"] != "rejected":
            key = (row["request_id"], row["choice"])
            found[key] = _life(row, events[key], [run for run in runs[key] if steps.knows(run[0])], steps)
    return found


def _events(decisions: pa.Table) -> dict[Key, list[_Event]]:
    """Every admission, resumption and preemption, by sequence and in order: who leaves in the plan that let it
    in left after it."""
    events: dict[Key, list[_Event]] = defaultdict(list)
    names = ("request_id", "choice", "action", "time_ns", "first_step")
    for request_id, choice, action, time_ns, step in zip(
        *(decisions[name].to_pylist() for name in names), strict=True
    ):
        if action in (Action.ADMIT, Action.RESUME, Action.FORK, Action.PREEMPT, Action.SWAP_OUT):
            runs = action not in (Action.PREEMPT, Action.SWAP_OUT)
            events[request_id, choice].append(_Event(runs, time_ns, step))
    for of_sequence in events.values():
        of_sequence.sort(key=lambda event: (event.step, not event.enters))
    return events


def _token_runs(tokens: pa.Table) -> dict[Key, list[tuple[int, int]]]:
    """[first, last] step of every run of tokens, by sequence."""
    runs: dict[Key, list[tuple[int, int]]] = defaultdict(list)
    names = ("request_id", "choice", "first_step", "num_steps")
    for request_id, choice, first, count in zip(*(tokens[name].to_pylist() for name in names), strict=True):
        runs[request_id, choice].append((first, first + count - 1))
    return runs


def _life(row: dict[str, Any], events: list[_Event], runs: list[tuple[int, int]], steps: _Steps) -> Life:
    life = Life(row)
    begin_ns, over_ns = row["arrival_ns"], row["finished_ns"]
    if over_ns is None:
        over_ns = max(begin_ns, steps.last_end_ns, *(event.time_ns for event in events))
    life.phases.append(("queued", begin_ns, events[0].time_ns if events else over_ns))
    over = _Event(False, over_ns, steps.number_after(over_ns))
    for event, until in zip(events, [*events[1:], over], strict=False):
        if event.enters:
            inside = [run for run in runs if event.step <= run[0] < until.step]
            _add_running(life, event, until, inside, steps)
        else:
            life.phases.append(("preempted", event.time_ns, until.time_ns))
    return life


def _add_running(
    life: Life, event: _Event, until: _Event, inside: list[tuple[int, int]], steps: _Steps
) -> None:
    """Add what lies between entering and `until`: a prefill, and a decode if it gave the tokens `inside`."""
    if not inside:
        life.phases.append(("prefill", event.time_ns, until.time_ns))
        life.steps += steps.of_prefill(event.step, until.step)
        return
    first = inside[0][0]
    first_token_ns = steps.end_ns(first)
    life.phases.append(("prefill", event.time_ns, first_token_ns))
    if until.time_ns > first_token_ns:
        life.phases.append(("decode", first_token_ns, until.time_ns))
    life.steps += [*steps.of_prefill(event.step, first), *inside]
