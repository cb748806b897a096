"""Admit whenever what is computed now fits, and hope for the rest: the policy that thrashes (vLLM issue 25538)."""

from __future__ import annotations

from kvengine.core.reasons import Refusal
from kvengine.core.sequence import Sequence
from kvengine.policies import Admission, SchedulingView


class FirstChunkAdmission(Admission):
    """Leaves it to the allocator, which is asked for just the tokens that the scheduler asked for, and refuses them
    when they have no room."""

    def refuses(self, seq: Sequence, view: SchedulingView) -> Refusal | None:
        return None
