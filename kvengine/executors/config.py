"""The settings of the torch executor, importable without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvengine.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchConfig:
    """`device`: auto takes cuda where there is one. `num_threads`: of torch on CPU (null: one per core)."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    num_threads: int | None = None

    def __post_init__(self) -> None:
        if self.num_threads is not None and self.num_threads < 1:
            raise ConfigError("executor.num_threads", self.num_threads, "must be at least 1")
