"""Random checkpoints of a few thousand weights, one per architecture, saved the way fine-tunes are.

Windows are shorter than most prompts, softcaps bite, and weights are wide enough that the two best logits lie
far apart: whatever a layer asks of attention changes the tokens (test_what_layers_ask_for_changes_the_tokens).
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from greedy_reference import Answer

WINDOW = 12
VOCAB_SIZE = 128
EOS = 2
MAX_POSITION = 256
SEED = 7  # of 0 to 7 the one with which no reference holds a tie

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITION,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}
MIXED = ["sliding_attention", "full_attention"]
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """`config` makes its configuration; each of `without` takes away one thing that attention must honour."""

    config: Callable[[], Any]
    without: tuple[dict[str, Any], ...] = ()


def architecture(name: str, *without: dict[str, Any], **settings: Any) -> Architecture:
    """The architecture whose configuration class is called `name`, in SIZES but for `settings`."""
    return Architecture(config=lambda: getattr(transformers, name)(**{**SIZES, **settings}), without=without)


NO_WINDOW = {"sliding_window": MAX_POSITION}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": architecture("LlamaConfig"),
    "qwen2": architecture(
        "Qwen2Config", NO_WINDOW, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "qwen3": architecture("Qwen3Config", head_dim=24),
    "mistral": architecture("MistralConfig", NO_WINDOW, sliding_window=WINDOW, num_key_value_heads=1),
    "gemma2": architecture(
        "Gemma2Config",
        NO_WINDOW,
        {"attn_logit_softcapping": None},
        {"query_pre_attn_scalar": 16},
        sliding_window=WINDOW,
        attn_logit_softcapping=2.0,
        query_pre_attn_scalar=20,
        head_dim=16,
        tie_word_embeddings=False,
    ),
    "gemma3": architecture(
        "Gemma3TextConfig",
        NO_WINDOW,
        sliding_window=WINDOW,
        layer_types=MIXED,
        head_dim=16,
        query_pre_attn_scalar=20,
        tie_word_embeddings=False,
    ),
    "phi3": architecture("Phi3Config", NO_WINDOW, sliding_window=WINDOW, num_key_value_heads=4),
    "olmo2": architecture("Olmo2Config"),
    "gpt_oss": architecture(
        "GptOssConfig",
        NO_WINDOW,
        sliding_window=WINDOW,
        layer_types=MIXED,
        head_dim=16,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        **EXPERTS,
    ),
    "granite": architecture("GraniteConfig", {"attention_multiplier": 0.25}, attention_multiplier=0.1),
    "mixtral": architecture("MixtralConfig", **EXPERTS),
    "cohere2": architecture(
        "Cohere2Config", NO_WINDOW, sliding_window=WINDOW, layer_types=MIXED, logit_scale=1.0
    ),
    "gpt_neox": architecture("GPTNeoXConfig", num_key_value_heads=4),
    "smollm3": architecture("SmolLM3Config", no_rope_layers=[1, 0]),
}


class Checkpoint(NamedTuple):
    """A saved model, and what transformers answers with it."""

    directory: Path
    answers: list[Answer]


def save_checkpoint(name: str, directory: Path) -> Path:
    """Make the model of ARCHITECTURES[name] from SEED and save it in `directory`, without a tokenizer."""
    config = ARCHITECTURES[name].config()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("sinks"):
                torch.nn.init.normal_(parameter, mean=2.0)
    model.save_pretrained(directory)
    return directory
