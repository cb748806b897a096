"""Paged attention on torch's fused kernel: decode rows gathered in groups of like length, prefill in blocks.

Shapes: T_all tokens with padding, S rows of a group, n queries of a block, L keys (the longest of a group),
H query heads, Hkv KV heads, G = H / Hkv, D head_dim. The kernel is called on [batch, heads, queries, D]:
decode as [S, Hkv, G, D], where a KV head's G query heads stand where queries do; prefill as [Hkv, G, n, D],
where the keys of a KV head are shared by stride.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvengine_kernels.cache import read_kv
from kvengine_kernels.metadata import AttentionMetadata

# Measured on 2 cores: larger gathers leave the CPU's cache, and a call costs about as much as 512 slots.
GROUP_SLOTS = 8192
GROUP_PADDING = 512
# Blocks skip most of the masked upper triangle; 256 is as fast as the kernel's own is_causal.
QUERY_BLOCK = 256


@dataclass(frozen=True, slots=True)
class _Decode:
    """Rows of one query each, padded to one length by repeating each row's last slot."""

    tokens: Tensor  # [S] int64
    slots: Tensor  # [S * L] int64
    mask: Tensor | None  # [S, 1, 1, L] bool, None where all rows are equally long


@dataclass(frozen=True, slots=True)
class _Prefill:
    """The queries of one row, the last of which see the last of its slots."""

    start: int  # first token that sees anything
    queries: int
    slots: Tensor  # [L] int64


@dataclass(frozen=True, slots=True)
class _Layout:
    decodes: tuple[_Decode, ...]
    prefills: tuple[_Prefill, ...]
    mask: Tensor  # [queries, keys] bool, aligned at the last query and key; blocks slice it
    window: int


@dataclass(frozen=True, slots=True)
class SdpaPlan:
    """One step's batch and, per sliding window in use, its index tensors, shared by all layers."""

    meta: AttentionMetadata
    layouts: dict[int | None, _Layout] = field(default_factory=dict)


def plan(meta: AttentionMetadata) -> SdpaPlan:
    """Prepare one step; every layer of the step runs the same plan."""
    return SdpaPlan(meta)


def run(
    plan: SdpaPlan,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend q [T_all, H, D] over caches [slots, Hkv, D] of any storage dtype -> [T_all, H, D] in q.dtype.

    sliding_window W >= 1: a query at p sees positions in (p - W, p]. softcap c: scores become
    c * tanh(score / c). sinks [H]: one more logit per head in the softmax, which contributes no value.
    A query that sees nothing, and padding, yield zero. H must be a multiple of Hkv (else RuntimeError).
    Softcap and sinks leave the fused kernel for an explicit softmax in fp32.
    """
    layout = plan.layouts.get(sliding_window)
    if layout is None:
        layout = plan.layouts[sliding_window] = _lay_out(plan.meta, sliding_window)
    options = _Options(scale, softcap, sinks)
    out = torch.zeros_like(q)
    for decode in layout.decodes:
        out[decode.tokens] = _run_decode(decode, q, k_cache, v_cache, options)
    for prefill in layout.prefills:
        _run_prefill(prefill, layout, q, k_cache, v_cache, options, out)
    return out


@dataclass(frozen=True, slots=True)
class _Options:
    scale: float
    softcap: float | None
    sinks: Tensor | None


def _lay_out(meta: AttentionMetadata, sliding_window: int | None) -> _Layout:
    window = max(meta.seq_lens, default=0) if sliding_window is None else sliding_window
    decodes: list[_Row] = []
    prefills: list[_Prefill] = []
    for row, (queries, length) in enumerate(zip(meta.query_lens, meta.seq_lens, strict=True)):
        seeing = min(queries, length)
        token = meta.row_starts[row + 1] - seeing
        keys = min(length, seeing + window - 1)
        if seeing == 1:
            decodes.append(_Row(row, token, keys))
        elif seeing > 1:
            slots = _slots(meta, [row], [keys])[0]
            prefills.append(_Prefill(token, seeing, slots))
    queries = min(QUERY_BLOCK, max((prefill.queries for prefill in prefills), default=0))
    keys = max((len(prefill.slots) for prefill in prefills), default=0)
    mask = _causal_mask(queries, keys, window, meta.block_tables.device)
    return _Layout(tuple(_group(meta, decodes)), tuple(prefills), mask, window)


class _Row(NamedTuple):
    row: int
    token: int
    keys: int


def _group(meta: AttentionMetadata, rows: list[_Row]) -> Iterator[_Decode]:
    """Gather rows of like length, so that no row pays much for a longer one."""
    group: list[_Row] = []
    padding = 0
    for row in sorted(rows, key=attrgetter("keys")):
        grown = padding + len(group) * (row.keys - group[-1].keys) if group else 0
        if group and (grown > GROUP_PADDING or (len(group) + 1) * row.keys > GROUP_SLOTS):
            yield _decode(meta, group)
            group, grown = [], 0
        group.append(row)
        padding = grown
    if group:
        yield _decode(meta, group)


def _decode(meta: AttentionMetadata, group: list[_Row]) -> _Decode:
    device = meta.block_tables.device
    keys = [row.keys for row in group]
    mask = None
    if keys[0] < keys[-1]:
        lengths = torch.tensor(keys, device=device)[:, None, None, None]
        mask = torch.arange(keys[-1], device=device) < lengths
    tokens = torch.tensor([row.token for row in group], device=device)
    return _Decode(tokens, _slots(meta, [row.row for row in group], keys).flatten(), mask)


def _slots(meta: AttentionMetadata, rows: list[int], keys: list[int]) -> Tensor:
    """Slots [S, L] of the last `keys` positions of each row; past its end a row repeats its last slot.

    Unwritten slots may hold NaN, which no mask removes from a sum, so they are never gathered.
    """
    device = meta.block_tables.device
    last = torch.tensor([meta.seq_lens[row] - 1 for row in rows], device=device)[:, None]
    first = last + 1 - torch.tensor(keys, device=device)[:, None]
    positions = torch.minimum(first + torch.arange(max(keys), device=device), last)
    blocks = meta.block_tables[torch.tensor(rows, device=device)[:, None], positions // meta.block_size]
    return blocks * meta.block_size + positions % meta.block_size


def _causal_mask(queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """[queries, keys] bool for the last queries and keys of any row: it depends on their distance alone."""
    query = torch.arange(queries, 0, -1, device=device)[:, None]
    key = torch.arange(keys, 0, -1, device=device)
    return (key >= query) & (key - query < window)


def _run_decode(decode: _Decode, q: Tensor, k_cache: Tensor, v_cache: Tensor, options: _Options) -> Tensor:
    """Return [S, H, D] for the group's tokens."""
    rows, heads, dim = len(decode.tokens), q.shape[1], q.shape[2]
    kv_heads = k_cache.shape[1]
    queries = q[decode.tokens].view(rows, kv_heads, heads // kv_heads, dim)
    k, v = (
        read_kv(cache, decode.slots, q.dtype).view(rows, -1, kv_heads, dim).transpose(1, 2)
        for cache in (k_cache, v_cache)
    )
    attended = _attend(queries, k, v, decode.mask, options, (1, kv_heads, -1, 1))
    return attended.reshape(rows, heads, dim)


def _run_prefill(
    prefill: _Prefill,
    layout: _Layout,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    options: _Options,
    out: Tensor,
) -> None:
    """Write the row's queries into out [T_all, H, D], a block of queries at a time."""
    kv_heads, group = k_cache.shape[1], q.shape[1] // k_cache.shape[1]
    k, v = (
        read_kv(cache, prefill.slots, q.dtype).transpose(0, 1)[:, None].expand(-1, group, -1, -1)
        for cache in (k_cache, v_cache)
    )
    for start in range(0, prefill.queries, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, prefill.queries)
        last = len(prefill.slots) - prefill.queries + stop
        first = max(0, last - (stop - start) - layout.window + 1)
        tokens = slice(prefill.start + start, prefill.start + stop)
        queries = q[tokens].unflatten(1, (kv_heads, group)).permute(1, 2, 0, 3)
        mask = layout.mask[start - stop :, first - last :]
        keys = slice(first, last)
        attended = _attend(queries, k[:, :, keys], v[:, :, keys], mask, options, (kv_heads, group, 1, 1))
        out[tokens] = attended.permute(2, 0, 1, 3).flatten(1, 2)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: _Options, sink_shape: tuple[int, ...]
) -> Tensor:
    """One kernel call: q [batch, heads, queries, D], k and v [batch, heads, keys, D] -> as q."""
    if options.softcap is None and options.sinks is None:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=options.scale)
    scores = (q.float() @ k.float().transpose(-1, -2)) * options.scale
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    top = scores.amax(-1, keepdim=True)
    if options.sinks is not None:
        sinks = options.sinks.float().view(sink_shape)
        top = torch.maximum(top, sinks)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    if options.sinks is not None:
        total = total + torch.exp(sinks - top)
    return ((weights / total) @ v.float()).to(q.dtype)
