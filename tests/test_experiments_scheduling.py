"""The experiments of scheduling, in small: each shows what its page says, beside what a hand calculation gives."""

from __future__ import annotations

import csv
import math
from itertools import product
from pathlib import Path

import pytest
from test_experiments import Variant, swept

from kvengine.core.shapes import ModelShape
from kvengine.telemetry.run_directory import read_tables

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
GIB = 2**30


def by_axes(runs: list[Variant], *axes: str) -> dict[tuple[str, ...], Variant]:
    """The variants by the values that they give `axes`."""
    words = [dict(word.split("=", 1) for word in run.words) for run in runs]
    return {tuple(said[axis] for axis in axes): run for said, run in zip(words, runs, strict=True)}


def tables_of(tmp_path: Path, number: int) -> dict:
    (sweep,) = (tmp_path / "traces").iterdir()
    return read_tables(sweep / str(number))


# ---- worked_case


def test_worked_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 of 100 blocks hold one region of 2,048 slots; 199 of them are written; 7 blocks hold 200 tokens."""
    reserved, paged = swept("worked_case", [], tmp_path, monkeypatch)
    assert "allocator=contiguous_max" in reserved.words
    most = [max(tables_of(tmp_path, number)["steps"]["num_rows"].to_pylist()) for number in (0, 1)]
    assert most == [1, 100 // -(-200 // 32)] == [1, 14]
    assert [run.summary["num_steps"] for run in (reserved, paged)] == [20 * 50, 2 * 50]
    assert [run.summary["num_preemptions"] for run in (reserved, paged)] == [0, 0]
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


def test_static_vs_continuous(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["workload.num_requests=320", "workload.output_len.max=32,1536"]
    runs = by_axes(
        swept("static_vs_continuous", words, tmp_path, monkeypatch),
        "workload.output_len.max", "engine.max_num_seqs", "scheduler",
    )  # fmt: skip
    ratio = {}
    for cap, seats in product(("32", "1536"), ("4", "16")):
        static, continuous = (runs[cap, seats, name].summary for name in ("static", "continuous"))
        assert continuous["row_steps"] == continuous["output_tokens"] == static["output_tokens"]
        assert static["row_steps"] * (1 - static["idle_row_share"]) == pytest.approx(static["output_tokens"])
        ratio[cap, seats] = static["row_steps"] / continuous["row_steps"]
        assert ratio[cap, seats] == pytest.approx(longest_over_mean(int(cap), int(seats)), rel=0.1)
    for seats in ("4", "16"):
        assert ratio["32", seats] < ratio["1536", seats]
    for cap in ("32", "1536"):
        assert ratio[cap, "4"] < ratio[cap, "16"]


def longest_over_mean(cap: int, batch: int, mean: float = 128.0) -> float:
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
    assert longest_over_mean(1536, batch) == pytest.approx(harmonic, rel=0.01)


def test_static_vs_continuous_azure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the row: a static batch takes as many rows as its longest output for each of its members."""
    trace = DATA / "azure2023_conv.csv"
    if not trace.exists():
        pytest.skip(f"{trace} is absent: the published traces lie beside the checkout, not in it")
    with trace.open(encoding="utf-8", newline="") as file:
        outputs = [int(row["GeneratedTokens"]) for row in csv.DictReader(file)][:100]
    words = [f"workload.path={trace}", "workload.num_requests=100"]
    found = swept("static_vs_continuous_azure", words, tmp_path, monkeypatch)
    runs = by_axes(found, "engine.max_num_seqs", "scheduler")
    for seats in (4, 16):
        batches = [outputs[first : first + seats] for first in range(0, 100, seats)]
        expected = sum(max(batch) * len(batch) for batch in batches)
        assert runs[str(seats), "static"].summary["row_steps"] == expected > 1.5 * sum(outputs)
        assert runs[str(seats), "continuous"].summary["row_steps"] == sum(outputs)


# ---- who waits for whom


def test_prefill_interference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = swept("prefill_interference", ["workload.num_requests=200"], tmp_path, monkeypatch)
    named = by_axes(runs, "scheduler")
    stalled = named["continuous",].summary
    assert stalled["itl_ms"]["p50"] == 10
    assert stalled["itl_ms"]["p99"] >= 50
    assert stalled["tpot_ms"]["p99"] > 15
    assert stalled["decode_stall_ms"]["p99"] > 200
    assert longest_gap(tmp_path, 0) > 10
    for number, name in ((1, "chunked"), (2, "prefill_budgeted")):
        smooth = named[name,].summary
        assert smooth["itl_ms"] == smooth["tpot_ms"] == pytest.approx({"p50": 10, "p90": 10, "p99": 10})
        assert smooth["decode_stall_share"] == 0
        assert longest_gap(tmp_path, number) == 1


def longest_gap(tmp_path: Path, number: int) -> int:
    """The most steps between two tokens of any sequence, from the table of tokens."""
    last, longest = {}, 1
    for row in sorted(tables_of(tmp_path, number)["tokens"].to_pylist(), key=lambda row: row["first_step"]):
        longest = max(longest, row["first_step"] - last.get(row["request_id"], row["first_step"] - 1))
        last[row["request_id"]] = row["first_step"] + row["num_steps"] - 1
    return longest


def test_fairness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fcfs, fair = swept("fairness", ["workload.num_requests=300"], tmp_path, monkeypatch)
    waits = [
        [run.summary["by_tenant"][tenant]["ttft_ms"]["p50"] for tenant in ("tenant0", "tenant1")]
        for run in (fcfs, fair)
    ]
    assert waits[0][1] == pytest.approx(waits[0][0], rel=0.3), "under fcfs both wait alike"
    assert waits[1][1] < 0.2 * waits[0][1]
    assert waits[1][0] < 1.5 * waits[0][0]
    requests = tables_of(tmp_path, 1)["requests"]
    lengths = [
        prompt + output
        for prompt, output in zip(
            requests["num_prompt_tokens"].to_pylist(), requests["num_output_tokens"].to_pylist(), strict=True
        )
    ]
    bound = 2 * max(max(requests["num_prompt_tokens"].to_pylist()), 2 * sum(sorted(lengths)[-16:]))
    gaps = [run.summary["fairness_gap_tokens"] for run in (fcfs, fair)]
    assert gaps[1] <= bound
    assert gaps[0] > 10 * gaps[1]


def test_priorities(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fcfs, priority = swept("priorities", ["workload.num_requests=400"], tmp_path, monkeypatch)
    (p99,) = ([r.summary["by_priority"][p]["ttft_ms"]["p99"] for p in "012"] for r in (priority,))
    assert p99[0] < 50 < p99[2]
    assert p99[0] < p99[1] < p99[2]
    assert p99[2] > fcfs.summary["by_priority"]["2"]["ttft_ms"]["p99"]
    assert fcfs.summary["by_priority"]["0"]["ttft_ms"]["p50"] > 10 * p99[0]
    assert priority.summary["num_preemptions"] > 0
    reasons = {
        row["reason"] for row in tables_of(tmp_path, 1)["decisions"].to_pylist() if row["action"] == "preempt"
    }
    assert reasons == {"PREEMPTED_FOR"}, "seats are what is short: every preemption displaces"


def test_ageing_lets_the_least_urgent_in_sooner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["workload.num_requests=400", "queue=priority", "queue.ageing_s=null,1"]
    never, ageing = swept("priorities", words, tmp_path, monkeypatch)
    for level, sooner in (("2", True), ("0", False)):
        one, other = (run.summary["by_priority"][level]["ttft_ms"]["p99"] for run in (never, ageing))
        assert (other < one) is sooner


def test_preemption_policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = swept("preemption_policies", ["workload.num_requests=100"], tmp_path, monkeypatch)
    runs = by_axes(found, "preemption", "victim")
    assert len(runs) == 12
    for (mechanism, victim), run in runs.items():
        s = run.summary
        assert s["num_finished"] == 100
        assert s["num_preemptions"] > 20
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
