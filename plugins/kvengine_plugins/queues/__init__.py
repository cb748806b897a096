"""Built-in queues: the order of the waiting."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvengine_plugins.queues.fcfs import FcfsQueue

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
