"""Random use of every allocator against a model that is a dict of slots, invariants checked after every operation."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from memory_model import REGISTRY, MemoryModel, prompt_pool, random_operation

from kvengine.core.sequence import Sequence
from kvengine.core.shapes import PrefixCacheConfig

OFF = PrefixCacheConfig(mode="off")
OFFLOAD = PrefixCacheConfig(offload=True, recompute_rate=1.0)
NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN = 24, 4, 64

VARIANTS: dict[str, dict[str, Any]] = {
    **{f"{name}, swap": {"allocator": name, "num_host_blocks": 12} for name in REGISTRY.names("allocator")},
    "paged, no cache": {"allocator": "paged", "prefix_cache": OFF},
    "paged, no host": {"allocator": "paged"},
    **{f"paged, {name}": {"allocator": "paged", "eviction": name} for name in REGISTRY.names("eviction")},
    "paged, offload": {"allocator": "paged", "num_host_blocks": 12, "prefix_cache": OFFLOAD},
    "paged, offload, small host": {"allocator": "paged", "num_host_blocks": 3, "prefix_cache": OFFLOAD},
    "paged, offload, small pools": {
        "allocator": "paged",
        "num_host_blocks": 6,
        "prefix_cache": OFFLOAD,
        "num_blocks": 8,
        "block_size": 3,
        "max_model_len": 20,
    },
    "paged, window": {"allocator": "paged", "sliding_window": 6, "num_host_blocks": 8},
}
"""Every registered allocator, and the paged one with all that it can do besides.

In the small pools a block often leaves and comes back within few plans, or in one.
"""

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=6)


def model_of(variant: str) -> MemoryModel:
    sizes = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "max_model_len": MAX_MODEL_LEN}
    return MemoryModel(**{**sizes, **VARIANTS[variant]})


class Machine(RuleBasedStateMachine):
    """Hypothesis chooses operations and, where something fails, the fewest that make it fail."""

    variant = ""

    @initialize()
    def start(self) -> None:
        self.model = model_of(self.variant)

    def pick(self, data: st.DataObject, sequences: list[Sequence]) -> Sequence:
        return sequences[data.draw(st.integers(0, len(sequences) - 1))]

    @property
    def growable(self) -> list[Sequence]:
        return [seq for seq in self.model.live if not seq.num_scheduled_tokens]

    @rule(prompt=TOKENS, repeat=st.integers(1, 4), num_output=st.integers(1, 20), count=st.integers(1, 12))
    def admit(self, prompt: list[int], repeat: int, num_output: int, count: int) -> None:
        self.model.admit(prompt * repeat, num_output, count)

    @precondition(lambda self: self.model.live)
    @rule(data=st.data(), num_output=st.integers(1, 20), count=st.integers(1, 12))
    def admit_follow_up(self, data: st.DataObject, num_output: int, count: int) -> None:
        tokens = self.pick(data, self.model.live).token_ids[: max(1, self.model.max_model_len - num_output)]
        self.model.admit(list(tokens), num_output, count)

    @precondition(lambda self: self.growable)
    @rule(data=st.data(), tokens=TOKENS)
    def grow(self, data: st.DataObject, tokens: list[int]) -> None:
        self.model.grow(self.pick(data, self.growable), tokens)

    @precondition(lambda self: self.growable)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        self.model.fork(self.pick(data, self.growable))

    @precondition(lambda self: self.model.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.model.free(self.pick(data, self.model.live))

    @precondition(lambda self: self.model.live)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.model.preempt(self.pick(data, self.model.live))

    @precondition(lambda self: self.model.swapped)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        self.model.resume(self.pick(data, self.model.swapped))

    @precondition(lambda self: self.model.swapped)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.model.abort_swapped(self.pick(data, self.model.swapped))

    @rule()
    def execute(self) -> None:
        self.model.execute()

    @invariant()
    def books_agree(self) -> None:
        self.model.check()


@pytest.mark.parametrize("variant", VARIANTS)
def test_hypothesis_finds_no_way_to_break_it(variant: str) -> None:
    """2,000 operations over the variant: 40 runs of 50."""
    machine = type("MachineOfVariant", (Machine,), {"variant": variant})
    machine.TestCase.settings = settings(
        max_examples=40,
        stateful_step_count=50,
        deadline=None,
        suppress_health_check=(HealthCheck.too_slow, HealthCheck.filter_too_much),
    )
    machine.TestCase("runTest").runTest()


def drive(variant: str, num_operations: int, seed: int) -> MemoryModel:
    rng = random.Random(seed)
    model = model_of(variant)
    prompts = prompt_pool(rng, max_len=24)
    for _ in range(num_operations):
        random_operation(model, rng, prompts)
        model.check()
    return model


def assert_everything_happened(variant: str, model: MemoryModel) -> None:
    """A run in which nothing was shared, refused or moved would prove nothing."""
    options = VARIANTS[variant]
    assert model.num_refused > 100
    if options["allocator"] != "paged":
        return
    assert model.num_copies > 100
    if options.get("prefix_cache") is not OFF and "sliding_window" not in options:
        assert model.num_hits > 1000
    if options.get("prefix_cache") is OFFLOAD:
        assert model.num_brought_back > 0


@pytest.mark.parametrize("variant", VARIANTS)
def test_20_000_operations(variant: str) -> None:
    assert_everything_happened(variant, drive(variant, 20_000, seed=1))


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_1_000_000_operations(variant: str) -> None:
    assert_everything_happened(variant, drive(variant, 1_000_000, seed=2))
