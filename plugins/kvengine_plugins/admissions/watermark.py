"""Admit where the whole known context has room and some of the pool stays free for those that run.

Source: the watermark of vLLM's first scheduler (0.01 of the pool); the safety margin of transformers' continuous
batching is the same with 0.15.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from decimal import Decimal

from kvengine.core.errors import ConfigError
from kvengine.core.reasons import Reason, Refusal
from kvengine.core.sequence import Sequence
from kvengine.policies import SchedulingView
from kvengine_plugins.admissions.whole_prompt import WholePromptAdmission


@dataclass(frozen=True, slots=True, kw_only=True)
class WatermarkConfig:
    """`watermark`: the share of the pool's blocks that must be free after an admission."""

    watermark: float = 0.01

    def __post_init__(self) -> None:
        if not 0 <= self.watermark < 1:
            raise ConfigError("admission.watermark", self.watermark, "must be at least 0 and below 1")


class WatermarkAdmission(WholePromptAdmission):
    """Whole prompts, and so many blocks left over for growth; who finds nothing running need not leave any."""

    def __init__(self, config: WatermarkConfig, num_blocks: int) -> None:
        # Decimal, since 0.07 * 100 is a little more than 7.
        self._num_kept = math.ceil(Decimal(str(config.watermark)) * num_blocks)

    def refuses(self, seq: Sequence, view: SchedulingView) -> Refusal | None:
        refusal = super().refuses(seq, view)
        if refusal is not None or not any(view.running):
            return refusal
        left = view.num_free_blocks - view.num_promised_blocks - self.needs(seq, view)
        if left >= self._num_kept:
            return None
        return Refusal(Reason.WATERMARK, f"{left} blocks would stay free, {self._num_kept} must")
