"""Which transformers models are refused, by what words, and that no weight is read for it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig

from kvengine.assemble import blueprint
from kvengine.compose import composer
from kvengine.core.errors import ConfigError, KvEngineError, ModelError
from kvengine.engine.driver import Driver
from kvengine.executors.hf_model import ATTENTION_NAME, _Step, paged_attention_forward
from kvengine.registry import discover

REGISTRY = discover()
DOORS = ("hf", "smollm2-135m")
"""The models by name that take a model.path."""


@pytest.fixture(scope="module")
def base() -> dict[str, Any]:
    with composer() as compose:
        return compose(["workload=synthetic"])


def refusal(base: dict[str, Any], path: Path, door: str = "hf", **engine: Any) -> KvEngineError:
    """The error over `model.path`, raised before weights (there are none), one line that names the path."""
    config = {
        **base,
        "model": {"name": door, "path": str(path)},
        "engine": {**base["engine"], "max_model_len": 128, **engine},
    }
    with pytest.raises(KvEngineError) as caught:
        blueprint(config, REGISTRY)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    return caught.value


def save_config(path: Path, name: str, **settings: Any) -> Path:
    """Write the config.json, and nothing else, of the configuration class `name`."""
    getattr(transformers, name)(**settings).save_pretrained(path)
    assert [file.name for file in path.iterdir()] == ["config.json"]
    return path


STATEFUL = [
    ("MambaConfig", {}, "linear_attention"),
    ("JambaConfig", {}, "linear_attention"),
    ("GraniteMoeHybridConfig", {}, "linear_attention"),
    ("RecurrentGemmaConfig", {}, "linear_attention"),
    ("FalconH1Config", {}, "hybrid"),
    ("Lfm2Config", {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}, "conv"),
    ("RwkvConfig", {}, "rwkv"),
]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(("name", "settings", "kind"), STATEFUL, ids=[name for name, _, _ in STATEFUL])
def test_a_state_besides_kv_is_named_by_layer_type(
    name: str, settings: dict[str, Any], kind: str, door: str, base: dict[str, Any], tmp_path: Path
) -> None:
    error = refusal(base, save_config(tmp_path, name, **settings), door)
    assert isinstance(error, ModelError)
    assert re.search(rf"state besides KV \([^)]*\b{kind}\b", str(error))


@pytest.mark.parametrize("name", ["BloomConfig", "FalconConfig", "StableLmConfig"])
def test_attention_that_is_not_dispatched_is_refused(name: str, base: dict[str, Any], tmp_path: Path) -> None:
    error = refusal(base, save_config(tmp_path, name))
    assert isinstance(error, ModelError)
    assert "AttentionInterface" in str(error)
    assert name.removesuffix("Config").lower() in str(error)


@pytest.mark.parametrize("name", ["BertConfig", "RobertaConfig", "T5Config", "ViTConfig"])
def test_what_is_no_decoder_is_refused(name: str, base: dict[str, Any], tmp_path: Path) -> None:
    error = refusal(base, save_config(tmp_path, name))
    assert isinstance(error, ModelError)
    assert name.removesuffix("Config").lower() in str(error)


@pytest.mark.parametrize(
    ("name", "named"), [("DeepseekV3Config", "kv_lora_rank"), ("Gemma4TextConfig", "head_dim")]
)
def test_kv_of_another_shape_is_refused(name: str, named: str, base: dict[str, Any], tmp_path: Path) -> None:
    error = refusal(base, save_config(tmp_path, name))
    assert isinstance(error, ModelError)
    assert named in str(error)


@pytest.mark.parametrize("name", ["GPT2Config", "GPTNeoXConfig", "OPTConfig", "SmolLM3Config"])
def test_decoders_of_every_age_pass_the_checks(name: str, base: dict[str, Any], tmp_path: Path) -> None:
    path = save_config(tmp_path, name)
    blueprint(
        {
            **base,
            "model": {"name": "hf", "path": str(path)},
            "engine": {**base["engine"], "max_model_len": 128},
        },
        REGISTRY,
    )


@pytest.mark.parametrize("content", [None, "", "{", "[]", "{}", '{"model_type": "no_such_model"}'], ids=repr)
def test_a_directory_without_a_readable_config_is_refused(
    content: str | None, base: dict[str, Any], tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    error = refusal(base, tmp_path)
    assert isinstance(error, ModelError)
    assert "config.json" in str(error)


def test_more_positions_than_the_checkpoint_has_are_refused(base: dict[str, Any], tmp_path: Path) -> None:
    path = save_config(tmp_path, "LlamaConfig", max_position_embeddings=100)
    error = refusal(base, path, max_model_len=101)
    assert isinstance(error, ConfigError)
    assert error.key == "engine.max_model_len"
    assert error.value == 101
    assert "100" in error.problem


def test_positions_end_where_rope_would_change_for_all_rows(base: dict[str, Any], tmp_path: Path) -> None:
    """Beyond its original positions a longrope model turns all rows of a batch when one of them is there."""
    path = save_config(
        tmp_path,
        "Phi3Config",
        max_position_embeddings=400,
        original_max_position_embeddings=100,
        rope_parameters={"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_hidden_layers=1,
    )
    error = refusal(base, path, max_model_len=101)
    assert isinstance(error, ConfigError)
    assert error.key == "engine.max_model_len"
    assert "100" in error.problem
    engine = {**base["engine"], "max_model_len": 100}
    blueprint({**base, "model": {"name": "hf", "path": str(path)}, "engine": engine}, REGISTRY)


def test_no_path_is_an_error_by_key(base: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        blueprint({**base, "model": {"name": "hf"}}, REGISTRY)
    assert caught.value.key == "model.path"


def test_a_good_config_without_weights_passes_the_checks_and_fails_to_load(
    base: dict[str, Any], tmp_path: Path
) -> None:
    path = save_config(tmp_path, "LlamaConfig", num_hidden_layers=1)
    config = {**base, "model": {"name": "hf", "path": str(path)}}
    plan = blueprint(config, REGISTRY)
    with pytest.raises(ModelError, match=re.escape(str(path))) as caught:
        plan.engine()
    assert "\n" not in str(caught.value)


# ---- what layers pass to attention


class Backend:
    """Notes what it is asked and answers zeros."""

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}

    def run(self, plan: Any, q: torch.Tensor, k_cache: Any, v_cache: Any, **options: Any) -> torch.Tensor:
        self.asked = options
        return torch.zeros_like(q)


def attend(backend: Backend | None = None, heads: int = 2, **arguments: Any) -> torch.Tensor:
    """paged_attention_forward over one layer, 3 tokens, 4 query heads and `heads` KV heads of size 8."""
    caches = [(torch.zeros(16, 2, 8), torch.zeros(16, 2, 8))]
    step = _Step(caches, torch.arange(3), backend or Backend(), None)
    module: Any = torch.nn.Module()
    module.layer_idx = 0
    query, key, value = (torch.ones(1, h, 3, 8) for h in (4, heads, heads))
    given = {"attention_mask": None, "kvengine_step": step, **arguments}
    return paged_attention_forward(module, query, key, value, **given)[0]


def test_known_arguments_reach_the_backend() -> None:
    backend, sinks = Backend(), torch.zeros(4)
    out = attend(
        backend, scaling=0.3, sliding_window=5, softcap=2.0, s_aux=sinks, dropout=0.0, use_cache=False
    )
    assert out.shape == (1, 3, 4, 8)
    assert backend.asked["scale"] == 0.3
    assert backend.asked["sliding_window"] == 5
    assert backend.asked["softcap"] == 2.0
    assert backend.asked["sinks"] is sinks


def test_without_a_scale_it_is_that_of_the_head_size() -> None:
    backend = Backend()
    attend(backend)
    assert backend.asked == {"scale": 8**-0.5, "sliding_window": None, "softcap": None, "sinks": None}


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"alibi": 0, "head_mask": torch.ones(4)}, "alibi, head_mask"),
        ({"attention_mask": torch.ones(1, 1, 3, 3)}, "mask"),
        ({"is_causal": False}, "non-causal"),
    ],
    ids=["one", "two", "mask", "non_causal"],
)
def test_an_argument_that_could_change_the_answer_raises(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named) as caught:
        attend(**arguments)
    assert "\n" not in str(caught.value)


def test_an_unknown_argument_that_is_none_says_nothing() -> None:
    attend(position_bias=None, is_causal=True)


def test_heads_that_do_not_fit_the_cache_raise() -> None:
    with pytest.raises(ModelError, match=r"\(1, 8\).*\(2, 8\)"):
        attend(heads=1)


def test_transformers_calls_it_for_every_layer() -> None:
    assert ATTENTION_NAME in AttentionInterface().valid_keys()
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL), attn_implementation=ATTENTION_NAME)
    with pytest.raises(ModelError, match="LlamaAttention passes position_bias"):
        model(torch.zeros(1, 3, dtype=torch.long), use_cache=False, kvengine_step=None, position_bias=1)


# ---- layers that would be served wrong without a word

SMALL: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


@pytest.mark.parametrize(
    ("name", "settings", "problem"),
    [
        ("DiffLlamaConfig", {}, "more than once in layer 0"),
        (
            "PhimoeConfig",
            {"sliding_window": 8, "num_local_experts": 2},
            r"layers \[0, 1\] .*sliding_window=8",
        ),
        ("NemotronConfig", {"head_dim": 8}, "does not pass on"),
    ],
    ids=["attends_twice", "keeps_its_window_to_itself", "drops_arguments"],
)
def test_layers_that_use_attention_in_another_way_end_the_run(
    name: str, settings: dict[str, Any], problem: str, base: dict[str, Any], tmp_path: Path
) -> None:
    config = getattr(transformers, name)(**SMALL, **settings)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    requests = tmp_path / "requests.jsonl"
    requests.write_text('{"prompt_token_ids": [1, 2, 3], "max_tokens": 2}')
    plan = blueprint(
        {
            **base,
            "model": {"name": "hf", "path": str(tmp_path)},
            "workload": {"name": "jsonl", "path": str(requests)},
            "executor": {"name": "torch", "device": "cpu"},
            "engine": {**base["engine"], "max_model_len": 64, "num_blocks": 4},
        },
        REGISTRY,
    )
    with pytest.raises(ModelError, match=problem) as caught:
        Driver(plan.engine(), plan.workload).run()
    assert "\n" not in str(caught.value)
