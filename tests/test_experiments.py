"""The experiments of conf/experiment: each composes, is documented, and shows in small what its page says."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvengine import launch
from kvengine.assemble import blueprint
from kvengine.cli import main
from kvengine.compose import composer, conf_dir, sweep_axes, variants
from kvengine.registry import discover

PAGES = Path(__file__).resolve().parents[1] / "docs" / "experiments"
NAMES = sorted(path.stem for path in (conf_dir() / "experiment").glob("*.yaml"))
TRACE = Path(__file__).parent / "azure_tiny.csv"
NEEDS = {"static_vs_continuous_azure": [f"workload.path={TRACE}", "workload.num_requests=3"]}
"""What the user has to give."""


class Variant(NamedTuple):
    """One run of a sweep, as it was recorded."""

    words: frozenset[str]
    num_blocks: int
    summary: dict[str, Any]


def swept(
    experiment: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[Variant]:
    """All variants of `experiment` under the overrides `words`, in order."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "checkout", lambda: None)
    assert main(["-m", f"experiment={experiment}", *words]) == 0
    (sweep,) = (tmp_path / "traces").iterdir()
    found = []
    for path in sorted((p for p in sweep.iterdir() if p.is_dir()), key=lambda p: int(p.name)):
        run = json.loads((path / "run.json").read_text(encoding="utf-8"))
        assert run["status"] == "complete"
        named = json.loads((path / "variant.json").read_text(encoding="utf-8"))
        found.append(Variant(frozenset(named), run["pool"]["num_blocks"], run["summary"]))
    return found


def rising(values: list[float]) -> bool:
    return all(one < other for one, other in pairwise(values))


# ---- all of them


@pytest.mark.parametrize("name", NAMES)
def test_every_choice_is_checked_and_needs_no_weights(name: str) -> None:
    registry = discover()
    with composer() as compose:
        given = [f"experiment={name}", *NEEDS.get(name, ())]
        runs = variants([*given, *sweep_axes(given)])
        assert len(runs) > 1, "an experiment compares"
        seen: set[str] = set()
        for words in runs:
            if seen.issuperset(words):
                continue  # each choice once, not each combination: composing takes its time
            seen.update(words)
            config = compose(words)
            assert config["executor"]["name"] == "null"
            assert config["telemetry"]["spans"] is False
            plan = blueprint(config, registry)
            if "preemption=recompute" not in words:  # which is told that it needs no host pool
                assert plan.notes == ()


@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_has_a_page_that_its_file_names(name: str) -> None:
    said = (conf_dir() / "experiment" / f"{name}.yaml").read_text(encoding="utf-8")
    page = next(path for path in PAGES.glob("*.md") if f"docs/experiments/{path.name}" in said)
    text = page.read_text(encoding="utf-8")
    assert f"`{name}`" in text
    given = "".join(f" {word.partition('=')[0]}=" for word in NEEDS.get(name, ())[:1])
    assert f"python -m kvengine -m experiment={name}{given or chr(10)}" in text


def test_the_index_names_every_experiment_and_links_every_page() -> None:
    index = (PAGES / "README.md").read_text(encoding="utf-8")
    for name in NAMES:
        assert f"`{name}`" in index
    for page in PAGES.glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in index


# ---- each of them, in small


def test_fragmentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = swept("fragmentation", ["workload.num_requests=150"], tmp_path, monkeypatch)
    assert [word for run in runs for word in run.words if word.startswith("allocator=")] == [
        f"allocator={name}" for name in ("contiguous_max", "contiguous_pow2", "contiguous_oracle", "paged")
    ]
    assert {run.num_blocks for run in runs} == {983}
    assert len({run.summary["num_finished"] for run in runs}) == 1
    assert rising([run.summary["kv_held_of_pool"]["mean"] for run in runs])
    assert rising([run.summary["output_tokens_per_s"] for run in runs])
    internal = [run.summary["kv_internal_of_pool"]["mean"] for run in runs]
    assert internal[0] > internal[1] > internal[2]
    assert internal[2:] == pytest.approx([0, 0], abs=1e-3)


def test_fragmentation_free_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = swept("fragmentation_free_list", ["workload.num_requests=150"], tmp_path, monkeypatch)
    held = {run.words: run.summary["kv_held_of_pool"]["mean"] for run in runs}
    for fit in ("first_fit", "best_fit"):
        pow2, oracle = (
            next(
                share
                for words, share in held.items()
                if {f"allocator={fit}", f"allocator.reserve={reserve}"} <= words
            )
            for reserve in ("pow2", "oracle")
        )
        assert pow2 < oracle
    assert all(run.summary["fragmented_steps"] for run in runs)


def test_prefix_sharing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["workload.num_sessions=60", "num_blocks=400"]
    on, off = swept("prefix_sharing", words, tmp_path, monkeypatch)
    assert "prefix_cache=on" in on.words
    assert on.summary["reused_token_share"] > 0.7
    assert off.summary["reused_tokens"] == 0
    assert on.summary["kv_shared_share"] > 0.4
    assert off.summary["kv_shared_share"] == 0
    assert on.summary["output_tokens"] == off.summary["output_tokens"]
    assert on.summary["output_tokens_per_s"] > 1.5 * off.summary["output_tokens_per_s"]


def test_multi_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["workload.num_sessions=80", "num_blocks=2048"]
    on, off = swept("multi_turn", words, tmp_path, monkeypatch)
    assert "prefix_cache=on" in on.words
    assert on.summary["reused_token_share"] > 0.5
    assert off.summary["reused_tokens"] == 0
    assert on.summary["num_requests"] == off.summary["num_requests"] > 80
    assert on.summary["ttft_ms"]["p99"] < off.summary["ttft_ms"]["p99"]


def test_tree_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = swept("tree_search", ["workload.num_trees=2"], tmp_path, monkeypatch)
    assert [run.summary["num_finished"] for run in runs] == [2, 16, 128]
    assert rising([run.summary["kv_shared_share"] for run in runs])
    assert runs[0].summary["kv_shared_share"] == 0
    assert runs[2].summary["kv_shared_share"] > 0.5
    assert {run.summary["num_preemptions"] for run in runs} == {0}
    assert len({run.summary["num_steps"] for run in runs}) == 1


def test_parallel_sampling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = swept("parallel_sampling", ["workload.num_requests=48"], tmp_path, monkeypatch)
    assert [run.summary["num_finished"] for run in runs] == [48, 96, 192, 288]
    assert rising([run.summary["kv_shared_share"] for run in runs])
    assert runs[0].summary["kv_shared_share"] == 0
    assert {run.summary["num_preemptions"] for run in runs} == {0}


def test_fp8_kv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = swept("fp8_kv", ["workload.num_requests=150"], tmp_path, monkeypatch)
    assert [run.num_blocks for run in runs] == [192, 384, 768]
    assert len({run.summary["output_tokens"] for run in runs}) == 1
    assert rising([run.summary["slot_occupancy"] for run in runs])
    for half, double in pairwise(runs):
        assert double.summary["output_tokens_per_s"] > 1.5 * half.summary["output_tokens_per_s"]
