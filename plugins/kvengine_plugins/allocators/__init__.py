"""Built-in allocators: which slots a sequence owns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvengine.policies import Build
from kvengine_plugins.allocators.contiguous_max import ContiguousMaxAllocator
from kvengine_plugins.allocators.paged import PagedAllocator

if TYPE_CHECKING:
    from kvengine.registry import Registry


def register_allocators(registry: Registry) -> None:
    """Add them all."""
    registry.add(
        "allocator",
        "contiguous_max",
        _contiguous_max,
        summary="one region of max_model_len per sequence, reserved at admission (before paging)",
    )
    registry.add(
        "allocator",
        "paged",
        _paged,
        summary="blocks from anywhere, one at a time as a sequence grows (vLLM)",
    )


def _contiguous_max(config: object, build: Build) -> ContiguousMaxAllocator:
    assert build.kv is not None
    assert build.limits is not None
    return ContiguousMaxAllocator(build.kv.num_blocks, build.kv.block_size, build.limits.max_model_len)


def _paged(config: object, build: Build) -> PagedAllocator:
    assert build.kv is not None
    return PagedAllocator(build.kv.num_blocks, build.kv.block_size)
