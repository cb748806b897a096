"""Move a victim's KV to host memory and back when it resumes (Kwon et al., SOSP 2023, section 4.5)."""

from __future__ import annotations

from kvengine.core.sequence import Sequence
from kvengine.policies import Mechanism, Preemption


class SwapPreemption(Preemption):
    """Computes nothing again but where the host pool is full; costs two copies of all that is computed."""

    def mechanism(self, victim: Sequence) -> Mechanism:
        return Mechanism.SWAP
