"""Built-in victim policies: whom to preempt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvengine_plugins.victims.latest_arrival import LatestArrivalVictim

if TYPE_CHECKING:
    from kvengine.registry import Registry


def register_victims(registry: Registry) -> None:
    """Add them all."""
    registry.add(
        "victim",
        "latest_arrival",
        lambda config, build: LatestArrivalVictim(),
        summary="preempt whoever arrived last",
    )
