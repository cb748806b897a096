"""The built-in workloads: prompts, drawn requests, conversations, tree searches, files and traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvengine_plugins.workloads.azure import AzureConfig, AzureWorkload
from kvengine_plugins.workloads.chat import ChatConfig, ChatWorkload
from kvengine_plugins.workloads.jsonl import JsonlConfig, jsonl_workload
from kvengine_plugins.workloads.mooncake import MooncakeConfig, MooncakeWorkload
from kvengine_plugins.workloads.prompts import PromptsConfig, prompts_workload
from kvengine_plugins.workloads.synthetic import SyntheticConfig, SyntheticWorkload
from kvengine_plugins.workloads.tree import TreeConfig, TreeWorkload

if TYPE_CHECKING:
    from kvengine.policies import Build, Workload
    from kvengine.registry import Registry


WORKLOADS: tuple[tuple[str, Callable[[Any, Build], Workload], type, str], ...] = (
    ("prompts", prompts_workload, PromptsConfig, "prompts of a text or JSON Lines file, or 32 packaged ones"),
    (
        "synthetic",
        SyntheticWorkload,
        SyntheticConfig,
        "random token ids, with lengths and arrivals drawn from distributions",
    ),
    (
        "jsonl",
        jsonl_workload,
        JsonlConfig,
        "a JSON Lines file with prompts or token ids, known lengths and arrival times",
    ),
    (
        "chat",
        ChatWorkload,
        ChatConfig,
        "conversations of several turns with pauses, which share system prompts",
    ),
    ("tree", TreeWorkload, TreeConfig, "tree searches, whose branches fork after every level"),
    (
        "mooncake",
        MooncakeWorkload,
        MooncakeConfig,
        "a Mooncake trace: real arrivals, lengths and shared prefixes",
    ),
    ("azure", AzureWorkload, AzureConfig, "an Azure LLM inference trace: real arrivals and lengths"),
)
"""Name, factory, settings and summary of each."""


def register_workloads(registry: Registry) -> None:
    """Register every built-in workload; nothing here imports torch."""
    for name, factory, schema, summary in WORKLOADS:
        registry.add("workload", name, factory, schema=schema, summary=summary)
