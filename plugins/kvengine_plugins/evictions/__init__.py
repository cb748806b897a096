"""Built-in eviction policies: which cached leaf dies first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvengine_plugins.evictions.fifo import FifoEviction
from kvengine_plugins.evictions.lfu import LfuEviction
from kvengine_plugins.evictions.lru import LruEviction

if TYPE_CHECKING:
    from kvengine.registry import Registry


def register_evictions(registry: Registry) -> None:
    """Add them all."""
    for name, policy, summary in (
        ("lru", LruEviction, "the cached block used longest ago dies first"),
        ("lfu", LfuEviction, "the cached block hit least often dies first"),
        ("fifo", FifoEviction, "the cached block computed longest ago dies first"),
    ):
        registry.add("eviction", name, lambda config, build, policy=policy: policy(), summary=summary)
