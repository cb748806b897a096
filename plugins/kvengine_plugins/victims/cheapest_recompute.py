"""Preempt whoever loses the fewest computed tokens; the latest arrival of equals.

Source: vLLM issues 54644 and 56897 score victims by what recomputing them costs. The latter divides by the blocks
freed; here the cost counts alone, since a victim frees about as many blocks as it has computed tokens to fill.
"""

from __future__ import annotations

from kvengine.core.sequence import Sequence


class CheapestRecomputeVictim:
    """Counts all computed tokens, also those that a prefix cache might still have when the victim comes back."""

    def choose(self, candidates: list[Sequence], needy: Sequence) -> Sequence:
        return min(candidates, key=lambda seq: (seq.num_computed_tokens, -seq.order))
