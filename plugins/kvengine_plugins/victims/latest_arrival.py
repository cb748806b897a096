"""Preempt whoever arrived last, so that the oldest work is finished first (Kwon et al., SOSP 2023, 4.5)."""

from __future__ import annotations

from kvengine.core.sequence import Sequence


class LatestArrivalVictim:
    """The last to come is the first to go, even if it is the one that needs room."""

    def choose(self, candidates: list[Sequence], needy: Sequence) -> Sequence:
        return max(candidates, key=lambda seq: seq.order)
