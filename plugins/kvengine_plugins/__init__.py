"""The built-in policies, registered through the same door as everybody's; a folder per kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvengine.hookspecs import hookimpl
from kvengine_plugins.admissions import register_admissions
from kvengine_plugins.allocators import register_allocators
from kvengine_plugins.attention import register_attention
from kvengine_plugins.evictions import register_evictions
from kvengine_plugins.executors import register_executors
from kvengine_plugins.models import register_models
from kvengine_plugins.predictors import register_predictors
from kvengine_plugins.preemptions import register_preemptions
from kvengine_plugins.queues import register_queues
from kvengine_plugins.schedulers import register_schedulers
from kvengine_plugins.victims import register_victims
from kvengine_plugins.workloads import register_workloads

if TYPE_CHECKING:
    from kvengine.registry import Registry

KVENGINE_API = 1


@hookimpl
def kvengine_register(registry: Registry) -> None:
    """Register every built-in; nothing here imports torch."""
    register_allocators(registry)
    register_evictions(registry)
    register_schedulers(registry)
    register_queues(registry)
    register_admissions(registry)
    register_victims(registry)
    register_preemptions(registry)
    register_predictors(registry)
    register_attention(registry)
    register_executors(registry)
    register_workloads(registry)
    register_models(registry)
