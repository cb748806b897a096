"""How long prompts and outputs are, in tokens: fixed, uniform, lognormal or exponential, within limits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from statistics import NormalDist
from typing import Literal

import numpy as np

from kvengine.core.errors import ConfigError

DEFAULT_MEAN = 64.0
DEFAULT_SIGMA = 0.8
LONGEST = 10_000_000
"""Tokens; a longer length is a mistake or the far tail of a distribution without `max`."""
MIN_KEPT = 0.001
"""A smaller share of draws within `max` is a mistake: redrawing would hardly end."""
_CHUNK = 256
_USED = {
    "fixed": ("mean",),
    "uniform": ("min", "max"),
    "lognormal": ("mean", "sigma", "min", "max"),
    "exponential": ("mean", "min", "max"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthConfig:
    """Lengths in tokens; what is None takes its default, and what a distribution does not use must be None.

    `fixed`: always `mean`. `uniform`: whole numbers from `min` to `max`, both included and both needed.
    `lognormal` and `exponential`: of that `mean` (default 64), rounded and then clipped to `min` (1) and
    `max` (none); so `mean` is that of the distribution before clipping. `sigma` (0.8) is the standard
    deviation of the logarithm of the length, lognormal only. `above_max`: what exceeds `max` becomes `max`
    (`clip`), or is drawn again (`redraw`), so that the realised mean is lower and `mean` may exceed `max`.
    """

    distribution: Literal["fixed", "uniform", "lognormal", "exponential"] = "lognormal"
    mean: float | None = None
    sigma: float | None = None
    min: int | None = None
    max: int | None = None
    above_max: Literal["clip", "redraw"] = "clip"

    def check(self, key: str) -> None:
        """ConfigError, with the full name below `key`, for what cannot work or contradicts itself."""
        used = _USED[self.distribution]
        for name in ("mean", "sigma", "min", "max"):
            value = getattr(self, name)
            low, high = (0.001, 10) if name == "sigma" else (1, LONGEST)
            if value is None and self.distribution == "uniform" and name in used:
                raise ConfigError(f"{key}.{name}", "null", "distribution=uniform needs it (tokens)")
            if value is not None and name not in used:
                problem = f"distribution={self.distribution} has no {name}; drop one of the two"
                raise ConfigError(f"{key}.{name}", value, problem)
            if value is not None and not low <= value <= high:
                raise ConfigError(f"{key}.{name}", value, f"must be between {low} and {high}")
        self._check_together(key)

    def _check_together(self, key: str) -> None:
        low, high = self.bounds
        mean = DEFAULT_MEAN if self.mean is None else self.mean
        if low > high:
            raise ConfigError(f"{key}.min", low, f"must not be above max={high}")
        if self.distribution == "fixed" and not mean.is_integer():
            raise ConfigError(f"{key}.mean", mean, "distribution=fixed needs a whole number of tokens")
        if self.above_max == "redraw":
            self._check_redraw(key, mean)
        elif self.distribution != "uniform" and not low <= mean <= high:
            note = " (null means that)" if self.mean is None else ""
            raise ConfigError(f"{key}.mean", mean, f"must lie between min={low} and max={high}{note}")

    def _check_redraw(self, key: str, mean: float) -> None:
        key = f"{key}.above_max"
        if self.distribution not in ("lognormal", "exponential"):
            raise ConfigError(key, "redraw", f"distribution={self.distribution} exceeds no max; drop it")
        if self.max is None:
            raise ConfigError(
                key, "redraw", "needs a max (tokens) that a draw can exceed; set it, or drop this"
            )
        if self.bounds[0] > mean:
            raise ConfigError(
                f"{key.removesuffix('above_max')}mean", mean, f"must be at least min={self.min}"
            )
        kept = _share_within(self, mean, self.max + 0.5)
        if kept < MIN_KEPT:
            problem = f"only {kept:.2g} of draws of mean={mean:g} are within max={self.max}; raise max"
            raise ConfigError(key, "redraw", problem)

    @property
    def bounds(self) -> tuple[int, int]:
        """The shortest and the longest length there can be, in tokens."""
        return 1 if self.min is None else self.min, LONGEST if self.max is None else self.max


def lengths(config: LengthConfig, stream: np.random.Generator) -> Iterator[int]:
    """Endless lengths in tokens, drawn from `stream`."""
    if config.distribution == "fixed":
        yield from repeat(int(DEFAULT_MEAN if config.mean is None else config.mean))
    while True:
        yield from _draw(config, stream, _CHUNK).tolist()


def _draw(config: LengthConfig, stream: np.random.Generator, count: int) -> np.ndarray:
    """`count` lengths, fewer where those above `max` are to be drawn again."""
    low, high = config.bounds
    if config.distribution == "uniform":
        return stream.integers(low, high, size=count, endpoint=True)
    mean = DEFAULT_MEAN if config.mean is None else config.mean
    if config.distribution == "exponential":
        drawn = stream.standard_exponential(count) * mean
    else:
        sigma = DEFAULT_SIGMA if config.sigma is None else config.sigma
        drawn = np.exp(math.log(mean) - sigma**2 / 2 + sigma * stream.standard_normal(count))
    rounded = np.rint(drawn)
    if config.above_max == "redraw":
        rounded = rounded[rounded <= high]
    return rounded.clip(low, high).astype(np.int64)


def _share_within(config: LengthConfig, mean: float, limit: float) -> float:
    """The probability that a draw is below `limit`."""
    if config.distribution == "exponential":
        return -math.expm1(-limit / mean)
    sigma = DEFAULT_SIGMA if config.sigma is None else config.sigma
    return NormalDist(math.log(mean) - sigma**2 / 2, sigma).cdf(math.log(limit))
