"""The driver over a scripted engine: arrivals, closed loops, follow-ups, forks, refusals, stalls, interrupts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvengine.core.errors import EngineStalledError, RequestError
from kvengine.core.plan import Idle, RequestOutput
from kvengine.core.reasons import FinishReason
from kvengine.core.request import Request
from kvengine.engine.clock import VirtualClock
from kvengine.engine.driver import MAX_FRUITLESS_WAKES, Driver
from kvengine.policies import Workload

STEP_NS = 10


class FakeEngine:
    """Every step takes STEP_NS and gives each live request one token, until it has its known number.

    `sent` holds (moment, how, request); ids in `refuse` are refused. With `wake_at` it computes nothing and asks
    to be woken then; `asleep` without it, it can never go on.
    """

    def __init__(self, *, start_ns: int = 0, refuse: Iterable[str] = (), asleep: bool = False) -> None:
        self.clock = VirtualClock()
        self.clock.advance(start_ns)
        self.sent: list[tuple[int, str, Request]] = []
        self.live: dict[str, list[Any]] = {}
        self.refuse = set(refuse)
        self.asleep = asleep
        self.wake_at: int | None = None
        self.num_steps = 0

    def add_request(self, request: Request) -> None:
        self._take("add", request)

    def fork(self, request: Request) -> None:
        assert request.fork_of is not None
        if request.fork_of not in self.live:
            raise RequestError(request.id, f"nothing called {request.fork_of} is live")
        self._take("fork", request)

    def _take(self, how: str, request: Request) -> None:
        assert request.id not in self.live
        self.sent.append((self.clock.now(), how, request))
        if request.id in self.refuse:
            raise RequestError(request.id, "refused")
        self.live[request.id] = [request, 0]

    @property
    def num_unfinished(self) -> int:
        return len(self.live)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.live)

    def step(self) -> list[RequestOutput] | Idle:
        self.num_steps += 1
        if self.asleep or not self.live:
            return Idle(self.wake_at if self.asleep else None)
        self.clock.advance(STEP_NS)
        outputs = []
        for entry in list(self.live.values()):
            request, entry[1] = entry[0], entry[1] + 1
            ended = entry[1] == request.known_output_tokens
            reason = FinishReason.LENGTH if ended else None
            outputs.append(RequestOutput(request.id, 0, [7], reason, None))  # type: ignore[arg-type]
            if ended:
                del self.live[request.id]
        return outputs

    def stalled(self) -> EngineStalledError:
        return EngineStalledError("no progress")

    def times(self) -> dict[str, int]:
        return {request.id: moment for moment, _, request in self.sent}


@dataclass
class Script(Workload):
    """`first` arrive by themselves; `then` maps an id to what follows when it finishes: (wait in ns, request)."""

    first: list[Request]
    then: dict[str, list[tuple[int, Request]]] = field(default_factory=dict)
    concurrency: int | None = None
    reacts: bool = True
    heard: list[tuple[int, str, bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_requests = len(self.first) + sum(map(len, self.then.values()))

    def requests(self) -> Iterator[Request]:
        yield from self.first

    def after(self, output: RequestOutput, now_ns: int) -> Iterable[Request]:
        finished = output.finish_reason is not None
        self.heard.append((now_ns, output.request_id, finished))
        for wait_ns, request in self.then.get(output.request_id, []) if finished else []:
            yield ask(request.id, now_ns + wait_ns, request.known_output_tokens, fork_of=request.fork_of)


def ask(name: str, at: int = 0, tokens: int | None = 1, **more: Any) -> Request:
    return Request(id=name, prompt_token_ids=(1,), arrival_ns=at, known_output_tokens=tokens, **more)


def drive(engine: Any, workload: Workload, **more: Any) -> Any:
    return Driver(engine, workload, **more).run()


# ---- without follow-ups


def test_open_loop_sends_at_arrival_and_counts_from_the_start_of_the_drive():
    engine = FakeEngine(start_ns=1000)
    report = drive(engine, Script([ask("a", 0, 3), ask("b", 15), ask("c", 100)], reacts=False))
    assert engine.times() == {"a": 1000, "b": 1020, "c": 1100}
    assert [request.arrival_ns for _, _, request in engine.sent] == [1000, 1015, 1100]
    assert [request.ordinal for _, _, request in engine.sent] == [0, 1, 2]
    assert (report.num_sent, report.rejected, report.interrupted) == (3, [], False)


def test_a_workload_that_does_not_react_is_never_asked():
    workload = Script([ask("a")], {"a": [(0, ask("b"))]}, reacts=False)
    engine = FakeEngine()
    drive(engine, workload)
    assert (list(engine.times()), workload.heard) == (["a"], [])


def test_closed_loop_arrives_when_it_is_sent():
    engine = FakeEngine()
    drive(engine, Script([ask("a", 500, 2), ask("b", 600), ask("c", 700)], concurrency=2, reacts=False))
    assert engine.times() == {"a": 0, "b": 0, "c": 10}
    assert [request.arrival_ns for _, _, request in engine.sent] == [0, 0, 10]


# ---- follow-ups


def test_every_output_is_heard_at_the_end_of_its_step_counted_from_the_start():
    workload = Script([ask("a", 5, 2)])
    drive(FakeEngine(start_ns=300), workload)
    assert workload.heard == [(15, "a", False), (25, "a", True)]


def test_follow_ups_are_merged_with_new_requests_by_arrival():
    """a ends at 10; its follow-ups arrive at 10 (at once), 30 and 25, the new ones at 20 and 30."""
    follow = [(0, ask("a0", tokens=1)), (20, ask("a20")), (15, ask("a15"))]
    engine = FakeEngine(start_ns=100)
    report = drive(engine, Script([ask("a"), ask("n20", 20), ask("n30", 30)], {"a": follow}))
    assert [(request.id, at, request.arrival_ns) for at, _, request in engine.sent] == [
        ("a", 100, 100), ("a0", 110, 110), ("n20", 120, 120), ("a15", 130, 125), ("a20", 130, 130),
        ("n30", 130, 130),
    ]  # fmt: skip
    assert report.num_sent == 6


def test_follow_ups_of_one_moment_keep_their_order():
    follow = [(5, ask(name)) for name in "zyx"]
    engine = FakeEngine()
    drive(engine, Script([ask("a")], {"a": follow}))
    assert list(engine.times()) == ["a", "z", "y", "x"]


def test_the_drive_goes_on_while_somebody_thinks():
    """Nobody is left at 10, and the clock jumps over the pauses of 1000 and 500 ns."""
    engine = FakeEngine()
    drive(engine, Script([ask("a")], {"a": [(1000, ask("b"))], "b": [(500, ask("c"))]}))
    assert engine.times() == {"a": 0, "b": 1010, "c": 1520}


def test_a_thinking_time_ends_while_others_run():
    engine = FakeEngine()
    drive(engine, Script([ask("a"), ask("long", 0, 9)], {"a": [(25, ask("b"))]}))
    assert engine.times() == {"a": 0, "long": 0, "b": 40}


def test_closed_loop_lets_due_follow_ups_go_before_new_requests():
    """One place. a ends at 10 and a0 goes before n; a50 is not due at 20, so that n does not wait for it."""
    follow = [(50, ask("a50")), (0, ask("a0"))]
    engine = FakeEngine()
    drive(engine, Script([ask("a"), ask("n"), ask("m")], {"a": follow}, concurrency=1))
    assert engine.times() == {"a": 0, "a0": 10, "n": 20, "m": 30, "a50": 60}


def test_closed_loop_follow_ups_wait_for_a_place():
    """b is due at 11, but n took the place at 10 and keeps it until 40: it arrives when it is sent."""
    engine = FakeEngine()
    drive(engine, Script([ask("a"), ask("n", 0, 3)], {"a": [(1, ask("b"))]}, concurrency=1))
    assert engine.times() == {"a": 0, "n": 10, "b": 40}
    assert engine.sent[-1][2].arrival_ns == 40


def test_a_reacting_workload_numbers_its_requests_itself():
    engine = FakeEngine()
    drive(engine, Script([ask("a", ordinal=4), ask("b", ordinal=2)]))
    assert [request.ordinal for _, _, request in engine.sent] == [4, 2]


def test_forks_go_to_fork_and_the_others_to_add_request():
    engine = FakeEngine()
    then = {"a": [(0, ask("b", fork_of="live")), (0, ask("c", fork_of="gone")), (0, ask("d"))]}
    report = drive(engine, Script([ask("a"), ask("live", 0, 4)], then))
    assert [(how, request.id) for _, how, request in engine.sent] == [
        ("add", "a"), ("add", "live"), ("fork", "b"), ("add", "d"),
    ]  # fmt: skip
    assert [error.request_id for error in report.rejected] == ["c"]
    assert report.num_sent == 5


def test_what_would_follow_a_refused_request_never_comes():
    refused = []
    engine = FakeEngine(refuse=["b"])
    then = {"a": [(0, ask("b"))], "b": [(0, ask("c"))]}
    report = drive(engine, Script([ask("a")], then), on_rejected=refused.append)
    assert list(engine.times()) == ["a", "b"]
    assert [error.request_id for error in refused] == ["b"] == [e.request_id for e in report.rejected]
    assert not report.interrupted


# ---- interrupts, stalls and wakes


@pytest.mark.parametrize(("after", "interrupted"), [(1, True), (2, True), (3, False)])
def test_an_interrupt_with_only_a_follow_up_left_is_an_interrupted_run(after, interrupted):
    """a ends with step 1, then b thinks for 40 ns (an idle step), and ends with step 3."""
    engine = FakeEngine()
    workload = Script([ask("a")], {"a": [(40, ask("b"))]})
    report = drive(engine, workload, interrupted=lambda: engine.num_steps >= after)
    assert engine.num_steps == after
    assert report.interrupted == interrupted


def test_an_interrupt_stops_sending():
    engine = FakeEngine()
    report = drive(
        engine, Script([ask("a"), ask("b")], concurrency=2), interrupted=lambda: len(engine.sent) == 1
    )
    assert (list(engine.times()), report.interrupted) == (["a"], True)


@pytest.mark.parametrize("concurrency", [None, 1])
def test_an_engine_that_sleeps_for_ever_is_stalled(concurrency):
    with pytest.raises(EngineStalledError):
        drive(FakeEngine(asleep=True), Script([ask("a")], concurrency=concurrency))


def test_a_full_closed_loop_does_not_wait_for_those_who_need_a_place():
    """The follow-up, due at 1000, can never come, since the place never becomes free."""

    class FallsAsleep(FakeEngine):
        def step(self) -> list[RequestOutput] | Idle:
            self.asleep = "n" in self.live
            return super().step()

    workload = Script([ask("a"), ask("n")], {"a": [(1000, ask("b"))]}, concurrency=1)
    engine = FallsAsleep()
    with pytest.raises(EngineStalledError):
        drive(engine, workload)
    assert engine.clock.now() == 10


@pytest.mark.parametrize(("wake_at", "step_at"), [(40, 40), (90, 70)])
def test_the_earlier_of_wake_and_follow_up_ends_a_wait(wake_at, step_at):
    """Idle from 10 on; b arrives at 70, and until then only the wake can make a step happen."""
    moments = []

    class Sleeper(FakeEngine):
        def step(self) -> list[RequestOutput] | Idle:
            moments.append(self.clock.now())
            self.wake_at = wake_at
            self.asleep = self.clock.now() >= 10 and "b" not in self.live
            return super().step()

    engine = Sleeper()
    drive(engine, Script([ask("a"), ask("long", 0, 4)], {"a": [(60, ask("b", tokens=9))]}))
    assert moments[:3] == [0, 10, step_at]
    assert engine.times()["b"] == 70


def test_a_wake_that_never_helps_stalls_the_run():
    engine = FakeEngine(asleep=True)
    engine.wake_at = 5
    with pytest.raises(EngineStalledError):
        drive(engine, Script([ask("a")]))
    assert engine.num_steps == MAX_FRUITLESS_WAKES + 1


# ---- any workload


@dataclass
class Node:
    """A request and, when it has ended, those after it."""

    wait_ns: int
    tokens: int
    then: list[Node]


def nodes() -> Any:
    def node(then: Any) -> Any:
        return st.builds(Node, st.integers(0, 60), st.integers(1, 4), then)

    return st.recursive(node(st.just([])), lambda inner: node(st.lists(inner, max_size=3)), max_leaves=12)


@settings(deadline=None, max_examples=200)
@given(
    trees=st.lists(nodes(), min_size=1, max_size=5),
    concurrency=st.none() | st.integers(1, 3),
    start_ns=st.integers(0, 50),
)
def test_any_workload_is_sent_once_in_order_and_neither_early_nor_late(trees, concurrency, start_ns):
    then: dict[str, list[tuple[int, Request]]] = {}

    def register(name: str, node: Node) -> None:
        children = [(child.wait_ns, ask(f"{name}.{i}", 0, child.tokens)) for i, child in enumerate(node.then)]
        then[name] = children
        for i, child in enumerate(node.then):
            register(f"{name}.{i}", child)

    at, first = 0, []
    for i, tree in enumerate(trees):
        at += tree.wait_ns
        first.append(ask(f"t{i}", at, tree.tokens))
        register(f"t{i}", tree)
    workload = Script(first, then, concurrency)
    engine = FakeEngine(start_ns=start_ns)
    report = drive(engine, workload)

    times = engine.times()
    assert sorted(times) == sorted([r.id for r in first] + [r.id for rs in then.values() for _, r in rs])
    assert report.num_sent == len(engine.sent) == workload.num_requests
    ended = {name: start_ns + moment for moment, name, finished in workload.heard if finished}
    due = {r.id: start_ns + r.arrival_ns for r in first}
    due |= {r.id: ended[name] + wait for name, follow in then.items() if name in ended for wait, r in follow}
    new = {r.id for r in first}
    for name, moment in times.items():
        if concurrency is None:
            assert due[name] <= moment < due[name] + STEP_NS
        else:
            assert name in new or due[name] <= moment
            assert sum(times[n] <= moment < ended[n] for n in times) <= concurrency
    if concurrency is None:
        sent = [request.arrival_ns for _, _, request in engine.sent]
        assert sent == [due[name] for name in times]
        assert all(a <= b for a, b in pairwise(sent))
    elif any(name not in new for name in times):
        for name in new:
            overtaken = [n for n in times if n not in new and due[n] <= times[name] < times[n]]
            assert not overtaken, f"{name} went before {overtaken}, which were due"
