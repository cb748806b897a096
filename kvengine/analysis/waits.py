"""Why a sequence waited: each moment of a wait has the reason that the plan before it recorded.

The reason that a plan gave holds until the next plan. It is the sequence's own refusal, if that plan refused it,
else the one that the scheduler stated for all the rest, else that it was preempted by that very plan.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from kvengine.core.decision import Action
from kvengine.core.reasons import Reason
from kvengine.telemetry.phases import Key, actions

NOT_RECORDED = "NOT_RECORDED"
"""No plan left a reason: the run was killed before it was written."""

NEVER = 2**61
"""A moment (ns) that no run reaches."""


class Share(NamedTuple):
    """What part of some time goes to `name`: a reason of waiting, or what happened meanwhile.

    `detail` and `first_ns` are those of the first of the `times` that it did.
    """

    name: str
    detail: str
    first_ns: int
    ns: int
    times: int = 1


class Cause(NamedTuple):
    """A reason and what makes it concrete."""

    name: str
    detail: str = ""


def add_up(shares: list[Share]) -> list[Share]:
    """One share for each name, in the order in which they first held; those of no length are left out."""
    found: dict[str, Share] = {}
    for share in sorted((share for share in shares if share.ns), key=lambda share: share.first_ns):
        before = found.get(share.name)
        if before is not None:
            share = before._replace(ns=before.ns + share.ns, times=before.times + share.times)
        found[share.name] = share
    return list(found.values())


class _Refusal(NamedTuple):
    """A run of equal refusals of one sequence: it held from its first plan until the first plan without it.

    `lasting`: until the sequence enters, since it was let behind all others; then only its own refusals count.
    """

    begin_ns: int
    end_ns: int
    cause: Cause
    lasting: bool


class Waits:
    """The reasons of every wait of a run, from the tables `decisions` and `steps`."""

    def __init__(self, tables: dict[str, pa.Table]) -> None:
        decisions = tables["decisions"]
        self._moments, self._numbers = _plans(decisions, tables["steps"])
        self._own: dict[Key, list[_Refusal]] = defaultdict(list)
        for row in actions(decisions, Action.REFUSE, Action.REJECT, Action.DEFER):
            if row["reason"] != Reason.NO_SWAP_SPACE:  # which says how it left, not why it waits
                self._own[row["request_id"], row["choice"]].append(self._refusal(row))
        for refusals in self._own.values():
            refusals.sort(key=lambda refusal: refusal.begin_ns)
        stops = [self._refusal(row) for row in actions(decisions, Action.STOP)]
        self._stops = _Stops([(stop.begin_ns, stop.end_ns, stop.cause) for stop in stops])

    def queued(self, key: Key, begin: int, end: int) -> list[Share]:
        """The reasons of a wait that began between plans: at first, a step was in progress."""
        in_progress = Cause(Reason.STEP_IN_PROGRESS)
        seen = min(self._plan_from(begin), end)
        shares = [Share(*in_progress, begin, seen - begin), *self.preempted(key, seen, end, in_progress)]
        return add_up(shares)

    def preempted(self, key: Key, begin: int, end: int, cause: Cause) -> list[Share]:
        """The reasons of a wait that began in the plan at `begin`, which had this `cause` if it stated none."""
        return add_up(list(self._shares(key, begin, end, self._plan_from(begin + 1), cause)))

    def queued_behind(self, key: Key, begin: int, end: int, until: int, cause: Cause) -> list[Share]:
        """The reasons of a wait which, as far as none was stated, had this `cause` until the moment `until`."""
        return add_up(list(self._shares(key, begin, end, until, cause)))

    def _shares(self, key: Key, begin: int, end: int, until: int, cause: Cause) -> Iterator[Share]:
        """Own refusals, and between them what was stated for all; where nothing was, `cause` until `until`."""
        lasting: Cause | None = None
        at = begin
        for refusal in [*self._own.get(key, ()), _Refusal(end, end, cause, False)]:
            if refusal.begin_ns > end or (refusal.begin_ns if refusal.lasting else refusal.end_ns) < begin:
                continue
            first, last = max(refusal.begin_ns, at), min(refusal.end_ns, end)
            if lasting is not None:
                yield Share(*lasting, at, first - at)
            else:
                yield from self._stops.shares(at, min(until, first), cause)
                yield from self._stops.shares(max(at, min(until, first)), first, Cause(NOT_RECORDED))
            at = first
            if refusal.lasting:
                lasting = refusal.cause
            elif last > first:
                yield Share(*refusal.cause, first, last - first)
                at = last

    def _refusal(self, row: dict[str, Any]) -> _Refusal:
        cause, begin = Cause(row["reason"], row["detail"]), row["time_ns"]
        if row["action"] in (Action.REFUSE, Action.STOP):
            return _Refusal(begin, self._plan_after(row["last_ns"], row["last_step"]), cause, False)
        return _Refusal(begin, NEVER, cause, row["action"] == Action.DEFER)

    def _plan_from(self, moment: int) -> int:
        """When the first plan at or after `moment` was made."""
        index = bisect_left(self._moments, moment)
        return self._moments[index] if index < len(self._moments) else NEVER

    def _plan_after(self, moment: int, number: int) -> int:
        """When the plan after the one of that moment and number was made: at once, if that one took no time."""
        index = bisect_left(self._moments, moment)
        while index < len(self._moments) and self._moments[index] == moment:
            if self._numbers[index] > number:
                return moment
            index += 1
        return self._moments[index] if index < len(self._moments) else NEVER


def _plans(decisions: pa.Table, steps: pa.Table) -> tuple[list[int], list[int]]:
    """Moment and number of every plan that is known, in order."""
    moments, numbers = (
        np.concatenate([decisions[name].to_numpy() for name in names] + [steps[name].to_numpy()])
        for *names, name in (("time_ns", "last_ns", "start_ns"), ("first_step", "last_step", "step"))
    )
    order = np.lexsort((numbers, moments))
    moments, numbers = moments[order], numbers[order]
    fresh = np.ones(len(order), bool)
    fresh[1:] = (np.diff(moments) > 0) | (np.diff(numbers) > 0)
    return moments[fresh].tolist(), numbers[fresh].tolist()


class _Stops:
    """What was stated for all the rest, as a partition of time, so that any wait is summed up without a walk over
    the plans in it."""

    def __init__(self, stops: list[tuple[int, int, Cause]]) -> None:
        stops.sort(key=lambda stop: stop[0])
        self._begins, self._causes = [-NEVER], [Cause("")]
        for i, (begin, end, cause) in enumerate(stops):
            following = stops[i + 1][0] if i + 1 < len(stops) else NEVER
            self._append(begin, cause)
            if end < following:
                self._append(end, Cause(""))
        names = list(dict.fromkeys(cause.name for cause in self._causes))
        of = np.array([names.index(cause.name) for cause in self._causes])
        lengths = np.diff(np.array([*self._begins, NEVER]))
        self._places = [np.flatnonzero(of == code).tolist() for code in range(len(names))]
        """Of each name, the parts of the partition that have it."""
        self._before = [np.concatenate([[0], np.cumsum(lengths[p])]).tolist() for p in self._places]
        """Of each name, the time it held before each of these."""

    def shares(self, begin: int, end: int, otherwise: Cause) -> Iterator[Share]:
        """How [begin, end) is shared out; `otherwise` has the time for which nothing was stated."""
        if begin >= end:
            return
        first, last = self._part(begin), self._part(end - 1)
        for places, before in zip(self._places, self._before, strict=True):
            low, high = bisect_left(places, first), bisect_left(places, last + 1)
            if low == high:
                continue
            ns = before[high] - before[low]
            ns -= max(0, begin - self._begins[places[low]])
            ns -= max(0, self._end(places[high - 1]) - end)
            cause = self._causes[places[low]]
            first_ns = max(begin, self._begins[places[low]])
            yield Share(*(cause if cause.name else otherwise), first_ns, ns, high - low)

    def _append(self, begin: int, cause: Cause) -> None:
        """A part from `begin` on; a later one of the same moment takes the place of an earlier one."""
        if self._begins[-1] == begin:
            self._causes[-1] = cause
        else:
            self._begins.append(begin)
            self._causes.append(cause)

    def _part(self, moment: int) -> int:
        """The part that `moment` lies in."""
        return bisect_left(self._begins, moment + 1) - 1

    def _end(self, part: int) -> int:
        return self._begins[part + 1] if part + 1 < len(self._begins) else NEVER
