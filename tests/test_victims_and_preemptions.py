"""Whom each victim policy takes, when `auto` swaps, which preemption policies are refused, and unused host pools."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from memory_support import sequence

from kvengine.assemble import blueprint
from kvengine.compose import composer
from kvengine.core.errors import ConfigError
from kvengine.core.request import Request, SamplingParams
from kvengine.core.sequence import Sequence
from kvengine.core.shapes import KvShape, PrefixCacheConfig
from kvengine.overrides import expand
from kvengine.policies import Build, Mechanism, Victim
from kvengine.registry import discover
from kvengine.testing.engines import TestEngine
from kvengine.testing.sources import checksum_output
from kvengine_plugins.preemptions.auto import AutoConfig, AutoPreemption

REGISTRY = discover()
NAMES = ("latest_arrival", "shortest_generated", "lowest_priority", "cheapest_recompute")


def victim_policy(name: str) -> Victim:
    return REGISTRY.get("victim", name).factory(None, Build())


def running(name: str, *, priority: int, generated: int, computed: int) -> Sequence:
    seq = sequence(range(4), name, priority=priority)
    seq.token_ids += range(generated)
    seq.num_computed_tokens = computed
    return seq


@pytest.mark.parametrize(("policy", "victim"), list(zip(NAMES, "dabc", strict=True)))
@pytest.mark.parametrize("order", [1, -1])
def test_each_policy_takes_another(policy: str, victim: str, order: int) -> None:
    candidates = [
        running("a", priority=2, generated=1, computed=30),
        running("b", priority=7, generated=6, computed=12),
        running("c", priority=0, generated=4, computed=5),
        running("d", priority=1, generated=4, computed=40),
    ]
    assert victim_policy(policy).choose(candidates[::order], candidates[0]).id == victim


@pytest.mark.parametrize("policy", NAMES)
@pytest.mark.parametrize("order", [1, -1])
def test_the_latest_arrival_of_equals(policy: str, order: int) -> None:
    candidates = [running(name, priority=1, generated=2, computed=3) for name in "abc"]
    assert victim_policy(policy).choose(candidates[::order], candidates[0]).id == "c"


@pytest.mark.parametrize(("policy", "victim"), list(zip(NAMES, "ddbc", strict=True)))
def test_who_leaves_when_a_block_is_lacking(policy: str, victim: str) -> None:
    """In blocks of one token step 0 computes 2, 4, 3, and 5 of 6 prompt tokens; in step 1 a takes the last of 15, and
    b needs another: d has generated nothing, and c has computed least."""
    engine = TestEngine(
        block_size=1,
        num_blocks=15,
        max_num_batched_tokens=14,
        policies={"victim": policy},
        prefix_cache=PrefixCacheConfig(mode="off"),
    )
    prompts = {"a": 2, "b": 4, "c": 3, "d": 6}
    sampling = SamplingParams(max_tokens=4, temperature=0.0)
    for name, length in prompts.items():
        priority = 5 if name == "b" else 0
        prompt = tuple(range(length))
        engine.engine.add_request(
            Request(id=name, prompt_token_ids=prompt, sampling=sampling, priority=priority)
        )
    engine.run(max_steps=60)
    assert [step.preempted[:1] for step in engine.log.steps[:2]] == [(), (victim,)]
    assert engine.outputs == {name: checksum_output(range(length), 4) for name, length in prompts.items()}


# ---- auto

KV = KvShape(num_blocks=8, block_size=16, dtype="fp32", block_bytes=16_000_000, num_host_blocks=8)
LINK = AutoConfig(host_bandwidth=32e9, recompute_rate=10_000)
"""1 ms for 16 MB out and in again; 0.1 ms for a token."""


@pytest.mark.parametrize(
    ("tokens", "swaps"),
    [
        (0, False),
        (1, False),
        (10, False),
        (11, True),
        (16, True),
        (17, False),
        (20, False),
        (21, True),
        (32, True),
    ],
)
def test_auto_swaps_where_blocks_move_faster_than_tokens_are_computed(tokens: int, swaps: bool) -> None:
    victim = running("a", priority=0, generated=1, computed=tokens)
    wanted = Mechanism.SWAP if swaps else Mechanism.RECOMPUTE
    assert AutoPreemption(LINK, KV).mechanism(victim) is wanted


def test_auto_does_not_move_what_fell_out_of_a_window() -> None:
    """49 tokens in 4 blocks of 4 ms take 4.9 ms to compute; of the last block alone it is worth it."""
    slow = AutoConfig(host_bandwidth=8e9, recompute_rate=10_000)
    victim = running("a", priority=0, generated=1, computed=49)
    assert AutoPreemption(slow, KV).mechanism(victim) is Mechanism.RECOMPUTE
    victim.block_table.num_dropped = 3
    assert AutoPreemption(slow, KV).mechanism(victim) is Mechanism.SWAP


def test_auto_does_both_in_one_run() -> None:
    """A block of 4 tokens takes as long as 3.7 tokens, so that few tokens in the last block are too few."""
    made: list[tuple[int, Mechanism]] = []

    class Watched(AutoPreemption):
        def mechanism(self, victim: Sequence) -> Mechanism:
            made.append((victim.num_computed_tokens, super().mechanism(victim)))
            return made[-1][1]

    def watched(config: Any, build: Build) -> Watched:
        assert build.kv is not None
        config = AutoConfig(host_bandwidth=2e9, recompute_rate=3700)
        return Watched(config, replace(build.kv, block_bytes=1_000_000))

    registry = discover()
    registry.add("preemption", "watched", watched, summary="")
    engine = TestEngine(
        registry=registry,
        block_size=4,
        num_blocks=12,
        num_host_blocks=12,
        policies={"preemption": "watched"},
        prefix_cache=PrefixCacheConfig(mode="off"),
    )
    prompts = {f"r{i}": range(30 * i, 30 * i + 5 + i) for i in range(6)}
    for name, prompt in prompts.items():
        engine.add(name, prompt, 16)
    engine.run(max_steps=300)
    assert engine.outputs == {name: checksum_output(prompt, 16) for name, prompt in prompts.items()}
    assert {mechanism for _, mechanism in made} == {Mechanism.SWAP, Mechanism.RECOMPUTE}
    for tokens, mechanism in made:
        blocks = -(-tokens // 4)
        assert (mechanism is Mechanism.SWAP) == (37 * blocks < 10 * tokens)
    swapped = sum(-(-tokens // 4) for tokens, mechanism in made if mechanism is Mechanism.SWAP)
    assert sum(len(step.swap_outs) for step in engine.log.steps) == swapped


# ---- what assembly says


def notes(*words: str) -> tuple[str, ...]:
    with composer() as compose:
        overrides = expand(["executor=null", "model=checksum", "workload=synthetic", *words])
        return blueprint(compose(overrides), discover()).notes


def refused(make: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as error:
        make()
    return str(error.value)


@pytest.mark.parametrize("name", ["swap", "auto"])
def test_without_a_host_pool_nobody_can_swap(name: str) -> None:
    said = refused(lambda: TestEngine(policies={"preemption": name}))
    assert said == (
        f"preemption={name}: needs host memory: set engine.swap_space_bytes, or take preemption=recompute"
    )


@pytest.mark.parametrize(
    ("words", "unused"),
    [
        (["preemption=recompute"], "recompute"),
        (["preemption=never", "allocator=contiguous_max"], "never"),
        (["preemption=auto", "preemption.host_bandwidth=1"], "auto"),
        (["preemption=auto"], None),
        (["preemption=swap"], None),
        (["preemption=recompute", "prefix_cache=on", "prefix_cache.offload=true"], None),
    ],
)
def test_a_host_pool_that_serves_nobody_is_noted(words: list[str], unused: str | None) -> None:
    said = [note for note in notes("num_host_blocks=8", *words) if "host pool" in note]
    wanted = f"the host pool is unused: preemption={unused} swaps nothing, and nothing is offloaded"
    assert said == ([] if unused is None else [wanted])
