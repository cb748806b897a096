"""The built-in policies, registered through the same door as everybody's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvengine.hookspecs import hookimpl
from kvengine_plugins.admissions.whole_prompt import WholePromptAdmission
from kvengine_plugins.allocators.contiguous_max import ContiguousMaxAllocator
from kvengine_plugins.allocators.paged import PagedAllocator
from kvengine_plugins.attention import register_attention
from kvengine_plugins.executors import register_executors
from kvengine_plugins.models import register_models
from kvengine_plugins.preemptions.recompute import RecomputePreemption
from kvengine_plugins.queues.fcfs import FcfsQueue
from kvengine_plugins.schedulers.chunked import ChunkedScheduler
from kvengine_plugins.schedulers.continuous import ContinuousScheduler
from kvengine_plugins.schedulers.static import StaticConfig, StaticScheduler
from kvengine_plugins.victims.latest_arrival import LatestArrivalVictim
from kvengine_plugins.workloads import register_workloads

if TYPE_CHECKING:
    from kvengine.registry import Registry

KVENGINE_API = 1


@hookimpl
def kvengine_register(registry: Registry) -> None:
    """Register every built-in; nothing here imports torch."""
    _register_scheduling(registry)
    register_attention(registry)
    register_executors(registry)
    register_models(registry)
    register_workloads(registry)


def _register_scheduling(registry: Registry) -> None:
    add = registry.add
    add(
        "allocator",
        "paged",
        lambda config, build: PagedAllocator(build.kv.num_blocks, build.kv.block_size),
        summary="blocks from anywhere, one at a time as a sequence grows (vLLM)",
    )
    add(
        "allocator",
        "contiguous_max",
        lambda config, build: ContiguousMaxAllocator(
            build.kv.num_blocks, build.kv.block_size, build.limits.max_model_len
        ),
        summary="one region of max_model_len per sequence, reserved at admission (before paging)",
    )
    add(
        "scheduler",
        "static",
        lambda config, build: StaticScheduler(config),
        schema=StaticConfig,
        summary="collect a batch, run it until its longest member ends, then the next",
    )
    add(
        "scheduler",
        "continuous",
        lambda config, build: ContinuousScheduler(),
        summary="whoever fits enters at once; whole prefills first, decodes wait for them",
    )
    add(
        "scheduler",
        "chunked",
        lambda config, build: ChunkedScheduler(),
        summary="decodes first, prefills in chunks within the token budget (Sarathi)",
    )
    add("queue", "fcfs", lambda config, build: FcfsQueue(), summary="first come, first served")
    add(
        "admission",
        "whole_prompt",
        lambda config, build: WholePromptAdmission(),
        summary="enter when all known tokens have room, promised blocks subtracted",
    )
    add(
        "victim",
        "latest_arrival",
        lambda config, build: LatestArrivalVictim(),
        summary="preempt whoever arrived last",
    )
    add(
        "preemption",
        "recompute",
        lambda config, build: RecomputePreemption(),
        summary="drop a victim's KV and compute it again on resume",
    )
