"""A victim policy: preempt whoever holds most blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvengine.core.errors import ConfigError
from kvengine.core.sequence import Sequence
from kvengine.hookspecs import hookimpl
from kvengine.policies import Victim

if TYPE_CHECKING:
    from kvengine.registry import Registry

KVENGINE_API = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MostBlocksConfig:
    """`spare`: how many of those that have run longest are left alone while there are others."""

    spare: int = 0

    def __post_init__(self) -> None:
        if self.spare < 0:
            raise ConfigError("victim.spare", self.spare, "must be at least 0")


class MostBlocksVictim(Victim):
    """One large victim instead of several small ones; the latest arrival of equals.

    The longest are hit again and again, and have most to compute again: `spare` leaves some in peace.
    """

    def __init__(self, config: MostBlocksConfig) -> None:
        self._spare = config.spare

    def choose(self, candidates: list[Sequence], needy: Sequence) -> Sequence:
        others = candidates[self._spare :]  # they come in order of admission
        return max(others or candidates, key=lambda seq: (len(seq.block_table.blocks), seq.order))


@hookimpl
def kvengine_register(registry: Registry) -> None:
    """Called once when kvengine starts."""
    registry.add(
        "victim",
        "most_blocks",
        lambda config, build: MostBlocksVictim(config),
        schema=MostBlocksConfig,
        summary="preempt whoever holds most blocks",
    )
