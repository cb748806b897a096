"""Work ends whatever the policies do, and every output is what it would be alone; where a policy breaks its contract
the run ends and names it, the step and the request (docs/scheduling.md)."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvengine.core.errors import ConfigError, EngineStalledError, KvEngineError, PolicyError
from kvengine.core.reasons import Reason, Refusal, Verdict
from kvengine.core.request import Request, SamplingParams
from kvengine.core.sequence import Sequence
from kvengine.core.shapes import PrefixCacheConfig
from kvengine.engine import engine as engine_module
from kvengine.engine.driver import Driver
from kvengine.policies import Admission, Preemption, Queue, SchedulingView, Workload
from kvengine.registry import Registry, discover
from kvengine.testing.cases import Case, cases, check_nothing_is_left, check_outputs, drive, steps_one_by_one
from kvengine.testing.engines import TestEngine
from kvengine.testing.sources import checksum_output
from kvengine_plugins.admissions.whole_prompt import WholePromptAdmission
from kvengine_plugins.schedulers.chunked import ChunkedScheduler
from kvengine_plugins.schedulers.continuous import ContinuousScheduler

BUILT_IN = discover()
SCHEDULERS = BUILT_IN.names("scheduler")
BUILT = {
    name: TestEngine(registry=BUILT_IN, policies={"scheduler": name}).engine.context.scheduler
    for name in SCHEDULERS
}
CHUNKS = {name: scheduler.chunks for name, scheduler in BUILT.items()}
FAST = settings(
    max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
SLOWEST = 4
"""So many times the steps of running one by one may a workload take, and 30 more."""

Make = Callable[[], object]
"""Makes a policy; anew for every engine."""


def registry_with(**policies: Make) -> Registry:
    """All plug-ins, and each of `policies`, by kind, as the one named hostile."""
    registry = discover()
    for kind, make in policies.items():
        registry.add(kind, "hostile", lambda config, build, make=make: make(), summary="")
    return registry


def hostile(*, policies: dict[str, str] | None = None, **config: Any) -> TestEngine:
    """An engine in which the policies given by kind are hostile, with `policies` beside them."""
    kinds = [kind for kind in ("scheduler", "queue", "admission", "victim", "preemption") if kind in config]
    registry = registry_with(**{kind: config.pop(kind) for kind in kinds})
    return TestEngine(
        registry=registry, policies={**(policies or {}), **dict.fromkeys(kinds, "hostile")}, **config
    )


def add(engine: TestEngine, *names: str, prompt: int = 3, new: int = 4) -> dict[str, list[int]]:
    """Requests, and what each must say."""
    prompts = {name: [(20 * i + j) % 251 for j in range(prompt)] for i, name in enumerate(names)}
    for name, tokens in prompts.items():
        engine.add(name, tokens, new)
    return {name: checksum_output(tokens, new) for name, tokens in prompts.items()}


def ends_by_name(engine: TestEngine, kind: str, said: str, *, max_steps: int = 100) -> KvEngineError:
    """Run; the error names the policy of `kind` and the step, and all steps before that one are recorded."""
    with pytest.raises((PolicyError, EngineStalledError), match=said) as raised:
        engine.run(max_steps=max_steps)
    text = str(raised.value)
    culprit = re.search(r"\b(\w+)=hostile\b", text)
    assert culprit, text
    assert culprit[1] == kind, text
    step = re.search(r"\bstep (\d+)", text)
    assert step, text
    assert [logged.step for logged in engine.log.steps] == list(range(int(step[1])))
    return raised.value


# ---- hostile, and within their contracts: work ends, and every output is right


class Victims:
    """Chooses by `pick(candidates)`."""

    def __init__(self, pick: Callable[[list[Sequence]], Sequence]) -> None:
        self._pick = pick

    def choose(self, candidates: list[Sequence], needy: Sequence) -> Sequence:
        return self._pick(candidates)


class Alternating:
    """First the one who was admitted first, then the one who was admitted last, and so on."""

    def __init__(self) -> None:
        self._place = 0

    def choose(self, candidates: list[Sequence], needy: Sequence) -> Sequence:
        self._place = -1 - self._place
        return candidates[self._place]


def random_victims() -> Victims:
    return Victims(random.Random(1).choice)


VICTIMS: dict[str, Make] = {
    "most advanced": lambda: Victims(lambda found: max(found, key=lambda seq: seq.num_output_tokens)),
    "most computed": lambda: Victims(lambda found: max(found, key=lambda seq: seq.num_computed_tokens)),
    "admitted last": lambda: Victims(lambda found: found[-1]),
    "at random": random_victims,
    "alternating": Alternating,
}


class ListQueue(Queue):
    """In the order of `place(waiting, seq)`, where `seq` goes in."""

    def __init__(
        self, place: Callable[[list[Sequence], Sequence], int] = lambda held, seq: len(held)
    ) -> None:
        self.held: list[Sequence] = []
        self._place = place

    def push(self, seq: Sequence) -> None:
        self.held.insert(self._place(self.held, seq), seq)

    def peek(self) -> Sequence:
        return self.held[0]

    def remove(self, seq: Sequence) -> None:
        self.held.remove(seq)

    def __len__(self) -> int:
        return len(self.held)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.held)


def random_queue() -> ListQueue:
    chance = random.Random(2)
    return ListQueue(lambda held, seq: chance.randint(0, len(held)))


QUEUES: dict[str, Make] = {
    "last in first out": lambda: ListQueue(lambda held, seq: 0),
    "at random": random_queue,
    "longest first": lambda: ListQueue(
        lambda held, seq: sum(other.num_tokens > seq.num_tokens for other in held)
    ),
}


class PreemptsAll(ChunkedScheduler):
    """Preempts whom it may in every step, and goes on as if nothing had been."""

    def schedule(self, view: SchedulingView) -> None:
        for seq in view.running:
            view.preempt(seq, Reason.QUANTUM, seq)
        super().schedule(view)


class PreemptsAllWhole(ContinuousScheduler):
    """The same, without splitting prefills, and after it has scheduled them."""

    def schedule(self, view: SchedulingView) -> None:
        super().schedule(view)
        for seq in view.running:
            view.preempt(seq, Reason.QUANTUM, seq)


class DefersAll(WholePromptAdmission):
    """Lets everybody else go before everybody."""

    def refuses(self, seq: Sequence, view: SchedulingView) -> Refusal | None:
        if not seq.deferred and seq.num_preemptions == 0:
            return Refusal(Reason.DEADLINE, "nobody is in a hurry", Verdict.DEFER)
        return super().refuses(seq, view)


def serves(case: Case, chunks: bool, slowest: int = SLOWEST, **config: Any) -> TestEngine:
    engine = hostile(**config, **case.limits)
    delivered = drive(engine, case, max_steps=30 + slowest * steps_one_by_one(case, chunks))
    check_outputs(engine, case, delivered)
    check_nothing_is_left(engine)
    return engine


hostile_victims = st.sampled_from(list(VICTIMS)).map(VICTIMS.__getitem__)
hostile_queues = st.sampled_from(list(QUEUES)).map(QUEUES.__getitem__)
preempting = st.sampled_from(["recompute", "swap"])


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_victims_and_order_cost_time_and_nothing_else(scheduler: str) -> None:
    """Order only where the scheduler leaves that to a queue."""

    @FAST
    @given(case=cases(CHUNKS[scheduler]), victim=hostile_victims, queue=hostile_queues, preemption=preempting)
    def check(case: Case, victim: Make, queue: Make, preemption: str) -> None:
        config: dict[str, Any] = {} if BUILT[scheduler].orders else {"queue": queue}
        policies = {"scheduler": scheduler, "preemption": preemption}
        serves(case, CHUNKS[scheduler], victim=victim, policies=policies, **config)

    check()


@pytest.mark.parametrize(("scheduler", "chunks"), [(PreemptsAll, True), (PreemptsAllWhole, False)])
def test_a_scheduler_that_preempts_all_it_can_still_gets_done(scheduler: Make, chunks: bool) -> None:
    """Each entry gives a token, so that it takes a prefill per token at worst."""

    @FAST
    @given(case=cases(chunks), victim=hostile_victims, queue=hostile_queues, preemption=preempting)
    def check(case: Case, victim: Make, queue: Make, preemption: str) -> None:
        slowest = SLOWEST * (2 + (case.limits["max_model_len"] if chunks else 1))
        policies = {"preemption": preemption}
        serves(case, chunks, slowest, scheduler=scheduler, queue=queue, victim=victim, policies=policies)

    check()


def test_a_scheduler_may_preempt_nobody_twice_between_two_of_his_tokens() -> None:
    engine = hostile(scheduler=PreemptsAll)
    outputs = add(engine, "a", "b", new=6)
    assert engine.run(max_steps=40) == outputs
    for name in outputs:
        steps = [("out" if name in step.preempted else "in") for step in engine.log.steps]
        assert steps == ["in", "out"] * 5 + ["in"]
        assert all((name in step.sampled) == (name not in step.preempted) for step in engine.log.steps)


def test_nobody_takes_the_seat_in_the_plan_in_which_a_scheduler_preempted() -> None:
    engine = hostile(scheduler=PreemptsAll, max_num_seqs=1)
    outputs = add(engine, "a", "b", new=2)
    assert engine.run(max_steps=20) == outputs
    assert [list(step.scheduled) for step in engine.log.steps] == [["a"], [], ["a"], ["b"], [], ["b"]]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_an_admission_that_defers_everybody_gets_done(scheduler: str) -> None:
    @FAST
    @given(case=cases(CHUNKS[scheduler]))
    def check(case: Case) -> None:
        serves(case, CHUNKS[scheduler], admission=DefersAll, policies={"scheduler": scheduler})

    check()


# ---- queues that break their contract


class Loses(ListQueue):
    """Drops every second that comes."""

    def __init__(self) -> None:
        super().__init__()
        self._count = 0

    def push(self, seq: Sequence) -> None:
        self._count += 1
        if self._count % 2:
            super().push(seq)


class LosesAndLies(Loses):
    """And says that it has them."""

    def __init__(self) -> None:
        super().__init__()
        self._pushed: dict[Sequence, None] = {}

    def push(self, seq: Sequence) -> None:
        super().push(seq)
        self._pushed[seq] = None

    def remove(self, seq: Sequence) -> None:
        super().remove(seq)
        del self._pushed[seq]

    def __len__(self) -> int:
        return len(self._pushed)


def ghost() -> Sequence:
    request = Request(id="ghost", prompt_token_ids=(1, 2), sampling=SamplingParams())
    return Sequence(request, choice=0, order=10**6, max_tokens_total=9, stop_ids=frozenset(), seed=0)


class Invents(ListQueue):
    """Has one that nobody asked for, behind the first."""

    def push(self, seq: Sequence) -> None:
        super().push(seq)
        if len(self.held) == 1:
            super().push(ghost())


class InventsAndLies(Invents):
    """And does not count it."""

    def __len__(self) -> int:
        return sum(seq.request.id != "ghost" for seq in self.held)

    def peek(self) -> Sequence:
        return self.held[-1]


class KeepsTheGone(ListQueue):
    """Answers with one that was removed to run, as long as others wait."""

    def __init__(self) -> None:
        super().__init__()
        self._gone: list[Sequence] = []

    def remove(self, seq: Sequence) -> None:
        super().remove(seq)
        self._gone.append(seq)

    def peek(self) -> Sequence:
        return self._gone[0] if self._gone else super().peek()

    def __iter__(self) -> Iterator[Sequence]:
        return iter([*self._gone, *self.held])


class TakesAnother(ListQueue):
    """Removes the last, whoever was meant."""

    def remove(self, seq: Sequence) -> None:
        self.held.pop()


class Empty(ListQueue):
    """Answers with nobody."""

    def peek(self) -> Any:
        return None


BROKEN_QUEUES: list[tuple[Make, str]] = [
    (Loses, "holds 1 sequences, and 2 wait"),
    (LosesAndLies, "raised IndexError"),
    (Invents, "holds 3 sequences, and 2 wait"),
    (InventsAndLies, r"answers with <ghost WAITING 0/2 tokens>, which does not wait"),
    (KeepsTheGone, r"answers with <a RUNNING .*, which does not wait"),
    (TakesAnother, r"answers with <a RUNNING .*, which does not wait"),
    (Empty, "answers with None, which does not wait"),
]


class PeeksItself(ChunkedScheduler):
    """Asks the queue for the head by itself."""

    def schedule(self, view: SchedulingView) -> None:
        view.schedule_decodes()
        while len(view.waiting) and view.admit(view.waiting.peek()):
            pass


@pytest.mark.parametrize("scheduler", ["chunked", "continuous", PeeksItself])
@pytest.mark.parametrize(("queue", "said"), BROKEN_QUEUES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_queue_that_loses_or_invents_somebody_is_named(scheduler: Any, queue: Make, said: str) -> None:
    if isinstance(scheduler, str):
        engine = hostile(queue=queue, max_num_seqs=1, policies={"scheduler": scheduler})
    else:
        registry = registry_with(queue=queue)
        registry.add("scheduler", "peeks", lambda config, build: PeeksItself(), summary="")
        policies = {"queue": "hostile", "scheduler": "peeks"}
        engine = TestEngine(registry=registry, policies=policies, max_num_seqs=1)
    add(engine, "a", "b")
    assert isinstance(ends_by_name(engine, "queue", said), PolicyError)


@pytest.mark.parametrize("method", ["push", "peek", "remove", "__len__", "__iter__", "admitted", "committed"])
def test_a_queue_that_raises_anywhere_is_named(method: str) -> None:
    broken = type("Broken", (ListQueue,), {method: boom})
    scheduler = "static" if method == "__iter__" else "chunked"
    engine = hostile(queue=broken, policies={"scheduler": scheduler})
    add(engine, "a", "b")
    ends_by_name(engine, "queue", r"queue=hostile \(Broken\), step 0.*: raised ValueError: boom")


# ---- admissions that break theirs


def boom(self: object, *args: object, **named: object) -> Any:
    raise ValueError("boom")


def admission(answer: Callable[[Sequence], object]) -> Make:
    """One that answers so, and where that is None lets in whose known tokens have room."""

    class Answers(WholePromptAdmission):
        def refuses(self, seq: Sequence, view: SchedulingView) -> Any:
            return answer(seq) or super().refuses(seq, view)

    return Answers


def verdict_on(verdict: Verdict, when: Callable[[Sequence], bool]) -> Make:
    return admission(lambda seq: Refusal(Reason.POLICY, "so", verdict) if when(seq) else None)


@pytest.mark.parametrize("verdict", [Verdict.DEFER, Verdict.REFUSE])
def test_an_admission_that_sends_away_who_ran_already_is_named(verdict: Verdict) -> None:
    """b gives way to a in step 5 and asks again when a has ended, in step 8."""
    engine = hostile(
        admission=verdict_on(verdict, lambda seq: seq.num_preemptions > 0), block_size=4, num_blocks=6
    )
    add(engine, "a", "b", prompt=8, new=8)
    said = (
        r"admission=hostile \(Answers\), step \d+, <b PREEMPTED .*: may not defer or refuse for good who ran"
    )
    ends_by_name(engine, "admission", said)


def test_an_admission_that_defers_for_ever_is_named() -> None:
    engine = hostile(admission=verdict_on(Verdict.DEFER, lambda seq: True))
    add(engine, "a", "b")
    ends_by_name(engine, "admission", "<a WAITING .*: may not defer .*, or was deferred before")


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("verdict", [Verdict.REFUSE, Verdict.DEFER])
def test_refusing_and_deferring_one_after_the_other_is_no_standstill(
    scheduler: str, verdict: Verdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than the engine would bear of steps that decide and compute nothing."""
    monkeypatch.setattr(engine_module, "MAX_EMPTY_STEPS", 5)
    engine = hostile(
        admission=verdict_on(verdict, lambda seq: not seq.deferred), policies={"scheduler": scheduler}
    )
    names = [f"r{i}" for i in range(20)]
    outputs = add(engine, *names)
    engine.run(max_steps=300)
    refused = verdict is Verdict.REFUSE
    assert engine.finish_reasons == dict.fromkeys(names, "refused" if refused else "length")
    assert engine.outputs == ({name: [] for name in names} if refused else outputs)
    check_nothing_is_left(engine)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_an_admission_that_refuses_everything_is_named(scheduler: str) -> None:
    engine = hostile(
        admission=admission(lambda seq: Refusal(Reason.NO_BLOCKS, "on principle")),
        policies={"scheduler": scheduler},
    )
    add(engine, "a", "b")
    said = r"step 0: admission=hostile lets nobody in although nobody runs: <a .*> NO_BLOCKS on principle; 2 wait"
    ends_by_name(engine, "admission", said)


def test_an_admission_that_never_lets_the_second_in_is_named_when_the_first_has_ended() -> None:
    refusal = Refusal(Reason.WATERMARK, "no more")
    engine = hostile(admission=admission(lambda seq: refusal if seq.id == "b" else None))
    outputs = add(engine, "a", "b")
    ends_by_name(
        engine, "admission", r"step 4: admission=hostile .* <b WAITING .*> WATERMARK no more; 1 wait"
    )
    assert engine.outputs == {"a": outputs["a"]}


NO_REASON: Any = "so"


@pytest.mark.parametrize(
    "answer", [True, "NO_BLOCKS", (Reason.NO_BLOCKS, "", Verdict.WAIT), Refusal(NO_REASON)]
)
def test_an_admission_that_answers_nothing_known_is_named(answer: object) -> None:
    engine = hostile(admission=admission(lambda seq: answer))
    add(engine, "a")
    ends_by_name(
        engine, "admission", "step 0, <a WAITING .*: answered .*, which is neither None nor a Refusal"
    )


@pytest.mark.parametrize("method", ["refuses", "preempted", "committed"])
def test_an_admission_that_raises_is_named(method: str) -> None:
    broken = type("Broken", (WholePromptAdmission,), {method: boom})
    engine = hostile(admission=broken, block_size=4, num_blocks=6)
    add(engine, "a", "b", prompt=8, new=8)
    ends_by_name(engine, "admission", r"Broken\), step \d+.*: raised ValueError: boom")


# ---- schedulers that break theirs


class Acts(ChunkedScheduler):
    """The chunked scheduler for `good` steps, then `act(view)`."""

    def __init__(self, act: Callable[[SchedulingView], object], good: int = 0) -> None:
        self._act, self._good = act, good

    def schedule(self, view: SchedulingView) -> None:
        if self._good:
            self._good -= 1
            super().schedule(view)
        else:
            self._act(view)


def asks_for_ever(view: SchedulingView) -> None:
    while True:
        view.admit(view.waiting.peek())


def refuses_for_ever(view: SchedulingView) -> None:
    while True:
        view.refuse(view.waiting.peek(), Reason.POLICY, "not yet")


@pytest.mark.parametrize("act", [asks_for_ever, refuses_for_ever])
def test_a_scheduler_that_asks_for_the_same_head_for_ever_ends_within_one_plan(act: Any) -> None:
    engine = hostile(scheduler=lambda: Acts(act, good=2), max_num_seqs=1)
    add(engine, "a", "b")
    ends_by_name(
        engine, "scheduler", r"scheduler=hostile \(Acts\), step 2, <b WAITING .*: asked for it 1001 times"
    )


class LeavesTheOldest(ChunkedScheduler):
    """Schedules all but the one that nobody may preempt."""

    def schedule(self, view: SchedulingView) -> None:
        for seq in view.running:
            if seq.id != "a":
                view.schedule(seq, view.token_budget_left)
        for seq in view.heads:
            view.admit(seq, 1)


@pytest.mark.parametrize("others", ["", "b", "bcd"])
@pytest.mark.parametrize("num_blocks", [6, 100])
def test_a_scheduler_that_never_schedules_the_oldest_ends_by_name(others: str, num_blocks: int) -> None:
    engine = hostile(scheduler=LeavesTheOldest, block_size=1, num_blocks=num_blocks)
    outputs = add(engine, "a", *others, prompt=2, new=3)
    said = r"scheduler=hostile schedules nothing and names no time .*running: <a RUNNING 1/2 tokens>"
    ends_by_name(engine, "scheduler", said)
    assert engine.outputs == {name: output for name, output in outputs.items() if name != "a"}


def sleeps_on(view: SchedulingView) -> None:
    view.wake_at(view.now + 1000)


def test_a_scheduler_that_asks_to_be_woken_for_ever_ends_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "MAX_IDLE_PLANS", 100)
    engine = hostile(scheduler=lambda: Acts(sleeps_on, good=2))
    add(engine, "a", "b")
    said = r"step 2: scheduler=hostile asks to wait for ever; 0 wait, running: <a RUNNING"
    ends_by_name(engine, "scheduler", said, max_steps=200)


class OneRequest(Workload):
    """A single request at once."""

    num_requests = 1
    concurrency = None

    def requests(self) -> Iterator[Request]:
        yield Request(id="a", prompt_token_ids=(1, 2), sampling=SamplingParams(max_tokens=3))


def test_the_same_when_a_workload_is_driven() -> None:
    engine = hostile(scheduler=lambda: Acts(sleeps_on))
    with pytest.raises(EngineStalledError, match="step 0: scheduler=hostile asks to wait for ever; 1 wait"):
        Driver(engine.engine, OneRequest()).run()


class OnlyAgain(ChunkedScheduler):
    """Leaves the oldest, and computes another in single tokens up to where no block is left, again and again."""

    def schedule(self, view: SchedulingView) -> None:
        for seq in view.running:
            if seq.id != "a":
                view.schedule(seq, 1)
        for seq in view.heads:
            view.admit(seq, 1)


def test_a_scheduler_that_only_computes_again_ends_by_name() -> None:
    """a holds one of 6 blocks of one token; b, let in whatever it needs, can never compute its sixth token."""
    everybody = type("LetsIn", (Admission,), {"refuses": lambda self, seq, view: None})
    engine = hostile(
        scheduler=OnlyAgain,
        admission=everybody,
        block_size=1,
        num_blocks=6,
        max_model_len=16,
        prefix_cache=PrefixCacheConfig(mode="off"),
    )
    engine.add("a", [1, 2], 3)
    engine.add("b", [1, 2, 3, 4, 5, 6], 1)
    with pytest.raises(
        PolicyError, match=r"scheduler=hostile \(OnlyAgain\), step \d+, <a .*: nobody got further in 1017"
    ):
        engine.run(max_steps=2000)
    assert engine.log.num_preemptions > 100
    assert len(engine.log.steps) > 1000


def test_a_scheduler_that_raises_is_named_with_the_step() -> None:
    engine = hostile(scheduler=lambda: Acts(lambda view: boom(view), good=2))
    add(engine, "a")
    ends_by_name(engine, "scheduler", r"Acts\), step 2: raised ValueError: boom")


# ---- victims and preemptions that break theirs


class Widens:
    """Puts the protected one among the candidates and takes it."""

    def choose(self, candidates: list[Sequence], needy: Sequence) -> Sequence:
        candidates.append(needy)
        return needy


def test_a_victim_policy_that_changes_the_candidates_does_not_reach_the_protected() -> None:
    """In step 5 a, the oldest, needs a block."""
    engine = hostile(victim=Widens, block_size=4, num_blocks=6)
    add(engine, "a", "b", prompt=8, new=8)
    ends_by_name(engine, "victim", r"Widens\), step 5, <a RUNNING .*: chose <a .*, which is not a candidate")


@pytest.mark.parametrize("kind", ["victim", "preemption"])
def test_a_victim_or_preemption_policy_that_raises_is_named(kind: str) -> None:
    method = {"victim": "choose", "preemption": "mechanism"}[kind]
    config: dict[str, Any] = {kind: type("Broken", (Preemption,), {method: boom})}
    engine = hostile(**config, block_size=4, num_blocks=6)
    add(engine, "a", "b", prompt=8, new=8)
    ends_by_name(engine, kind, r"Broken\), step 5, .*: raised ValueError: boom")


# ---- nobody is ever preempted


class Reserves(Admission):
    """Lets in where all that run, and it, can grow to their full length."""

    reserves_worst_case = True

    def refuses(self, seq: Sequence, view: SchedulingView) -> Refusal | None:
        wanted = sum(view.blocks_needed(other, other.max_tokens_total - 1) for other in (*view.running, seq))
        return Refusal(Reason.NO_BLOCKS, f"{wanted} lacking") if wanted > view.num_free_blocks else None


@pytest.mark.parametrize("scheduler", [name for name in SCHEDULERS if not BUILT[name].preempts])
def test_under_never_nobody_is_preempted_and_all_get_done(scheduler: str) -> None:
    @FAST
    @given(case=cases(CHUNKS[scheduler]), allocator=st.sampled_from(["contiguous_max", "paged"]))
    def check(case: Case, allocator: str) -> None:
        policies = {"scheduler": scheduler, "allocator": allocator, "preemption": "never"}
        case = Case(tuple(replace(ask, n=1) for ask in case.asks), case.limits)
        cache = PrefixCacheConfig(mode="off")
        engine = serves(case, CHUNKS[scheduler], admission=Reserves, policies=policies, prefix_cache=cache)
        assert engine.log.num_preemptions == 0

    check()


def test_never_is_refused_where_somebody_may_not_be_able_to_grow() -> None:
    with pytest.raises(ConfigError, match=r"^preemption=never: admission=whole_prompt lets in who may not"):
        TestEngine(policies={"preemption": "never"})
    TestEngine(policies={"preemption": "never", "allocator": "contiguous_max"})


def test_an_admission_that_lies_about_its_reserve_is_named() -> None:
    liar = type("Liar", (WholePromptAdmission,), {"reserves_worst_case": True})
    engine = hostile(admission=liar, block_size=4, num_blocks=6, policies={"preemption": "never"})
    outputs = add(engine, "a", "b", prompt=8, new=8)
    # Both need a fourth block in step 5, and none is left.
    said = r"step 5: admission=hostile let in who cannot grow under preemption=never: <b .* 12/13 tokens> NO_BLOCKS"
    ends_by_name(engine, "admission", said)
    assert engine.outputs == {name: output[:5] for name, output in outputs.items()}


def test_who_cannot_grow_under_never_waits_for_others_to_end() -> None:
    liar = type("Liar", (WholePromptAdmission,), {"reserves_worst_case": True})
    engine = hostile(admission=liar, block_size=4, num_blocks=6, policies={"preemption": "never"})
    first = add(engine, "a", prompt=8, new=4)
    engine.add("b", range(20, 32), 8)
    engine.run(max_steps=40)
    assert engine.outputs == {**first, "b": checksum_output(range(20, 32), 8)}
    assert engine.log.num_preemptions == 0


def test_under_never_a_scheduler_preempts_nobody_and_a_high_priority_waits_for_a_seat() -> None:
    policies = {"preemption": "never", "allocator": "contiguous_max"}
    engine = hostile(scheduler=PreemptsAll, policies=policies, max_num_seqs=1, num_blocks=64)
    add(engine, "a")
    engine.step()
    sampling = SamplingParams(max_tokens=2, temperature=0.0)
    engine.engine.add_request(Request(id="h", prompt_token_ids=(1, 2), sampling=sampling, priority=-5))
    engine.run(max_steps=20)
    assert [list(step.scheduled) for step in engine.log.steps] == [["a"]] * 4 + [["h"]] * 2
    assert engine.log.num_preemptions == 0
