"""Models that transformers runs: from a directory or a hub id, checked before any weight is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from kvengine.core.errors import ConfigError, ModelError
from kvengine.core.shapes import KvShape, ModelShape
from kvengine.models.tokenizer import HfTokenizer, declared_eos_ids
from kvengine.policies import Build, Tokenizer

WINDOWED_LAYERS = frozenset({"full_attention", "sliding_attention"})
"""The layer types whose state is the KV of past tokens, and nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HfConfig:
    """`path`: a directory or a model hub id. `dtype` of weights and activations (auto: the checkpoint's)."""

    path: str | None = None
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"


class HfModel:
    """Any transformers causal LM whose attention goes through AttentionInterface and keeps no other state."""

    def __init__(self, config: HfConfig) -> None:
        if not config.path:
            shown = "null" if config.path is None else ""
            raise ConfigError("model.path", shown, "give a directory or a model hub id")
        self.name = config.path
        self._dtype = config.dtype

    @cached_property
    def directory(self) -> Path:
        """Where the checkpoint lies, fetched from the model hub if `path` is no directory; ModelError."""
        return Path(self.name) if Path(self.name).is_dir() else _fetch(self.name)

    @cached_property
    def _config(self) -> Any:
        from transformers import AutoConfig

        try:
            return AutoConfig.from_pretrained(self.directory, local_files_only=True).get_text_config()
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(
                f"model.path={self.name}: no readable config.json ({_first_line(error)})"
            ) from error

    def shape(self) -> ModelShape:
        config = self._config
        refuse_unservable(config, self.name)
        heads = config.num_attention_heads
        return ModelShape(
            num_layers=config.num_hidden_layers,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            vocab_size=config.vocab_size,
            max_position=_max_position(config),
            dtype=self._dtype if self._dtype != "auto" else _dtype_name(config.dtype),
            eos_token_ids=declared_eos_ids(self.directory),
            sliding_window=_window_of_all_layers(config),
        )

    def weight_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.directory.glob("*.safetensors"))

    def tokenizer(self) -> Tokenizer:
        return HfTokenizer(self.directory)

    def load(self, build: Build) -> Any:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        from kvengine.executors.hf_model import ATTENTION_NAME

        logging.disable_progress_bar()  # it counts tensors, in a second
        try:
            return AutoModelForCausalLM.from_pretrained(
                self.directory,
                local_files_only=True,
                dtype=torch_dtype(self.shape().dtype),
                attn_implementation=ATTENTION_NAME,
            )
        except Exception as error:  # safetensors, torch and transformers each have their own
            raise ModelError(f"model.path={self.name}: cannot be loaded ({_first_line(error)})") from error

    def token_source(self, kv: KvShape) -> None:
        return None


def declared_windows(config: Any) -> dict[int, int]:
    """The sliding window (tokens) of each layer that has one, by its configuration."""
    config = config.get_text_config()
    window = getattr(config, "sliding_window", None)
    if not window or getattr(config, "use_sliding_window", True) is False:
        return {}
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return {layer: window for layer, kind in enumerate(kinds) if kind == "sliding_attention"}


def _window_of_all_layers(config: Any) -> int | None:
    windows = declared_windows(config)
    return max(windows.values()) if len(windows) == config.num_hidden_layers else None


def _max_position(config: Any) -> int:
    """The positions of `config`; with longrope the original ones, since beyond them a model turns the rotary
    embedding of all rows of a batch as soon as one of them is there."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if rope.get("rope_type") == "longrope":
        original = getattr(config, "original_max_position_embeddings", None)
        return original or rope.get("original_max_position_embeddings") or config.max_position_embeddings
    return config.max_position_embeddings


def refuse_unservable(config: Any, name: str) -> None:
    """ModelError for a model that would be served wrong, saying what about it: no causal decoder, a state besides
    KV, attention that is not dispatched, or KV whose shape is not the same in all layers."""
    for problem in (_not_causal, _stateful, _not_dispatched, _uneven_kv):
        found = problem(config)
        if found:
            raise ModelError(f"model.path={name}: {found}")


def _model_class(config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM._model_mapping.get(type(config), None)


def _not_causal(config: Any) -> str | None:
    from transformers import AutoModelForMaskedLM

    encoder = (
        getattr(config, "is_decoder", True) is False and type(config) in AutoModelForMaskedLM._model_mapping
    )
    if _model_class(config) is None or encoder:
        return f"'{config.model_type}' is not a causal LM that transformers knows"
    return None


def _stateful(config: Any) -> str | None:
    kinds = set(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ())
    other = kinds - WINDOWED_LAYERS
    if not other and not getattr(_model_class(config), "_is_stateful", False):
        return None
    which = ", ".join(sorted(other)) or config.model_type
    return (
        f"its layers keep a state besides KV ({which}), which kvengine cannot batch; "
        f"take a model with attention layers only"
    )


def _not_dispatched(config: Any) -> str | None:
    if getattr(_model_class(config), "_supports_attention_backend", False):
        return None
    return (
        f"attention of '{config.model_type}' does not go through transformers' AttentionInterface, "
        f"so kvengine cannot page its KV"
    )


def _uneven_kv(config: Any) -> str | None:
    """One cache shape serves all layers, so K and V must have it everywhere."""
    try:
        head_dim = getattr(config, "head_dim", None)
    except (
        Exception
    ):  # transformers' own refusal to name one size where layers differ, which is no AttributeError
        return "its layers differ in head_dim, and kvengine has one cache shape for all"
    if getattr(config, "kv_lora_rank", None):
        return "it keeps a compressed KV (kv_lora_rank), which kvengine cannot page yet"
    if getattr(config, "num_kv_shared_layers", 0):
        return "some layers use the KV of others (num_kv_shared_layers), which kvengine cannot page yet"
    for other in ("global_head_dim", "v_head_dim"):
        size = getattr(config, other, None)
        if size and head_dim and size != head_dim:
            return (
                f"its KV has two sizes (head_dim={head_dim}, {other}={size}), which kvengine cannot page yet"
            )
    return None


def torch_dtype(name: str) -> Any:
    """The torch dtype that `fp32`, `bf16` or `fp16` names."""
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]


def _dtype_name(dtype: Any) -> str:
    names = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "bfloat16": "bf16", "float16": "fp16"}
    return names.get(str(dtype), "fp32")


def _fetch(hub_id: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model"]))
    except Exception as error:  # whatever the network, the hub or the id's syntax trips over
        raise ModelError(
            f"model.path={hub_id}: no such directory, and the model hub does not give it ({_first_line(error)})"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
