"""What static batching computes for nothing, by how much outputs differ: row-steps, and the time of a real model.

    python benchmarks/static_vs_continuous.py [--requests 64]

Prints for each cap on the exponential output lengths of experiment=static_vs_continuous, and for 4 and 16 seats, the
row-steps of 1,000 requests under scheduler=static and continuous with their ratio, and the ratio of the seconds that
the first --requests of them take with model=tiny under executor=torch (0: leave that out). With 64 it is made to take
less than 5 minutes on two quiet cores, of which row-steps are one.
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import product
from typing import NamedTuple

from kvengine.assemble import blueprint
from kvengine.compose import composer
from kvengine.core.plan import StepPlan, StepResult
from kvengine.engine.driver import Driver
from kvengine.engine.recording import NullRecorder, PoolState
from kvengine.overrides import expand
from kvengine.registry import discover

CAPS, SEATS = (32, 128, 512, 1536), (4, 16)
REAL = ["executor=torch", "model=tiny"]


class RowCounter(NullRecorder):
    """Counts rows, those computed for nothing included."""

    row_steps = 0

    def step(self, plan: StepPlan, result: StepResult, pool: PoolState, end_ns: int) -> None:
        self.row_steps += len(plan.rows) + len(plan.idle_rows)


class Cost(NamedTuple):
    """What a run took."""

    row_steps: int
    seconds: float


def cost(scheduler: str, cap: int, seats: int, words: list[str]) -> Cost:
    """Of serving the workload under `scheduler` with outputs of at most `cap` tokens and so many seats."""
    settings = [f"scheduler={scheduler}", f"workload.output_len.max={cap}", f"max_num_seqs={seats}"]
    with composer() as compose:
        config = compose(expand(["experiment=static_vs_continuous", *settings, *words]))
    plan, counter = blueprint(config, discover()), RowCounter()
    engine = plan.engine(counter)
    began = time.perf_counter()
    report = Driver(engine, plan.workload).run()
    assert not report.rejected, report.rejected[0]
    return Cost(counter.row_steps, time.perf_counter() - began)


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--requests", type=int, default=64, help="of the wall-clock ratio; 0: none")
    num_requests = parser.parse_args().requests
    print(
        "| cap | seats | static, row-steps | continuous | ratio | ratio of seconds |\n|---|---|---|---|---|---|"
    )
    for cap, seats in product(CAPS, SEATS):
        static, continuous = (cost(name, cap, seats, []) for name in ("static", "continuous"))
        ratio, seconds = static.row_steps / continuous.row_steps, "-"
        if num_requests:
            words = [*REAL, f"workload.num_requests={num_requests}"]
            slow, fast = (cost(name, cap, seats, words) for name in ("static", "continuous"))
            seconds = f"{slow.seconds:.1f} / {fast.seconds:.1f} = {slow.seconds / fast.seconds:.2f}"
        counts = f"{static.row_steps:,} | {continuous.row_steps:,}"
        print(f"| {cap:,} | {seats} | {counts} | {ratio:.2f} | {seconds} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
