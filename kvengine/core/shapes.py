"""Sizes that memory depends on: of a model, of its KV pool, and what the prefix cache may do in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvengine.core.errors import ConfigError, choices_hint


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What memory and limits depend on: sizes of a decoder-only transformer, no weights."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    dtype: str
    """Of weights and activations: fp32, bf16 or fp16; also of the KV pool under kv.dtype=auto."""
    eos_token_ids: tuple[int, ...] = ()
    sliding_window: int | None = None
    """The window (tokens) where every layer has one and it is the same; None where any layer sees everything."""

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """Bytes of K and V that one token holds over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_value


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """The KV pool: how many blocks of how many token slots, stored as which dtype (`fp8_e4m3`, `bf16`, ...).

    `num_host_blocks` are as many blocks of host memory to swap to. `sliding_window` is set where no layer attends
    further back than that many tokens, so that what is older can be freed.
    """

    num_blocks: int
    block_size: int
    dtype: str
    block_bytes: int = 0
    """Bytes of a block over all layers, K and V; 0 where no model says."""
    num_host_blocks: int = 0
    sliding_window: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCacheConfig:
    """The `prefix_cache` group.

    `mode`: auto is on where the allocator shares blocks and no sliding window frees them. `isolate_tenants`:
    requests hit only blocks of their own tenant. `offload`: an evicted block goes to the host pool, and comes
    back on a hit where moving its bytes at `host_bandwidth` (bytes/s) takes less time than computing its tokens
    at `recompute_rate` (tokens/s).
    """

    mode: Literal["auto", "on", "off"] = "auto"
    isolate_tenants: bool = False
    offload: bool = False
    host_bandwidth: float = 25e9
    recompute_rate: float = 10_000.0

    def __post_init__(self) -> None:
        if self.mode not in ("auto", "on", "off"):
            raise ConfigError("prefix_cache.mode", self.mode, choices_hint(self.mode, ("auto", "on", "off")))
        for name in ("host_bandwidth", "recompute_rate"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"prefix_cache.{name}", getattr(self, name), "must be a positive number")
