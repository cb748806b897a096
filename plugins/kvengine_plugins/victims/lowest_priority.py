"""Preempt whoever has the lowest static priority, the largest number; the latest arrival of equals."""

from __future__ import annotations

from kvengine.core.sequence import Sequence


class LowestPriorityVictim:
    """What vLLM does under its priority policy; with equal priorities it is latest_arrival."""

    def choose(self, candidates: list[Sequence], needy: Sequence) -> Sequence:
        return max(candidates, key=lambda seq: (seq.priority, seq.order))
