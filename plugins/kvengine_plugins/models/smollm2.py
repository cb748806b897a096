"""SmolLM2-135M-Instruct by name: its shape is known without its files, which are fetched when needed."""

from __future__ import annotations

from dataclasses import replace

from kvengine.core.shapes import ModelShape
from kvengine.models import smollm2
from kvengine.models.hf import HfConfig, HfModel

SHAPE = ModelShape(
    num_layers=30,
    num_kv_heads=3,
    head_dim=64,
    vocab_size=49152,
    max_position=8192,
    dtype="bf16",
    eos_token_ids=(2,),
)


class SmolLM2Model(HfModel):
    """The default model (Apache-2.0)."""

    def __init__(self, config: HfConfig) -> None:
        self.name = smollm2.NAME
        self._dtype = config.dtype

    @property
    def directory(self):  # type: ignore[override]
        return smollm2.ensure_smollm2()

    def shape(self) -> ModelShape:
        return SHAPE if self._dtype == "auto" else replace(SHAPE, dtype=self._dtype)
