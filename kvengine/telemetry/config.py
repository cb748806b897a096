"""The `telemetry` group of the configuration."""

from __future__ import annotations

from dataclasses import dataclass

from kvengine.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryConfig:
    """`record`: write the run directory. `spans`: also spans.jsonl in it, with at most `max_step_spans` steps,
    every `step_span_interval`-th among them."""

    record: bool = True
    spans: bool = True
    max_step_spans: int = 2000
    step_span_interval: int = 100

    def __post_init__(self) -> None:
        for name in ("max_step_spans", "step_span_interval"):
            if getattr(self, name) < 1:
                raise ConfigError(f"telemetry.{name}", getattr(self, name), "must be at least 1")
