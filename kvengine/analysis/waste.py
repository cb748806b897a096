"""What decodes lost to prefills: the time in which they got no token because others were prefilled."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from kvengine.telemetry.phases import LEAVES, Key, actions


class TokenRuns:
    """Runs of consecutive steps that gave a sequence a token each, by sequence and in order.

    `owner` numbers the sequences as `numbers` says; `first` and `last` are steps. What a killed run did not record
    is left out.
    """

    def __init__(self, tables: dict[str, pa.Table]) -> None:
        tokens, steps = tables["tokens"], tables["steps"]
        keys = list(zip(tokens["request_id"].to_pylist(), tokens["choice"].to_pylist(), strict=True))
        self.numbers: dict[Key, int] = {key: i for i, key in enumerate(dict.fromkeys(keys))}
        owner = np.fromiter((self.numbers[key] for key in keys), np.int64, len(keys))
        first = tokens["first_step"].to_numpy()
        last = np.minimum(first + tokens["num_steps"].to_numpy(), len(steps)) - 1
        order = np.lexsort((first, owner))
        order = order[last[order] >= first[order]]
        self.owner, self.first, self.last = owner[order], first[order], last[order]
        self.begins, self.ends = (steps[name].to_numpy() for name in ("start_ns", "end_ns"))

    def sums(self, values: np.ndarray, of: np.ndarray | slice = slice(None)) -> np.ndarray:
        """For every sequence the sum of `values`, which are of all runs or those chosen by `of`."""
        return np.bincount(self.owner[of], values, len(self.numbers)).astype(np.float64)

    @property
    def num_tokens(self) -> np.ndarray:
        """For every sequence."""
        return self.sums(self.last - self.first + 1)

    def tpot_ms(self) -> np.ndarray:
        """For every sequence the mean time between its tokens; NaN for fewer than two."""
        opening = np.flatnonzero(np.diff(self.owner, prepend=-1))
        closing = np.flatnonzero(np.diff(self.owner, append=-1))
        found = np.full(len(self.numbers), np.nan)
        counts = self.num_tokens[self.owner[opening]]
        spans = self.ends[self.last[closing]] - self.ends[self.first[opening]]
        several = counts > 1
        found[self.owner[opening][several]] = spans[several] / (counts[several] - 1) / 1e6
        return found

    def gaps_ms(self) -> np.ndarray:
        """All times between neighbouring tokens of a sequence."""
        count = self.last - self.first + 1
        in_run = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        moments, owner = self.ends[np.repeat(self.first, count) + in_run], np.repeat(self.owner, count)
        return np.diff(moments)[owner[1:] == owner[:-1]] / 1e6


def decode_stalls(tables: dict[str, pa.Table], runs: TokenRuns) -> tuple[np.ndarray, np.ndarray]:
    """Of every sequence with two tokens or more: the time (ns) of its decode phases in steps that gave it no token
    and computed prefill tokens of others; and all the time of its decode phases.

    A decode phase goes from a token to the last one, or until a preemption, and from the first token after that on.
    """
    if not len(runs.first):
        return np.zeros(0), np.zeros(0)
    prefilling = np.where(tables["steps"]["num_prefill_tokens"].to_numpy() > 0, runs.ends - runs.begins, 0)
    before = np.concatenate([[0], np.cumsum(prefilling)])
    gap = np.flatnonzero(runs.owner[1:] == runs.owner[:-1])  # after the run of that index
    last, following = runs.last[gap], runs.first[gap + 1]
    preempted = _next_preemption(tables["decisions"], runs)[gap]
    whole = preempted >= following
    until = np.where(whole, following, preempted)
    stalled = runs.sums(before[until] - before[last + 1], gap)
    decoded = runs.sums(np.where(whole, runs.ends[following], runs.begins[until]) - runs.ends[last], gap)
    decoded += runs.sums(runs.ends[runs.last] - runs.ends[runs.first])
    several = runs.num_tokens > 1
    return stalled[several], decoded[several]


def _next_preemption(decisions: pa.Table, runs: TokenRuns) -> np.ndarray:
    """For every run of tokens the step of its sequence's first preemption after it, or a very large number."""
    found = [
        (number, row["first_step"])
        for row in actions(decisions, *LEAVES)
        if (number := runs.numbers.get((row["request_id"], row["choice"]))) is not None
    ]
    nobody = (len(runs.numbers), 0)
    owner, step = np.array([*sorted(found), nobody], np.int64).T
    scale = max(int(step.max()), int(runs.last.max())) + 2
    place = np.searchsorted(owner * scale + step, runs.owner * scale + runs.last, side="right")
    return np.where(owner[place] == runs.owner, step[place], np.iinfo(np.int64).max)
