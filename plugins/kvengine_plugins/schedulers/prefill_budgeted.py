"""Chunked prefill with limits of its own for prefills: tokens per step, prompts at once, long prompts, cadence.

Sources: the limits of partial prefills that vLLM had and dropped (issues 49075, 57413); its cadence (44558).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from itertools import chain

from kvengine.core.errors import ConfigError
from kvengine.core.reasons import Reason
from kvengine.core.sequence import SequenceState
from kvengine.policies import Scheduler, SchedulingView

UNLIMITED = sys.maxsize


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillBudgetedConfig:
    """All prefills of a step get `max_prefill_tokens` (null: what decodes leave), and it leaves at most
    `max_partial_prefills` prompts unfinished. A prompt with more than `long_prefill_tokens` (null: none) to
    compute is long: it gets `long_prefill_cap` tokens a step (null: no cap), and at most `max_long_prefills` of
    them (null: no cap) are left unfinished. While decodes run, prefills have every `prefill_interval`-th step."""

    max_prefill_tokens: int | None = None
    max_partial_prefills: int = 1
    long_prefill_tokens: int | None = None
    long_prefill_cap: int | None = None
    max_long_prefills: int | None = None
    prefill_interval: int = 1

    def __post_init__(self) -> None:
        given = {setting.name: getattr(self, setting.name) for setting in fields(self)}
        for name, value in given.items():
            if value is not None and value < 1:
                raise ConfigError(f"scheduler.{name}", value, "must be at least 1")
        for name in ("long_prefill_cap", "max_long_prefills"):
            if given[name] is not None and self.long_prefill_tokens is None:
                problem = "no prompt is long unless scheduler.long_prefill_tokens is set; set that too"
                raise ConfigError(f"scheduler.{name}", given[name], problem)
        if (self.max_long_prefills or 0) > self.max_partial_prefills:
            problem = f"must be at most scheduler.max_partial_prefills={self.max_partial_prefills}"
            raise ConfigError("scheduler.max_long_prefills", self.max_long_prefills, problem)


class PrefillBudgetedScheduler(Scheduler):
    """Decodes first, then unfinished prefills, oldest first, then who waits, in order, as far as the limits allow.

    The cadence is off under saturation, that is while more wait than there are free seats: sparing decodes would
    only make the queue longer then.
    """

    chunks = True

    def __init__(self, config: PrefillBudgetedConfig) -> None:
        self._max_tokens = config.max_prefill_tokens or UNLIMITED
        self._max_partial = config.max_partial_prefills
        self._long_tokens = config.long_prefill_tokens or UNLIMITED
        self._long_cap = config.long_prefill_cap or UNLIMITED
        self._max_long = config.max_long_prefills or UNLIMITED
        self._interval = self._steps_since_prefill = config.prefill_interval

    def schedule(self, view: SchedulingView) -> None:
        view.schedule_decodes()
        self._steps_since_prefill += 1
        if self._spares_decodes(view):
            return view.stop(Reason.PREFILL_INTERVAL)
        left = min(self._max_tokens, view.token_budget_left)
        num_partial = num_long = 0
        for seq in chain(view.prefilling, view.heads):
            uncomputed = view.uncomputed(seq)
            is_long = uncomputed > self._long_tokens
            share = min(left, self._long_cap) if is_long else left
            stays_partial = uncomputed > share
            if seq.state is SequenceState.RUNNING:
                computed = view.schedule(seq, share)
            elif not left:
                return view.stop(Reason.NO_TOKEN_BUDGET)
            elif stays_partial and num_partial >= self._max_partial:
                return view.refuse(seq, Reason.PARTIAL_PREFILLS)
            elif stays_partial and is_long and num_long >= self._max_long:
                return view.refuse(seq, Reason.LONG_PREFILL_CAP)
            else:
                computed = view.admit(seq, share)
            left -= computed
            num_partial += stays_partial
            num_long += stays_partial and is_long
            if computed:
                self._steps_since_prefill = 0
        return None

    def _spares_decodes(self, view: SchedulingView) -> bool:
        """Whether decodes have this step for themselves."""
        decodes_run = view.token_budget_left < view.limits.max_num_batched_tokens
        saturated = len(view.waiting) > view.num_free_seats
        return decodes_run and not saturated and self._steps_since_prefill < self._interval
