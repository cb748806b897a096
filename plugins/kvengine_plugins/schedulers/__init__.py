"""Built-in schedulers: who runs a step, and for how many tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvengine_plugins.schedulers.chunked import ChunkedConfig
from kvengine_plugins.schedulers.continuous import ContinuousConfig, ContinuousScheduler
from kvengine_plugins.schedulers.mlfq import MlfqConfig, MlfqScheduler
from kvengine_plugins.schedulers.prefill_budgeted import PrefillBudgetedConfig, PrefillBudgetedScheduler
from kvengine_plugins.schedulers.static import StaticConfig, StaticScheduler

if TYPE_CHECKING:
    from kvengine.registry import Registry


def register_schedulers(registry: Registry) -> None:
    """Add them all."""
    registry.add(
        "scheduler",
        "chunked",
        lambda config, build: config.scheduler(),
        schema=ChunkedConfig,
        summary="decodes first, prefills in chunks within the token budget (Sarathi); or in order of admission",
    )
    registry.add(
        "scheduler",
        "continuous",
        lambda config, build: ContinuousScheduler(config),
        schema=ContinuousConfig,
        summary="whoever fits enters at once; whole prefills first, decodes wait for them",
    )
    registry.add(
        "scheduler",
        "mlfq",
        lambda config, build: MlfqScheduler(config),
        schema=MlfqConfig,
        summary="who was served least goes first, preempting others (skip-join feedback queue, FastServe)",
    )
    registry.add(
        "scheduler",
        "prefill_budgeted",
        lambda config, build: PrefillBudgetedScheduler(config),
        schema=PrefillBudgetedConfig,
        summary="as chunked, with limits for prefills: tokens, prompts at once, long prompts, cadence",
    )
    registry.add(
        "scheduler",
        "static",
        lambda config, build: StaticScheduler(config),
        schema=StaticConfig,
        summary="collect a batch, run it until its longest member ends, then the next",
    )
