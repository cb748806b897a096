"""How many blocks a KV pool and its host pool have: from memory, storage dtype and model shape, or as given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvengine.core.errors import ConfigError
from kvengine.core.limits import EngineConfig
from kvengine.core.shapes import KvShape, ModelShape

BYTES_PER_VALUE = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}

DEFAULT_KV_MEMORY_BYTES = 512 * 2**20

MAX_BLOCKS = 2**26
"""Above this a typing error is likelier than a machine: at 16 tokens a block it is a billion tokens."""


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


def kv_shape(
    kv: KvConfig, engine: EngineConfig, model: ModelShape, default_memory_bytes: int | None = None
) -> KvShape:
    """The pool of a run; without a size from the user it is `default_memory_bytes`, or else 512 MiB.

    The host pool has no blocks unless the user gives it a size. Raises ConfigError when a memory does not hold
    one block, or holds more than MAX_BLOCKS.
    """
    dtype = kv.storage_dtype(model)
    block_bytes = model.kv_bytes_per_token(BYTES_PER_VALUE[dtype]) * kv.block_size

    def blocks_in(key: str, memory: int) -> int:
        if memory < block_bytes:
            raise ConfigError(
                key,
                memory,
                f"does not hold one block: {kv.block_size} tokens in {dtype} take {block_bytes} bytes; "
                f"raise it or lower kv.block_size",
            )
        return _at_most_max(key, memory, memory // block_bytes)

    if engine.num_blocks is None:
        memory = engine.kv_memory_bytes or default_memory_bytes or DEFAULT_KV_MEMORY_BYTES
        num_blocks = blocks_in("engine.kv_memory_bytes", memory)
    else:
        num_blocks = _at_most_max("engine.num_blocks", engine.num_blocks, engine.num_blocks)
    if engine.swap_space_bytes:
        num_host_blocks = blocks_in("engine.swap_space_bytes", engine.swap_space_bytes)
    else:
        wanted = engine.num_host_blocks or 0
        num_host_blocks = _at_most_max("engine.num_host_blocks", wanted, wanted)
    window = model.sliding_window
    return KvShape(
        num_blocks=num_blocks,
        block_size=kv.block_size,
        dtype=dtype,
        block_bytes=block_bytes,
        num_host_blocks=num_host_blocks,
        sliding_window=window if window is not None and window < engine.max_model_len else None,
    )


def _at_most_max(key: str, given: int, num_blocks: int) -> int:
    if num_blocks > MAX_BLOCKS:
        raise ConfigError(key, given, f"makes {num_blocks:,} blocks; at most {MAX_BLOCKS:,} are possible")
    return num_blocks
