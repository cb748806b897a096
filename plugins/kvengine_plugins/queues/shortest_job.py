"""Whoever is predicted to have the fewest tokens left to generate goes first.

Source: shortest-job-first by predicted output lengths, as learning-to-rank schedulers do it (Fu et al., "Efficient
LLM Scheduling by Learning to Rank", NeurIPS 2024), without their promotion of the starving.
"""

from __future__ import annotations

from kvengine.core.sequence import Sequence
from kvengine.policies import Predictor
from kvengine_plugins.queues.ordered import OrderedQueue


class ShortestJobQueue(OrderedQueue):
    """By predicted output tokens less those it has, as predicted when it begins to wait; ties by arrival.

    Long outputs starve while short ones keep coming.
    """

    def __init__(self, predictor: Predictor) -> None:
        super().__init__()
        self._predictor = predictor
        self.needs_lengths = predictor.needs_lengths

    def key(self, seq: Sequence) -> float:
        return self._predictor.predict(seq) - seq.num_output_tokens
