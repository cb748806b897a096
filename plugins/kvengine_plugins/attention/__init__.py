"""Built-in attention backends: names for the modules of kvengine_kernels, imported when a model is loaded."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvengine.registry import Registry


class KernelModule:
    """A backend that is a module of kvengine_kernels."""

    def __init__(self, module: str) -> None:
        self._module = module

    def backend(self) -> Any:
        return import_module(self._module)


def register_attention(registry: Registry) -> None:
    """Add them all."""
    registry.add(
        "attention",
        "torch",
        lambda config, build: KernelModule("kvengine_kernels.reference"),
        summary="the reference: plain torch, one sequence at a time, fp32 accumulation",
    )
    registry.add(
        "attention",
        "sdpa",
        lambda config, build: KernelModule("kvengine_kernels.sdpa"),
        summary="torch's scaled_dot_product_attention, decodes batched",
    )
