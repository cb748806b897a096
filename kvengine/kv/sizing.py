"""How many blocks a KV pool has: from memory, storage dtype and model shape, or as given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvengine.core.errors import ConfigError
from kvengine.core.limits import EngineConfig
from kvengine.policies import KvShape, ModelShape

BYTES_PER_VALUE = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}

DEFAULT_KV_MEMORY_BYTES = 512 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class KvConfig:
    """The `kv` group: storage dtype (auto: the model's; fp8 means fp8_e4m3) and tokens per block."""

    dtype: Literal["auto", "fp32", "fp16", "bf16", "fp8", "fp8_e4m3", "fp8_e5m2"] = "auto"
    block_size: int = 16

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ConfigError("kv.block_size", self.block_size, "must be at least 1")

    def storage_dtype(self, model: ModelShape) -> str:
        """The dtype that is really stored, one of BYTES_PER_VALUE."""
        name = model.dtype if self.dtype == "auto" else self.dtype
        return "fp8_e4m3" if name == "fp8" else name


def kv_shape(kv: KvConfig, engine: EngineConfig, model: ModelShape, memory_bytes: int | None = None) -> KvShape:
    """The pool of a run; `memory_bytes` is what a device offers when the user named no size.

    Raises ConfigError when the memory does not hold one block.
    """
    dtype = kv.storage_dtype(model)
    if engine.num_blocks is not None:
        return KvShape(num_blocks=engine.num_blocks, block_size=kv.block_size, dtype=dtype)
    block_bytes = model.kv_bytes_per_token(BYTES_PER_VALUE[dtype]) * kv.block_size
    memory = engine.kv_memory_bytes or memory_bytes or DEFAULT_KV_MEMORY_BYTES
    if memory < block_bytes:
        raise ConfigError(
            "engine.kv_memory_bytes",
            memory,
            f"does not hold one block: {kv.block_size} tokens in {dtype} take {block_bytes} bytes; "
            f"raise it or lower kv.block_size",
        )
    return KvShape(num_blocks=memory // block_bytes, block_size=kv.block_size, dtype=dtype)
