"""Continuous batching, prefill first: whoever fits enters at once, and decodes wait for prefills.

Source: iteration-level scheduling of Orca (Yu et al., OSDI 2022, section 4.1), with whole prompts in steps of
their own as vLLM's first scheduler had it.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvengine.core.errors import ConfigError
from kvengine.core.reasons import Reason
from kvengine.policies import Scheduler, SchedulingView


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinuousConfig:
    """`max_consecutive_prefills`: prefill steps in a row for which decodes wait at most (null: no cap)."""

    max_consecutive_prefills: int | None = None

    def __post_init__(self) -> None:
        cap = self.max_consecutive_prefills
        if cap is not None and cap < 1:
            raise ConfigError(
                "scheduler.max_consecutive_prefills", cap, "must be at least 1, or null: no cap"
            )


DEFAULTS = ContinuousConfig()


class ContinuousScheduler(Scheduler):
    """A step is either the prefill of all that may enter, or one token for everybody who runs."""

    def __init__(self, config: ContinuousConfig = DEFAULTS) -> None:
        self._cap = config.max_consecutive_prefills
        self._num_prefills = 0
        """Prefill steps since decodes had their turn."""

    def schedule(self, view: SchedulingView) -> None:
        decodes_wait = any(view.running)
        if decodes_wait and self._num_prefills == self._cap:
            view.stop(Reason.PREFILL_INTERVAL)
        elif sum(view.admit(seq) for seq in view.heads):
            self._num_prefills = self._num_prefills + 1 if decodes_wait else 0
            return
        self._num_prefills = 0
        view.schedule_running()
