"""Preempt whoever has generated least, so that who is furthest in an answer goes on; the latest arrival of equals."""

from __future__ import annotations

from kvengine.core.sequence import Sequence


class ShortestGeneratedVictim:
    """Readers have seen least of what stops; a prompt that is still being computed goes first, long as it may be."""

    def choose(self, candidates: list[Sequence], needy: Sequence) -> Sequence:
        return min(candidates, key=lambda seq: (seq.num_output_tokens, -seq.order))
