"""The figures of a run, computed from its recorded tables and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from kvengine.analysis.bound import steps_by_reason
from kvengine.analysis.fairness import fairness_gap
from kvengine.analysis.goodput import by_group, goodput, percentiles
from kvengine.analysis.waste import TokenRuns, decode_stalls
from kvengine.core.limits import SloConfig
from kvengine.core.reasons import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFacts:
    """What the figures are shares of."""

    num_blocks: int
    block_size: int
    block_bytes: int
    max_num_seqs: int


def summarize(tables: dict[str, pa.Table], pool: PoolFacts, slo: SloConfig | None = None) -> dict[str, Any]:
    """All headline figures as plain numbers; None where nothing was measured.

    Times are in ms, durations in s, shares between 0 and 1. Latency percentiles are over sequences (ITL over
    gaps between tokens), linear interpolation. TTFT and queue time end at delivery and admission; TPOT and ITL
    are between the steps that computed the tokens. Means over steps are weighted by the steps' durations.
    """
    steps, requests = tables["steps"], tables["requests"]
    status = requests["status"].cast(pa.string()).to_pylist()
    served = requests.filter(pa.array([word != "rejected" for word in status], pa.bool_()))
    output_tokens = _sum(served, "num_output_tokens")
    duration_s = _duration_s(steps, served)
    runs = TokenRuns(tables)
    latencies = _latencies(served, runs)
    return {
        "num_requests": len(set(served["request_id"].to_pylist())),
        "num_finished": status.count("finished"),
        "num_unfinished": status.count("unfinished") + status.count("aborted"),
        "num_refused": status.count("refused"),
        "num_rejected": status.count("rejected"),
        "prompt_tokens": _sum(served, "num_prompt_tokens"),
        "output_tokens": output_tokens,
        "duration_s": duration_s,
        "output_tokens_per_s": output_tokens / duration_s if duration_s else None,
        **{name: percentiles(values) for name, values in latencies.items()},
        "itl_ms": percentiles(runs.gaps_ms()),
        **goodput(served, slo or SloConfig(), duration_s, latencies["ttft_ms"], latencies["tpot_ms"]),
        "by_priority": by_group(served, "priority", **latencies),
        "by_tenant": by_group(served, "tenant", **latencies),
        "fairness_gap_tokens": fairness_gap(tables),
        **_stalls(tables, runs),
        **_memory(tables, pool),
        **_reuse(served, steps, pool),
        **_work(steps, pool),
        "fragmented_steps": len(steps_by_reason(tables["decisions"]).get(Reason.FRAGMENTED, ())),
    }


def _array(table: pa.Table, name: str) -> np.ndarray:
    """A column as float64, null as NaN; times in ns stay exact up to 2**53 (104 days)."""
    return table[name].cast(pa.float64()).to_numpy(zero_copy_only=False)


def _sum(table: pa.Table, name: str) -> int:
    return int(table[name].to_numpy().sum())


def _latencies(served: pa.Table, runs: TokenRuns) -> dict[str, np.ndarray]:
    """TTFT, TPOT and queue time (ms) of every row of `served`, NaN where there is none."""
    arrival = _array(served, "arrival_ns")
    keys = zip(served["request_id"].to_pylist(), served["choice"].to_pylist(), strict=True)
    tpot = np.append(runs.tpot_ms(), np.nan)
    return {
        "ttft_ms": _gap_ms(served, "first_token_ns", arrival),
        "tpot_ms": tpot[np.array([runs.numbers.get(key, -1) for key in keys], np.int64)],
        "queue_ms": _gap_ms(served, "admitted_ns", arrival),
    }


def _stalls(tables: dict[str, pa.Table], runs: TokenRuns) -> dict[str, Any]:
    """What decodes lost to prefills of others, over sequences of two tokens and more."""
    stalled, decoded = decode_stalls(tables, runs)
    whole = float(decoded.sum())
    return {
        "decode_stall_ms": percentiles(stalled / 1e6),
        "decode_stall_share": float(stalled.sum()) / whole if whole else None,
    }


def _gap_ms(table: pa.Table, name: str, since: np.ndarray) -> np.ndarray:
    return (_array(table, name) - since) / 1e6


def _duration_s(steps: pa.Table, served: pa.Table) -> float:
    """From the first arrival to the end of the last step."""
    if not len(steps):
        return 0.0
    begin = served["arrival_ns"] if len(served) else steps["start_ns"]
    return int(steps["end_ns"].to_numpy().max() - begin.to_numpy().min()) / 1e9


def _memory(tables: dict[str, pa.Table], pool: PoolFacts) -> dict[str, Any]:
    """What the slots of the pool were used for.

    held + reserved + internal + external = 1 in every step. Held: the KV of computed tokens. Reserved: to be
    written by the sequence that owns it. Internal: owned and never written. External: owned by nobody, or lost to
    the rounding of regions; of these, cached keep a prefix. The shared share is of the blocks that it would take
    without sharing.
    """
    steps = tables["steps"]
    names = ("held", "reserved", "internal", "external", "cached")
    if not len(steps):
        return {
            **dict.fromkeys(f"kv_{name}_of_pool" for name in names),
            "kv_held_of_owned": None,
            "kv_saved_bytes": None,
            "kv_shared_share": None,
        }
    size = pool.num_blocks * pool.block_size
    held, owned = _array(steps, "num_slots_held"), _array(steps, "num_slots_owned")
    internal = _unwritten(tables["unwritten"], steps)
    cached = _array(steps, "num_cached_blocks") * pool.block_size
    parts = (held, owned - held - internal, internal, size - owned, cached)
    saved = _array(steps, "num_saved_blocks")
    in_use = pool.num_blocks - _array(steps, "num_free_blocks")
    weights, busy = _weights(steps), owned > 0
    of_pool = {
        f"kv_{name}_of_pool": _mean_and_peak(part / size, weights)
        for name, part in zip(names, parts, strict=True)
    }
    return {
        **of_pool,
        "kv_held_of_owned": _mean_and_peak(held[busy] / owned[busy], weights[busy]) if busy.any() else None,
        "kv_saved_bytes": _mean_and_peak(saved * pool.block_bytes, weights),
        "kv_shared_share": float(np.average(saved / np.maximum(in_use + saved, 1), weights=weights)),
    }


def _unwritten(unwritten: pa.Table, steps: pa.Table) -> np.ndarray:
    """For every step the slots that were owned in it and never written."""
    number = steps["step"].to_numpy()
    change = np.zeros(len(number) + 1)
    slots = unwritten["num_slots"].to_numpy()
    np.add.at(change, np.searchsorted(number, unwritten["first_step"].to_numpy()), slots)
    np.subtract.at(change, np.searchsorted(number, unwritten["last_step"].to_numpy(), side="right"), slots)
    return np.cumsum(change)[:-1]


def _weights(steps: pa.Table) -> np.ndarray:
    return np.maximum(_array(steps, "end_ns") - _array(steps, "start_ns"), 1)


def _mean_and_peak(values: np.ndarray, weights: np.ndarray) -> dict[str, float]:
    return {"mean": float(np.average(values, weights=weights)), "peak": float(values.max())}


def _reuse(served: pa.Table, steps: pa.Table, pool: PoolFacts) -> dict[str, Any]:
    """Tokens that were not computed because the pool had them, and blocks that were copied."""
    cached, prompt = _sum(served, "num_cached_tokens"), _sum(served, "num_prompt_tokens")
    out, back = _sum(steps, "num_swapped_out_blocks"), _sum(steps, "num_swapped_in_blocks")
    return {
        "reused_tokens": cached,
        "reused_token_share": cached / prompt if prompt else None,
        "copied_blocks": _sum(steps, "num_copied_blocks"),
        "swapped_out_blocks": out,
        "swapped_in_blocks": back,
        "swapped_bytes": (out + back) * pool.block_bytes,
    }


def _work(steps: pa.Table, pool: PoolFacts) -> dict[str, Any]:
    """Counts of steps, preemptions and waste; shares of tokens are of all computed, with idle rows and padding."""
    rows, idle = _sum(steps, "num_rows"), _sum(steps, "num_idle_rows")
    computed = idle + sum(_sum(steps, f"num_{kind}_tokens") for kind in ("prefill", "decode", "padding"))
    again, padding = _sum(steps, "num_recomputed_tokens"), _sum(steps, "num_padding_tokens")
    occupancy = None
    if len(steps):
        occupancy = float(np.average(_array(steps, "num_rows") / pool.max_num_seqs, weights=_weights(steps)))
    return {
        "slot_occupancy": occupancy,
        "num_steps": len(steps),
        "num_preemptions": _sum(steps, "num_preempted"),
        "recomputed_tokens": again,
        "recompute_share": again / computed if computed else None,
        "padding_tokens": padding,
        "padding_share": padding / computed if computed else None,
        "row_steps": rows + idle,
        "idle_row_share": idle / (rows + idle) if rows + idle else None,
    }
