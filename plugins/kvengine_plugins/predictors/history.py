"""Predicts that an output becomes as long as the median of those that ended last.

Source: output lengths from recent history, as the Past-Future scheduler samples them (Gong et al., "LightLLM",
ASPLOS 2025); the median instead of a sample keeps it deterministic.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass

from kvengine.core.errors import ConfigError
from kvengine.core.sequence import Sequence
from kvengine.policies import Predictor


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryConfig:
    """Looks at the last `window` outputs that ended; before there are any, it says `prior` tokens."""

    window: int = 256
    prior: float = 256.0

    def __post_init__(self) -> None:
        for name in ("window", "prior"):
            if not 1 <= getattr(self, name) <= 1_000_000_000:
                raise ConfigError(f"predictor.{name}", getattr(self, name), "must be between 1 and 10^9")


class HistoryPredictor(Predictor):
    """Never less than one token more than there are, and never more than the request's `max_tokens`.

    Predicting costs O(1), and noting an output that ended O(window), the moving of a few integers.
    """

    def __init__(self, config: HistoryConfig) -> None:
        self._config = config
        self._recent: deque[int] = deque()
        """By time."""
        self._sorted: list[int] = []
        """The same by length."""

    def predict(self, seq: Sequence) -> float:
        cap = seq.request.sampling.max_tokens
        guess = self._median() if cap is None else min(self._median(), cap)
        return max(guess, seq.num_output_tokens + 1)

    def finished(self, seq: Sequence) -> None:
        self._recent.append(seq.num_output_tokens)
        insort(self._sorted, seq.num_output_tokens)
        if len(self._recent) > self._config.window:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]

    def _median(self) -> float:
        lengths, half = self._sorted, len(self._sorted) // 2
        if not lengths:
            return self._config.prior
        return lengths[half] if len(lengths) % 2 else (lengths[half - 1] + lengths[half]) / 2
