"""The experiments of scheduling, in small: each shows what its page says, beside what a hand calculation gives."""

from __future__ import annotations

import csv
import math
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest

from kvengine.analysis.summary import PoolFacts, summarize
from kvengine.assemble import blueprint
from kvengine.compose import composer, sweep_axes, variants
from kvengine.core.shapes import ModelShape
from kvengine.engine.driver import Driver
from kvengine.overrides import expand
from kvengine.registry import discover
from kvengine.telemetry.recorder import ColumnRecorder

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
GIB = 2**30


class Measured(NamedTuple):
    """One variant of an experiment, run here and now: what was recorded, and its figures."""

    tables: dict[str, pa.Table]
    summary: dict[str, Any]


def measured(experiment: str, *axes: str, words: tuple[str, ...] = ()) -> dict[Any, Measured]:
    """The variants of `experiment` under the overrides `words`, by the value (or values) that they give `axes`."""
    found = {}
    with composer() as compose:
        given = expand([f"experiment={experiment}", *words])
        for variant in variants([*given, *sweep_axes(given)]):
            said = dict(word.split("=", 1) for word in variant)
            key = tuple(said[axis] for axis in axes)
            found[key if len(axes) > 1 else key[0]] = run(compose(variant))
    return found


def run(config: dict[str, Any]) -> Measured:
    plan = blueprint(config, discover())
    recorder = ColumnRecorder(None)
    report = Driver(plan.engine(recorder), plan.workload).run()
    assert not report.rejected
    recorder.flush()
    tables = recorder.tables()
    facts = PoolFacts(
        num_blocks=plan.kv.num_blocks,
        block_size=plan.kv.block_size,
        block_bytes=plan.kv.block_bytes,
        max_num_seqs=plan.limits.max_num_seqs,
    )
    return Measured(tables, summarize(tables, facts))


# ---- worked_case


def test_worked_case() -> None:
    """64 of 100 blocks hold one region of 2,048 slots; 199 of them are written; 7 blocks hold 200 tokens."""
    runs = measured("worked_case", "allocator")
    reserved, paged = runs["contiguous_max"], runs["paged"]
    most = [max(one.tables["steps"]["num_rows"].to_pylist()) for one in (reserved, paged)]
    assert most == [1, 100 // -(-200 // 32)] == [1, 14]
    assert [one.summary["num_steps"] for one in (reserved, paged)] == [20 * 50, 2 * 50]
    assert [one.summary["num_preemptions"] for one in (reserved, paged)] == [0, 0]
    parts = [reserved.summary[f"kv_{part}_of_pool"]["mean"] for part in ("held", "reserved", "internal")]
    assert parts[2] / sum(parts) == pytest.approx(1 - 199 / 2048, abs=0.01)
    assert paged.summary["kv_internal_of_pool"]["mean"] < 0.02


def test_the_bytes_of_the_worked_case_count_layers_and_heads() -> None:
    """Published: 0.5 MiB for each token of Llama-2-7B in fp16 (shared/reference/simulation.md, 2.7)."""
    llama = ModelShape(
        num_layers=32, num_kv_heads=32, head_dim=128, vocab_size=32_000, max_position=4096, dtype="fp16"
    )
    token = llama.kv_bytes_per_token(2)
    assert token == 524_288
    assert 20 * 2048 * token / GIB == 20
    assert 20 * 200 * token / GIB == pytest.approx(1.95, abs=0.005)


# ---- static_vs_continuous


def test_static_vs_continuous() -> None:
    """Lengths and caps are a quarter of the experiment's, which leaves the ratios nearly as they are."""
    words = ("num_requests=320", "output_len.mean=32", "output_len.max=8,384")
    runs = measured(
        "static_vs_continuous", "workload.output_len.max", "engine.max_num_seqs",
        words=("scheduler=static", *(f"workload.{word}" for word in words)),
    )  # fmt: skip
    ratio = {}
    for cap, seats in product(("8", "384"), ("4", "16")):
        s = runs[cap, seats].summary
        assert s["row_steps"] * (1 - s["idle_row_share"]) == pytest.approx(s["output_tokens"])
        ratio[cap, seats] = s["row_steps"] / s["output_tokens"]  # the latter are what continuous takes
        assert ratio[cap, seats] == pytest.approx(longest_over_mean(int(cap), int(seats), 32), rel=0.1)
    for seats in ("4", "16"):
        assert ratio["8", seats] < ratio["384", seats]
    for cap in ("8", "384"):
        assert ratio[cap, "4"] < ratio[cap, "16"]


def longest_over_mean(cap: int, batch: int, mean: float) -> float:
    """E[longest of `batch`] / E[length] of rounded exponential lengths, at least 1, redrawn above `cap`: sums of
    the probability to be longer than k."""
    whole = -math.expm1(-(cap + 0.5) / mean)
    shorter = [-math.expm1(-(k + 0.5) / mean) / whole for k in range(1, cap)]
    return (1 + sum(1 - share**batch for share in shorter)) / (1 + sum(1 - share for share in shorter))


@pytest.mark.parametrize("batch", [4, 16])
def test_without_a_cap_the_ratio_is_the_harmonic_number(batch: int) -> None:
    """The longest of B exponentials: the first of B ends after mean / B, the next after mean / (B - 1), ..."""
    harmonic = sum(1 / k for k in range(1, batch + 1))
    assert harmonic == pytest.approx({4: 2.08, 16: 3.38}[batch], abs=0.005)
    assert longest_over_mean(1536, batch, 128) == pytest.approx(harmonic, rel=0.01)


def test_static_vs_continuous_azure() -> None:
    """To the row: a static batch takes as many rows as its longest output for each of its members."""
    trace = DATA / "azure2023_conv.csv"
    if not trace.exists():
        pytest.skip(f"{trace} is absent: the published traces lie beside the checkout, not in it")
    with trace.open(encoding="utf-8", newline="") as file:
        outputs = [int(row["GeneratedTokens"]) for row in csv.DictReader(file)][:60]
    words = (f"workload.path={trace}", "workload.num_requests=60")
    runs = measured("static_vs_continuous_azure", "engine.max_num_seqs", "scheduler", words=words)
    for seats in (4, 16):
        batches = [outputs[first : first + seats] for first in range(0, 60, seats)]
        expected = sum(max(batch) * len(batch) for batch in batches)
        assert runs[str(seats), "static"].summary["row_steps"] == expected > 1.5 * sum(outputs)
        assert runs[str(seats), "continuous"].summary["row_steps"] == sum(outputs)


# ---- who waits for whom


def test_prefill_interference() -> None:
    runs = measured("prefill_interference", "scheduler", words=("workload.num_requests=120",))
    stalled = runs["continuous"].summary
    assert stalled["itl_ms"]["p50"] == 10
    assert stalled["itl_ms"]["p99"] >= 50
    assert stalled["tpot_ms"]["p99"] > 15
    assert stalled["decode_stall_ms"]["p99"] > 200
    assert longest_gap(runs["continuous"]) > 10
    for name in ("chunked", "prefill_budgeted"):
        smooth = runs[name].summary
        assert smooth["itl_ms"] == smooth["tpot_ms"] == pytest.approx({"p50": 10, "p90": 10, "p99": 10})
        assert smooth["decode_stall_share"] == 0
        assert longest_gap(runs[name]) == 1


def longest_gap(one: Measured) -> int:
    """The most steps between two tokens of any sequence, from the table of tokens."""
    last, longest = {}, 1
    for row in sorted(one.tables["tokens"].to_pylist(), key=lambda row: row["first_step"]):
        longest = max(longest, row["first_step"] - last.get(row["request_id"], row["first_step"] - 1))
        last[row["request_id"]] = row["first_step"] + row["num_steps"] - 1
    return longest


def test_fairness() -> None:
    runs = measured("fairness", "queue", words=("workload.num_requests=250",))
    fcfs, fair = runs["fcfs"], runs["fair"]
    waits = [
        [one.summary["by_tenant"][tenant]["ttft_ms"]["p50"] for tenant in ("tenant0", "tenant1")]
        for one in (fcfs, fair)
    ]
    assert waits[0][1] == pytest.approx(waits[0][0], rel=0.3), "under fcfs both wait alike"
    assert waits[1][1] < 0.2 * waits[0][1]
    assert waits[1][0] < 1.5 * waits[0][0]
    requests = fair.tables["requests"]
    lengths = [
        prompt + output
        for prompt, output in zip(
            requests["num_prompt_tokens"].to_pylist(), requests["num_output_tokens"].to_pylist(), strict=True
        )
    ]
    bound = 2 * max(max(requests["num_prompt_tokens"].to_pylist()), 2 * sum(sorted(lengths)[-16:]))
    gaps = [one.summary["fairness_gap_tokens"] for one in (fcfs, fair)]
    assert gaps[1] <= bound
    assert gaps[0] > 10 * gaps[1]


def test_priorities() -> None:
    runs = measured("priorities", "queue", words=("workload.num_requests=250",))
    fcfs, priority = runs["fcfs"], runs["priority"]
    p99 = [priority.summary["by_priority"][level]["ttft_ms"]["p99"] for level in "012"]
    assert p99[0] < 50
    assert p99[1] < p99[2]
    assert p99[2] > fcfs.summary["by_priority"]["2"]["ttft_ms"]["p99"]
    assert fcfs.summary["by_priority"]["0"]["ttft_ms"]["p50"] > 10 * p99[0]
    assert priority.summary["num_preemptions"] > 0
    preempted = [row for row in priority.tables["decisions"].to_pylist() if row["action"] == "preempt"]
    reasons = {row["reason"] for row in preempted}
    assert reasons == {"PREEMPTED_FOR"}, "seats are what is short: every preemption displaces"


def test_ageing_lets_the_least_urgent_in_sooner() -> None:
    words = ("workload.num_requests=250", "queue=priority", "queue.ageing_s=null,1")
    runs = measured("priorities", "queue.ageing_s", words=words)
    for level, sooner in (("2", True), ("0", False)):
        one, other = (runs[s].summary["by_priority"][level]["ttft_ms"]["p99"] for s in ("null", "1"))
        assert (other < one) is sooner


def test_preemption_policies() -> None:
    words = ("max_model_len=1024", "num_blocks=128", "num_host_blocks=128", "workload.num_requests=60")
    words += ("workload.output_len.mean=96", "workload.arrival.rate=6")
    axes = ("preemption", "victim")
    runs = measured("preemption_policies", *axes, words=(*words, "preemption=recompute,swap"))
    assert len(runs) == 8
    # 25 GB/s is far beyond the break-even of 2 x 368,640 bytes in the time of 16 tokens, 16 / 10,000 s
    auto = measured("preemption_policies", *axes, words=(*words, "preemption=auto", "victim=latest_arrival"))
    assert auto["auto", "latest_arrival"].summary == runs["swap", "latest_arrival"].summary
    for (mechanism, victim), one in runs.items():
        s = one.summary
        assert s["num_finished"] == 60
        assert s["num_preemptions"] > 10
        assert (s["recompute_share"] > 0.1) is (mechanism == "recompute")
        assert (s["swapped_out_blocks"] > 0) is (mechanism != "recompute")
        assert s["swapped_out_blocks"] == s["swapped_in_blocks"]
        if (
            mechanism == "auto"
        ):  # 25 GB/s is far beyond the break-even of 2 x 368,640 bytes against 16 / 10,000 s
            assert s == runs["swap", victim].summary
        if victim == "lowest_priority":
            urgent, least = (s["by_priority"][p]["tpot_ms"]["p99"] for p in "02")
            assert urgent < least
    counts = {victim: runs["recompute", victim].summary["num_preemptions"] for _, victim in runs}
    assert counts["cheapest_recompute"] > counts["latest_arrival"] == counts["shortest_generated"]
