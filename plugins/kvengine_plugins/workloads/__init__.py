"""The built-in workloads: prompts, drawn requests, conversations, tree searches, files and traces."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvengine_plugins.workloads.azure import AzureConfig, AzureWorkload
from kvengine_plugins.workloads.chat import ChatConfig, ChatWorkload
from kvengine_plugins.workloads.jsonl import JsonlConfig, jsonl_workload
from kvengine_plugins.workloads.mooncake import MooncakeConfig, MooncakeWorkload
from kvengine_plugins.workloads.prompts import PromptsConfig, prompts_workload
from kvengine_plugins.workloads.synthetic import SyntheticConfig, SyntheticWorkload
from kvengine_plugins.workloads.tree import TreeConfig, TreeWorkload

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
    registry.add(
        "workload",
        "chat",
        ChatWorkload,
        schema=ChatConfig,
        summary="conversations of several turns with pauses, which share system prompts",
    )
    registry.add(
        "workload",
        "tree",
        TreeWorkload,
        schema=TreeConfig,
        summary="tree searches, whose branches fork after every level",
    )
    registry.add(
        "workload",
        "mooncake",
        MooncakeWorkload,
        schema=MooncakeConfig,
        summary="a Mooncake trace: real arrivals, lengths and shared prefixes",
    )
    registry.add(
        "workload",
        "azure",
        AzureWorkload,
        schema=AzureConfig,
        summary="an Azure LLM inference trace: real arrivals and lengths",
    )
