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

LEAVES = (Action.PREEMPT, Action.SWAP_OUT)
ENTERS = (Action.ADMIT, Action.RESUME, Action.FORK)


class Preemption(NamedTuple):
    """Who had to leave for whom: as kvengine.core.decision explains the numbers."""

    step: int
    swapped: bool
    reason: str
    beneficiary: str
    policy: str
    """The victim policy that chose it, or the scheduler."""
    num_blocks_freed: int
    num_tokens_lost: int
    """To be computed again, or, if it was swapped out, moved to the host."""
    num_moved_blocks: int
    num_free_before: int
    num_free_after: int


@dataclass(slots=True)
class Life:
    """`phases` are (name, start_ns, end_ns) in order, without gaps, and `preemptions` belong to those called
    preempted, in order.

    `tokens` are [first, last] numbers of consecutive steps that gave it a token each, and `prefills` those that
    computed tokens which it knew, with their number; one step may be the end of a prefill and give a token.
    """

    request: dict[str, Any]
    phases: list[tuple[str, int, int]] = field(default_factory=list)
    preemptions: list[Preemption] = field(default_factory=list)
    tokens: list[tuple[int, int]] = field(default_factory=list)
    prefills: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def steps(self) -> list[tuple[int, int]]:
        """[first, last] numbers of the steps that it was in, in order and without overlaps."""
        merged: list[tuple[int, int]] = []
        for first, last in sorted([*self.tokens, *((first, last) for first, last, _ in self.prefills)]):
            if merged and first <= merged[-1][1] + 1:
                merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
            else:
                merged.append((first, last))
        return merged


class _Event(NamedTuple):
    """A sequence entered, or was preempted, in the plan of `step` at `time_ns`."""

    time_ns: int
    step: int
    preemption: Preemption | None


class _Steps:
    """What phases need of the table `steps`, whose rows are numbered from 0 without gaps."""

    def __init__(self, steps: pa.Table) -> None:
        self._ends = steps["end_ns"].to_numpy()

    @property
    def last_end_ns(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def known(self, runs: list[tuple[int, ...]]) -> list[Any]:
        """Those runs that begin in a step of the table: that of a killed run may lack the last ones."""
        return [run for run in runs if run[0] < len(self._ends)]

    def end_ns(self, step: int) -> int:
        return int(self._ends[step])

    def number_after(self, time_ns: int) -> int:
        """The first step that ended after `time_ns`, or the number that one would have."""
        return int(np.searchsorted(self._ends, time_ns, side="right"))


def lives(tables: dict[str, pa.Table]) -> dict[Key, Life]:
    """Every sequence that was not rejected, from the tables `requests`, `tokens`, `prefills`, `decisions` and
    `steps`."""
    steps = _Steps(tables["steps"])
    events = _events(tables["decisions"])
    tokens, prefills = _runs(tables["tokens"]), _runs(tables["prefills"], "num_tokens")
    found = {}
    for row in tables["requests"].to_pylist():
        if row["status"] != "rejected":
            key = (row["request_id"], row["choice"])
            life = Life(row, tokens=steps.known(tokens[key]), prefills=steps.known(prefills[key]))
            _add_phases(life, events[key], steps)
            found[key] = life
    return found


def _events(decisions: pa.Table) -> dict[Key, list[_Event]]:
    """Every admission, resumption and preemption, by sequence and in order: who leaves in the plan that let it
    in left after it."""
    events: dict[Key, list[_Event]] = defaultdict(list)
    for row in actions(decisions, *ENTERS, *LEAVES):
        preemption = None if row["action"] in ENTERS else _preemption(row)
        event = _Event(row["time_ns"], row["first_step"], preemption)
        events[row["request_id"], row["choice"]].append(event)
    for of_sequence in events.values():
        of_sequence.sort(key=lambda event: (event.step, event.preemption is not None))
    return events


def actions(decisions: pa.Table, *wanted: Action) -> list[dict[str, Any]]:
    """The rows of these actions."""
    words = decisions["action"].cast(pa.string()).to_pylist()
    return decisions.take(
        pa.array([i for i, word in enumerate(words) if word in wanted], pa.int64())
    ).to_pylist()


def _preemption(row: dict[str, Any]) -> Preemption:
    return Preemption(
        row["first_step"], row["action"] == Action.SWAP_OUT, row["reason"], row["detail"], row["policy"],
        row["num_blocks"], row["num_tokens"], row["num_moved_blocks"], row["num_free_before"], row["num_free_after"],
    )  # fmt: skip


def _runs(table: pa.Table, *more: str) -> dict[Key, list[tuple[int, ...]]]:
    """[first, last] step of every run, and the columns `more`, by sequence."""
    runs: dict[Key, list[tuple[int, ...]]] = defaultdict(list)
    names = ("request_id", "choice", "first_step", "num_steps", *more)
    rows = zip(*(table[name].to_pylist() for name in names), strict=True)
    for request_id, choice, first, count, *rest in rows:
        runs[request_id, choice].append((first, first + count - 1, *rest))
    return runs


def _add_phases(life: Life, events: list[_Event], steps: _Steps) -> None:
    begin_ns, over_ns = life.request["arrival_ns"], life.request["finished_ns"]
    if over_ns is None:
        over_ns = max(begin_ns, steps.last_end_ns, *(event.time_ns for event in events))
    life.phases.append(("queued", begin_ns, events[0].time_ns if events else over_ns))
    over = _Event(over_ns, steps.number_after(over_ns), None)
    for event, until in zip(events, [*events[1:], over], strict=False):
        if event.preemption is None:
            first_tokens = [first for first, _ in life.tokens if event.step <= first < until.step]
            _add_running(life, event, until, [steps.end_ns(step) for step in first_tokens[:1]])
        else:
            life.phases.append(("preempted", event.time_ns, until.time_ns))
            life.preemptions.append(event.preemption)


def _add_running(life: Life, event: _Event, until: _Event, first_token_ns: list[int]) -> None:
    """Add what lies between entering and `until`: a prefill, and a decode if there was a token meanwhile."""
    if not first_token_ns:
        life.phases.append(("prefill", event.time_ns, until.time_ns))
        return
    life.phases.append(("prefill", event.time_ns, first_token_ns[0]))
    if until.time_ns > first_token_ns[0]:
        life.phases.append(("decode", first_token_ns[0], until.time_ns))
