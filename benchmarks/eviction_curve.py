"""How many prompt blocks of published traces are hit, by eviction policy and size of the cache.

    python benchmarks/eviction_curve.py [--jobs 2] [--plot docs/experiments/eviction_curve.svg]

Replays the two Mooncake traces (FAST'25; looked for in --data, ../shared/data unless said) one request after the
other, prompts only, through the engine with a pool of so many blocks of 512 tokens, and prints a table in percent of
all hash ids. --plot draws it besides and needs matplotlib: pip install "kvengine[plot]". It took 15 minutes with
--jobs 2 on two busy cores.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from pathlib import Path
from typing import NamedTuple

from kvengine.assemble import blueprint
from kvengine.compose import composer
from kvengine.core.plan import RequestOutput
from kvengine.core.shapes import KvShape
from kvengine.engine.driver import Driver
from kvengine.overrides import expand
from kvengine.registry import discover
from kvengine_plugins.models.checksum import ChecksumModel

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
TRACES = ("conversation", "synthetic")
POLICIES = ("lru", "lfu", "fifo")
SIZES = (1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)
UNLIMITED = 300_000
"""More blocks than either trace has hash ids: nothing is evicted, whatever the policy."""
BLOCK = 512

WORK = [
    "executor=null", "model=checksum", "prefix_cache=on", "workload=mooncake", f"workload.block_tokens={BLOCK}",
    "workload.output=one", "workload.concurrency=1", "max_model_len=200000", "max_num_batched_tokens=200000",
    f"block_size={BLOCK}",
]  # fmt: skip


class Case(NamedTuple):
    """One replay."""

    trace: str
    policy: str
    num_blocks: int


Rates = dict[Case, float]

LOOKS = {
    "lru": {"color": "#0072B2", "marker": "o", "markersize": 4},
    "lfu": {"color": "#D55E00", "marker": "s", "markersize": 5},
    "fifo": {"color": "#222222", "marker": "^", "markersize": 9, "fillstyle": "none", "linestyle": ":"},
}
"""Lines that can be told apart where one covers another, as lru and fifo nearly do."""


class SilentModel(ChecksumModel):
    """As many positions as the traces need, and no tokens computed: that would take most of the time."""

    def token_source(self, kv: KvShape) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None


def trace_file(data: Path, trace: str) -> Path:
    return data / f"mooncake_{trace}_trace.jsonl"


def hit_rate(case: Case, data: Path) -> float:
    """Blocks that were cached over all hash ids of the trace."""
    path = trace_file(data, case.trace)
    registry = discover()
    registry.add("model", "silent", lambda config, build: SilentModel(), summary="no tokens")
    words = [f"workload.path={path}", f"eviction={case.policy}", f"num_blocks={case.num_blocks}"]
    with composer() as compose:
        config = compose(expand([*WORK, *words]))
    plan = blueprint({**config, "model": {"name": "silent"}}, registry)
    cached: list[int] = []

    def note(outputs: list[RequestOutput]) -> None:
        cached.extend(output.sequence.num_cached_tokens for output in outputs if output.finish_reason)

    report = Driver(plan.engine(), plan.workload, on_outputs=note).run()
    assert not report.rejected, report.rejected[0]
    with path.open(encoding="utf-8") as lines:
        num_ids = sum(len(json.loads(line)["hash_ids"]) for line in lines)
    return sum(cached) / BLOCK / num_ids


def measure(data: Path, jobs: int) -> Rates:
    """All cases, the long ones first; an unlimited cache once for all policies."""
    cases = [Case(*parts) for parts in product(TRACES, POLICIES, SIZES)]
    cases += [Case(trace, POLICIES[0], UNLIMITED) for trace in TRACES]
    with ProcessPoolExecutor(jobs) as pool:
        return dict(zip(cases, pool.map(hit_rate, cases, [data] * len(cases)), strict=True))


def print_table(rates: Rates) -> None:
    sizes = " | ".join(f"{size:,}" for size in SIZES)
    print(f"| trace | eviction | {sizes} | unlimited |\n{'|---' * (len(SIZES) + 3)}|")
    for trace, policy in product(TRACES, POLICIES):
        row = [rates[Case(trace, policy, size)] for size in SIZES]
        row.append(rates[Case(trace, POLICIES[0], UNLIMITED)])
        print(f"| {trace} | {policy} | " + " | ".join(f"{100 * rate:.1f}" for rate in row) + " |")


def plot(rates: Rates, target: Path) -> None:
    """One panel per trace, one line per policy, and what no policy can pass."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "kvengine", "svg.fonttype": "path", "font.size": 10}
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(TRACES), figsize=(9, 3.8), sharey=True, layout="constrained")
    for axes, trace in zip(panels, TRACES, strict=True):
        limit = 100 * rates[Case(trace, POLICIES[0], UNLIMITED)]
        axes.axhline(limit, color="0.5", linewidth=1, linestyle=(0, (4, 3)))
        axes.text(SIZES[0], limit + 1, f"unlimited: {limit:.1f}%", color="0.35", fontsize=9)
        for policy, look in LOOKS.items():
            heights = [100 * rates[Case(trace, policy, size)] for size in SIZES]
            axes.plot(SIZES, heights, label=policy, **look)
        axes.set(xscale="log", title=f"{trace} trace", xlabel="cache size in blocks of 512 tokens")
        axes.set_xticks(SIZES, [f"{size // 1000}k" for size in SIZES])
        axes.minorticks_off()
        axes.set_ylim(0, 75)
        axes.grid(color="0.9")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("prompt blocks hit, %")
    panels[0].legend(title="eviction", frameon=False, loc="upper left", bbox_to_anchor=(0, 0.97))
    figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None, dpi=130)


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time, of about 1 GB each")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of mooncake_*_trace.jsonl")
    parser.add_argument("--plot", type=Path, help="file to draw to, .svg or .png")
    options = parser.parse_args()
    for path in (trace_file(options.data, trace) for trace in TRACES):
        if not path.is_file():
            print(f"error: {path} is absent; --data names the folder of the traces", file=sys.stderr)
            return 2
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        print('error: --plot needs matplotlib: pip install "kvengine[plot]"', file=sys.stderr)
        return 2
    rates = measure(options.data, options.jobs)
    print_table(rates)
    if options.plot:
        plot(rates, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
