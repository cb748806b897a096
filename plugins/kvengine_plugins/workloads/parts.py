"""What several workloads share: checks of their settings, draws by share, and a vocabulary that ends no output."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate, repeat

import numpy as np

from kvengine.core.errors import ConfigError
from kvengine.core.request import SamplingParams
from kvengine.core.shapes import ModelShape
from kvengine.policies import Build


def check_sampling(sampling: SamplingParams, build: Build) -> None:
    """ConfigError `workload.sampling.NAME` for what the engine would refuse in every single request."""
    assert build.model is not None
    problem = sampling.problem(build.model.shape().vocab_size)
    if problem:
        name, rule = problem
        raise ConfigError(f"workload.sampling.{name}", getattr(sampling, name), rule)


def check_no_stop_tokens(sampling: SamplingParams, workload: str) -> None:
    """ConfigError for stop tokens, which can end nothing where lengths are known."""
    if sampling.stop_token_ids:
        raise ConfigError(
            "workload.sampling.stop_token_ids",
            list(sampling.stop_token_ids),
            f"outputs of workload={workload} have a known length, and no token ends them; drop it",
        )


def check_range(name: str, value: float, low: float, high: float) -> None:
    """ConfigError `workload.NAME` unless low <= value <= high."""
    if not low <= value <= high:
        raise ConfigError(f"workload.{name}", value, f"must be between {low:,} and {high:,}")


def check_shares(name: str, shares: tuple[float, ...]) -> None:
    """ConfigError `workload.NAME` unless each share is a number, at least 0, and one is above it; [] is none."""
    if any(not 0 <= share < math.inf for share in shares) or (shares and not any(shares)):
        raise ConfigError(f"workload.{name}", list(shares), "must be shares of at least 0, not all of them 0")


def drawn_by_share(shares: tuple[float, ...], stream: np.random.Generator) -> Iterator[int]:
    """Endless places in `shares`, each as often as its share of their sum; all 0 where there are none."""
    if len(shares) < 2:
        yield from repeat(0)
    ends = list(accumulate(shares))
    last = max(place for place, share in enumerate(shares) if share)
    while True:
        yield min(bisect_right(ends, stream.random() * ends[-1]), last)


def plain_vocabulary(shape: ModelShape) -> np.ndarray:
    """All token ids but the end-of-sequence ones, ascending."""
    return np.setdiff1d(np.arange(shape.vocab_size), shape.eos_token_ids)
