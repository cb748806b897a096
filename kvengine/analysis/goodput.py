"""Latencies of groups of requests, and how many requests were served within the limits that somebody set."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from kvengine.core.limits import SloConfig

PERCENTILES = (50, 90, 99)


def percentiles(values: np.ndarray) -> dict[str, float] | None:
    """Those of the values that are there (not NaN), by linear interpolation; None where there is none."""
    values = values[~np.isnan(values)]
    if not len(values):
        return None
    return {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES}


def by_group(served: pa.Table, name: str, **latencies: np.ndarray) -> dict[str, dict[str, Any]] | None:
    """For every value of the column `name` the number of sequences and the percentiles of their latencies (one value
    per row of `served`); None if there is one value only. A null is called none."""
    column = served[name].to_pylist()
    values = sorted(set(column), key=lambda value: (value is not None, value))
    if len(values) < 2:
        return None
    found = {}
    for value in values:
        inside = np.array([other == value for other in column])
        shares = {key: percentiles(array[inside]) for key, array in latencies.items()}
        found["none" if value is None else str(value)] = {"num_sequences": int(inside.sum()), **shares}
    return found


def goodput(
    served: pa.Table, slo: SloConfig, duration_s: float, ttft_ms: np.ndarray, tpot_ms: np.ndarray
) -> dict[str, Any]:
    """Requests of which every choice was finished within the limits, per second and as a share of all.

    A limit that is null is met by all; an output of one token has no TPOT to judge. What was refused, aborted or is
    unfinished is not met.
    """
    if not slo.is_set:
        return {"goodput_per_s": None, "slo_attainment": None}
    met = np.array([status == "finished" for status in served["status"].to_pylist()], bool)
    if slo.ttft_ms is not None:
        met &= ttft_ms <= slo.ttft_ms
    if slo.tpot_ms is not None:
        met &= np.isnan(tpot_ms) | (tpot_ms <= slo.tpot_ms)
    ids = served["request_id"].to_pylist()
    missed = {request_id for request_id, good in zip(ids, met.tolist(), strict=True) if not good}
    everybody = set(ids)
    count = len(everybody) - len(missed)
    return {
        "goodput_per_s": count / duration_s if duration_s else None,
        "slo_attainment": count / len(everybody) if everybody else None,
    }
