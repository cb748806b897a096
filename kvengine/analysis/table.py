"""The tables that a run and a sweep print."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

WIDTH_OF_FILES = 140
"""Columns of a table that goes to a file or a pipe, where nothing says how wide it may be."""


POOL_PARTS = ("held", "reserved", "internal", "external")
"""What each slot of the KV pool is in a step; kvengine.analysis.summary explains them."""

MAX_GROUPS = 8
"""So many priorities or tenants have a line of their own: those with the most sequences."""

LEAST_FOR_NAMES = 24
"""Below so many columns for the names of variants a sweep is printed as paragraphs."""


def stdout() -> Console:
    """The console that tables are printed on."""
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if known else WIDTH_OF_FILES)


def print_summary(console: Console, summary: dict[str, Any], title: str) -> None:
    """One run: a figure per line, latencies with their percentiles side by side."""
    console.print(title, style="bold", markup=False, highlight=False, soft_wrap=True)
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column("figure")
    table.add_column("value")
    for label, value in _lines(summary):
        table.add_row(label, value)
    console.print(table)


def print_sweep(console: Console, runs: list[tuple[list[str], dict[str, Any] | None, str]]) -> None:
    """All variants of a sweep, one row each (or one paragraph, where a row is too wide), named by what differs.

    A run is its overrides, its summary (None if it did not get that far) and its status.
    """
    common = set.intersection(*(set(words) for words, _, _ in runs)) if len(runs) > 1 else set()
    said = [word for word in runs[0][0] if word in common] if runs else []
    console.print(
        "\nAll variants" + (f" with {' '.join(said)}" if said else ""), markup=False, soft_wrap=True
    )
    labels, rows = _columns(runs), []
    for words, summary, status in runs:
        name = [word for word in words if word not in common] or ["(no overrides)"]
        ended = [] if status == "complete" else [status]
        refused = summary["num_rejected"] + summary["num_refused"] if summary else 0
        if refused:
            ended.append(f"({refused:,} refused)")
        cells = [_SWEEP_COLUMNS[label](summary) if summary else "-" for label in labels]
        rows.append(("\n".join(name + ended), cells))
    taken = sum(3 + _width([label, *(cells[i] for _, cells in rows)]) for i, label in enumerate(labels))
    longest, room = _width([name for name, _ in rows]), console.width - taken - len("│  │")
    if room < min(longest, LEAST_FOR_NAMES):
        for name, cells in rows:
            pairs = zip(labels, cells, strict=True)
            lines = [_one_line(name), *(f"  {_one_line(label)}: {cell}" for label, cell in pairs)]
            console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
        return
    table = Table()
    table.add_column("variant", overflow="fold", min_width=min(longest, room))
    for label in labels:
        table.add_column(label, justify="right", no_wrap=True)
    for name, cells in rows:
        table.add_row(name, *cells)
    console.print(table)


def _width(texts: list[str]) -> int:
    """Columns that the longest of their lines takes."""
    return max((len(line) for text in texts for line in text.split("\n")), default=0)


def _one_line(text: str) -> str:
    return text.replace("-\n", "").replace("\n", " ")


def _lines(s: dict[str, Any]) -> list[tuple[str, str]]:
    requests = f"{s['num_finished']} finished"
    requests += "".join(
        f", {s[f'num_{k}']} {k}" for k in ("refused", "rejected", "unfinished") if s[f"num_{k}"]
    )
    lines = [
        ("sequences", requests),
        ("prompt tokens", f"{s['prompt_tokens']:,}"),
        ("output tokens", f"{s['output_tokens']:,}"),
        ("duration", f"{s['duration_s']:.2f} s"),
        ("output throughput", _number(s["output_tokens_per_s"], "{:,.1f} tok/s")),
        ("TTFT", _latency(s["ttft_ms"])),
        ("TPOT", _latency(s["tpot_ms"])),
        ("ITL", _latency(s["itl_ms"])),
        ("queue time", _latency(s["queue_ms"])),
        ("KV held / pool", _mean_peak(s["kv_held_of_pool"])),
        ("KV held / owned", _mean_peak(s["kv_held_of_owned"])),
        ("KV pool", _pool_parts(s)),
        ("seats taken", _number(s["slot_occupancy"], "{:.1%} of max_num_seqs")),
        ("steps", f"{s['num_steps']:,}"),
        ("preemptions", _preemptions(s)),
    ]
    return lines + _memory_lines(s) + _waste_lines(s) + _service_lines(s)


def _memory_lines(s: dict[str, Any]) -> list[tuple[str, str]]:
    """What was found in memory, shared, copied and moved."""
    lines = []
    if s["reused_tokens"]:
        lines.append(
            ("reused tokens", f"{s['reused_tokens']:,} ({s['reused_token_share']:.1%} of prompt tokens)")
        )
    if s["kv_saved_bytes"] and s["kv_saved_bytes"]["peak"]:
        saved = s["kv_saved_bytes"]
        share = f"{s['kv_shared_share']:.1%} of the blocks that it would take without"
        lines.append(
            ("saved by sharing", f"mean {_bytes(saved['mean'])}  peak {_bytes(saved['peak'])}  ({share})")
        )
    if s["copied_blocks"]:
        lines.append(("copy-on-write", f"{s['copied_blocks']:,} blocks"))
    if s["swapped_bytes"]:
        moved = f"{s['swapped_out_blocks']:,} blocks out, {s['swapped_in_blocks']:,} in"
        lines.append(("swapped", f"{moved}, {_bytes(s['swapped_bytes'])}"))
    return lines


def _waste_lines(s: dict[str, Any]) -> list[tuple[str, str]]:
    """What was computed or waited for to no use."""
    lines = []
    if s["decode_stall_share"]:
        stalls = f"{_latency(s['decode_stall_ms'])}  ({s['decode_stall_share']:.1%} of decode time)"
        lines.append(("stalled by prefills", stalls))
    if s["idle_row_share"]:
        lines.append(("finished rows", f"{s['idle_row_share']:.1%} of row-steps computed for nothing"))
    if s["padding_tokens"]:
        lines.append(
            ("padding tokens", f"{s['padding_tokens']:,} ({s['padding_share']:.1%} of all computed)")
        )
    if s["fragmented_steps"]:
        lines.append(("refused though enough was free", f"{s['fragmented_steps']:,} steps (fragmentation)"))
    return lines


def _service_lines(s: dict[str, Any]) -> list[tuple[str, str]]:
    """How well requests were served within their limits, and how the groups of them compare."""
    lines = []
    if s["slo_attainment"] is not None:
        rate = _number(s["goodput_per_s"], "{:,.2f} requests/s")
        lines.append(("goodput", f"{rate} within the limits of slo ({s['slo_attainment']:.1%})"))
    if s["fairness_gap_tokens"] is not None:
        lines.append(
            ("fairness gap", f"{s['fairness_gap_tokens']:,} tokens of service between two waiting tenants")
        )
    for kind in ("priority", "tenant"):
        groups = s[f"by_{kind}"] or {}
        largest = sorted(groups, key=lambda name: -groups[name]["num_sequences"])[:MAX_GROUPS]
        for name in groups:
            if name in largest:
                lines.append((f"{kind} {name}", _group(groups[name])))
        if len(groups) > MAX_GROUPS:
            lines.append((f"{kind} ...", f"{len(groups) - MAX_GROUPS:,} more are in run.json"))
    return lines


def _group(group: dict[str, Any]) -> str:
    """Sequences and latencies of a priority or a tenant."""
    said = [f"{name} {_pair(group[f'{name.lower()}_ms'])}" for name in ("TTFT", "TPOT")]
    return f"{group['num_sequences']:,} sequences  {'  '.join(said)} ms (p50 / p99)"


def _preemptions(s: dict[str, Any]) -> str:
    share = f", {s['recompute_share']:.1%} of all computed" if s["recomputed_tokens"] else ""
    return f"{s['num_preemptions']:,} ({s['recomputed_tokens']:,} tokens recomputed{share})"


def _pool_parts(s: dict[str, Any]) -> str:
    """The mean parts of the pool, which add up to all of it."""
    if s["kv_held_of_pool"] is None:
        return "-"
    named = zip(POOL_PARTS, _percents(s, 1), strict=True)
    text = " + ".join(f"{name} {part:.1f}%" for name, part in named)
    cached = s["kv_cached_of_pool"]["mean"]
    return text + (f" (of it cached {cached:.1%})" if cached else "")


def _percents(s: dict[str, Any], digits: int) -> list[float]:
    """The mean parts of the pool, rounded so that they add up to 100 (by largest remainder)."""
    unit = 10**digits
    exact = [100 * unit * s[f"kv_{name}_of_pool"]["mean"] for name in POOL_PARTS]
    floors = [math.floor(part + 1e-6) for part in exact]
    missing = round(sum(exact)) - sum(floors)
    largest = sorted(range(len(exact)), key=lambda i: floors[i] - exact[i])
    for i in largest[:missing]:
        floors[i] += 1
    return [part / unit for part in floors]


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:,.0f} {unit}"
        count /= 1024
    return f"{count:,.1f} GiB"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _latency(percentiles: dict[str, float] | None) -> str:
    if percentiles is None:
        return "-"
    return "  ".join(f"{name} {value:,.1f}" for name, value in percentiles.items()) + " ms"


def _mean_peak(value: dict[str, float] | None) -> str:
    return "-" if value is None else f"mean {value['mean']:.1%}  peak {value['peak']:.1%}"


_SWEEP_COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "tok/s": lambda s: _number(s["output_tokens_per_s"], "{:,.1f}"),
    "TTFT ms\np50/p99": lambda s: _pair(s["ttft_ms"]),
    "TPOT ms\np50/p99": lambda s: _pair(s["tpot_ms"]),
    "% of the KV pool\nheld/res/int/ext": lambda s: _parts(s),
    "reused\n/shared": lambda s: f"{_percent(s['reused_token_share'])}/{_percent(s['kv_shared_share'])}%",
    "finished\nrows": lambda s: _number(s["idle_row_share"], "{:.1%}"),
    "stall ms\np50/p99": lambda s: _pair(s["decode_stall_ms"]),
    "good-\nput/s": lambda s: _number(s["goodput_per_s"], "{:,.2f}"),
    "fair-\nness": lambda s: _number(s["fairness_gap_tokens"], "{:,}"),
    "steps": lambda s: f"{s['num_steps']:,}",
    "frag-\nmented": lambda s: f"{s['fragmented_steps']:,}",
    "pre-\nempted": lambda s: _preempted(s),
}

_ONLY_WHERE_SEEN = {
    "stall ms\np50/p99": ("decode_stall_share",),
    "good-\nput/s": ("slo_attainment",),
    "fair-\nness": ("fairness_gap_tokens",),
    "reused\n/shared": ("reused_token_share", "kv_shared_share"),
    "finished\nrows": ("idle_row_share",),
    "frag-\nmented": ("fragmented_steps",),
    "pre-\nempted": ("num_preemptions",),
}
"""Columns that appear only if one of these figures is not 0 in some variant."""

_WHERE_SET = ("slo_attainment",)
"""Figures of which a 0 says something: they are none where nobody asked."""


def _columns(runs: list[tuple[list[str], dict[str, Any] | None, str]]) -> list[str]:
    """The columns that say something about these runs."""
    summaries = [summary for _, summary, _ in runs if summary]
    return [
        label
        for label in _SWEEP_COLUMNS
        if label not in _ONLY_WHERE_SEEN
        or any(_says_something(s, name) for s in summaries for name in _ONLY_WHERE_SEEN[label])
    ]


def _says_something(s: dict[str, Any], name: str) -> bool:
    return s[name] is not None if name in _WHERE_SET else bool(s[name])


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f}"


def _parts(s: dict[str, Any]) -> str:
    """The mean parts of the pool in percent."""
    if s["kv_held_of_pool"] is None:
        return "-"
    return "/".join(f"{part:.0f}" for part in _percents(s, 0))


def _preempted(s: dict[str, Any]) -> str:
    """How often, and the share of tokens that were computed again for it."""
    again = f" ({_percent(s['recompute_share'])}%)" if s["recomputed_tokens"] else ""
    return f"{s['num_preemptions']:,}{again}"


def _pair(percentiles: dict[str, float] | None) -> str:
    return "-" if percentiles is None else f"{percentiles['p50']:,.0f} / {percentiles['p99']:,.0f}"
