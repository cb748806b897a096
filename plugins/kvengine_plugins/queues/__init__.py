"""Built-in queues: the order of the waiting."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvengine_plugins.queues.fair import FairConfig, FairQueue
from kvengine_plugins.queues.fcfs import FcfsQueue
from kvengine_plugins.queues.longest_prefix import LongestPrefixConfig, LongestPrefixQueue
from kvengine_plugins.queues.priority import PriorityConfig, PriorityQueue
from kvengine_plugins.queues.shortest_job import ShortestJobQueue

if TYPE_CHECKING:
    from kvengine.registry import Registry


def register_queues(registry: Registry) -> None:
    """Add them all."""
    registry.add(
        "queue",
        "fcfs",
        lambda config, build: FcfsQueue(),
        summary="first come, first served",
    )
    registry.add(
        "queue",
        "priority",
        lambda config, build: PriorityQueue(config),
        schema=PriorityConfig,
        summary="the most urgent first; with ageing, waiting makes up for priority",
    )
    registry.add(
        "queue",
        "shortest_job",
        lambda config, build: ShortestJobQueue(build.predictor),
        summary="the shortest predicted rest of an output first",
    )
    registry.add(
        "queue",
        "fair",
        lambda config, build: FairQueue(config),
        schema=FairConfig,
        summary="the least served tenant first (virtual token counter)",
    )
    registry.add(
        "queue",
        "longest_prefix",
        lambda config, build: LongestPrefixQueue(config, build.allocator),
        schema=LongestPrefixConfig,
        summary="the longest cached prefix first, among the oldest",
    )
