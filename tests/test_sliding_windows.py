"""Sliding windows: when one is said of a whole model, and that blocks out of it may be given back."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from kvengine.core.errors import ModelError
from kvengine.core.limits import EngineConfig
from kvengine.core.plan import ScheduledRow, StepPlan
from kvengine.core.request import Request
from kvengine.core.sequence import Sequence
from kvengine.core.shapes import KvShape, ModelShape
from kvengine.executors.hf_model import ATTENTION_NAME, HfLogitsModel
from kvengine.executors.input_batch import input_batch
from kvengine.kv.sizing import KvConfig, kv_shape
from kvengine.models.hf import HfConfig, HfModel
from kvengine.models.tiny import TinyConfig, TinyModel
from kvengine_kernels import reference, sdpa

WINDOW, BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN = 6, 4, 12, 64
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_MODEL_LEN,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
WINDOWED = ("MistralConfig", {"sliding_window": WINDOW})
HYBRID = ("Qwen2Config", {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1})

# ---- what is said of a model

DECLARATIONS: list[tuple[str, dict[str, Any], int | None]] = [
    ("LlamaConfig", {}, None),
    ("MistralConfig", {"sliding_window": None}, None),
    ("MistralConfig", {"sliding_window": 9}, 9),
    ("MistralConfig", {"sliding_window": 9, "use_sliding_window": False}, None),
    ("Phi3Config", {"sliding_window": 9}, 9),
    ("MixtralConfig", {"sliding_window": 9}, 9),
    ("Qwen2Config", {"sliding_window": 9}, None),
    ("Qwen2Config", {"sliding_window": 9, "use_sliding_window": False}, None),
    ("Qwen2Config", {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 0}, 9),
    ("Qwen2Config", {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 1}, None),
    ("Qwen2Config", {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 2}, None),
    ("Gemma2Config", {"sliding_window": 9}, None),
    ("Gemma2Config", {"sliding_window": 9, "layer_types": ["sliding_attention"] * 2}, 9),
    ("Gemma2Config", {"sliding_window": 9, "layer_types": ["full_attention"] * 2}, None),
]


@pytest.mark.parametrize(("name", "settings", "window"), DECLARATIONS, ids=str)
def test_a_models_window_is_that_of_all_its_layers(
    name: str, settings: dict[str, Any], window: int | None, tmp_path: Path
) -> None:
    getattr(transformers, name)(**{**SMALL, **settings}).save_pretrained(tmp_path)
    shape = HfModel(HfConfig(path=str(tmp_path))).shape()
    assert shape.sliding_window == window
    for max_model_len, expected in ((MAX_MODEL_LEN, window), (9, None)):
        engine = EngineConfig(max_model_len=max_model_len, num_blocks=4)
        assert kv_shape(KvConfig(), engine, shape).sliding_window == expected


def test_a_model_says_nothing_of_windows_it_has_not() -> None:
    assert TinyModel(TinyConfig()).shape().sliding_window is None


# ---- blocks out of the window


class Served:
    """A random model served in steps, and the same run by transformers' own attention."""

    def __init__(self, name: str, settings: dict[str, Any], backend: Any = sdpa) -> None:
        config, own = (getattr(transformers, name)(**SMALL, **settings) for _ in range(2))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.eager = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        module = AutoModelForCausalLM.from_config(own, attn_implementation=ATTENTION_NAME).eval()
        module.load_state_dict(self.eager.state_dict())
        self.model = HfLogitsModel(
            module,
            shape=ModelShape(
                num_layers=2,
                num_kv_heads=2,
                head_dim=8,
                vocab_size=64,
                max_position=MAX_MODEL_LEN,
                dtype="fp32",
            ),
            kv=KvShape(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype="fp32"),
            backend=backend,
            device=torch.device("cpu"),
            max_model_len=MAX_MODEL_LEN,
        )

    @torch.inference_mode()
    def step(self, tokens: list[int], blocks: list[int], start: int, padding: int = 0) -> torch.Tensor:
        """Compute tokens[start:] with the table `blocks` -> logits [V] after the last."""
        seq = Sequence(
            Request(id="r", prompt_token_ids=tuple(tokens)),
            choice=0,
            order=0,
            max_tokens_total=MAX_MODEL_LEN,
            stop_ids=frozenset(),
            seed=0,
        )
        seq.block_table.blocks = blocks
        plan = StepPlan(0, 0, [ScheduledRow(seq, start, len(tokens) - start, True)], padding_tokens=padding)
        batch = input_batch(plan, block_size=BLOCK_SIZE, scratch_block=NUM_BLOCKS, device=torch.device("cpu"))
        return self.model.forward(batch)[0]

    def fill_scratch(self, value: float) -> None:
        self.model._pool[:, NUM_BLOCKS] = value

    @torch.inference_mode()
    def truth(self, tokens: list[int]) -> torch.Tensor:
        return self.eager(torch.tensor([tokens])).logits[0, -1]


TOKENS = [(7 * i + 3) % 64 for i in range(40)]
CHUNKS = [0, 13, 14, 22, 30, 31, 32, 33, 40]
"""Where a prefill in chunks and some decodes begin and end."""

BACKENDS = pytest.mark.parametrize("backend", [reference, sdpa], ids=["reference", "sdpa"])
GARBAGE = pytest.mark.parametrize("garbage", [1.0, 3e38, float("nan")], ids=str)


@BACKENDS
@GARBAGE
def test_blocks_out_of_the_window_are_given_back_and_used_again(backend: Any, garbage: float) -> None:
    """Four blocks and those of the chunk serve any length; the scratch block stands for what is gone."""
    served = Served(*WINDOWED, backend)
    free, blocks = list(range(NUM_BLOCKS)), []
    most = 0
    for start, end in pairwise(CHUNKS):
        for gone in range(max(0, start - WINDOW + 1) // BLOCK_SIZE):
            if blocks[gone] != NUM_BLOCKS:
                free.append(blocks[gone])
                blocks[gone] = NUM_BLOCKS
        while len(blocks) * BLOCK_SIZE < end:
            blocks.append(free.pop())
        served.fill_scratch(garbage)
        logits = served.step(TOKENS[:end], list(blocks), start, padding=3)
        torch.testing.assert_close(logits, served.truth(TOKENS[:end]), rtol=1e-4, atol=1e-4)
        most = max(most, NUM_BLOCKS - len(free))
    assert blocks.count(NUM_BLOCKS) == (33 - WINDOW + 1) // BLOCK_SIZE
    assert most < len(blocks) - 2


@BACKENDS
def test_a_hybrid_keeps_all_blocks_and_needs_them(backend: Any) -> None:
    served = Served(*HYBRID, backend)
    blocks = list(range(10))
    for start, end in pairwise(CHUNKS):
        logits = served.step(TOKENS[:end], blocks[: -(-end // BLOCK_SIZE)], start)
        torch.testing.assert_close(logits, served.truth(TOKENS[:end]), rtol=1e-4, atol=1e-4)
    served.fill_scratch(1.0)
    without = served.step(TOKENS, [NUM_BLOCKS, *blocks[1:]], start=39)
    assert not torch.allclose(without, logits, atol=1e-2)


@pytest.mark.parametrize("used", [None, WINDOW + 1])
def test_layers_that_see_further_than_declared_end_the_run(used: int | None) -> None:
    """What is out of the declared window may be gone."""
    served = Served("MistralConfig", {"sliding_window": used})
    served.model._windows = dict.fromkeys(range(2), WINDOW)
    with pytest.raises(ModelError, match=r"layers \[0, 1\] .*sliding_window=6"):
        served.step(TOKENS, list(range(10)), start=0)
