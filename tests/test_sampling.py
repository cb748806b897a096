"""Sampling: what survives each filter, how often each token is drawn, and that no row feels its neighbours.

Cases E1 and E2 of known-failures.md, and what E5 says of extreme values.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvengine.core.errors import ModelError
from kvengine.core.request import Request, SamplingParams
from kvengine.core.sequence import Sequence
from kvengine.executors import sampling
from kvengine.executors.sampling import sample, uniform
from kvengine.executors.torch_executor import TorchExecutor
from kvengine.registry import discover
from kvengine.testing.engines import TestEngine
from kvengine.testing.table_model import TableModel

VOCAB_SIZE = 20
LOGITS = torch.from_numpy(np.random.default_rng(0).normal(0, 2, VOCAB_SIZE)).float()
NUM_DRAWS = 6000
NUM_SLICES = 2000

FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_p": 0.6},
    {"top_p": 0.95},
    {"min_p": 0.1},
    {"temperature": 2.0, "top_k": 12, "top_p": 0.8},
    {"temperature": 2.0, "top_k": 12, "min_p": 0.2},
    {"temperature": 2.0, "top_p": 0.9, "min_p": 0.15},
    {"temperature": 1.5, "top_k": 9, "top_p": 0.9, "min_p": 0.05},
]


def row(name: str = "r", **params: Any) -> Sequence:
    """A sequence that is about to get its first token."""
    return rows(1, name, **params)[0]


def rows(count: int, name: str = "r", **params: Any) -> list[Sequence]:
    """Sequences of one request with seeds from 0 on, each about to get its first token."""
    request = Request(id=name, prompt_token_ids=(0,), sampling=SamplingParams(**params))
    return [sequence(request, seed=seed) for seed in range(count)]


def sequence(request: Request, *, seed: int = 0, choice: int = 0) -> Sequence:
    return Sequence(request, choice=choice, order=0, max_tokens_total=10**9, stop_ids=frozenset(), seed=seed)


def sample_one(logits: Iterable[float], **params: Any) -> int:
    return sample(torch.tensor([list(logits)]), [row(**params)])[0]


def expected_probabilities(logits: torch.Tensor, **params: Any) -> np.ndarray:
    """The distribution after temperature, top_k, top_p and min_p, one after another, each renormalised."""
    scaled = logits.double().numpy() / params.get("temperature", 1.0)
    weights = np.exp(scaled - scaled.max())
    order = np.argsort(-weights, kind="stable")
    weights[order[params.get("top_k", len(order)) :]] = 0
    weights /= weights.sum()
    covered = 0.0
    for token in order:
        if covered >= params.get("top_p", 1.0):
            weights[token] = 0
        covered += weights[token]
    weights /= weights.sum()
    weights[weights < params.get("min_p", 0.0) * weights.max()] = 0
    return weights / weights.sum()


def chi_square(counts: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """Pearson's statistic over cells of 5 and more expected, and what it exceeds once in 10,000 by chance.

    The quantile is Wilson and Hilferty's: df (1 - 2 / 9 df + z sqrt(2 / 9 df))^3, with z = 3.719.
    """
    large = expected >= 5
    cells = [
        *zip(counts[large], expected[large], strict=True),
        (counts[~large].sum(), expected[~large].sum()),
    ]
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells if mean > 0)
    freedom = max(sum(mean > 0 for _, mean in cells) - 1, 1)
    ninth = 2 / (9 * freedom)
    return float(statistic), freedom * (1 - ninth + 3.719 * math.sqrt(ninth)) ** 3


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_tokens_are_drawn_as_often_as_they_should(params: dict[str, Any]) -> None:
    drawn = sample(LOGITS.expand(NUM_DRAWS, -1), rows(NUM_DRAWS, **params))
    counts = np.bincount(drawn, minlength=VOCAB_SIZE)
    expected = NUM_DRAWS * expected_probabilities(LOGITS, **params)
    assert not counts[expected == 0].any(), "a filtered token was drawn"
    statistic, critical = chi_square(counts, expected)
    assert statistic < critical


def along(varied: str) -> list[Sequence]:
    """3,000 sequences that differ in nothing but their seed, choice or position."""
    if varied == "position":
        requests = [Request(id="r", prompt_token_ids=(0,) * length) for length in range(1, 3001)]
        return [sequence(request) for request in requests]
    request = Request(id="r", prompt_token_ids=(0,))
    return [sequence(request, **{varied: value}) for value in range(3000)]


@pytest.mark.parametrize("varied", ["seed", "choice", "position"])
def test_draws_are_independent_along(varied: str) -> None:
    drawn = np.array(sample(torch.zeros(3000, 8), along(varied)))
    counts = np.bincount(drawn, minlength=8)
    pairs = np.bincount(drawn[:-1] * 8 + drawn[1:], minlength=64)
    for seen in (counts, pairs):
        statistic, critical = chi_square(seen, np.full(len(seen), seen.sum() / len(seen)))
        assert statistic < critical


@pytest.mark.parametrize("params", [p for p in FILTERS if p], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_the_same_tokens_survive_as_in_transformers(
    params: dict[str, Any], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.from_numpy(np.random.default_rng(seed).normal(0, 1.5, VOCAB_SIZE)).float()
    warpers = LogitsProcessorList()
    for name, warper in (
        ("temperature", TemperatureLogitsWarper),
        ("top_k", TopKLogitsWarper),
        ("top_p", TopPLogitsWarper),
        ("min_p", MinPLogitsWarper),
    ):
        if name in params:
            warpers.append(warper(params[name]))
    warped = warpers(torch.zeros(1, 1, dtype=torch.long), logits[None].clone())[0]  # type: ignore[arg-type]
    # One draw from each of NUM_SLICES equal slices of [0, 1) meets every token of at least that probability.
    monkeypatch.setattr(sampling, "uniform", lambda seed, choice, position: (seed + 0.5) / NUM_SLICES)
    drawn = sample(logits.expand(NUM_SLICES, -1), rows(NUM_SLICES, **params))
    counts = np.bincount(drawn, minlength=VOCAB_SIZE)
    expected = NUM_SLICES * torch.softmax(warped.double(), dim=-1).numpy()
    assert counts[expected > 1].all(), "a token that survives there is not drawn"
    assert not counts[expected == 0].any(), "a token that is filtered there is drawn"
    assert np.abs(counts - expected).max() <= 1.01


@pytest.mark.parametrize("temperature", [1e-6, 1e-300, 5e-324])
def test_the_smallest_temperatures_are_greedy(temperature: float) -> None:
    logits = torch.stack([LOGITS, -LOGITS, LOGITS * 1e30, LOGITS * 1e-3])
    assert sample(logits, rows(4, temperature=temperature)) == logits.argmax(dim=-1).tolist()


def test_the_largest_temperature_makes_all_equal() -> None:
    drawn = sample(LOGITS.expand(NUM_DRAWS, -1), rows(NUM_DRAWS, temperature=1e300))
    counts = np.bincount(drawn, minlength=VOCAB_SIZE)
    statistic, critical = chi_square(counts, np.full(VOCAB_SIZE, NUM_DRAWS / VOCAB_SIZE))
    assert statistic < critical


@pytest.mark.parametrize("params", [{"top_p": 1e-9}, {"top_k": 1}, {"min_p": 1.0}], ids=str)
def test_filters_at_their_tightest_are_greedy(params: dict[str, Any]) -> None:
    logits = torch.stack(
        [LOGITS, LOGITS.flip(0), torch.full_like(LOGITS, -50).index_fill(0, torch.tensor(3), 0)]
    )
    assert sample(logits, rows(3, temperature=5.0, **params)) == logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize("others", [{}, {"top_p": 0.7}], ids=str)
@pytest.mark.parametrize("top_k", [0, -1, VOCAB_SIZE, VOCAB_SIZE + 1, 10**7])
def test_a_top_k_that_is_off_or_beyond_the_vocabulary_changes_nothing(
    top_k: int, others: dict[str, Any]
) -> None:
    logits = LOGITS.expand(1000, -1)
    with_it = sample(logits, rows(1000, top_k=top_k, **others))
    without = sample(logits, rows(1000, **others))
    assert expected_probabilities(LOGITS, **others)[with_it].all()
    assert len(set(with_it)) == len(set(without))
    if others or top_k < 1:
        assert with_it == without


@pytest.mark.parametrize(
    "params", [{}, {"top_k": 10}, {"top_p": 0.99}, {"min_p": 1e-9}, {"temperature": 0.0}], ids=str
)
def test_an_impossible_token_is_never_drawn(params: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.full((VOCAB_SIZE,), -math.inf)
    logits[[4, 9, 15]] = torch.tensor([0.0, 1.0, -1.0])
    for draw in (0.0, 0.5, 1 - 2**-53):
        monkeypatch.setattr(sampling, "uniform", lambda *_, draw=draw: draw)
        assert sample_one(logits.tolist(), **params) in (4, 9, 15)
    logits[[4, 15]] = -math.inf
    assert sample_one(logits.tolist(), **params) == 9


@pytest.mark.parametrize("draw", [0.0, 1 - 2**-53, 1.0])
@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_the_ends_of_the_unit_interval_draw_a_token_that_survived(
    draw: float, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """1.0 stands for a draw whose product with the total of the weights is rounded up to that total."""
    monkeypatch.setattr(sampling, "uniform", lambda *_: draw)
    token = sample(LOGITS[None], [row(**params)])[0]
    assert expected_probabilities(LOGITS, **params)[token] > 0


def test_of_equal_logits_the_lowest_ids_win() -> None:
    tied = [0.0, 3.0, 1.0, 3.0, 3.0, 2.0]
    assert sample_one(tied, temperature=0.0) == 1
    assert sample_one(tied, top_k=1) == 1
    assert sample_one(tied, top_p=1e-9) == 1

    def drawn(**params: Any) -> set[int]:
        return set(sample(torch.tensor(tied).expand(300, -1), rows(300, **params)))

    assert drawn(top_k=2) == {1, 3}
    assert drawn(min_p=1.0) == drawn(temperature=1e-6) == {1, 3, 4}
    assert drawn(top_p=0.5) == {1, 3}


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_k": 3}], ids=str)
@pytest.mark.parametrize(
    "bad",
    [[math.nan] * 4, [0.0, math.nan, 1.0, 2.0], [0.0, math.inf, 1.0, 2.0], [-math.inf] * 4],
    ids=["all_nan", "one_nan", "inf", "nothing_possible"],
)
def test_logits_that_are_no_distribution_raise_and_name_the_sequence(
    bad: list[float], params: dict[str, Any]
) -> None:
    good = [0.0, 1.0, 2.0, -math.inf]
    batch = [row("good"), row("culprit", **params), row("other")]
    with pytest.raises(ModelError, match=r"culprit") as caught:
        sample(torch.tensor([good, bad, good]), batch)
    assert "\n" not in str(caught.value)


def test_uniform_is_a_fixed_function_into_the_unit_interval() -> None:
    numbers = [
        uniform(seed, choice, at) for seed in (0, 1, -1, 2**63) for choice in range(4) for at in range(50)
    ]
    assert len(set(numbers)) == len(numbers)
    assert all(0 <= number < 1 for number in numbers)
    assert uniform(7, 0, 3) == uniform(7, 0, 3)
    assert uniform(7, 1, 23) != uniform(7, 12, 3), "arguments run together"


# ---- E1: seed and n; the table model, uniform over 50 tokens

TABLE_SIZE = 50
M = 10


class TableEngine:
    """A TestEngine whose executor runs a table model; `submit` adds requests, `outputs` answers by id."""

    def __init__(self, model: TableModel | None = None, **engine: Any) -> None:
        self.test = TestEngine(**{"vocab_size": TABLE_SIZE, **engine})
        kv = self.test.engine.context.allocator
        self.test.engine.executor = TorchExecutor(
            model or TableModel.uniform(TABLE_SIZE), block_size=kv.block_size, scratch_block=kv.num_blocks
        )

    def submit(self, name: str, prompt: Iterable[int] = (1, 2, 3), **params: Any) -> None:
        sampling = SamplingParams(**{"max_tokens": M, **params})
        self.test.engine.add_request(Request(id=name, prompt_token_ids=tuple(prompt), sampling=sampling))

    def outputs(self) -> dict[str, list[int]]:
        return {name: list(tokens) for name, tokens in self.test.run().items()}


def choices(engine: TableEngine, name: str, **params: Any) -> list[list[int]]:
    """The four answers to one request, in order of choice."""
    engine.submit(name, n=4, **params)
    outputs = engine.outputs()
    return [outputs[f"{name}/{choice}"] for choice in range(4)]


def test_e1_one_seed_gives_four_different_choices_and_the_same_four_again() -> None:
    engine = TableEngine()
    first = choices(engine, "first", seed=7)
    assert [len(tokens) for tokens in first] == [M] * 4
    assert len({tuple(tokens) for tokens in first}) == 4
    assert choices(engine, "second", seed=7) == first
    assert choices(TableEngine(policies={"scheduler": "static"}), "elsewhere", seed=7) == first
    assert choices(engine, "third", seed=8) != first


def test_e1_without_a_seed_two_submissions_differ() -> None:
    engine = TableEngine(seed=0)
    first = choices(engine, "first")
    assert choices(engine, "second") != first
    assert choices(TableEngine(seed=0), "in the same place of an equal run") == first
    assert choices(TableEngine(seed=1), "in another run") != first


def test_e1_without_any_seed_two_engines_differ() -> None:
    assert choices(TableEngine(seed=None), "r") != choices(TableEngine(seed=None), "r")


def test_the_first_choice_is_what_n_1_gives() -> None:
    engine = TableEngine()
    engine.submit("alone", seed=7)
    alone = engine.outputs()["alone"]
    assert choices(TableEngine(), "r", seed=7)[0] == alone


# ---- E2: a request does not feel its neighbours

PEAKED = TableModel(torch.from_numpy(np.random.default_rng(1).normal(0, 2, (TABLE_SIZE, TABLE_SIZE))))
SCHEDULERS = discover().names("scheduler")

NEIGHBOURS: dict[str, list[dict[str, Any]]] = {
    "unseeded": [{}],
    "greedy": [{"temperature": 0.0}],
    "ends_earlier": [{"max_tokens": 2, "seed": 3}],
    "same_seed": [{"seed": 7, "max_tokens": 5}],
    "many": [
        {"temperature": 0.0, "max_tokens": 3},
        {"temperature": 1.5, "top_k": 5},
        {"top_p": 0.5, "max_tokens": 1},
        {"min_p": 0.3, "n": 3, "seed": 7},
    ],
}


def served(asks: dict[str, dict[str, Any]], **engine: Any) -> tuple[dict[str, list[int]], int]:
    """The answers to requests by id, submitted in this order, and the number of preemptions."""
    table = TableEngine(PEAKED, **engine)
    for name, params in asks.items():
        table.submit(name, **params)
    return table.outputs(), table.test.log.num_preemptions


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("neighbours", NEIGHBOURS.values(), ids=list(NEIGHBOURS))
@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_e2_a_seeded_request_is_the_same_among(
    neighbours: list[dict[str, Any]], scheduler: str, first: bool
) -> None:
    mine = {"seed": 7, "temperature": 1.2, "top_p": 0.95}
    alone, _ = served({"mine": mine})
    others = {f"other{i}": params for i, params in enumerate(neighbours)}
    asks = {"mine": mine, **others} if first else {**others, "mine": mine}
    outputs, _ = served(asks, policies={"scheduler": scheduler})
    assert outputs["mine"] == alone["mine"]


def test_e2_a_seeded_request_is_the_same_after_a_preemption() -> None:
    asks = {
        name: {"prompt": range(start, start + 8), "seed": 7, "max_tokens": 8}
        for name, start in (("a", 1), ("b", 11))
    }
    crowded, num_preemptions = served(asks, num_blocks=6, block_size=4)
    assert num_preemptions >= 1
    for name, params in asks.items():
        alone, _ = served({name: params})
        assert crowded[name] == alone[name]


def test_e2_greedy_and_hot_rows_share_a_batch() -> None:
    outputs, _ = served({"cold": {"temperature": 0.0}, "hot": {"temperature": 1.5, "seed": 7}})
    table = PEAKED._table
    tokens, greedy = [3], []
    while len(greedy) < M:
        greedy.append(int(table[tokens[-1]].argmax()))
        tokens.append(greedy[-1])
    assert outputs["cold"] == greedy
    pairs = zip([3, *outputs["hot"]], outputs["hot"], strict=False)
    hot = Counter(int(table[last].argmax()) == token for last, token in pairs)
    assert hot[False] > 0


def test_e2_parameters_stay_with_their_rows_when_one_leaves() -> None:
    asks: dict[str, dict[str, Any]] = {
        "leaves first": {"max_tokens": 1, "temperature": 2.0, "seed": 1},
        "greedy": {"temperature": 0.0},
        "leaves next": {"max_tokens": 3, "top_p": 0.3, "seed": 2},
        "hot": {"temperature": 3.0, "seed": 3},
        "narrow": {"top_k": 2, "temperature": 2.0, "seed": 4},
        "likely": {"min_p": 0.4, "seed": 5},
        "enters late": {"temperature": 0.7, "seed": 6},
    }
    together, _ = served(asks, max_num_seqs=6)
    assert len({tuple(tokens[:1]) for tokens in together.values()}) > 1
    for name, params in asks.items():
        alone, _ = served({name: params})
        assert together[name] == alone[name], name


def test_a_table_must_be_square() -> None:
    with pytest.raises(ValueError, match=r"\[2, 3\]"):
        TableModel([[0.0, 1.0, 2.0], [0.0, 1.0, 2.0]])


def test_the_table_gives_the_row_of_each_last_token() -> None:
    log_probabilities = torch.tensor([[0.5, 0.4, 0.1], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]).log()
    engine = TableEngine(TableModel(log_probabilities), vocab_size=3)
    engine.submit("r", prompt=[1], max_tokens=4, temperature=0.0)
    assert engine.outputs()["r"] == [2, 0, 0, 0]
