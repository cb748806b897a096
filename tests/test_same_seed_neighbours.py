"""Same seed, same sampled tokens, whatever the neighbours, the scheduler and the preemptions (model=tiny)."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from kvengine.assemble import blueprint
from kvengine.compose import composer
from kvengine.core.plan import RequestOutput
from kvengine.engine.driver import Driver
from kvengine.registry import discover
from kvengine.testing.engines import TestEngine
from kvengine.testing.step_log import StepLog

REGISTRY = discover()
ALLOCATORS = [
    name
    for name in REGISTRY.names("allocator")
    if not TestEngine(policies={"allocator": name}).engine.context.allocator.needs_lengths
]
"""Those that serve requests whose output length nobody knows."""
MAX_MODEL_LEN = 128
AMPLE, SCARCE = 128, 13
"""Blocks of 8: for sixteen sequences of any length, and just enough for the longest request."""

SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.5, "top_k": 20},
    {"temperature": 1.2, "min_p": 0.05},
    {"temperature": 2.0, "top_k": 50, "top_p": 0.95, "min_p": 0.01},
)

Ask = dict[str, Any]
Tokens = dict[str, list[int]]


def seeded(count: int) -> list[Ask]:
    """Requests with a seed each, of unlike lengths."""
    rng = random.Random(1)
    return [
        {
            "id": f"seeded-{i}",
            "prompt_token_ids": rng.choices(range(256), k=rng.choice((1, 7, 16, 33, 60))),
            "max_tokens": rng.randint(10, 40),
            "seed": 1000 + i,
            **SAMPLING[i % len(SAMPLING)],
        }
        for i in range(count)
    ]


def neighbours(count: int) -> list[Ask]:
    """Requests without a seed, every third greedy, some of which end soon."""
    rng = random.Random(2)
    return [
        {
            "id": f"neighbour-{i}",
            "prompt_token_ids": rng.choices(range(256), k=rng.randint(1, 50)),
            "max_tokens": rng.randint(1, 25),
            "temperature": 0.0 if i % 3 == 0 else 1.3,
        }
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def base() -> dict[str, Any]:
    with composer() as compose:
        return compose(
            [
                "model=tiny",
                "workload=jsonl",
                "executor.device=cpu",
                "executor.num_threads=1",
                "kv.block_size=8",
                f"engine.num_blocks={16 * AMPLE}",
                "engine.max_num_seqs=8",
                f"engine.max_model_len={MAX_MODEL_LEN}",
            ]
        )


def changed(base: Mapping[str, Any], **groups: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with some settings of some groups replaced; with another choice, all of its group."""
    config = deepcopy(dict(base))
    for group, settings in groups.items():
        config[group] = {**({} if "name" in settings else config[group]), **settings}
    return config


def serve(config: Mapping[str, Any], asks: Sequence[Ask], path: Path) -> tuple[Tokens, StepLog]:
    """The answers to `asks`, all there at once, by id."""
    path.write_text("\n".join(map(json.dumps, asks)), encoding="utf-8")
    plan = blueprint(changed(config, workload={"path": str(path)}), REGISTRY)
    outputs: Tokens = {}

    def take(delivered: list[RequestOutput]) -> None:
        engine.context.check_integrity()
        for output in delivered:
            outputs.setdefault(output.request_id, []).extend(output.token_ids)

    log = StepLog()
    engine = plan.engine(log)
    report = Driver(engine, plan.workload, on_outputs=take).run()
    engine.close()
    assert not report.rejected
    return outputs, log


def serve_alone(config: Mapping[str, Any], asks: Sequence[Ask], path: Path) -> Tokens:
    """The answers to `asks`, each in a run of its own."""
    return {ask["id"]: serve(config, [ask], path)[0][ask["id"]] for ask in asks}


@pytest.fixture(scope="module")
def alone(base: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    return serve_alone(base, seeded(10), tmp_path_factory.mktemp("alone") / "requests.jsonl")


def crowd() -> list[Ask]:
    """Seeded requests and neighbours, one after another in turn."""
    return [ask for pair in zip(neighbours(10), seeded(10), strict=True) for ask in pair]


@pytest.mark.parametrize("allocator", ALLOCATORS)
@pytest.mark.parametrize("scheduler", REGISTRY.names("scheduler"))
def test_tokens_do_not_depend_on_neighbours_and_scheduler(
    scheduler: str, allocator: str, base: dict[str, Any], alone: Tokens, tmp_path: Path
) -> None:
    config = changed(base, scheduler={"name": scheduler}, allocator={"name": allocator})
    outputs, _ = serve(config, crowd(), tmp_path / "requests.jsonl")
    assert {name: outputs[name] for name in alone} == alone


@pytest.mark.parametrize("budget", [None, 16])
@pytest.mark.parametrize("attention", ["torch", "sdpa"])
def test_tokens_do_not_depend_on_preemptions_and_chunks(
    attention: str, budget: int | None, base: dict[str, Any], alone: Tokens, tmp_path: Path
) -> None:
    config = changed(
        base,
        scheduler={"name": "chunked"},
        attention={"name": attention},
        engine={"num_blocks": SCARCE, "max_num_batched_tokens": budget},
    )
    outputs, log = serve(config, crowd(), tmp_path / "requests.jsonl")
    assert log.num_preemptions
    assert {name: outputs[name] for name in alone} == alone


def test_tokens_are_really_sampled(base: dict[str, Any], alone: Tokens, tmp_path: Path) -> None:
    reseeded = [{**ask, "seed": ask["seed"] + 1} for ask in seeded(10)]
    others = serve_alone(base, reseeded, tmp_path / "requests.jsonl")
    assert all(others[name] != alone[name] for name in alone)


def test_the_share_in_bf16_is_printed(
    base: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = changed(base, model={"dtype": "bf16"})
    alone = serve_alone(config, seeded(10), tmp_path / "requests.jsonl")
    crowded = changed(config, scheduler={"name": "chunked"}, engine={"num_blocks": SCARCE})
    outputs, _ = serve(crowded, crowd(), tmp_path / "requests.jsonl")
    same = sum(outputs[name] == tokens for name, tokens in alone.items())
    with capsys.disabled():
        print(f"\nsame seed, bf16, other neighbours and preemptions: {same} of {len(alone)} identical")
