"""Drop a victim's KV and compute it again when it resumes (Kwon et al., SOSP 2023, section 4.5)."""

from __future__ import annotations

from kvengine.core.sequence import Sequence
from kvengine.policies import Mechanism, Preemption


class RecomputePreemption(Preemption):
    """Costs one prefill of all tokens so far, and no host memory."""

    swaps = False

    def mechanism(self, victim: Sequence) -> Mechanism:
        return Mechanism.RECOMPUTE
