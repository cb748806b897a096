"""An eviction policy: evict the deepest cached block first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvengine.core.errors import ConfigError
from kvengine.hookspecs import hookimpl
from kvengine.policies import CachedBlock, Eviction

if TYPE_CHECKING:
    from kvengine.registry import Registry

KVENGINE_API = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepestConfig:
    """`stride`: depths are compared in steps of that many blocks, within which the least recent goes."""

    stride: int = 4

    def __post_init__(self) -> None:
        if self.stride < 1:
            raise ConfigError("eviction.stride", self.stride, "must be at least 1")


class DeepestEviction(Eviction):
    """What begins a prompt is shared by many, what ends a conversation belongs to one.

    kvengine asks only for leaves of the prefix tree, so a chain dies from its tail under any policy;
    this one also chooses the chain by its length, where `lru` chooses by age alone.
    """

    def __init__(self, config: DeepestConfig) -> None:
        self._stride = config.stride

    def rank(self, block: CachedBlock) -> tuple[int, int]:
        return -(block.depth // self._stride), block.last_used


@hookimpl
def kvengine_register(registry: Registry) -> None:
    """Called once when kvengine starts."""
    registry.add(
        "eviction",
        "deepest",
        lambda config, build: DeepestEviction(config),
        schema=DeepestConfig,
        summary="evict the deepest cached block first",
    )
