"""Knows the true output length of every request, as no real system does: the upper bound for predictors."""

from __future__ import annotations

from kvengine.core.sequence import Sequence
from kvengine.policies import Predictor


class OraclePredictor(Predictor):
    """Answers with `known_output_tokens`, or with `max_tokens` where that ends an output earlier."""

    needs_lengths = True

    def predict(self, seq: Sequence) -> float:
        return seq.max_tokens_total - seq.num_prompt_tokens
