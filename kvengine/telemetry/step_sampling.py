"""Which steps get a span of their own, and the windows that stand for the rest."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa

WINDOW_NS = 250_000_000


@dataclass(frozen=True, slots=True)
class StepSample:
    """`chosen` maps the index of a sampled step to why; `windows` are [first, last] indices of the others."""

    chosen: dict[int, str]
    windows: list[tuple[int, int]]
    said: str


def sample_steps(steps: pa.Table, *, at_most: int, every: int) -> StepSample:
    """The slowest 1%, every phase change and every `every`-th step, at most `at_most`; 250 ms windows else.

    When there are more, the slowest are kept first, then changes of phase, then every N-th, each kind thinned
    evenly over the run. Windows are widened until they number at most `at_most`, too.
    """
    num_steps = len(steps)
    if not num_steps:
        return StepSample({}, [], "no steps")
    start, end = (steps[name].to_numpy() for name in ("start_ns", "end_ns"))
    kinds = {
        "slow": np.argsort(start - end, kind="stable")[: max(1, num_steps // 100)],
        "phase change": np.flatnonzero(_phase_changes(steps)),
        "interval": np.arange(0, num_steps, every),
    }
    chosen: dict[int, str] = {}
    for reason, indices in kinds.items():
        fresh = np.sort(np.array([i for i in indices.tolist() if i not in chosen], dtype=np.int64))
        room = at_most - len(chosen)
        if len(fresh) > room:
            fresh = fresh[np.linspace(0, len(fresh) - 1, room).astype(np.int64)] if room else fresh[:0]
        chosen.update(dict.fromkeys(fresh.tolist(), reason))
    windows, width = _windows(start, end, set(chosen), at_most)
    said = (
        f"{len(chosen)} of {num_steps} steps: slowest 1%, phase changes, every {every}th, at most {at_most}; "
        f"the others in {len(windows)} windows of {width / 1e6:.0f} ms"
    )
    return StepSample(dict(sorted(chosen.items())), windows, said)


def _phase_changes(steps: pa.Table) -> np.ndarray:
    """Whether a step's kind of work differs from that of the step before, or somebody was preempted in it."""
    has = [
        steps[name].to_numpy() > 0 for name in ("num_prefill_tokens", "num_decode_tokens", "num_idle_rows")
    ]
    kind = has[0] * 1 + has[1] * 2 + has[2] * 4
    changed = np.ones(len(kind), dtype=bool)
    changed[1:] = kind[1:] != kind[:-1]
    return changed | (steps["num_preempted"].to_numpy() > 0)


def _windows(
    start: np.ndarray, end: np.ndarray, chosen: set[int], at_most: int
) -> tuple[list[tuple[int, int]], int]:
    """Runs of steps that start in the same window and hold an unsampled one; and the window's width in ns."""
    width = WINDOW_NS
    while (start[-1] - start[0]) // width >= at_most:
        width *= 2
    number = (start - start[0]) // width
    edges = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), len(start)]
    spans = [(a, b - 1) for a, b in pairwise(edges)]
    return [(a, b) for a, b in spans if any(i not in chosen for i in range(a, b + 1))], width
