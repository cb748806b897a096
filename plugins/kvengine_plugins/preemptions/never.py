"""Preempt nobody: for admission or allocation that reserves all that a sequence will ever need, as Orca does.

Source: Yu et al., OSDI 2022, section 4.2, where a request enters only if its worst case fits.
"""

from __future__ import annotations

from kvengine.core.sequence import Sequence
from kvengine.policies import Mechanism, Preemption


class NeverPreemption(Preemption):
    """Neither for blocks nor for a seat, whatever the priority."""

    preempts = False
    swaps = False

    def mechanism(self, victim: Sequence) -> Mechanism:
        raise AssertionError("nobody is preempted")
