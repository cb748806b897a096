"""Skip-join multi-level feedback queue: who has been served least goes first, whatever its length will be.

Source: FastServe (Wu et al., arXiv 2305.05920).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kvengine.core.errors import ConfigError
from kvengine.core.reasons import Reason
from kvengine.core.sequence import Sequence, SequenceState
from kvengine.policies import Scheduler, SchedulingView

MAX_LEVELS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class MlfqConfig:
    """`levels` with quanta of `quantum`, `quantum * ratio`, ... iterations; a prefill counts as an iteration for
    each `prefill_tokens_per_iteration` tokens begun; who has waited for `starvation_s` since it last ran goes to
    the first level (null: never)."""

    levels: int = 4
    quantum: int = 4
    ratio: int = 2
    prefill_tokens_per_iteration: int = 512
    starvation_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("quantum", "ratio", "prefill_tokens_per_iteration"):
            if getattr(self, name) < 1:
                raise ConfigError(f"scheduler.{name}", getattr(self, name), "must be at least 1")
        if not 1 <= self.levels <= MAX_LEVELS:
            raise ConfigError("scheduler.levels", self.levels, f"must be between 1 and {MAX_LEVELS}")
        if self.starvation_s is not None and not 0 < self.starvation_s < float("inf"):
            problem = "must be a number of seconds above 0, or null: never"
            raise ConfigError("scheduler.starvation_s", self.starvation_s, problem)


@dataclass(slots=True)
class _Job:
    """A sequence's level, the output tokens with which its quantum there is used up, and since when it waits."""

    level: int
    until: int
    since_ns: int = 0


class MlfqScheduler(Scheduler):
    """A sequence joins the first level whose quantum its prefill fits, and goes down one with each quantum used up.

    Within a level whoever began to wait first goes first. Where a seat or blocks are short, running sequences of
    strictly lower levels give way, from the lowest, the last to arrive first. A quantum counts the first prefill and
    then each token; computing again what a preemption lost counts nothing. Prefills are whole and go before decodes.
    """

    preempts = True
    orders = True

    def __init__(self, config: MlfqConfig) -> None:
        self._quanta = [config.quantum * config.ratio**level for level in range(config.levels)]
        self._tokens_per_iteration = config.prefill_tokens_per_iteration
        limit = config.starvation_s
        self._starvation_ns = None if limit is None else round(limit * 1e9)
        self._waiting = _Waiting(config.levels)
        self._running: dict[Sequence, _Job] = {}

    def schedule(self, view: SchedulingView) -> None:
        self._running = {seq: self._running.get(seq) or self._join(seq) for seq in view.running}
        for seq, job in self._running.items():
            if seq.num_output_tokens >= job.until and job.level + 1 < len(self._quanta):
                self._move(seq, job, job.level + 1)
        self._promote_starving(view.now)
        self._waiting.forget_aborted(len(view.waiting))
        if self._admit_in_order(view):
            return
        if self._make_room(view) and self._admit_in_order(view):
            return
        view.schedule_running()

    def waits(self, seq: Sequence, now: int) -> None:
        job = self._running.pop(seq, None) or self._join(seq)
        job.since_ns = now
        self._waiting.push(seq, job)

    def _join(self, seq: Sequence) -> _Job:
        """Skip the levels whose quantum the prefill exceeds: it would only be demoted through them."""
        iterations = max(1, -(-(seq.num_tokens - seq.num_computed_tokens) // self._tokens_per_iteration))
        fits = (level for level, quantum in enumerate(self._quanta) if quantum >= iterations)
        level = next(fits, len(self._quanta) - 1)
        return _Job(level, seq.num_output_tokens + self._quanta[level] - iterations + 1)

    def _move(self, seq: Sequence, job: _Job, level: int) -> None:
        job.level, job.until = level, seq.num_output_tokens + self._quanta[level]

    def _promote_starving(self, now: int) -> None:
        while self._starvation_ns is not None and (longest := self._waiting.longest()):
            seq, job = longest
            if now - job.since_ns < self._starvation_ns:
                return
            self._waiting.remove(seq, job)
            self._move(seq, job, 0)
            self._waiting.push(seq, job)

    def _admit_in_order(self, view: SchedulingView) -> bool:
        """Whether anybody entered."""
        entered = False
        while first := self._waiting.first():
            seq, job = first
            was_deferred = seq.deferred
            if view.admit(seq):
                self._waiting.remove(seq, job)
                self._running[seq] = job
                entered = True
            elif seq.deferred and not was_deferred:  # the engine lets it wait again when nobody else does
                self._waiting.remove(seq, job)
            elif seq.state is not SequenceState.FINISHED:
                break
        return entered

    def _make_room(self, view: SchedulingView) -> bool:
        """Preempt those of lower levels until the first in order has seats and blocks, or nobody is left to."""
        if not (first := self._waiting.first()):
            return False
        seq, job = first
        num_seats = min(1 + len(seq.siblings), view.limits.max_num_seqs)
        lower = [other for other, its in self._running.items() if its.level > job.level]
        preempted = False
        for other in sorted(lower, key=lambda other: (-self._running[other].level, -other.order)):
            blocks_fit = view.blocks_needed(seq, seq.num_tokens) <= view.num_free_blocks
            if blocks_fit and num_seats <= view.num_free_seats:
                break
            preempted |= view.preempt(other, Reason.QUANTUM, seq)
        return preempted


class _Waiting:
    """Who waits, by level and by time; one that was aborted stays until it is met, or too many have been."""

    def __init__(self, num_levels: int) -> None:
        self._levels: list[OrderedDict[Sequence, _Job]] = [OrderedDict() for _ in range(num_levels)]
        self._below: OrderedDict[Sequence, _Job] = OrderedDict()
        """All but those of the first level, in the order in which they began to wait."""

    def push(self, seq: Sequence, job: _Job) -> None:
        self._levels[job.level][seq] = job
        if job.level:
            self._below[seq] = job

    def remove(self, seq: Sequence, job: _Job) -> None:
        del self._levels[job.level][seq]
        self._below.pop(seq, None)

    def first(self) -> tuple[Sequence, _Job] | None:
        """Who began to wait first in the first level in which anybody waits."""
        for level in self._levels:
            while level:
                seq, job = next(iter(level.items()))
                if seq.state is not SequenceState.FINISHED:
                    return seq, job
                self.remove(seq, job)
        return None

    def longest(self) -> tuple[Sequence, _Job] | None:
        """Who waits for the longest below the first level."""
        return next(iter(self._below.items()), None)

    def forget_aborted(self, num_waiting: int) -> None:
        """Drop the aborted where they are the most: that costs no more than as many aborts did."""
        if sum(map(len, self._levels)) <= 2 * num_waiting + 16:
            return
        for level in self._levels:
            for seq, job in list(level.items()):
                if seq.state is SequenceState.FINISHED:
                    self.remove(seq, job)
