"""Built-in allocators: which slots a sequence owns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvengine.core.errors import ConfigError
from kvengine.kv.offload import Offload
from kvengine.kv.prefix_index import PrefixIndex
from kvengine.policies import Build
from kvengine_plugins.allocators.best_fit import best_fit
from kvengine_plugins.allocators.contiguous import FitConfig
from kvengine_plugins.allocators.contiguous_max import contiguous_max
from kvengine_plugins.allocators.contiguous_oracle import contiguous_oracle
from kvengine_plugins.allocators.contiguous_pow2 import contiguous_pow2
from kvengine_plugins.allocators.first_fit import first_fit
from kvengine_plugins.allocators.paged import PagedAllocator

if TYPE_CHECKING:
    from kvengine.registry import Registry


def register_allocators(registry: Registry) -> None:
    """Add them all."""
    registry.add(
        "allocator",
        "contiguous_max",
        contiguous_max,
        summary="one region of max_model_len per sequence, reserved at admission (before paging)",
    )
    registry.add(
        "allocator",
        "contiguous_pow2",
        contiguous_pow2,
        summary="one region per sequence, for its output rounded up to a power of two; needs known lengths",
    )
    registry.add(
        "allocator",
        "contiguous_oracle",
        contiguous_oracle,
        summary="one region per sequence, for exactly what it will write; needs known lengths",
    )
    registry.add(
        "allocator",
        "first_fit",
        first_fit,
        schema=FitConfig,
        summary="one region per sequence, not rounded, in the first gap that is large enough",
    )
    registry.add(
        "allocator",
        "best_fit",
        best_fit,
        schema=FitConfig,
        summary="one region per sequence, not rounded, in the smallest gap that is large enough",
    )
    registry.add(
        "allocator",
        "paged",
        _paged,
        summary="blocks from anywhere, one at a time as a sequence grows (vLLM)",
    )


def _paged(config: object, build: Build) -> PagedAllocator:
    """With a prefix cache unless it is off, or left to us and in the way of a sliding window."""
    kv, cache = build.kv, build.prefix_cache
    assert kv is not None
    window = kv.sliding_window
    if cache.mode == "on" and window is not None:
        problem = (
            f"all layers of the model have a sliding window of {window} tokens, whose old blocks are freed, and a "
            f"cached prefix would need them; take prefix_cache=off, or lower engine.max_model_len to the window"
        )
        raise ConfigError("prefix_cache", "on", problem)
    if cache.mode == "off" or window is not None:
        return PagedAllocator(kv)
    assert build.eviction is not None
    index = PrefixIndex(kv.block_size, build.eviction)
    offload = _offload(index, build) if cache.offload else None
    return PagedAllocator(kv, index, offload, isolate_tenants=cache.isolate_tenants)


def _offload(index: PrefixIndex, build: Build) -> Offload:
    """Evicted blocks on the host; ConfigError where they could never be kept or never be worth the way back."""
    kv, cache = build.kv, build.prefix_cache
    assert kv is not None
    assert build.host_pool is not None
    if not kv.num_host_blocks:
        raise ConfigError("prefix_cache.offload", True, "needs host memory: set engine.swap_space_bytes")
    move_s = kv.block_bytes / cache.host_bandwidth
    compute_s = kv.block_size / cache.recompute_rate
    if move_s >= compute_s:
        problem = (
            f"moving a block back takes {move_s * 1e3:.3g} ms at prefix_cache.host_bandwidth, computing its "
            f"{kv.block_size} tokens {compute_s * 1e3:.3g} ms at prefix_cache.recompute_rate: nothing would come back"
        )
        raise ConfigError("prefix_cache.offload", True, problem)
    return Offload(index, build.host_pool)
