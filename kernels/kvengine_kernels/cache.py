"""Allocate, write and read a paged cache in any storage dtype, without overflow on the way in.

Shapes: T tokens, N gathered slots, Hkv KV heads, D head_dim; a cache is [num_blocks * block_size, Hkv, D].
"""

from functools import lru_cache

import torch
from torch import Tensor

KV_DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}


def allocate_cache(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Tensor:
    """Return zeros [num_blocks * block_size, Hkv, D] of dtype; call once for K and once for V.

    Raises RuntimeError (torch's) if a size is negative or memory does not suffice.
    """
    return torch.zeros(num_blocks * block_size, num_kv_heads, head_dim, dtype=dtype, device=device)


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Store k, v [T, Hkv, D] (compute dtype) at slot_mapping [T] int64 of both caches, in place.

    Values beyond the finite range of a narrower storage dtype, infinities included, become its largest
    finite value of that sign; NaN stays NaN. Only slots of the scratch block may occur twice.
    Raises IndexError or RuntimeError (torch's) for a slot outside the cache or shapes that differ.
    """
    for values, cache in ((k, k_cache), (v, v_cache)):
        stored = _saturating_cast(values, cache.dtype)
        _bytes_if_fp8(cache).index_copy_(0, slot_mapping, _bytes_if_fp8(stored))


def read_kv(cache: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the cache's entries at slots [N] int64 as [N, Hkv, D] in dtype.

    Raises IndexError (torch's) for a slot outside the cache.
    """
    if cache.dtype.itemsize > 1:
        return cache.index_select(0, slots).to(dtype)
    codes = cache.view(torch.uint8).index_select(0, slots)
    if not codes.is_cpu:
        return codes.view(cache.dtype).to(dtype)
    # torch casts fp8 on the CPU element by element; looking the 256 codes up takes a third of the time.
    values = _fp8_values(cache.dtype, dtype)
    return values.index_select(0, codes.flatten().int()).view(codes.shape)


@lru_cache
def _fp8_values(stored: torch.dtype, dtype: torch.dtype) -> Tensor:
    return torch.arange(256, dtype=torch.uint8).view(stored).to(dtype)


def _saturating_cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    if torch.finfo(dtype).max < torch.finfo(values.dtype).max:
        limit = torch.finfo(dtype).max
        # In fp32: in bf16 the limit of fp16 would itself round up to 65536, which is inf in fp16.
        values = values.float().clamp(-limit, limit)
    return values.to(dtype)


def _bytes_if_fp8(tensor: Tensor) -> Tensor:
    # index_copy_ is not defined for fp8 on every device; bytes are.
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
