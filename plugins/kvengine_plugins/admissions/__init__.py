"""Built-in admission policies: whether a waiting sequence may enter now."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvengine_plugins.admissions.first_chunk import FirstChunkAdmission
from kvengine_plugins.admissions.growth_ratio import GrowthRatioAdmission, GrowthRatioConfig
from kvengine_plugins.admissions.reserve_worst_case import ReserveWorstCaseAdmission
from kvengine_plugins.admissions.slo import SloAdmission, SloConfig
from kvengine_plugins.admissions.watermark import WatermarkAdmission, WatermarkConfig
from kvengine_plugins.admissions.whole_prompt import WholePromptAdmission

if TYPE_CHECKING:
    from kvengine.registry import Registry


def register_admissions(registry: Registry) -> None:
    """Add them all."""
    registry.add(
        "admission",
        "whole_prompt",
        lambda config, build: WholePromptAdmission(),
        summary="enter when all known tokens have room, promised blocks subtracted",
    )
    registry.add(
        "admission",
        "first_chunk",
        lambda config, build: FirstChunkAdmission(),
        summary="enter when what is computed now has room: thrashes under pressure",
    )
    registry.add(
        "admission",
        "watermark",
        lambda config, build: WatermarkAdmission(config, build.allocator.num_blocks),
        schema=WatermarkConfig,
        summary="whole_prompt, and a share of the pool must stay free",
    )
    registry.add(
        "admission",
        "reserve_worst_case",
        lambda config, build: ReserveWorstCaseAdmission(build.allocator.block_size),
        summary="enter when all fit at full length, so that nobody is preempted (Orca)",
    )
    registry.add(
        "admission",
        "growth_ratio",
        lambda config, build: GrowthRatioAdmission(config),
        schema=GrowthRatioConfig,
        summary="enter when a share of what all may generate fits, less as it goes well (SGLang)",
    )
    registry.add(
        "admission",
        "slo",
        lambda config, build: SloAdmission(config, choices_fork=build.allocator.shares),
        schema=SloConfig,
        summary="whole_prompt; who cannot have its first token in time is refused or goes last",
    )
