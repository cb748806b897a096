"""Admit where a share of what everybody may still generate fits; the share falls until somebody is preempted.

Source: the retraction-based admission of SGLang (its new_token_ratio): a ratio of the remaining max_new_tokens,
clipped at 4096, from 0.7 down to 0.7 * 0.14 in 600 steps, and up again on retraction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvengine.core.errors import ConfigError
from kvengine.core.plan import StepPlan
from kvengine.core.sequence import Sequence
from kvengine.policies import SchedulingView
from kvengine_plugins.admissions.reserving import ReservingAdmission

MAX_NEW_TOKENS = 4096
"""Of a longer rest only so many are taken into account."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthRatioConfig:
    """The ratio falls evenly from `init_ratio` to `min_ratio` in `decay_steps`, and is `init_ratio` again when
    somebody is preempted for want of blocks."""

    init_ratio: float = 0.7
    min_ratio: float = 0.1
    decay_steps: int = 600

    def __post_init__(self) -> None:
        if not 0 <= self.init_ratio <= 1:
            raise ConfigError("admission.init_ratio", self.init_ratio, "must be between 0 and 1")
        if not 0 <= self.min_ratio <= self.init_ratio:
            problem = f"must be between 0 and init_ratio={self.init_ratio}"
            raise ConfigError("admission.min_ratio", self.min_ratio, problem)
        if self.decay_steps < 1:
            raise ConfigError("admission.decay_steps", self.decay_steps, "must be at least 1")


class GrowthRatioAdmission(ReservingAdmission):
    """Between reserving for the worst case (ratio 1) and hoping for the best (0): two numbers to turn.

    The remaining tokens are those up to max_tokens_total, so with known lengths it knows them too.
    """

    def __init__(self, config: GrowthRatioConfig) -> None:
        self._config = config
        self._num_calm_steps = 0

    @property
    def ratio(self) -> float:
        """The share of the remaining tokens that is expected to be generated."""
        first, last, steps = self._config.init_ratio, self._config.min_ratio, self._config.decay_steps
        return first - (first - last) * min(self._num_calm_steps, steps) / steps

    @property
    def basis(self) -> str:
        return f" at ratio {self.ratio:.3f}"

    def preempted(self) -> None:
        self._num_calm_steps = 0

    def committed(self, plan: StepPlan) -> None:
        self._num_calm_steps += 1

    def lacks(self, seq: Sequence, view: SchedulingView) -> int:
        """Blocks that `seq` is expected to take yet; each sibling besides for its growth and its own tail."""
        remaining = min(seq.max_tokens_total - seq.num_tokens, MAX_NEW_TOKENS)
        slots = min(seq.num_tokens + math.ceil(self.ratio * remaining), seq.max_tokens_total - 1)
        needed = view.blocks_needed(seq, slots)
        if seq.siblings:
            growth = needed - view.blocks_needed(seq, seq.num_tokens)
            needed += len(seq.siblings) * (growth + 1)
        return needed
