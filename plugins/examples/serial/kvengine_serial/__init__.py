"""One sequence at a time: what serving looks like without any batching."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvengine.core.errors import ConfigError
from kvengine.core.reasons import Reason
from kvengine.hookspecs import hookimpl
from kvengine.policies import Scheduler, SchedulingView

if TYPE_CHECKING:
    from kvengine.registry import Registry

KVENGINE_API = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SerialConfig:
    """`at_once`: how many sequences run together."""

    at_once: int = 1

    def __post_init__(self) -> None:
        if self.at_once < 1:
            raise ConfigError("scheduler.at_once", self.at_once, "must be at least 1")


class SerialScheduler(Scheduler):
    """The next sequence enters when one of `at_once` has ended."""

    def __init__(self, config: SerialConfig) -> None:
        self._at_once = config.at_once

    def schedule(self, view: SchedulingView) -> None:
        view.schedule_running()
        for seq in view.heads:
            if len(list(view.running)) >= self._at_once:
                return view.stop(Reason.MAX_NUM_SEQS)
            view.admit(seq)
        return None


@hookimpl
def kvengine_register(registry: Registry) -> None:
    """Called once when kvengine starts."""
    registry.add(
        "scheduler",
        "serial",
        lambda config, build: SerialScheduler(config),
        schema=SerialConfig,
        summary="one sequence at a time, no batching (example package)",
    )
