"""Built-in victim policies: whom to preempt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvengine_plugins.victims.cheapest_recompute import CheapestRecomputeVictim
from kvengine_plugins.victims.latest_arrival import LatestArrivalVictim
from kvengine_plugins.victims.lowest_priority import LowestPriorityVictim
from kvengine_plugins.victims.shortest_generated import ShortestGeneratedVictim

if TYPE_CHECKING:
    from kvengine.registry import Registry


def register_victims(registry: Registry) -> None:
    """Add them all."""
    for name, policy, summary in (
        ("latest_arrival", LatestArrivalVictim, "preempt whoever arrived last"),
        ("shortest_generated", ShortestGeneratedVictim, "preempt whoever has generated fewest tokens"),
        ("lowest_priority", LowestPriorityVictim, "preempt whoever has the lowest static priority"),
        ("cheapest_recompute", CheapestRecomputeVictim, "preempt whoever loses the fewest computed tokens"),
    ):
        registry.add("victim", name, lambda config, build, policy=policy: policy(), summary=summary)
