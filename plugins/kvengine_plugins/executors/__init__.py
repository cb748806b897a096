"""Built-in executors."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

from kvengine.executors.config import TorchConfig
from kvengine.executors.null import NullConfig, NullExecutor
from kvengine.policies import Build

if TYPE_CHECKING:
    from kvengine.registry import Registry


def register_executors(registry: Registry) -> None:
    """Add them all."""
    registry.add(
        "executor",
        "torch",
        _torch,
        schema=TorchConfig,
        summary="runs the model with torch, on CPU or GPU",
    )
    registry.add(
        "executor",
        "null",
        _null,
        schema=NullConfig,
        summary="no model: a fixed virtual time per step, output lengths from the workload",
    )


def _torch(config: TorchConfig, build: Build) -> Any:
    gc.disable()  # importing and loading make many long-lived objects and no garbage: 0.5 s of 3.5
    try:
        from kvengine.executors.torch_executor import load_torch_executor

        return load_torch_executor(config, build)
    finally:
        gc.enable()


def _null(config: NullConfig, build: Build) -> NullExecutor:
    assert build.model is not None
    assert build.kv is not None
    eos = build.model.shape().eos_token_ids
    filler = next(i for i in range(len(eos) + 1) if i not in eos)
    source = build.model.token_source(build.kv)
    return NullExecutor(config, block_size=build.kv.block_size, source=source, filler_id=filler)
