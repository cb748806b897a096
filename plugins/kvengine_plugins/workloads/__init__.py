"""The built-in workloads: the packaged or your own prompts, drawn lengths and arrivals, JSON Lines files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvengine_plugins.workloads.jsonl import JsonlConfig, jsonl_workload
from kvengine_plugins.workloads.prompts import PromptsConfig, prompts_workload
from kvengine_plugins.workloads.synthetic import SyntheticConfig, SyntheticWorkload

if TYPE_CHECKING:
    from kvengine.registry import Registry


def register_workloads(registry: Registry) -> None:
    """Register every built-in workload; nothing here imports torch."""
    registry.add(
        "workload",
        "prompts",
        prompts_workload,
        schema=PromptsConfig,
        summary="prompts of a text or JSON Lines file, or 32 packaged ones",
    )
    registry.add(
        "workload",
        "synthetic",
        SyntheticWorkload,
        schema=SyntheticConfig,
        summary="random token ids, with lengths and arrivals drawn from distributions",
    )
    registry.add(
        "workload",
        "jsonl",
        jsonl_workload,
        schema=JsonlConfig,
        summary="a JSON Lines file with prompts or token ids, known lengths and arrival times",
    )
