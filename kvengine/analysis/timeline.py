"""A sequence's life in parts that add up to its latency, to the nanosecond, and what each part was spent on."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from kvengine.analysis.waits import NEVER, Cause, Share, Waits, add_up
from kvengine.core.decision import Action
from kvengine.telemetry.phases import Key, Life, Preemption, actions, lives

COMPUTED = "computed"
"""Steps that computed tokens of it, or gave it one."""
STALLED_BY_PREFILLS = "stalled_by_prefills"
"""Steps of its decode phase that gave it no token, and computed prefill tokens of others."""
IN_OTHER_STEPS = "in_other_steps"
"""Steps that it had no share of, although it ran."""
BETWEEN_STEPS = "between_steps"
"""Time in which no step was executed."""
HELD = "held"
"""It had its last token, and was not yet handed over (a static batch goes on), or not yet aborted."""

WAITING_FOR_PROMPT = "WAITING_FOR_PROMPT"
"""The prompt that the choices of a request share is not computed yet: the detail names the choice that does it."""


@dataclass(frozen=True, slots=True)
class Part:
    """A phase, [begin_ns, end_ns): `shares` say what it was spent on, and add up to it.

    A prefill and a decode have the number of their steps and tokens, and a wait after a preemption has that.
    """

    phase: str
    begin_ns: int
    end_ns: int
    shares: list[Share] = field(default_factory=list)
    num_steps: int = 0
    num_tokens: int = 0
    preemption: Preemption | None = None

    @property
    def ns(self) -> int:
        return self.end_ns - self.begin_ns


class StepTime:
    """How much of any span of time the steps took, of all or of some: `counts` says which."""

    def __init__(self, begins: np.ndarray, ends: np.ndarray, counts: np.ndarray) -> None:
        self._begins, self._ends, self._counts = begins, ends, counts
        self._before = np.concatenate([[0], np.cumsum((ends - begins) * counts)])

    def within(self, begin: int, end: int) -> int:
        """The part of [begin, end) in ns; 0 where that is empty."""
        return self._until(end) - self._until(begin) if end > begin else 0

    def _until(self, moment: int) -> int:
        index = int(np.searchsorted(self._begins, moment))
        total = int(self._before[index])
        if index and self._counts[index - 1]:
            total -= max(0, int(self._ends[index - 1]) - moment)
        return total


class Timeline:
    """The lives of all sequences of a run, from its tables; what is asked for is worked out then."""

    def __init__(self, tables: dict[str, pa.Table]) -> None:
        self.lives = lives(tables)
        self._waits = Waits(tables)
        steps = tables["steps"]
        self._begins, self._ends = (steps[name].to_numpy() for name in ("start_ns", "end_ns"))
        every = np.ones(len(steps), np.int64)
        self._all = StepTime(self._begins, self._ends, every)
        self._prefills = StepTime(
            self._begins, self._ends, every * (steps["num_prefill_tokens"].to_numpy() > 0)
        )
        forks = actions(tables["decisions"], Action.FORK)
        self._forks_choices = any(row["detail"] == f"{row['request_id']}/0" for row in forks)

    def parts(self, key: Key) -> list[Part]:
        """The phases of a sequence and what each was spent on."""
        life, preemptions = self.lives[key], iter(self.lives[key].preemptions)
        spans = [self._times(run) for run in life.steps]
        found = []
        for phase, begin, end in life.phases:
            if phase == "queued":
                found.append(Part(phase, begin, end, self._queued(key, begin, end)))
            elif phase == "preempted":
                found.append(self._preempted(key, begin, end, next(preemptions)))
            else:
                inside = [(max(a, begin), min(b, end)) for a, b in spans if a < end and b > begin]
                found.append(self._running(life, phase, begin, end, inside))
        return found

    def waits(self, key: Key) -> list[Part]:
        """Those of its parts in which it did not run, in order: the first while it was queued, and one for each
        preemption."""
        life, preemptions = self.lives[key], iter(self.lives[key].preemptions)
        return [
            Part(phase, begin, end, self._queued(key, begin, end))
            if phase == "queued"
            else self._preempted(key, begin, end, next(preemptions))
            for phase, begin, end in life.phases
            if phase in ("queued", "preempted")
        ]

    def _preempted(self, key: Key, begin: int, end: int, preemption: Preemption) -> Part:
        cause = Cause(preemption.reason, preemption.beneficiary)
        shares = self._waits.preempted(key, begin, end, cause)
        return Part("preempted", begin, end, shares, preemption=preemption)

    def _queued(self, key: Key, begin: int, end: int) -> list[Share]:
        """The reasons of its first wait. Where blocks are shared, other choices than the first are not in the queue
        until that one's prompt is computed, and need not be afterwards."""
        request_id, choice = key
        first = self.lives.get((request_id, 0))
        if choice == 0 or first is None:
            return self._waits.queued(key, begin, end)
        cause = Cause(WAITING_FOR_PROMPT, f"{request_id}/0")
        known = int(self._ends[first.tokens[0][0]]) if first.tokens else NEVER
        if (
            not self._forks_choices
        ):  # seats were too few, or nothing is shared and it waited like anybody else
            return self._waits.queued_behind(key, begin, end, known, cause)
        middle = min(known, end)
        shares = [Share(*cause, begin, middle - begin)]
        return add_up(shares + (self._waits.queued(key, middle, end) if middle < end else []))

    def _running(self, life: Life, phase: str, begin: int, end: int, inside: list[tuple[int, int]]) -> Part:
        """A prefill or a decode, with the spans of time `inside` in which steps had a share in it."""
        until = end
        if phase == "decode" and (phase, begin, end) == life.phases[-1]:
            until = inside[-1][1] if inside else begin
        computed = sum(self._all.within(a, b) for a, b in inside)
        in_steps = self._all.within(begin, until)
        stalled = 0
        if phase == "decode":
            own = sum(self._prefills.within(a, b) for a, b in inside)
            stalled = self._prefills.within(begin, until) - own
        lengths = {
            COMPUTED: computed,
            STALLED_BY_PREFILLS: stalled,
            IN_OTHER_STEPS: in_steps - computed - stalled,
            BETWEEN_STEPS: until - begin - in_steps,
            HELD: end - until,
        }
        shares = [Share(name, "", begin, ns) for name, ns in lengths.items() if ns]
        return Part(phase, begin, end, shares, *self._counts(life, phase, begin, end))

    def _counts(self, life: Life, phase: str, begin: int, end: int) -> tuple[int, int]:
        """Steps and tokens of a prefill, or of the tokens of a decode, that lie in [begin, end)."""
        if phase == "prefill":
            runs = [run for run in life.prefills if begin <= self._begins[run[0]] < end]
            return sum(last - first + 1 for first, last, _ in runs), sum(tokens for _, _, tokens in runs)
        low, high = np.searchsorted(self._begins, begin), np.searchsorted(self._begins, end)
        count = sum(max(0, int(min(last + 1, high) - max(first, low))) for first, last in life.tokens)
        return count, count

    def _times(self, run: tuple[int, int]) -> tuple[int, int]:
        """From the beginning of the first to the end of the last step of a run, as far as they are known."""
        last = min(run[1], len(self._ends) - 1)
        return int(self._begins[run[0]]), int(self._ends[last])
