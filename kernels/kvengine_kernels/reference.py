"""Paged attention in plain torch, one row at a time in fp32: the truth the fast backends are held to.

Shapes: T_all tokens with padding, n a row's queries, L the keys a row gathers, H query heads,
Hkv KV heads, D head_dim.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvengine_kernels.metadata import AttentionMetadata


@dataclass(frozen=True, slots=True)
class ReferencePlan:
    """One step's batch; the reference derives everything else from it on every call."""

    meta: AttentionMetadata


def plan(meta: AttentionMetadata) -> ReferencePlan:
    """Prepare one step; every layer of the step runs the same plan."""
    return ReferencePlan(meta)


def run(
    plan: ReferencePlan,
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
    """
    meta = plan.meta
    out = torch.zeros_like(q)
    for row, (length, queries) in enumerate(zip(meta.seq_lens, meta.query_lens, strict=True)):
        window = max(1, length) if sliding_window is None else sliding_window
        # Blocks that no query sees any more may hold anything, so they are not even read.
        first = max(0, length - queries - window + 1)
        slots = _row_slots(meta, row)[first:]
        tokens = slice(meta.row_starts[row], meta.row_starts[row + 1])
        k, v = (cache.index_select(0, slots).float() for cache in (k_cache, v_cache))
        visible = _visible(queries, length, first, window, q.device)
        out[tokens] = _attend(q[tokens].float(), k, v, visible, scale, softcap, sinks).to(q.dtype)
    return out


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    meta: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Plan and run in one call; shapes and meaning are those of run()."""
    return run(
        plan(meta),
        q,
        k_cache,
        v_cache,
        scale=scale,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=sinks,
    )


def _row_slots(meta: AttentionMetadata, row: int) -> Tensor:
    """Slots [L] of a row's positions 0 .. L-1."""
    positions = torch.arange(meta.seq_lens[row], device=meta.block_tables.device)
    blocks = meta.block_tables[row, positions // meta.block_size]
    return blocks * meta.block_size + positions % meta.block_size


def _visible(queries: int, length: int, first: int, window: int, device: torch.device) -> Tensor:
    """Which keys first .. length-1 each of the last `queries` positions sees: [n, L] bool."""
    at = torch.arange(length - queries, length, device=device)[:, None]
    keys = torch.arange(first, length, device=device)[None, :]
    return (keys <= at) & (keys > at - window)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """q [n, H, D], k and v [L, Hkv, D], visible [n, L] -> [n, H, D], all fp32."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("nhd,lhd->hnl", q, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        column = sinks.float()[:, None, None].expand(-1, len(q), 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : len(k)]
    # The softmax of a query that sees nothing is NaN; its weights are zero like all invisible ones.
    return torch.einsum("hnl,lhd->nhd", weights.masked_fill(~visible, 0.0), v)
