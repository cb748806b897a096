"""How much of the step time recording takes: a batch of equal requests on the torch executor, recorded to disk.

    python benchmarks/telemetry_overhead.py                      # smollm2-135m, 32 sequences, 200 steps
    python benchmarks/telemetry_overhead.py --model tiny --steps 1000
    python benchmarks/telemetry_overhead.py --steps 40 executor.device=cpu kv=fp8

The share is the time inside recorder calls on the step thread over the sum of all steps' durations. Exit code 1
when it is not below the limit (1 % unless --limit says otherwise), 2 for a setting that cannot work.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from kvengine.assemble import blueprint
from kvengine.compose import composer
from kvengine.core.errors import KvEngineError
from kvengine.engine.driver import Driver
from kvengine.overrides import HYDRA_ERRORS, expand, explain
from kvengine.registry import discover
from kvengine.telemetry.recorder import ColumnRecorder
from kvengine.telemetry.run_directory import RunDirectory, read_tables

PROMPT_TOKENS = 16


def main() -> int:
    """Measure, print, judge."""
    options = arguments()
    try:
        with tempfile.TemporaryDirectory() as directory:
            return report(measure(options, Path(directory)), options)
    except HYDRA_ERRORS as error:
        print(f"error: {explain(error, options.overrides, ())}", file=sys.stderr)
    except KvEngineError as error:
        print(f"error: {error}", file=sys.stderr)
    return 2


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--batch", type=int, default=32, help="sequences that run at once")
    parser.add_argument("--steps", type=int, default=200, help="steps, the prefill among them")
    parser.add_argument("--limit", type=float, default=0.01, help="share that recording must stay below")
    parser.add_argument("overrides", nargs="*", help="settings as for python -m kvengine")
    return parser.parse_args()


def measure(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Run the batch; seconds in the recorder and in each step."""
    fixed = {"prompt_len": PROMPT_TOKENS, "output_len": options.steps}
    words = [f"model={options.model}", "workload=synthetic", f"workload.num_requests={options.batch}"]
    words += [
        f"workload.{name}.{key}"
        for name, mean in fixed.items()
        for key in ("distribution=fixed", f"mean={mean}")
    ]
    words += [f"max_num_seqs={options.batch}", f"max_model_len={PROMPT_TOKENS + options.steps}"]
    with composer() as compose:
        plan = blueprint(compose(expand([*words, *options.overrides])), discover())
    recorder = ColumnRecorder(RunDirectory(directory))
    engine = plan.engine(recorder)
    Driver(engine, plan.workload).run()
    in_steps = recorder.seconds
    began = time.perf_counter()
    recorder.flush()
    flush = time.perf_counter() - began
    engine.close()
    steps = read_tables(directory)["steps"]
    durations = (steps["end_ns"].to_numpy() - steps["start_ns"].to_numpy()) / 1e9
    return {
        "recorder": in_steps,
        "flush": flush,
        "durations": durations,
        "rows": steps["num_rows"].to_numpy(),
    }


def report(found: dict[str, Any], options: argparse.Namespace) -> int:
    durations, rows = found["durations"], found["rows"]
    share = found["recorder"] / durations.sum()
    print(f"model={options.model}: {len(rows)} steps of {np.median(rows):.0f} rows (median)")
    print(f"step: median {np.median(durations) * 1e3:.2f} ms, all {durations.sum():.2f} s")
    print(
        f"recorder: {found['recorder'] / len(rows) * 1e6:.0f} us per step, all {found['recorder'] * 1e3:.2f} ms"
    )
    print(f"last flush, after the last step: {found['flush'] * 1e3:.2f} ms, not counted")
    good = share < options.limit
    print(f"share of the step time: {share:.3%}, {'below' if good else 'NOT below'} {options.limit:.1%}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
