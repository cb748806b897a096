"""Built-in predictors: how long an output will be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvengine_plugins.predictors.history import HistoryConfig, HistoryPredictor
from kvengine_plugins.predictors.max_tokens import MaxTokensPredictor
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
    registry.add(
        "predictor",
        "max_tokens",
        lambda config, build: MaxTokensPredictor(build.kv.num_blocks * build.kv.block_size),
        summary="the most tokens that the request asked for",
    )
    registry.add(
        "predictor",
        "history",
        lambda config, build: HistoryPredictor(config),
        schema=HistoryConfig,
        summary="the median of the outputs that ended last",
    )
