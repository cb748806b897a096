"""The one hook a plug-in package implements."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from kvengine.registry import Registry

API_VERSION = 1
"""Raised when a contract in kvengine/policies changes; a plug-in states the one it was written for."""

hookspec = pluggy.HookspecMarker("kvengine")
hookimpl = pluggy.HookimplMarker("kvengine")


@hookspec
def kvengine_register(registry: Registry) -> None:
    """Add this package's policies: `registry.add(kind, name, factory, summary=..., schema=...)`."""
