"""Random paged batches, run through an attention backend or through a float64 softmax over K and V in plain lists.

Shapes: T_all tokens with padding, L a row's KV length, H query heads, Hkv KV heads, D head_dim, B block size.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvengine_kernels.cache import allocate_cache, write_kv
from kvengine_kernels.metadata import AttentionMetadata

SCALE = 0.1  # no head_dim's default
SCRATCH = 0  # the block that padding tokens write to and that block tables are padded with


@dataclass(frozen=True, kw_only=True)
class Case:
    """A filled cache, and the same K and V as one tensor [L, Hkv, D] a row."""

    meta: AttentionMetadata
    q: Tensor  # [T_all, H, D]
    k_cache: Tensor
    v_cache: Tensor
    keys: list[Tensor]
    values: list[Tensor]


def make_case(
    rows: list[tuple[int, int]],  # (query_len, seq_len)
    *,
    heads: tuple[int, int] = (6, 2),
    head_dim: int = 64,
    block_size: int = 8,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    padding: int = 0,
    poison: float = 0.0,
    seed: int = 0,
) -> Case:
    """Scatter random K and V over shuffled blocks; all slots that no row has written hold poison."""
    generator = torch.Generator().manual_seed(seed)
    stored, shape = kv_dtype or dtype, (heads[1], head_dim)
    blocks = [-(-length // block_size) for _, length in rows]
    ids = (torch.randperm(sum(blocks), generator=generator) + 1).split(blocks)
    tables = torch.full((len(rows), max(blocks) + 1), SCRATCH)
    caches = [
        fill(allocate_cache(sum(blocks) + 1, block_size, *shape, stored, "cpu"), poison) for _ in range(2)
    ]
    kept: tuple[list[Tensor], list[Tensor]] = ([], [])
    for row, (_, length) in enumerate(rows):
        tables[row, : blocks[row]] = ids[row]
        k, v = (torch.randn(length, *shape, generator=generator).to(dtype) for _ in range(2))
        write_kv(k, v, caches[0], caches[1], all_slots(ids[row].tolist(), length, block_size))
        for rows_kept, written in zip(kept, (k, v), strict=True):
            rows_kept.append(written.to(stored).double())
    meta = make_meta(rows, tables, block_size, padding)
    q = 3 * torch.randn(len(meta.slot_mapping), heads[0], head_dim, generator=generator)
    return Case(meta=meta, q=q.to(dtype), k_cache=caches[0], v_cache=caches[1], keys=kept[0], values=kept[1])


def all_slots(blocks: list[int], length: int, block_size: int) -> Tensor:
    """Slots [L] of a row's positions, one at a time."""
    slots = [blocks[p // block_size] * block_size + p % block_size for p in range(length)]
    return torch.tensor(slots, dtype=torch.int64)


def make_meta(
    rows: list[tuple[int, int]], tables: Tensor, block_size: int, padding: int = 0
) -> AttentionMetadata:
    """Metadata of rows (query_len, seq_len) with block tables [S, max_blocks]; padding writes to SCRATCH."""
    query_lens = tuple(queries for queries, _ in rows)
    mapping = torch.full((sum(query_lens) + padding,), SCRATCH * block_size)
    starts = [0, *accumulate(query_lens)]
    for row, (queries, length) in enumerate(rows):
        slots = all_slots(tables[row].tolist(), length, block_size)[max(0, length - queries) :]
        mapping[starts[row + 1] - len(slots) : starts[row + 1]] = slots
    meta = AttentionMetadata(
        query_start=torch.tensor(starts),
        query_lens=query_lens,
        seq_lens=tuple(length for _, length in rows),
        block_tables=tables,
        slot_mapping=mapping,
        block_size=block_size,
    )
    meta.check()
    return meta


def only(case: Case, row: int) -> Case:
    """The same cache with one row of the batch."""
    lengths = (case.meta.query_lens[row], case.meta.seq_lens[row])
    meta = make_meta([lengths], case.meta.block_tables[row : row + 1], case.meta.block_size)
    tokens = slice(*case.meta.row_starts[row : row + 2])
    keys, values = case.keys[row : row + 1], case.values[row : row + 1]
    return replace(case, meta=meta, q=case.q[tokens], keys=keys, values=values)


def fill(cache: Tensor, value: float) -> Tensor:
    return cache.copy_(torch.full(cache.shape, value).to(cache.dtype))


def attend(backend: Any, case: Case, **options: Any) -> Tensor:
    return run(backend, backend.plan(case.meta), case, **options)


def run(backend: Any, plan: Any, case: Case, **options: Any) -> Tensor:
    return backend.run(plan, case.q, case.k_cache, case.v_cache, scale=SCALE, **options)


def brute_force(
    case: Case,
    *,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """One query at a time, in float64 and in numpy, from the kept lists: [T_all, H, D]."""
    q = case.q.double().numpy()
    out = np.zeros_like(q)
    token = 0
    for row, queries in enumerate(case.meta.query_lens):
        k, v = case.keys[row].numpy(), case.values[row].numpy()
        kv_head = [head * k.shape[1] // q.shape[1] for head in range(q.shape[1])]
        for position in range(len(k) - queries, len(k)):
            first = max(0, position - sliding_window + 1) if sliding_window else 0
            seen = slice(first, max(first, position + 1))
            scores = np.einsum("hd,lhd->hl", q[token], k[seen][:, kv_head]) * SCALE
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            weights = np.exp(scores)
            total = weights.sum(1) + (0 if sinks is None else np.exp(sinks.double().numpy()))
            if position >= 0:
                out[token] = np.einsum("hl,lhd->hd", weights / total[:, None], v[seen][:, kv_head])
            token += 1
    return torch.from_numpy(out)


def assert_close(got: Tensor, want: Tensor, tolerance: float, where: str = "") -> None:
    assert got.isfinite().all(), f"computes what is not finite{where}"
    worst = (got.double() - want.double()).abs().max().item()
    assert worst <= tolerance, f"computes something else{where}: off by {worst:g}, allowed is {tolerance:g}"


def mixed_rows(block_size: int) -> list[tuple[int, int]]:
    """Decode rows at the edges of a block, a whole prompt, the last chunk of one, and a first token."""
    edges = [1, block_size - 1, block_size, block_size + 1, 3 * block_size + 5]
    prefills = [(block_size + 1, block_size + 1), (5, 3 * block_size + 5), (2, 2)]
    return [prefills[0], *((1, length) for length in edges), *prefills[1:]]


def check_backend(backend: Any, seed: int) -> None:
    """AssertionError unless `backend` attends over one random mixed batch as brute force does.

    Heads, sizes, storage dtype, padding and options follow from `seed`; what nobody wrote is NaN (known failure
    H2). One plan serves two layers, of which the second has other options.
    """
    chance = random.Random(seed)
    block_size = chance.choice([1, 8, 16, 32])
    rows = chance.sample(mixed_rows(block_size), k=chance.randint(1, 6))
    case = make_case(
        [(min(queries, length), length) for queries, length in rows if length > 0] or [(1, 1)],
        heads=chance.choice([(4, 4), (6, 2), (14, 2), (12, 1)]),
        head_dim=chance.choice([64, 80, 96, 128]),
        block_size=block_size,
        kv_dtype=chance.choice([torch.float32, torch.bfloat16, torch.float8_e4m3fn]),
        padding=chance.randint(0, 3),
        poison=float("nan"),
        seed=seed,
    )
    given = [tensor.clone() for tensor in (case.q, case.k_cache.float(), case.v_cache.float())]
    plan = backend.plan(case.meta)
    for _ in range(2):
        options: dict[str, Any] = {
            "sliding_window": chance.choice([None, 1, 6, 1000]),
            "softcap": chance.choice([None, 2.0]),
            "sinks": chance.choice([None, torch.linspace(-1, 3, case.q.shape[1])]),
        }
        out = run(backend, plan, case, **options)
        described = ", ".join(name for name, value in options.items() if value is not None) or "no options"
        assert out.shape == case.q.shape, f"computes {tuple(out.shape)} from q of {tuple(case.q.shape)}"
        assert out.dtype == case.q.dtype, f"computes {out.dtype} from q in {case.q.dtype}"
        assert not out[case.meta.num_tokens :].any(), (
            "computes something for padding tokens, which yield zero"
        )
        assert_close(out, brute_force(case, **options), 1e-5, f" with {described}")
    for before, after in zip(given, (case.q, case.k_cache.float(), case.v_cache.float()), strict=True):
        assert torch.equal(before.nan_to_num(7.0), after.nan_to_num(7.0)), "changes q or the cache"
