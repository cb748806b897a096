"""Figure 2 of the vLLM paper without a clock: what a full KV pool holds under each way of giving it out.

Source: Kwon et al., SOSP 2023, figures 2 and 13: OPT-13B in 12 GiB of KV, ShareGPT lengths. Here the lengths are
drawn: lognormal, those beyond 2,048 tokens dropped (as vLLM's benchmark scripts do), of such means that 161 in and
338 out are left. `python tests/test_kv_figure.py [KEY=VALUE ...]` prints rows of docs/experiments/fragmentation.md.
"""

from __future__ import annotations

import sys
from collections import Counter
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import pytest

from kvengine.assemble import blueprint
from kvengine.compose import composer
from kvengine.core.plan import StepPlan, StepResult
from kvengine.core.reasons import Reason
from kvengine.engine.context import SchedulingContext
from kvengine.engine.driver import Driver
from kvengine.engine.recording import NullRecorder, PoolState
from kvengine.overrides import expand
from kvengine.registry import discover

POOL_SLOTS = 12 * 2**30 // 819_200
"""15,728: a token of OPT-13B takes 2 x 40 layers x 5,120 values x 2 bytes."""

NUM_REQUESTS, WARM_UP = 1000, 100
"""Steps count from when the first `WARM_UP` requests were admitted until none waits."""

WORK = [
    "executor=null", "scheduler=chunked", "queue=fcfs", "admission=whole_prompt", "max_model_len=2048",
    "max_num_seqs=1024", "max_num_batched_tokens=1000000",
    "workload=synthetic", f"workload.num_requests={NUM_REQUESTS}", "workload.clip_to_model_len=false",
    "workload.prompt_len.mean=167.2", "workload.prompt_len.sigma=1.0",
    "workload.output_len.mean=358.5", "workload.output_len.sigma=0.85",
]  # fmt: skip
"""All at once, first come first served, nobody overtakes; neither seats nor tokens of a step ever bind."""


class Shares(NamedTuple):
    """Means over steps, in percent of the pool but for `batch` (sequences): slots with KV of a token, slots
    that a sequence owns and will write, slots that it owns and will not, and slots that nobody owns."""

    held: float
    reserved: float
    internal: float
    external: float
    batch: float


PUBLISHED = {
    "contiguous_max": Shares(20.4, 13.3, 57.3, 8.9, 7.0),
    "contiguous_pow2": Shares(26.8, 17.9, 13.6, 41.6, 9.81),
    "contiguous_oracle": Shares(38.2, 25.2, 0.0, 36.6, 13.62),
}


class Meter(NullRecorder):
    """Looks at all running sequences after every step that counts."""

    def __init__(self) -> None:
        self.context: Any = None
        self.drained = False
        self.reasons: set[str] = set()
        self._sums: Counter[str] = Counter()

    def step(self, plan: StepPlan, result: StepResult, pool: PoolState, end_ns: int) -> None:
        context: SchedulingContext = self.context
        self.drained = not len(context.waiting)
        if self.drained or context.waiting.peek().order < WARM_UP:
            return
        self.reasons |= {decision.reason for decision in plan.decisions if decision.reason}
        held = owned = used = 0
        for seq in context.running:
            slots = seq.block_table.num_slots
            held += seq.num_computed_tokens
            owned += slots
            used += min(slots, seq.max_tokens_total - 1)
        parts = {
            "held": held,
            "reserved": used - held,
            "internal": owned - used,
            "external": POOL_SLOTS - owned,
        }
        self._sums.update(parts, batch=len(plan.rows), steps=1)

    def shares(self) -> Shares:
        mean = {name: total / self._sums["steps"] for name, total in self._sums.items()}
        parts = (100 * mean[name] / POOL_SLOTS for name in ("held", "reserved", "internal", "external"))
        return Shares(*parts, batch=mean["batch"])


@cache
def measure(allocator: str, *words: str) -> tuple[Shares, frozenset[str]]:
    """The shares of a whole run, and the reasons for which anybody waited at the head, or left, in it."""
    block_size = 16 if allocator == "paged" else 1
    pool = [f"allocator={allocator}", f"block_size={block_size}", f"num_blocks={POOL_SLOTS // block_size}"]
    with composer() as compose:
        plan = blueprint(compose(expand([*WORK, *pool, *words])), discover())
    meter = Meter()
    engine = plan.engine(meter)
    meter.context = engine.context
    Driver(engine, plan.workload, interrupted=lambda: meter.drained).run()
    return meter.shares(), frozenset(meter.reasons - {Reason.HEAD_OF_LINE})


TOLERANCE = {
    "contiguous_max": (1.5, 7.0, 0.05),
    "contiguous_pow2": (6.0, 9.8, 0.6),
    "contiguous_oracle": (3.0, 13.3, 1.0),
}
"""In points of the pool; the mean batch, and its tolerance, in sequences."""


@pytest.mark.parametrize("allocator", PUBLISHED)
def test_a_contiguous_allocator_fills_the_pool_as_published(allocator: str) -> None:
    shares, reasons = measure(allocator)
    published, (points, batch, sequences) = PUBLISHED[allocator], TOLERANCE[allocator]
    assert sum(shares[:4]) == pytest.approx(100)
    for name, ours, theirs in zip(Shares._fields[:4], shares[:4], published[:4], strict=True):
        assert ours == pytest.approx(theirs, abs=points), name
    assert shares.batch == pytest.approx(batch, abs=sequences)
    assert reasons == ({Reason.NO_BLOCKS} if "max" in allocator else {Reason.NO_BLOCKS, Reason.FRAGMENTED})


def test_the_oracle_wastes_nothing_inside_a_region() -> None:
    assert measure("contiguous_oracle")[0].internal == 0


def test_paging_holds_tokens_in_nearly_all_of_the_pool() -> None:
    shares, reasons = measure("paged")
    assert shares.held >= 96.3  # as published
    assert shares.held / (100 - shares.external) >= 0.98
    assert shares.batch > 2 * PUBLISHED["contiguous_oracle"].batch
    assert reasons == {Reason.NO_BLOCKS, Reason.PREEMPTED_FOR, Reason.AFTER_PREEMPTION}


def main(words: list[str]) -> None:
    """A row per allocator, under the overrides `words`."""
    rows: dict[str, tuple[str, ...]] = {name: (name,) for name in (*PUBLISHED, "paged")}
    for fit, reserve in product(("first_fit", "best_fit"), ("pow2", "oracle")):
        rows[f"{fit}, {reserve}"] = (fit, f"allocator.reserve={reserve}")
    print("| allocator | held | reserved | internal | external | batch |\n|---|---|---|---|---|---|")
    for label, (name, *options) in rows.items():
        *parts, batch = measure(name, *options, *words)[0]
        print(f"| {label} |", " | ".join(f"{part:.1f}" for part in parts), f"| {batch:.2f} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
