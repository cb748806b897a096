"""Built-in schedulers: who runs a step, and for how many tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvengine_plugins.schedulers.chunked import ChunkedScheduler
from kvengine_plugins.schedulers.continuous import ContinuousScheduler
from kvengine_plugins.schedulers.static import StaticConfig, StaticScheduler

if TYPE_CHECKING:
    from kvengine.registry import Registry


def register_schedulers(registry: Registry) -> None:
    """Add them all."""
    registry.add(
        "scheduler",
        "chunked",
        lambda config, build: ChunkedScheduler(),
        summary="decodes first, prefills in chunks within the token budget (Sarathi)",
    )
    registry.add(
        "scheduler",
        "continuous",
        lambda config, build: ContinuousScheduler(),
        summary="whoever fits enters at once; whole prefills first, decodes wait for them",
    )
    registry.add(
        "scheduler",
        "static",
        lambda config, build: StaticScheduler(config),
        schema=StaticConfig,
        summary="collect a batch, run it until its longest member ends, then the next",
    )
