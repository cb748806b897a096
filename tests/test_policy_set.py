"""A policy that raises is named, with the step, wherever the engine was when it did."""

from __future__ import annotations

from typing import Any

import pytest

from kvengine.core.errors import ConfigError, PolicyError
from kvengine.core.shapes import PrefixCacheConfig
from kvengine.policies import Preemption
from kvengine.registry import discover
from kvengine.testing.engines import TestEngine


class Broken:
    """Raises when it is asked anything."""

    def rank(self, block: object) -> int:
        raise KeyError("rank")


class Incomparable:
    """Ranks of two kinds."""

    def rank(self, block: Any) -> object:
        return "a" if block.depth % 2 else 1


class Answers(Preemption):
    """A preemption policy of any answer."""

    def __init__(self, answer: object) -> None:
        self._answer = answer

    def mechanism(self, victim: object) -> object:
        return self._answer


def engine_with(kind: str, policy: object, **options: Any) -> TestEngine:
    registry = discover()
    registry.add(kind, "mine", lambda config, build: policy, summary="of this test")
    engine = TestEngine(registry=registry, policies={kind: "mine"}, num_blocks=6, block_size=4, **options)
    engine.add("a", range(1, 9), 8)
    engine.add("b", range(11, 19), 8)
    return engine


def test_an_eviction_policy_that_raises_while_a_request_ends() -> None:
    with pytest.raises(PolicyError, match=r"^eviction=\w+ \(Broken\), step \d+.*: raised KeyError: 'rank'$"):
        engine_with("eviction", Broken()).run()


def test_an_eviction_policy_whose_ranks_cannot_be_compared() -> None:
    engine = engine_with("eviction", Incomparable(), prefix_cache=PrefixCacheConfig(mode="on"))
    for i in range(5):
        engine.add(f"more{i}", range(20 * i + 20, 20 * i + 32), 4)
    with pytest.raises(PolicyError, match=r"^Incomparable: its ranks cannot be compared"):
        engine.run()


@pytest.mark.parametrize("answer", ["teleport", None, 1])
def test_a_preemption_policy_that_answers_nothing_known(answer: object) -> None:
    with pytest.raises(
        PolicyError,
        match=rf"^preemption=\w+ \(Answers\), step \d+, .*: answered {answer!r}, which is no Mechanism$",
    ):
        engine_with("preemption", Answers(answer)).run()


def test_the_word_of_a_mechanism_is_the_mechanism() -> None:
    engine = engine_with("preemption", Answers("swap"), num_host_blocks=8)
    engine.run()
    assert sum(len(step.swap_outs) for step in engine.log.steps) > 0


@pytest.mark.parametrize("options", [{"policies": {"schedulr": "static"}}, {"settings": {"schedulr": {}}}])
def test_a_misspelt_kind_of_policy_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"schedulr.*did you mean 'scheduler'"):
        TestEngine(**options)


def test_a_misspelt_mode_of_the_prefix_cache_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"prefix_cache.mode=onn.*did you mean 'on'"):
        PrefixCacheConfig(mode="onn")  # pyright: ignore[reportArgumentType]
