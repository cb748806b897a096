"""Built-in models by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvengine.models.hf import HfConfig, HfModel
from kvengine.models.tiny import TinyConfig, TinyModel
from kvengine_plugins.models.checksum import ChecksumModel
from kvengine_plugins.models.smollm2 import SmolLM2Model

if TYPE_CHECKING:
    from kvengine.registry import Registry


def register_models(registry: Registry) -> None:
    """Add them all."""
    add = registry.add
    add(
        "model",
        "smollm2-135m",
        lambda config, build: SmolLM2Model(config) if config.path is None else HfModel(config),
        schema=HfConfig,
        summary="SmolLM2-135M-Instruct, fetched once; with model.path: that model instead",
    )
    add(
        "model",
        "hf",
        lambda config, build: HfModel(config),
        schema=HfConfig,
        summary="any transformers causal LM by model.path (directory or hub id)",
    )
    add(
        "model",
        "tiny",
        lambda config, build: TinyModel(config),
        schema=TinyConfig,
        summary="a two-layer random Llama with a byte tokenizer, no files",
    )
    add(
        "model",
        "checksum",
        lambda config, build: ChecksumModel(),
        summary="exact integers from the KV slots, for executor=null: shows any misplaced slot",
    )
