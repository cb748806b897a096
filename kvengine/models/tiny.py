"""A small Llama with random weights, made on the spot from a seed: for tests and offline use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from kvengine.core.shapes import KvShape, ModelShape
from kvengine.models.byte_tokenizer import ByteTokenizer
from kvengine.policies import Build, Tokenizer

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, MAX_POSITION = 2, 4, 2, 16, 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyConfig:
    """`seed` of the weights; `dtype` of weights and activations."""

    seed: int = 0
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"


class TinyModel:
    """Two layers, byte tokenizer, nothing to download. What it says is noise, but always the same noise."""

    name = "tiny"

    def __init__(self, config: TinyConfig) -> None:
        self._config = config

    def shape(self) -> ModelShape:
        return ModelShape(
            num_layers=NUM_LAYERS,
            num_kv_heads=NUM_KV_HEADS,
            head_dim=HEAD_DIM,
            vocab_size=ByteTokenizer.vocab_size,
            max_position=MAX_POSITION,
            dtype=self._config.dtype,
            eos_token_ids=(ByteTokenizer.eos_token_id,),
        )

    def weight_bytes(self) -> int:
        return 0  # too few to count

    def tokenizer(self) -> Tokenizer:
        return ByteTokenizer()

    def load(self, build: Build) -> Any:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        from kvengine.executors.hf_model import ATTENTION_NAME
        from kvengine.models.hf import torch_dtype

        config = LlamaConfig(
            vocab_size=ByteTokenizer.vocab_size,
            hidden_size=NUM_HEADS * HEAD_DIM,
            intermediate_size=2 * NUM_HEADS * HEAD_DIM,
            num_hidden_layers=NUM_LAYERS,
            num_attention_heads=NUM_HEADS,
            num_key_value_heads=NUM_KV_HEADS,
            max_position_embeddings=MAX_POSITION,
            initializer_range=0.3,  # wide enough that the best two logits are far apart
            bos_token_id=None,
            eos_token_id=ByteTokenizer.eos_token_id,
            attn_implementation=ATTENTION_NAME,  # pyright: ignore[reportCallIssue] - a base class takes it
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._config.seed)
            return LlamaForCausalLM(config).to(torch_dtype(self._config.dtype))

    def token_source(self, kv: KvShape) -> None:
        return None
