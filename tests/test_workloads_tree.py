"""workload=tree over a scripted engine that forks: who forks when, names, lengths, counts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_driver import STEP_NS, FakeEngine
from test_workloads import EOS, make, refused

from kvengine.core.plan import RequestOutput
from kvengine.core.reasons import FinishReason
from kvengine.engine.driver import Driver


class ForkingEngine(FakeEngine):
    """Keeps what each request would have as tokens: a fork begins with those of its parent at that moment."""

    def __init__(self, tokens_per_step: int = 1) -> None:
        super().__init__()
        self.tokens: dict[str, list[Any]] = {}
        self.ended: dict[str, int] = {}

    def _take(self, how: str, request: Any) -> None:
        inherited = self.tokens[request.fork_of] if how == "fork" else []
        super()._take(how, request)
        self.tokens[request.id] = [*inherited, *request.prompt_token_ids]

    def step(self) -> Any:
        outputs = super().step()
        for output in outputs if isinstance(outputs, list) else []:
            self.tokens[output.request_id].append("new")
            if output.finish_reason is not None:
                self.ended[output.request_id] = self.clock.now()
        return outputs


def grown(**options: Any) -> tuple[ForkingEngine, Any]:
    workload = make("tree", **{"num_trees": 1, "prompt_len": 3, "segment_len": 2, **options})
    engine = ForkingEngine()
    report = Driver(engine, workload).run()  # type: ignore[arg-type]
    assert not report.rejected
    assert report.num_sent == len(engine.ended) == workload.num_requests
    return engine, workload


def test_a_binary_tree_of_three_levels_by_hand():
    """Levels of 2 tokens end at 20, 40 and 60; forks get their drawn token and what levels remain."""
    engine, workload = grown(branching=2, depth=3)
    assert (workload.num_requests, workload.concurrency) == (4, None)
    assert [(at, how, r.id, r.fork_of, r.known_output_tokens, r.arrival_ns) for at, how, r in engine.sent] == [
        (0, "add", "t0", None, 6, 0), (20, "fork", "t0.1", "t0", 4, 20), (40, "fork", "t0.0.1", "t0", 2, 40),
        (40, "fork", "t0.1.1", "t0.1", 2, 40),
    ]  # fmt: skip
    assert set(engine.ended.values()) == {60}
    token = {r.id: r.prompt_token_ids[0] for _, how, r in engine.sent if how == "fork"}
    root = list(engine.sent[0][2].prompt_token_ids)
    new = ["new"] * 2
    assert engine.tokens == {
        "t0": root + new * 3,
        "t0.1": [*root, *new, token["t0.1"], *new, *new],
        "t0.0.1": [*root, *new, *new, token["t0.0.1"], *new],
        "t0.1.1": [*root, *new, token["t0.1"], *new, token["t0.1.1"], *new],
    }
    assert {r.id: r.ordinal for _, _, r in engine.sent} == {"t0": 0, "t0.0.1": 1, "t0.1": 2, "t0.1.1": 3}


def test_branches_of_one_fork_point_get_different_tokens():
    engine, _ = grown(branching=40, depth=2, segment_len=1)
    tokens = [r.prompt_token_ids for _, how, r in engine.sent if how == "fork"]
    assert len(set(tokens)) == len(tokens) == 39
    assert all(len(t) == 1 and t[0] != EOS for t in tokens)


def test_every_fork_point_draws_tokens_of_its_own():
    engine, _ = grown(num_trees=2, branching=4, depth=3, segment_len=1)
    drawn: dict[tuple[int, str | None], list[int]] = {}
    for at, how, request in engine.sent:
        if how == "fork":
            drawn.setdefault((at, request.fork_of), []).append(request.prompt_token_ids[0])
    assert len(drawn) == len({tuple(tokens) for tokens in drawn.values()}) == 2 * (1 + 4)


def test_trees_have_roots_of_their_own_and_arrivals():
    engine, _ = grown(num_trees=3, depth=1, arrival={"process": "gamma", "rate": 1e7, "cv": 0.0})
    assert [(r.id, r.arrival_ns, r.ordinal) for _, _, r in engine.sent] == [
        ("t0", 100, 0), ("t1", 200, 1), ("t2", 300, 2),
    ]  # fmt: skip
    assert len({r.prompt_token_ids for _, _, r in engine.sent}) == 3


def test_one_branch_or_one_level_is_a_plain_request():
    for options in ({"branching": 1, "depth": 4}, {"branching": 3, "depth": 1}):
        engine, workload = grown(**options)
        assert workload.num_requests == 1
        assert engine.sent[0][2].known_output_tokens == 2 * options["depth"]


def test_tokens_that_come_late_or_together():
    """Two levels at once fork twice; a branch that has ended when they are heard of has no forks."""

    def output(name: str, count: int, reason: FinishReason | None = None) -> RequestOutput:
        return RequestOutput(name, 0, [1] * count, reason, None)  # type: ignore[arg-type]

    workload = make("tree", num_trees=2, prompt_len=3, segment_len=2, depth=4)
    assert [r.id for r in workload.requests()] == ["t0", "t1"]
    assert not workload.after(output("t0", 1), 5)
    assert [r.id for r in workload.after(output("t0", 3), 5)] == ["t0.1", "t0.0.1"]
    assert [r.id for r in workload.after(output("t0", 3), 6)] == ["t0.0.0.1"]
    assert not workload.after(output("t1", 8, FinishReason.LENGTH), 7)
    assert not workload.after(output("t1", 2), 8)
    assert not workload.after(output("unknown", 2), 8)


def test_the_same_tree_again():
    workload = make("tree", num_trees=2, prompt_len=3, segment_len=2, depth=3, branching=3)
    engines = [ForkingEngine(), ForkingEngine()]
    for engine in engines:
        Driver(engine, workload).run()  # type: ignore[arg-type]
    assert engines[0].sent == engines[1].sent
    other = ForkingEngine()
    Driver(other, make("tree", num_trees=2, prompt_len=3, segment_len=2, depth=3, branching=3, seed=1)).run()  # type: ignore[arg-type]
    assert other.tokens != engines[0].tokens


@pytest.mark.parametrize(("options", "key"), [
    ({"num_trees": 0}, "num_trees"), ({"branching": 0}, "branching"), ({"depth": 0}, "depth"),
    ({"segment_len": 0}, "segment_len"), ({"prompt_len": 0}, "prompt_len"), ({"depth": 40}, "depth"),
    ({"branching": 300, "depth": 2}, "branching"), ({"sampling": {"n": 2}}, "sampling.n"),
    ({"sampling": {"max_tokens": 9}}, "sampling.max_tokens"),
    ({"sampling": {"stop_token_ids": [1]}}, "sampling.stop_token_ids"),
    ({"sampling": {"top_p": 2.0}}, "sampling.top_p"),
    ({"max_model_len": 64 + 48 + 1}, "segment_len"),
])  # fmt: skip
def test_settings_that_cannot_work(options, key):
    assert refused("tree", **options).key == f"workload.{key}"


def test_a_leaf_may_be_as_long_as_the_model_allows():
    assert make("tree", max_model_len=64 + 48 + 2).num_requests == 16


@settings(deadline=None, max_examples=60)
@given(
    num_trees=st.integers(1, 3),
    branching=st.integers(1, 4),
    depth=st.integers(1, 4),
    segment_len=st.integers(1, 5),
)
def test_any_tree_has_all_its_leaves_once(num_trees, branching, depth, segment_len):
    engine, workload = grown(num_trees=num_trees, branching=branching, depth=depth, segment_len=segment_len)
    assert workload.num_requests == num_trees * branching ** (depth - 1)
    assert sorted(r.ordinal or 0 for _, _, r in engine.sent) == list(range(workload.num_requests))
    assert set(engine.ended.values()) == {depth * segment_len * STEP_NS}
    for name, tokens in engine.tokens.items():
        assert tokens.count("new") == depth * segment_len
        drawn = len([step for step in name.split(".")[1:] if step != "0"])
        assert len(tokens) == 3 + depth * segment_len + drawn
    assert len({tuple(tokens) for tokens in engine.tokens.values()}) == workload.num_requests
