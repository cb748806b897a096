"""Predicts that every request generates as many tokens as it asked for at most."""

from __future__ import annotations

from kvengine.core.sequence import Sequence
from kvengine.policies import Predictor


class MaxTokensPredictor(Predictor):
    """Answers with `max_tokens`, whatever the workload knows; with all that the pool holds where there is none."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots

    def predict(self, seq: Sequence) -> float:
        max_tokens = seq.request.sampling.max_tokens
        return self._num_slots if max_tokens is None else max_tokens
