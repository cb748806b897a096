"""Serve those that can still have their first token in time: late requests are refused, or go last.

Source: dropping or requeueing negative slack as in earliest-deadline-first scheduling; early rejection is also what
Mooncake does (Qin et al., FAST 2025), by a predicted load.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from kvengine.core.errors import ConfigError
from kvengine.core.reasons import Reason, Refusal, Verdict
from kvengine.core.sequence import Sequence, SequenceState
from kvengine.policies import SchedulingView
from kvengine_plugins.admissions.whole_prompt import WholePromptAdmission


@dataclass(frozen=True, slots=True, kw_only=True)
class SloConfig:
    """The first token is due `ttft_ms` after the arrival; a prefill takes its tokens / `prefill_tokens_per_s`
    (null: no time, so that a request is late when its deadline has passed); what is `late` is refused for good, or
    deferred until nobody else waits."""

    ttft_ms: float = 1000.0
    prefill_tokens_per_s: float | None = None
    late: Literal["refuse", "defer"] = "refuse"

    def __post_init__(self) -> None:
        if not 0 < self.ttft_ms < math.inf:
            raise ConfigError("admission.ttft_ms", self.ttft_ms, "must be a positive number of milliseconds")
        rate = self.prefill_tokens_per_s
        if rate is not None and not 0 < rate < math.inf:
            problem = "must be a positive number of tokens per second, or null for no time"
            raise ConfigError("admission.prefill_tokens_per_s", rate, problem)


class SloAdmission(WholePromptAdmission):
    """Whole prompts, of requests that are on time or have begun.

    Only who is looked at is judged, so a late request holds its place until it is the next. Choices that are forked
    from another have begun with it.
    """

    def __init__(self, config: SloConfig, *, choices_fork: bool) -> None:
        self._ttft_ns = round(config.ttft_ms * 1e6)
        self._tokens_per_s = config.prefill_tokens_per_s or math.inf
        self._verdict = Verdict.REFUSE if config.late == "refuse" else Verdict.DEFER
        self._choices_fork = choices_fork

    def refuses(self, seq: Sequence, view: SchedulingView) -> Refusal | None:
        if not (seq.deferred or self._has_begun(seq)):
            first_token_ns = view.now + round(view.uncomputed(seq) / self._tokens_per_s * 1e9)
            late_ns = first_token_ns - (seq.arrival_ns + self._ttft_ns)
            if late_ns > 0:
                detail = f"its first token would be {late_ns / 1e6:.1f} ms late"
                return Refusal(Reason.DEADLINE, detail, self._verdict)
        return super().refuses(seq, view)

    def _has_begun(self, seq: Sequence) -> bool:
        return seq.state is not SequenceState.WAITING or (self._choices_fork and seq.choice > 0)
