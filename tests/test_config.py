"""From mappings to checked settings, the limits of a run, and the size of the KV pool."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from typing import Literal

import pytest

from kvengine.config import NoOptions, from_mapping
from kvengine.core.errors import ConfigError
from kvengine.core.limits import EngineConfig
from kvengine.core.shapes import ModelShape
from kvengine.executors.device_memory import check_host_memory
from kvengine.kv.sizing import KvConfig, kv_shape

# ---- from_mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    rate: float = 1.0
    depth: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    count: int
    rate: float = 0.5
    eager: bool = False
    label: str = "plain"
    limit: int | None = None
    share: float | None = None
    mode: Literal["fast", "slow", "auto"] = "auto"
    sizes: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    inner: Inner = Inner(depth=7)

    def __post_init__(self) -> None:
        if self.count > 100:
            raise ConfigError("part.count", self.count, "must be at most 100")


def built(**values) -> Settings:
    return from_mapping(Settings, {"count": 1, **values}, "part")


def refused(**values) -> ConfigError:
    with pytest.raises(ConfigError) as error:
        built(**values)
    return error.value


@pytest.mark.parametrize(
    ("name", "given", "taken"),
    [
        ("count", 3, 3),
        ("count", 3.0, 3),
        ("rate", 2, 2.0),
        ("rate", 0.25, 0.25),
        ("rate", math.inf, math.inf),
        ("eager", True, True),
        ("eager", 1, True),
        ("eager", "on", True),
        ("eager", "No", False),
        ("label", "x", "x"),
        ("limit", None, None),
        ("limit", 4, 4),
        ("limit", 4.0, 4),
        ("share", None, None),
        ("share", 1, 1.0),
        ("mode", "fast", "fast"),
        ("sizes", [1, 2.0], (1, 2)),
        ("sizes", (), ()),
        ("names", ["a", "b"], ("a", "b")),
        ("inner", {"rate": 3}, Inner(rate=3.0, depth=7)),
        ("inner", {}, Inner(depth=7)),
    ],
)
def test_right_values_are_taken_in_the_type_of_their_field(name, given, taken):
    value = getattr(built(**{name: given}), name)
    assert value == taken
    assert type(value) is type(taken)


@pytest.mark.parametrize(
    ("name", "given", "key", "said"),
    [
        ("count", True, "part.count", "whole number"),
        ("count", "3", "part.count", "whole number"),
        ("count", 3.5, "part.count", "whole number"),
        ("count", math.nan, "part.count", "whole number"),
        ("count", math.inf, "part.count", "whole number"),
        ("count", None, "part.count", "whole number"),
        ("rate", True, "part.rate", "a number"),
        ("rate", "1.0", "part.rate", "a number"),
        ("rate", math.nan, "part.rate", "a number"),
        ("rate", None, "part.rate", "a number"),
        ("eager", 2, "part.eager", "true or false"),
        ("eager", "maybe", "part.eager", "true or false"),
        ("eager", None, "part.eager", "true or false"),
        ("label", 7, "part.label", "a word"),
        ("label", None, "part.label", "a word"),
        ("limit", False, "part.limit", "whole number"),
        ("limit", "4", "part.limit", "whole number"),
        ("share", math.nan, "part.share", "a number"),
        ("mode", "fats", "part.mode", "did you mean 'fast'? choices: auto, fast, slow"),
        ("mode", None, "part.mode", "choices: auto, fast, slow"),
        ("sizes", 4, "part.sizes", "must be a list"),
        ("sizes", "1,2", "part.sizes", "must be a list"),
        ("sizes", [1, "2"], "part.sizes[1]", "whole number"),
        ("sizes", [True], "part.sizes[0]", "whole number"),
        ("inner", 3, "part.inner", "group of settings"),
        ("inner", {"rate": "3"}, "part.inner.rate", "a number"),
        ("inner", {"raet": 3.0}, "part.inner.raet", "did you mean 'rate'?"),
        ("cuont", 3, "part.cuont", "did you mean 'count'?"),
        (
            "zzzzzz",
            3,
            "part.zzzzzz",
            "choices: count, eager, inner, label, limit, mode, names, rate, share, sizes",
        ),
        ("count", 101, "part.count", "at most 100"),
    ],
)
def test_wrong_values_are_refused_by_their_full_key(name, given, key, said):
    error = refused(**{name: given})
    assert error.key == key
    assert said in error.problem
    assert str(error).startswith(f"{key}=")
    assert "\n" not in str(error)


def test_null_is_written_as_in_yaml():
    assert str(refused(count=None)).startswith("part.count=null: ")


def test_missing_value_is_named():
    with pytest.raises(ConfigError, match="count"):
        from_mapping(Settings, {"rate": 1.0}, "part")


def test_plug_in_without_options_takes_none():
    assert from_mapping(NoOptions, {}, "queue") == NoOptions()
    with pytest.raises(ConfigError, match=r"queue\.depth=3: no such setting"):
        from_mapping(NoOptions, {"depth": 3}, "queue")


# ---- EngineConfig


@pytest.mark.parametrize(
    ("max_model_len", "chunks", "budget"),
    [
        (2048, True, 512),
        (100, True, 512),
        (100, False, 2048),
        (2048, False, 2048),
        (5000, False, 5000),
        (5000, True, 512),
    ],
)
def test_budget_when_nothing_is_said(max_model_len, chunks, budget):
    config = EngineConfig(max_model_len=max_model_len)
    limits = config.resolve(chunks=chunks, scheduler="s")
    assert limits.max_num_batched_tokens == budget
    assert limits.max_model_len == max_model_len
    assert limits.max_num_seqs == 64


def test_budget_below_max_model_len_needs_chunks():
    config = EngineConfig(max_model_len=100, max_num_batched_tokens=99)
    assert config.resolve(chunks=True, scheduler="s").max_num_batched_tokens == 99
    with pytest.raises(ConfigError) as error:
        config.resolve(chunks=False, scheduler="continuous")
    assert error.value.key == "engine.max_num_batched_tokens"
    assert error.value.value == 99
    assert "max_model_len=100" in error.value.problem
    assert "scheduler=continuous" in error.value.problem
    assert "scheduler=chunked" in error.value.problem
    exact = EngineConfig(max_model_len=100, max_num_batched_tokens=100)
    assert exact.resolve(chunks=False, scheduler="s").max_num_batched_tokens == 100


@pytest.mark.parametrize(("chunks", "better"), [(True, "continuous"), (False, "chunked")])
def test_enable_chunked_prefill_must_not_contradict_the_scheduler(chunks, better):
    with pytest.raises(ConfigError) as error:
        EngineConfig(enable_chunked_prefill=not chunks).resolve(chunks=chunks, scheduler="mine")
    assert error.value.key == "engine.enable_chunked_prefill"
    assert "scheduler=mine" in error.value.problem
    assert f"scheduler={better}" in error.value.problem
    for agreeing in (chunks, None):
        EngineConfig(enable_chunked_prefill=agreeing).resolve(chunks=chunks, scheduler="mine")


def test_size_of_the_pool_is_said_once():
    with pytest.raises(ConfigError, match=r"engine\.num_blocks=8: .*not both"):
        EngineConfig(num_blocks=8, kv_memory_bytes=2**20)


def test_size_of_the_host_pool_is_said_once():
    for num_blocks in (None, 8):
        with pytest.raises(ConfigError, match=r"engine\.num_host_blocks=0: .*swap_space_bytes, not both"):
            EngineConfig(num_host_blocks=0, swap_space_bytes=2**20, num_blocks=num_blocks)
    EngineConfig(num_host_blocks=8, kv_memory_bytes=2**20)


@pytest.mark.parametrize("share", [math.nan, -0.1, 0.0, 1.5])
def test_memory_utilization_is_a_share(share):
    with pytest.raises(ConfigError, match="gpu_memory_utilization"):
        EngineConfig(gpu_memory_utilization=share)


# ---- the size of the KV pool

SMOLLM2 = ModelShape(
    num_layers=30, num_kv_heads=3, head_dim=64, vocab_size=49152, max_position=8192, dtype="bf16"
)
BLOCK_BYTES = 16 * 23_040
"""16 tokens of 2 (K and V) * 30 layers * 3 heads * 64 values * 2 bytes."""


def blocks(memory: int, dtype: str = "auto", block_size: int = 16) -> int:
    engine = EngineConfig(kv_memory_bytes=memory)
    return kv_shape(
        from_mapping(KvConfig, {"dtype": dtype, "block_size": block_size}, "kv"), engine, SMOLLM2
    ).num_blocks


def test_bytes_per_token():
    assert SMOLLM2.kv_bytes_per_token(2) == 23_040
    assert SMOLLM2.kv_bytes_per_token(1) == 11_520
    assert SMOLLM2.kv_bytes_per_token(4) == 46_080


@pytest.mark.parametrize("dtype", ["auto", "bf16", "fp16"])
def test_pool_holds_as_many_whole_blocks_as_the_memory(dtype):
    assert blocks(10 * BLOCK_BYTES, dtype) == 10
    assert blocks(11 * BLOCK_BYTES - 1, dtype) == 10
    assert blocks(2**29, dtype) == 1456  # 536,870,912 / 368,640 = 1456.36


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e4m3", "fp8_e5m2"])
def test_fp8_holds_twice_as_many(dtype):
    assert blocks(10 * BLOCK_BYTES, dtype) == 20
    assert blocks(10 * BLOCK_BYTES, "fp32") == 5
    assert blocks(2**29, dtype) == 2912


def test_small_blocks_hold_as_many_tokens():
    assert blocks(10 * BLOCK_BYTES, block_size=1) == 160
    assert blocks(10 * BLOCK_BYTES, block_size=32) == 5


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [("auto", "bf16"), ("fp8", "fp8_e4m3"), ("fp8_e5m2", "fp8_e5m2"), ("fp32", "fp32"), ("fp16", "fp16")],
)
def test_stored_dtype(dtype, stored):
    shape = kv_shape(from_mapping(KvConfig, {"dtype": dtype}, "kv"), EngineConfig(num_blocks=7), SMOLLM2)
    assert (shape.num_blocks, shape.block_size, shape.dtype) == (7, 16, stored)


@pytest.mark.parametrize(
    ("said", "offered", "expected"),
    [(None, None, 1456), (None, 4 * BLOCK_BYTES, 4), (3 * BLOCK_BYTES, 2**29, 3)],
)
def test_memory_is_what_the_user_says_or_the_device_offers_or_half_a_gibibyte(said, offered, expected):
    engine = EngineConfig(kv_memory_bytes=said)
    assert kv_shape(KvConfig(), engine, SMOLLM2, offered).num_blocks == expected


def test_memory_that_does_not_hold_one_block_is_refused_with_the_numbers():
    with pytest.raises(ConfigError) as error:
        blocks(BLOCK_BYTES - 1)
    assert error.value.key == "engine.kv_memory_bytes"
    assert error.value.value == 368_639
    assert "16 tokens in bf16 take 368640 bytes" in error.value.problem
    assert blocks(BLOCK_BYTES) == 1


def test_more_blocks_than_any_machine_has_are_refused():
    largest = 2**26
    assert kv_shape(KvConfig(), EngineConfig(num_blocks=largest), SMOLLM2).num_blocks == largest
    with pytest.raises(ConfigError, match=r"engine\.num_blocks=67108865: .*at most 67,108,864"):
        kv_shape(KvConfig(), EngineConfig(num_blocks=largest + 1), SMOLLM2)
    with pytest.raises(ConfigError, match=r"engine\.kv_memory_bytes=.*67,108,865 blocks"):
        blocks((largest + 1) * BLOCK_BYTES)


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ({}, 0),
        ({"num_host_blocks": 7}, 7),
        ({"swap_space_bytes": 0}, 0),
        ({"swap_space_bytes": 5 * BLOCK_BYTES - 1}, 4),
        ({"swap_space_bytes": BLOCK_BYTES, "num_blocks": 9}, 1),
    ],
    ids=str,
)
def test_the_host_pool_has_the_blocks_that_are_given_to_it(engine, expected):
    kv = kv_shape(KvConfig(), EngineConfig(**engine), SMOLLM2)
    assert kv.num_host_blocks == expected
    assert kv.num_blocks == engine.get("num_blocks", 1456)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("swap_space_bytes", BLOCK_BYTES - 1, "16 tokens in bf16 take 368640 bytes"),
        ("swap_space_bytes", (2**26 + 1) * BLOCK_BYTES, "67,108,865 blocks"),
        ("num_host_blocks", 2**26 + 1, "at most 67,108,864"),
    ],
)
def test_a_host_pool_that_cannot_be_is_refused_by_its_key(key, value, says):
    with pytest.raises(ConfigError, match=f"engine.{key}={value}: .*{says}"):
        kv_shape(KvConfig(), EngineConfig(**{key: value}), SMOLLM2)


def test_the_host_pool_counts_in_this_machines_memory():
    present = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // BLOCK_BYTES
    kv = kv_shape(KvConfig(), EngineConfig(num_blocks=present // 2, num_host_blocks=present // 2), SMOLLM2)
    check_host_memory(kv, SMOLLM2)
    larger = replace(kv, num_host_blocks=present)
    with pytest.raises(ConfigError, match=f"engine.num_host_blocks={present}: .* besides "):
        check_host_memory(larger, SMOLLM2)
    check_host_memory(larger, SMOLLM2, pool_on_gpu=True)
    with pytest.raises(ConfigError, match=f"engine.num_blocks={present + 1}: "):
        check_host_memory(replace(kv, num_blocks=present + 1), SMOLLM2)


@pytest.mark.parametrize(("window", "expected"), [(None, None), (99, 99), (100, None), (101, None)])
def test_a_window_counts_where_sequences_outgrow_it(window, expected):
    shape = replace(SMOLLM2, sliding_window=window)
    assert kv_shape(KvConfig(), EngineConfig(max_model_len=100), shape).sliding_window == expected


def test_a_group_must_be_a_mapping():
    with pytest.raises(ConfigError, match="kv=16: must be a group of settings"):
        from_mapping(KvConfig, 16, "kv")  # pyright: ignore[reportArgumentType]


def test_unknown_dtype_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'fp8_e4m3'"):
        from_mapping(KvConfig, {"dtype": "fp8_e4m4"}, "kv")
