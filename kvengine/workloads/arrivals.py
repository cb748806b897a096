"""When requests arrive, in integer nanoseconds after the start, and the random streams that workloads use.

Every purpose (arrivals, prompt lengths, ...) has a stream of its own, so that another arrival rate leaves
lengths and prompts as they were, and the first requests of a longer workload are those of a shorter one.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Literal

import numpy as np

from kvengine.core.errors import ConfigError

NS_PER_S = 1_000_000_000
MIN_RATE, MAX_RATE, MAX_CV = 1e-6, 1e9, 100.0
_EVEN_CV = 1e-6
"""Gaps with a cv below this are the same to the nanosecond for all that matters."""
_CHUNK = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivalConfig:
    """`process`: `all_at_once`; `poisson` of `rate` requests per second; or `gamma`, whose gaps have mean
    1/rate and coefficient of variation `cv` (standard deviation over mean: 0 even, 1 poisson, more bursty).

    Raises ConfigError for a setting that the process needs and lacks, or has and does not use.
    """

    process: Literal["all_at_once", "poisson", "gamma"] = "all_at_once"
    rate: float | None = None
    cv: float | None = None

    def __post_init__(self) -> None:
        used = {"all_at_once": (), "poisson": ("rate",), "gamma": ("rate", "cv")}[self.process]
        for name, low, high, unit in (
            ("rate", MIN_RATE, MAX_RATE, "requests per second"),
            ("cv", 0.0, MAX_CV, "standard deviation over mean of the gaps"),
        ):
            key, value = f"workload.arrival.{name}", getattr(self, name)
            if value is None and name in used:
                raise ConfigError(key, "null", f"arrival.process={self.process} needs it ({unit})")
            if value is not None and name not in used:
                raise ConfigError(key, value, f"arrival.process={self.process} has no {name}; drop it")
            if value is not None and not low <= value <= high:
                raise ConfigError(key, value, f"must be between {low:g} and {high:g} ({unit})")


MAX_REQUESTS = 100_000_000
"""Above this a typing error is likelier than a workload."""


def check_counts(
    num_requests: int | None, concurrency: int | None, arrival: ArrivalConfig | None = None
) -> None:
    """ConfigError for either below 1, and for a `concurrency` (closed loop) beside an arrival process."""
    for name, value in (("num_requests", num_requests), ("concurrency", concurrency)):
        if value is not None and not 1 <= value <= MAX_REQUESTS:
            raise ConfigError(f"workload.{name}", value, f"must be between 1 and {MAX_REQUESTS:,}")
    if concurrency is not None and arrival is not None and arrival.process != "all_at_once":
        raise ConfigError(
            "workload.concurrency",
            concurrency,
            f"a closed loop sends when a place is free and has no arrival.process={arrival.process}; "
            "drop one of the two",
        )


def arrival_times(config: ArrivalConfig, seed: int) -> Iterator[int]:
    """Endless arrival times in ns, never going back; the first one comes one gap after the start."""
    if config.process == "all_at_once":
        yield from repeat(0)
    now = 0
    for gap_ns in _gaps_ns(config, random_stream(seed, "arrival")):
        now += gap_ns
        yield now


def _gaps_ns(config: ArrivalConfig, stream: np.random.Generator) -> Iterator[int]:
    assert config.rate is not None
    cv = 1.0 if config.cv is None else config.cv
    if cv < _EVEN_CV:
        yield from repeat(round(NS_PER_S / config.rate))
    shape, scale_ns = 1 / cv**2, cv**2 / config.rate * NS_PER_S
    while True:
        yield from map(round, (stream.standard_gamma(shape, _CHUNK) * scale_ns).tolist())


def random_stream(seed: int, purpose: str, ordinal: int = 0) -> np.random.Generator:
    """A PCG64 generator of its own for each seed (taken modulo 2**64), purpose and ordinal.

    It is the same in every process and under every Python version. The bits of PCG64 are fixed for ever; what
    a distribution makes of them may change with a numpy version, which golden values in the tests would show.
    """
    key = (*purpose.encode(), ordinal)
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed % 2**64, spawn_key=key)))


def chosen_seed(seed: int | None) -> int:
    """`seed`, or a fresh random one of 64 bits when it is None."""
    return secrets.randbits(64) if seed is None else seed
