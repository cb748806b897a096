"""Built-in predictors: how long an output will be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvengine_plugins.predictors.oracle import OraclePredictor

if TYPE_CHECKING:
    from kvengine.registry import Registry


def register_predictors(registry: Registry) -> None:
    """Add them all."""
    registry.add(
        "predictor",
        "oracle",
        lambda config, build: OraclePredictor(),
        summary="the true output length, of workloads that know it",
    )
