"""Greedy tokens of random checkpoints equal those of `transformers`, however they are served."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from combinations import (
    REGISTRY,
    TOKEN_BUDGETS,
    Combination,
    configured,
    covering,
    every_combination,
    scheduler_chunks,
    serve,
    with_lengths,
)
from greedy_reference import (
    SEQUENCES_PER_NARROW,
    Ask,
    differences,
    generate,
    load,
    num_narrow,
)
from tiny_checkpoints import ARCHITECTURES, EOS, Checkpoint

from kvengine.assemble import blueprint
from kvengine.core.errors import ConfigError

Config = Callable[[Path], dict[str, Any]]
Tiny = Callable[[str], Checkpoint]

MAX_MODEL_LEN = 128
EVERY = every_combination()
USUAL = [combination for combination in EVERY if combination.allocator in ("contiguous_max", "paged")]
"""Every other allocator differs from contiguous_max in the size of its regions alone, which no model sees."""
COVERS = [
    pytest.param(name, combination, id=f"{name}-{combination}")
    for place, name in enumerate(ARCHITECTURES)
    for combination in covering(EVERY if name == "llama" else USUAL, offset=5 * place)
]
REST = [
    pytest.param(name, combination, id=f"{name}-{combination}")
    for name in ARCHITECTURES
    for combination in (EVERY if name == "llama" else USUAL)
]


def check(
    name: str, combination: Combination, tiny: Tiny, config: Config, asks: list[Ask], scratch: Path
) -> None:
    """Serve the checkpoint in this way, and hold its tokens and reasons against the reference."""
    directory, answers = tiny(name)
    settings = configured(config(directory), combination, asks, MAX_MODEL_LEN)
    settings = with_lengths(settings, combination, asks, answers, scratch / "lengths.jsonl")
    outcome = serve(settings)
    differ = [line for outputs in outcome.choices for line in differences(answers, outputs)]
    print(f"{name} {combination}: {len(asks) - len(differ)} of {len(asks)} identical")
    assert not differ
    for place, answer in enumerate(answers):
        if not answer.has_narrow:
            told = settings["workload"]["path"].endswith("lengths.jsonl")  # then the end is no surprise
            ended = "stop" if answer.tokens[-1] == EOS and not told else "length"
            assert outcome.finish_reasons[place] == ended, f"request {place}"
    if combination.scarce and outcome.ran_together and not (combination.shared or outcome.windowed):
        assert outcome.log.num_preemptions, "the pool was not scarce"
    if combination.shared and combination.block_size > 1:
        assert outcome.moved("copies"), "no shared block was written"
    if combination.shared and outcome.log.num_preemptions:
        assert outcome.moved("swap_outs"), "nobody was swapped out"


@pytest.mark.parametrize(("name", "combination"), COVERS)
def test_tokens_equal(
    name: str, combination: Combination, tiny: Tiny, tiny_config: Config, tiny_asks: list[Ask], tmp_path: Path
) -> None:
    check(name, combination, tiny, tiny_config, tiny_asks, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "combination"), REST)
def test_tokens_equal_everywhere(
    name: str, combination: Combination, tiny: Tiny, tiny_config: Config, tiny_asks: list[Ask], tmp_path: Path
) -> None:
    check(name, combination, tiny, tiny_config, tiny_asks, tmp_path)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("scheduler", ["static", "continuous", "chunked"])
def test_a_scarce_pool_preempts(
    scheduler: str, block_size: int, shared: bool, tiny: Tiny, tiny_config: Config, tiny_asks: list[Ask]
) -> None:
    combination = Combination(
        scheduler=scheduler,
        allocator="paged",
        block_size=block_size,
        token_budget=None,
        scarce=True,
        attention="torch",
        shared=shared,
    )
    config = configured(tiny_config(tiny("llama").directory), combination, tiny_asks, MAX_MODEL_LEN)
    if shared:
        config["prefix_cache"]["mode"] = "off"  # else much of what was swapped out is found on the device
    outcome = serve(config)
    assert outcome.log.num_preemptions
    answers = tiny("llama").answers
    assert not [line for outputs in outcome.choices for line in differences(answers, outputs)]
    if shared:
        assert outcome.moved("swap_outs")
        assert outcome.moved("swap_ins")


@pytest.mark.parametrize("budget", [budget for budget in TOKEN_BUDGETS if budget])
@pytest.mark.parametrize("scheduler", [s for s in REGISTRY.names("scheduler") if not scheduler_chunks(s)])
def test_a_budget_below_a_prompt_is_refused_where_prefills_stay_whole(
    scheduler: str, budget: int, tiny: Tiny, tiny_config: Config
) -> None:
    config = tiny_config(tiny("llama").directory)
    config["scheduler"] = {"name": scheduler}
    config["engine"] |= {"max_num_batched_tokens": budget, "max_model_len": MAX_MODEL_LEN}
    with pytest.raises(ConfigError, match=rf"^engine\.max_num_batched_tokens={budget}: .*\b{scheduler}\b"):
        blueprint(config, REGISTRY)


def test_the_references_are_sure(tiny: Tiny) -> None:
    answers = [answer for name in ARCHITECTURES for answer in tiny(name).answers]
    narrow = num_narrow(answers)
    print(f"{narrow} of {len(answers)} reference sequences hold a tie")
    assert narrow <= len(answers) // SEQUENCES_PER_NARROW


@pytest.mark.parametrize(
    ("name", "change"),
    [
        pytest.param(name, change, id=f"{name}-{'-'.join(change)}")
        for name, architecture in ARCHITECTURES.items()
        for change in architecture.without
    ],
)
def test_what_layers_ask_for_changes_the_tokens(
    name: str, change: dict[str, Any], tiny: Tiny, tiny_asks: list[Ask]
) -> None:
    directory, answers = tiny(name)
    changed = generate(load(directory, **change), tiny_asks)
    assert [a.tokens for a in changed] != [a.tokens for a in answers]


def test_sinks_change_the_tokens(tiny: Tiny, tiny_asks: list[Ask]) -> None:
    directory, answers = tiny("gpt_oss")
    model = load(directory)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.constant_(parameter, -100.0)
    assert [a.tokens for a in generate(model, tiny_asks)] != [a.tokens for a in answers]
