"""Predictors: what they say, by hand and against statistics.median."""

from __future__ import annotations

import statistics
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvengine.config import from_mapping
from kvengine.core.errors import ConfigError
from kvengine.core.request import Request, SamplingParams
from kvengine.core.sequence import Sequence
from kvengine.policies import Predictor
from kvengine.registry import discover
from kvengine.testing.engines import TestEngine

REGISTRY = discover()


def predictor_named(name: str, **options: Any) -> Predictor:
    entry = REGISTRY.get("predictor", name)
    build: Any = SimpleNamespace(kv=SimpleNamespace(num_blocks=100, block_size=4))
    return entry.factory(from_mapping(entry.schema, options, "predictor"), build)


def sequence(num_output: int = 0, max_tokens: int | None = None, known: int | None = None) -> Sequence:
    """One with a prompt of 3 tokens and so many new ones."""
    sampling = SamplingParams(max_tokens=max_tokens)
    request = Request(id="r", prompt_token_ids=(1, 2, 3), sampling=sampling, known_output_tokens=known)
    most = 3 + min(max_tokens or 1000, known or 1000)
    seq = Sequence(request, choice=0, order=0, max_tokens_total=most, stop_ids=frozenset(), seed=0)
    seq.token_ids += [0] * num_output
    return seq


@pytest.mark.parametrize(
    ("name", "max_tokens", "known", "said"),
    [
        ("oracle", 20, 7, 7),
        ("oracle", 5, 7, 5),
        ("oracle", None, 7, 7),
        ("max_tokens", 20, 7, 20),  # what the workload knows is no business of this one
        ("max_tokens", 5, 7, 5),
        ("max_tokens", None, 7, 400),  # the pool
        ("history", None, 7, 256),
        ("history", 20, 7, 20),
    ],
)
def test_before_anything_ended(name: str, max_tokens: int | None, known: int, said: float) -> None:
    predictor = predictor_named(name)
    assert predictor.predict(sequence(max_tokens=max_tokens, known=known)) == said
    assert predictor.needs_lengths == (name == "oracle")


@settings(max_examples=100, deadline=None, derandomize=True)
@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40), window=st.integers(1, 12))
def test_history_is_the_median_of_the_last_few(lengths: list[int], window: int) -> None:
    predictor = predictor_named("history", window=window, prior=99)
    assert predictor.predict(sequence()) == 99
    for count, length in enumerate(lengths, 1):
        predictor.finished(sequence(num_output=length))
        assert predictor.predict(sequence()) == statistics.median(lengths[max(0, count - window) : count])


def test_history_says_what_is_possible() -> None:
    predictor = predictor_named("history")
    for length in (10, 20, 40):
        predictor.finished(sequence(num_output=length))
    assert predictor.predict(sequence()) == 20
    assert predictor.predict(sequence(max_tokens=15)) == 15
    assert predictor.predict(sequence(num_output=19)) == 20
    assert predictor.predict(sequence(num_output=30)) == 31


def test_history_learns_from_a_run() -> None:
    """With one seat the first to run is the first to come; then the shorter cap goes first, as was seen before."""
    engine = TestEngine(
        registry=REGISTRY,
        policies={"queue": "shortest_job", "predictor": "history"},
        settings={"predictor": {"prior": 50}},
        max_num_seqs=1,
    )
    engine.add("first", [1, 2, 3], 4)
    engine.run()
    predictor = engine.engine.context.policies.predictor
    assert predictor.predict(sequence()) == 4
    engine.add("aborted", [1, 2, 3], 9)
    engine.step()
    engine.engine.abort("aborted")
    engine.run()
    assert predictor.predict(sequence()) == 4  # what was aborted teaches nothing


@pytest.mark.parametrize(
    ("options", "key"), [({"window": 0}, "predictor.window"), ({"prior": 0.5}, "predictor.prior")]
)
def test_settings_that_cannot_work_are_refused_by_key(options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as error:
        predictor_named("history", **options)
    assert error.value.key == key
