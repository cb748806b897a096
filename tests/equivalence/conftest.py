"""What the equivalence tests share: a whole configuration, and checkpoints with their reference answers."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from combinations import workload_file
from greedy_reference import Ask, generate, load
from tiny_checkpoints import ARCHITECTURES, VOCAB_SIZE, Checkpoint, save_checkpoint
from transformers.utils import logging

from kvengine.compose import composer

LENGTHS = ((37, 24), (1, 28), (23, 20), (33, 16), (64, 5), (90, 16), (2, 1), (17, 12))
"""Prompt tokens, and new ones at most; in this order a pool for the longest is soon too small for the first."""


@pytest.fixture(scope="session", autouse=True)
def _quiet() -> None:
    logging.disable_progress_bar()


@pytest.fixture(scope="session")
def default_config() -> dict[str, Any]:
    """What `python -m kvengine` runs, on one thread of the CPU: tiny models are slower on two."""
    with composer() as compose:
        return compose(["executor.device=cpu", "executor.num_threads=1"])


@pytest.fixture(scope="session")
def tiny_asks() -> list[Ask]:
    rng = random.Random(0)
    return [Ask(tuple(rng.choices(range(3, VOCAB_SIZE), k=length)), new) for length, new in LENGTHS]


@pytest.fixture(scope="session")
def tiny_config(
    default_config: dict[str, Any], tiny_asks: list[Ask], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Path], dict[str, Any]]:
    """The configuration that serves `tiny_asks`, five at a time, with the checkpoint in a directory."""
    requests = workload_file(tmp_path_factory.mktemp("workload") / "requests.jsonl", tiny_asks)
    return lambda directory: {
        **default_config,
        "model": {"name": "hf", "path": str(directory)},
        "workload": {"name": "jsonl", "path": str(requests)},
        "engine": {**default_config["engine"], "max_num_seqs": 5},
    }


@pytest.fixture(scope="session")
def tiny(tiny_asks: list[Ask], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """The checkpoint of an architecture by name, made when it is first asked for."""
    root = tmp_path_factory.mktemp("checkpoints")
    made: dict[str, Checkpoint] = {}

    def get(name: str) -> Checkpoint:
        assert name in ARCHITECTURES
        if name not in made:
            directory = save_checkpoint(name, root / name)
            made[name] = Checkpoint(directory, generate(load(directory), tiny_asks))
        return made[name]

    return get
