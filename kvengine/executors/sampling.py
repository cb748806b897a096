"""From logits to token ids: greedy, temperature, top-k, top-p and min-p, every row by its own parameters.

R: rows, V: vocabulary. A row's draw is a function of (seed, choice, position) alone, so neither neighbours nor
scheduling nor preemption can change it.
"""

from __future__ import annotations

import hashlib
from itertools import islice

import torch

from kvengine.core.errors import ModelError
from kvengine.core.plan import ScheduledRow
from kvengine.core.sequence import Sequence


def sample_rows(logits: torch.Tensor, rows: list[ScheduledRow]) -> list[list[int]]:
    """The ids of every row of a plan: none for one that does not sample, else one for its sequence and one for
    each of its forks, drawn by each one's own (seed, choice, position) from the same logits.

    `logits`: [rows that sample, V] float32. ModelError as in sample().
    """
    sequences = [(row.seq, *row.forks) if row.samples else () for row in rows]
    counts = [len(group) for group in sequences if group]
    if not counts:
        return [[] for _ in rows]
    if max(counts) > 1:
        index = [i for i, count in enumerate(counts) for _ in range(count)]
        logits = logits[index]
    ids = iter(sample(logits, [seq for group in sequences for seq in group]))
    return [list(islice(ids, len(group))) for group in sequences]


def sample(logits: torch.Tensor, rows: list[Sequence]) -> list[int]:
    """One id per row from `logits` [R, V] float32. ModelError, naming the sequence, for NaN, +inf or all -inf.

    Filters apply in the order temperature, top_k, top_p (over what top_k left, renormalised), min_p (against
    the most likely token). top_k of 0 or -1 is off.
    """
    best = logits.max(dim=-1)
    broken = ~torch.isfinite(best.values)
    if broken.any():
        raise ModelError(
            f"the model gave logits that are no distribution for {rows[int(broken.nonzero()[0])]}"
        )
    ids: list[int] = best.indices.tolist()
    drawn = [i for i, seq in enumerate(rows) if seq.request.sampling.temperature > 0]
    plain = [i for i in drawn if not _filters(rows[i])]
    filtered = [i for i in drawn if _filters(rows[i])]
    for indices, draw in ((plain, _draw_plain), (filtered, _draw_filtered)):
        if indices:
            chosen = draw(logits[indices], [rows[i] for i in indices])
            for i, token in zip(indices, chosen.tolist(), strict=True):
                ids[i] = token
    return ids


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) that depends on the three arguments only (53 bits of BLAKE2b)."""
    digest = hashlib.blake2b(repr((seed, choice, position)).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


def _filters(seq: Sequence) -> bool:
    params = seq.request.sampling
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def _column(values: list[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device).unsqueeze(1)


def _probabilities(logits: torch.Tensor, rows: list[Sequence]) -> torch.Tensor:
    """softmax(logits / temperature) [R, V] float64, finite for the smallest temperature (max subtracted first)."""
    shifted = logits.double() - logits.max(dim=-1, keepdim=True).values.double()
    return torch.softmax(shifted / _column([s.request.sampling.temperature for s in rows], logits), dim=-1)


def _pick(weights: torch.Tensor, rows: list[Sequence]) -> torch.Tensor:
    """Inverse transform: the first index whose cumulative weight exceeds u times the total [R, 1]."""
    cumulative = weights.cumsum(dim=-1)
    draws = _column([uniform(s.seed, s.choice, len(s.token_ids)) for s in rows], weights)
    index = torch.searchsorted(cumulative, draws * cumulative[:, -1:], right=True)
    last = (
        (weights > 0).long().cumsum(dim=-1).argmax(dim=-1, keepdim=True)
    )  # the last index that may be drawn
    return torch.minimum(index, last)


def _draw_plain(logits: torch.Tensor, rows: list[Sequence]) -> torch.Tensor:
    return _pick(_probabilities(logits, rows), rows).squeeze(1)


def _draw_filtered(logits: torch.Tensor, rows: list[Sequence]) -> torch.Tensor:
    params = [seq.request.sampling for seq in rows]
    vocab = logits.shape[-1]
    weights, order = _probabilities(logits, rows).sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(vocab, device=logits.device).unsqueeze(0)
    top_k = _column([p.top_k if p.top_k > 0 else vocab for p in params], logits)
    weights = weights * (rank < top_k)
    before = weights.cumsum(dim=-1) - weights
    top_p = _column([p.top_p for p in params], logits)
    kept = before < top_p * weights.sum(dim=-1, keepdim=True)
    min_p = _column([p.min_p for p in params], logits)
    kept &= weights >= min_p * weights[:, :1]
    return order.gather(1, _pick(weights * kept, rows)).squeeze(1)
