"""Built-in preemption mechanisms: how a victim leaves and comes back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvengine_plugins.preemptions.recompute import RecomputePreemption

if TYPE_CHECKING:
    from kvengine.registry import Registry


def register_preemptions(registry: Registry) -> None:
    """Add them all."""
    registry.add(
        "preemption",
        "recompute",
        lambda config, build: RecomputePreemption(),
        summary="drop a victim's KV and compute it again on resume",
    )
