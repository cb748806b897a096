"""workload=chat: whole conversations with real answers, shared prompts, pauses, clipping, independent streams."""

from __future__ import annotations

import statistics
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_workloads import EOS, MS, make, refused

from kvengine.core.plan import RequestOutput
from kvengine.core.reasons import FinishReason
from kvengine.core.request import Request
from kvengine.engine.driver import Driver
from kvengine.testing.engines import TestEngine
from kvengine.testing.sources import checksum_output


def fixed(mean: float) -> dict[str, Any]:
    return {"distribution": "fixed", "mean": mean}


def chat(**options: Any) -> Any:
    """Two sessions of three turns: 8 tokens of system prompt, 5 of the user, 4 of answer, no pause."""
    lens = {"turns": fixed(3), "system_prompt_len": 8, "user_len": fixed(5), "output_len": fixed(4)}
    return make("chat", **{"num_sessions": 2, "think_time_s": 0.0, **lens, **options})


def served(workload: Any, **engine: Any) -> tuple[dict[str, Request], TestEngine]:
    """The requests by id as the engine got them, over the whole drive, and the engine."""
    test_engine = TestEngine(**engine)
    requests = {}
    add = test_engine.engine.add_request

    def spy(request: Request) -> None:
        requests[request.id] = request
        add(request)

    test_engine.engine.add_request = spy
    report = Driver(test_engine.engine, workload).run()
    assert not report.rejected
    test_engine.engine.context.check_integrity()
    return requests, test_engine


def ended(
    request: Request, tokens: list[int], reason: FinishReason | None = FinishReason.LENGTH, choice=0
) -> Any:
    """The output with which `request` ends, as a workload sees it."""

    sequence: Any = SimpleNamespace(token_ids=[*request.prompt_token_ids, *tokens])
    return RequestOutput(request.id, choice, tokens, reason, sequence)


def test_each_turn_holds_all_that_was_said_with_the_real_answers():
    requests, engine = served(chat())
    assert sorted(requests) == ["s0.t0", "s0.t1", "s0.t2", "s1.t0", "s1.t1", "s1.t2"]
    for session in ("s0", "s1"):
        before: tuple[int, ...] = ()
        for turn, size in enumerate((13, 22, 31)):
            prompt = requests[f"{session}.t{turn}"].prompt_token_ids
            assert len(prompt) == size == len(before) + (5 if turn else 13)
            assert prompt[: len(before)] == before
            assert not set(prompt[len(before) :]) & {EOS}
            before = (*prompt, *checksum_output(list(prompt), 4))
    assert requests["s0.t0"].prompt_token_ids[:8] == requests["s1.t0"].prompt_token_ids[:8]
    assert requests["s0.t0"].prompt_token_ids[8:] != requests["s1.t0"].prompt_token_ids[8:]
    users = {r.prompt_token_ids[-5:] for r in requests.values()}
    assert len(users) == 6
    assert {r.known_output_tokens for r in requests.values()} == {4}
    assert {seq.num_output_tokens for seq in engine.log.finished_sequences} == {4}


def test_an_answer_cut_by_max_tokens_goes_on_as_it_is():
    requests, _ = served(chat(sampling={"max_tokens": 2, "temperature": 0.0}))
    first, second = requests["s1.t0"].prompt_token_ids, requests["s1.t1"].prompt_token_ids
    assert second[:15] == (*first, *checksum_output(list(first), 2))
    assert len(second) == 20


@pytest.mark.parametrize("scheduler", ["continuous", "chunked", "static"])
def test_every_scheduler_serves_the_same_conversations(scheduler):
    requests, _ = served(chat(), policies={"scheduler": scheduler})
    base, _ = served(chat())
    assert {name: (r.prompt_token_ids, r.ordinal) for name, r in requests.items()} == {
        name: (r.prompt_token_ids, r.ordinal) for name, r in base.items()
    }
    assert {r.pair_key for r in requests.values()} == {r.pair_key for r in base.values()}
    assert sorted(r.ordinal or 0 for r in base.values()) == list(range(6))


def test_pauses_come_before_turns_and_are_drawn_per_session():
    """A turn takes 4 steps of 10 ms (a prefill gives the first token); then its pause is waited for."""
    requests, _ = served(chat(think_time_s=2.0))
    pauses = [
        (requests[f"s{s}.t{t + 1}"].arrival_ns - requests[f"s{s}.t{t}"].arrival_ns) / MS
        for s in (0, 1) for t in (0, 1)
    ]  # fmt: skip
    assert len(set(pauses)) == 4
    assert min(pauses) > 40
    double, _ = served(chat(think_time_s=4.0))
    for name in ("s0.t1", "s1.t1"):
        assert (double[name].arrival_ns - 40 * MS) == pytest.approx(
            2 * (requests[name].arrival_ns - 40 * MS), abs=45 * MS
        )


def test_the_mean_pause_is_the_one_asked_for():
    """Within four standard errors of the mean of 2,000 exponential pauses."""
    workload = chat(num_sessions=1000, think_time_s=3.0)
    pauses = []
    for request in list(workload.requests()):
        for _ in range(2):
            (request,) = workload.after(ended(request, [1, 2, 3, 4]), 1000)
            pauses.append((request.arrival_ns - 1000) / 1e9)
    assert statistics.fmean(pauses) == pytest.approx(3, abs=4 * 3 / 2000**0.5)
    assert sum(p > 3 for p in pauses) / 2000 == pytest.approx(0.3679, abs=0.043)


def test_without_pauses_the_next_turn_arrives_at_once():
    requests, _ = served(chat(num_sessions=1))
    assert [requests[f"s0.t{t}"].arrival_ns // MS for t in range(3)] == [0, 40, 80]


def test_only_the_end_of_the_first_choice_is_answered():
    workload = chat(num_sessions=1, sampling={"n": 2})
    first = next(workload.requests())
    assert not workload.after(ended(first, [1], reason=None), 0)
    assert not workload.after(ended(first, [1], choice=1), 0)
    (second,) = workload.after(ended(first, [9]), 7)
    assert (second.id, second.arrival_ns, second.prompt_token_ids[13]) == ("s0.t1", 7, 9)
    assert not workload.after(ended(first, [9]), 7)
    assert not workload.after(ended(second, [9], reason=FinishReason.ABORT), 7)
    assert not workload.after(ended(second, [9]), 7)


def test_a_session_ends_early_when_its_next_turn_does_not_fit():
    """Turns need 17, 26 and 35 tokens."""
    for max_model_len, turns in ((17, 1), (25, 1), (26, 2), (34, 2), (35, 3)):
        requests, _ = served(chat(max_model_len=max_model_len), max_model_len=max_model_len)
        assert len(requests) == 2 * turns
    assert chat(max_model_len=25).num_requests == 6


def test_the_first_turn_is_clipped_output_first():
    def pair(max_model_len: int) -> tuple[int, Any]:
        first = next(chat(max_model_len=max_model_len).requests())
        return len(first.prompt_token_ids), first.known_output_tokens

    assert [pair(n) for n in (17, 15, 14, 13, 10)] == [(13, 4), (13, 2), (13, 1), (12, 1), (9, 1)]
    assert refused("chat", max_model_len=9, system_prompt_len=8).key == "workload.system_prompt_len"


def test_one_turn_is_a_stream_of_requests_with_shared_prefixes():
    workload = chat(num_sessions=6, turns=fixed(1), num_system_prompts=2, tenants=3)
    assert workload.num_requests == 6
    requests = list(served(workload)[0].values())
    assert [r.id for r in requests] == [f"s{i}.t0" for i in range(6)]
    heads = [r.prompt_token_ids[:8] for r in requests]
    assert heads[0] == heads[2] == heads[4] != heads[1] == heads[3] == heads[5]
    assert [r.tenant for r in requests] == [f"tenant{i % 3}" for i in range(6)]


def test_tenants_stay_with_their_session():
    requests, _ = served(chat(tenants=2))
    assert all(r.tenant == f"tenant{r.id[1]}" for r in requests.values())
    for none in (0, 1):
        assert {r.tenant for r in chat(tenants=none).requests()} == {None}


def test_the_number_of_turns_is_drawn_per_session():
    turns = {"distribution": "uniform", "mean": None, "min": 1, "max": 3}
    workload = chat(num_sessions=40, turns=turns, max_model_len=100)
    requests, _ = served(workload, max_model_len=100)
    counts = [sum(name.startswith(f"s{s}.") for name in requests) for s in range(40)]
    assert set(counts) == {1, 2, 3}
    assert sum(counts) == workload.num_requests == len(requests)
    fewer = chat(num_sessions=20, turns=turns)
    assert fewer.num_requests == sum(counts[:20])


def parts(workload: Any) -> Any:
    requests, _ = served(workload, max_model_len=2048)
    return {
        name: (r.prompt_token_ids[:8], r.prompt_token_ids[8:10], r.known_output_tokens)
        for name, r in requests.items()
        if name.endswith("t0")
    }, set(requests)


@pytest.mark.parametrize("change", [
    {"think_time_s": 5.0}, {"arrival": {"process": "poisson", "rate": 9.0}}, {"tenants": 2},
    {"concurrency": 1}, {"turns": {"distribution": "exponential"}},
    {"user_len": {"min": 9, "mean": 11.0}},
])  # fmt: skip
def test_one_setting_changes_nothing_else(change):
    lens = {"user_len": {"min": 2, "mean": 10.0}, "output_len": {"mean": 6.0}, "num_sessions": 5}
    base, _ = parts(chat(max_model_len=2048, **lens))
    assert len({output for _, _, output in base.values()}) > 1
    alike = chat(num_sessions=50, user_len={}, output_len={}, max_model_len=9999).requests()
    assert sum(len(r.prompt_token_ids) - 8 == r.known_output_tokens for r in alike) < 10
    assert parts(chat(max_model_len=2048, **{**lens, **change}))[0] == base


def test_the_same_conversations_in_every_drive_of_one_workload():
    workload = chat(think_time_s=1.0, arrival={"process": "poisson", "rate": 2.0})
    next(iter(workload.requests()))
    assert served(workload)[0] == served(workload)[0] == served(chat(
        think_time_s=1.0, arrival={"process": "poisson", "rate": 2.0}))[0]  # fmt: skip
    assert served(chat(seed=1))[0] != served(chat(seed=2))[0]
    assert served(chat(seed=1))[0] == served(chat(engine_seed=1))[0]


@pytest.mark.parametrize(("options", "key"), [
    ({"num_sessions": 0}, "num_sessions"), ({"turns": fixed(1.5)}, "turns.mean"),
    ({"turns": {"min": 0}}, "turns.min"), ({"system_prompt_len": -1}, "system_prompt_len"),
    ({"num_system_prompts": 0}, "num_system_prompts"), ({"user_len": {"min": 0}}, "user_len.min"),
    ({"output_len": fixed(0)}, "output_len.mean"), ({"think_time_s": -1.0}, "think_time_s"),
    ({"think_time_s": float("inf")}, "think_time_s"), ({"tenants": -1}, "tenants"),
    ({"concurrency": 0}, "concurrency"), ({"sampling": {"stop_token_ids": [1]}}, "sampling.stop_token_ids"),
    ({"concurrency": 1, "arrival": {"process": "poisson", "rate": 1.0}}, "concurrency"),
    ({"sampling": {"temperature": -1.0}}, "sampling.temperature"),
])  # fmt: skip
def test_settings_that_cannot_work(options, key):
    assert refused("chat", **options).key == f"workload.{key}"


@settings(deadline=None, max_examples=40)
@given(
    num_sessions=st.integers(1, 6),
    turns=st.integers(1, 4),
    concurrency=st.none() | st.integers(1, 3),
    think_time_s=st.sampled_from([0.0, 0.02, 1.0]),
    max_model_len=st.integers(12, 60),
    seed=st.integers(0, 99),
)
def test_any_drive_serves_every_turn_that_fits(
    num_sessions, turns, concurrency, think_time_s, max_model_len, seed
):
    lens = {"user_len": {"mean": 4.0, "max": 9}, "output_len": {"mean": 3.0, "max": 7}, "turns": fixed(turns)}
    workload = chat(
        num_sessions=num_sessions, concurrency=concurrency, think_time_s=think_time_s,
        max_model_len=max_model_len, seed=seed, **lens,
    )  # fmt: skip
    requests, engine = served(workload, max_model_len=max_model_len)
    assert len(requests) == len(engine.log.finished_sequences) <= workload.num_requests
    alone, _ = served(
        chat(num_sessions=num_sessions, max_model_len=max_model_len, seed=seed, **lens),
        max_model_len=max_model_len,
    )
    assert {n: r.prompt_token_ids for n, r in requests.items()} == {
        n: r.prompt_token_ids for n, r in alone.items()
    }
    if concurrency is not None:
        assert max(len(step.scheduled) for step in engine.log.steps) <= concurrency
