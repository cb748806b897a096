"""Built-in allocators: which slots a sequence owns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvengine.policies import Build
from kvengine_plugins.allocators.best_fit import BestFitConfig, best_fit
from kvengine_plugins.allocators.contiguous_max import contiguous_max
from kvengine_plugins.allocators.contiguous_oracle import contiguous_oracle
from kvengine_plugins.allocators.contiguous_pow2 import contiguous_pow2
from kvengine_plugins.allocators.first_fit import FirstFitConfig, first_fit
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
        schema=FirstFitConfig,
        summary="one region per sequence, not rounded, in the first gap that is large enough",
    )
    registry.add(
        "allocator",
        "best_fit",
        best_fit,
        schema=BestFitConfig,
        summary="one region per sequence, not rounded, in the smallest gap that is large enough",
    )
    registry.add(
        "allocator",
        "paged",
        _paged,
        summary="blocks from anywhere, one at a time as a sequence grows (vLLM)",
    )


def _paged(config: object, build: Build) -> PagedAllocator:
    assert build.kv is not None
    return PagedAllocator(build.kv.num_blocks, build.kv.block_size)
