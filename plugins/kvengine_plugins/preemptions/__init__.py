"""Built-in preemption mechanisms: how a victim leaves and comes back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvengine.core.errors import ConfigError
from kvengine.core.shapes import KvShape
from kvengine_plugins.preemptions.auto import AutoConfig, AutoPreemption
from kvengine_plugins.preemptions.never import NeverPreemption
from kvengine_plugins.preemptions.recompute import RecomputePreemption
from kvengine_plugins.preemptions.swap import SwapPreemption

if TYPE_CHECKING:
    from kvengine.policies import Build
    from kvengine.registry import Registry


def register_preemptions(registry: Registry) -> None:
    """Add them all."""
    registry.add(
        "preemption",
        "recompute",
        lambda config, build: RecomputePreemption(),
        summary="drop a victim's KV and compute it again on resume",
    )
    registry.add(
        "preemption",
        "swap",
        _swap,
        summary="move a victim's KV to the host, and back on resume",
    )
    registry.add(
        "preemption",
        "auto",
        lambda config, build: AutoPreemption(config, _with_host(build, "auto")),
        schema=AutoConfig,
        summary="swap where moving takes less time than computing again",
    )
    registry.add(
        "preemption",
        "never",
        lambda config, build: NeverPreemption(),
        summary="nobody gives way: for policies that reserve the worst case",
    )


def _swap(config: object, build: Build) -> SwapPreemption:
    _with_host(build, "swap")
    return SwapPreemption()


def _with_host(build: Build, name: str) -> KvShape:
    """The pool's shape; ConfigError where there is no host memory to swap to."""
    assert build.kv is not None
    if not build.kv.num_host_blocks:
        problem = "needs host memory: set engine.swap_space_bytes, or take preemption=recompute"
        raise ConfigError("preemption", name, problem)
    return build.kv
