"""Greedy tokens of SmolLM2-135M-Instruct in fp32 equal those of `transformers`, however they are served."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from combinations import (
    REGISTRY,
    Combination,
    configured,
    covering,
    every_combination,
    serve,
    with_lengths,
)
from greedy_reference import SEQUENCES_PER_NARROW, Answer, Ask, differences, generate, load, num_narrow
from transformers import PreTrainedTokenizerFast

from kvengine.assemble import blueprint
from kvengine.core.errors import ModelError
from kvengine.models.smollm2 import ensure_smollm2

pytestmark = pytest.mark.slow

MAX_NEW_TOKENS = 48
MAX_MODEL_LEN = 1024
MAX_NUM_SEQS = 24

EVERY = every_combination(attentions=["sdpa"])
COMBINATIONS = [c for c in EVERY if c.allocator == "paged"] + covering(
    [c for c in EVERY if c.allocator != "paged"], offset=0
)
"""All of the paged allocator, and enough of the others to pair each with everything else."""


class Demo(NamedTuple):
    """The demo prompts: how the product asks them, and what transformers answers to each alone."""

    directory: Path
    config: dict[str, Any]
    asks: list[Ask]
    answers: list[Answer]


@pytest.fixture(scope="session")
def demo(default_config: dict[str, Any]) -> Demo:
    try:
        directory = ensure_smollm2()
    except ModelError as error:
        pytest.skip(str(error))
    config = {
        **default_config,
        "model": {"name": "smollm2-135m", "dtype": "fp32"},
        "workload": {"name": "prompts", "sampling": {"max_tokens": MAX_NEW_TOKENS, "temperature": 0.0}},
        "engine": {**default_config["engine"], "max_num_seqs": MAX_NUM_SEQS, "max_model_len": MAX_MODEL_LEN},
    }
    requests = blueprint(config, REGISTRY).workload.requests()
    asks = [Ask(request.prompt_token_ids, request.max_new_tokens or 0) for request in requests]
    return Demo(directory, config, asks, generate(load(directory), asks))


def test_prompts_are_what_the_chat_template_makes_of_them(demo: Demo) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(demo.directory)
    for request in blueprint(demo.config, REGISTRY).workload.requests():
        messages = [{"role": "user", "content": request.prompt}]
        encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        assert list(request.prompt_token_ids) == encoded["input_ids"]


def test_the_reference_is_sure(demo: Demo, capsys: pytest.CaptureFixture[str]) -> None:
    narrow = num_narrow(demo.answers)
    with capsys.disabled():
        print(f"\n{narrow} of {len(demo.answers)} reference sequences hold a tie", flush=True)
    assert len(demo.answers) == SEQUENCES_PER_NARROW
    assert narrow <= 1


@pytest.mark.parametrize("combination", COMBINATIONS, ids=str)
def test_tokens_equal(
    combination: Combination, demo: Demo, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = configured(demo.config, combination, demo.asks, MAX_MODEL_LEN)
    config = with_lengths(config, combination, demo.asks, demo.answers, tmp_path / "lengths.jsonl")
    outcome = serve(config)
    differ = [line for outputs in outcome.choices for line in differences(demo.answers, outputs)]
    with capsys.disabled():
        same = len(demo.asks) - len(differ)
        print(f"\n{combination}: {same} of {len(demo.asks)} identical", end="", flush=True)
        print(f", {len(outcome.log.steps)} steps, {outcome.log.num_preemptions} preemptions", end="")
        moved = ", ".join(f"{outcome.moved(kind)} {kind}" for kind in ("copies", "swap_outs", "swap_ins"))
        print(f", {moved}", flush=True)
    assert not differ
    if combination.scarce and outcome.ran_together and not (combination.shared or outcome.windowed):
        assert outcome.log.num_preemptions, "the pool was not scarce"
