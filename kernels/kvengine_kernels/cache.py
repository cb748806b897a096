"""Allocate, write, read, copy and swap a paged cache in any storage dtype, without overflow on the way in.

Shapes: T tokens, N gathered slots, P planes (K and V of every layer), B block size, Hkv KV heads, D head_dim. A
cache is [num_blocks * B, Hkv, D]; a pool [P, num_blocks, B, Hkv, D] holds the caches of all layers, a host pool
[num_blocks, P, B, Hkv, D] the same in another order: there a block is one piece, which goes over a bus at once.
"""

from collections.abc import Sequence
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


def allocate_pool(
    num_layers: int,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Tensor:
    """Return zeros [2 * num_layers, num_blocks, B, Hkv, D]: plane 2 * i is K of layer i, plane 2 * i + 1 its V.

    Raises RuntimeError as allocate_cache().
    """
    planes = 2 * num_layers
    cache = allocate_cache(planes * num_blocks, block_size, num_kv_heads, head_dim, dtype, device)
    return cache.view(planes, num_blocks, block_size, num_kv_heads, head_dim)


def allocate_host_pool(pool: Tensor, num_blocks: int) -> Tensor:
    """Return zeros [num_blocks, P, B, Hkv, D] in host memory for blocks of `pool`, pinned if it is on a GPU.

    Raises RuntimeError (torch's) if a size is negative or memory does not suffice.
    """
    sizes = (num_blocks, len(pool), *pool.shape[2:])
    return torch.zeros(sizes, dtype=pool.dtype, pin_memory=pool.is_cuda and num_blocks > 0)


def layer_caches(pool: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return the K and V caches of every layer, views of the pool."""
    caches = [plane.flatten(0, 1) for plane in pool]
    return list(zip(caches[::2], caches[1::2], strict=True))


def copy_blocks(pool: Tensor, sources: Sequence[int], destinations: Sequence[int]) -> None:
    """Copy blocks within the pool, bit for bit, all planes at once.

    Raises ValueError when a destination is a source or occurs twice, and for a block outside the pool.
    """
    _check_pairs(sources, pool.shape[1], destinations, pool.shape[1])
    if not set(sources).isdisjoint(destinations):
        raise ValueError(f"blocks {sorted(set(sources) & set(destinations))} are both copied and overwritten")
    planes = _as_integers(pool)
    copied = planes.index_select(1, torch.tensor(sources, device=pool.device, dtype=torch.int64))
    planes.index_copy_(1, torch.tensor(destinations, device=pool.device, dtype=torch.int64), copied)


def swap_out(pool: Tensor, host: Tensor, device_blocks: Sequence[int], host_blocks: Sequence[int]) -> None:
    """Copy blocks of the pool to those of the host pool, bit for bit, all planes at once.

    On a GPU the copies end in the order of its stream, maybe after the return: later kernels and swaps see
    them, other readers of the host pool must synchronize. Raises ValueError as copy_blocks().
    """
    _check_pairs(device_blocks, pool.shape[1], host_blocks, len(host))
    index = torch.tensor(device_blocks, device=pool.device, dtype=torch.int64)
    gathered = _as_integers(pool).index_select(1, index).transpose(0, 1).contiguous()
    for block, content in zip(host_blocks, gathered, strict=True):
        _as_integers(host)[block].copy_(content, non_blocking=True)


def swap_in(host: Tensor, pool: Tensor, host_blocks: Sequence[int], device_blocks: Sequence[int]) -> None:
    """Copy blocks of the host pool to those of the pool, bit for bit, all planes at once.

    Raises ValueError as copy_blocks().
    """
    _check_pairs(host_blocks, len(host), device_blocks, pool.shape[1])
    staged = torch.empty((len(host_blocks), *host.shape[1:]), dtype=pool.dtype, device=pool.device)
    for block, room in zip(host_blocks, staged, strict=True):
        _as_integers(room).copy_(_as_integers(host)[block], non_blocking=True)
    index = torch.tensor(device_blocks, device=pool.device, dtype=torch.int64)
    _as_integers(pool).index_copy_(1, index, _as_integers(staged).transpose(0, 1))


def _check_pairs(
    sources: Sequence[int], num_sources: int, destinations: Sequence[int], num_destinations: int
) -> None:
    if len(sources) != len(destinations):
        raise ValueError(f"{len(sources)} blocks cannot be copied to {len(destinations)}")
    if len(set(destinations)) < len(destinations):
        raise ValueError("a block is overwritten twice in one call")
    for blocks, count in ((sources, num_sources), (destinations, num_destinations)):
        outside = [block for block in blocks if not 0 <= block < count]
        if outside:
            raise ValueError(f"blocks {outside} are outside a pool of {count}")


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Store k, v [T, Hkv, D] (compute dtype) at slot_mapping [T] int64 of both caches, in place.

    Values beyond the finite range of a narrower storage dtype, infinities included, become its largest
    finite value of that sign; NaN stays NaN. Only slots of the scratch block may occur twice.
    Raises IndexError or RuntimeError (torch's) for a slot outside the cache or shapes that differ.
    """
    for values, cache in ((k, k_cache), (v, v_cache)):
        stored = _saturating_cast(values, cache.dtype)
        _as_integers(cache).index_copy_(0, slot_mapping, _as_integers(stored))


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


def _as_integers(tensor: Tensor) -> Tensor:
    # index_copy_ is not defined for fp8 on every device, and integers keep the payload of a NaN.
    return tensor.view(_INTEGERS[tensor.dtype.itemsize])


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
