"""Queues: each against a naive sorted list, what their calls cost, and what they do in an engine."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvengine.config import from_mapping
from kvengine.core.errors import ConfigError
from kvengine.core.plan import ScheduledRow, StepPlan
from kvengine.core.request import Request, SamplingParams
from kvengine.core.sequence import Sequence, SequenceState
from kvengine.core.shapes import PrefixCacheConfig
from kvengine.policies import Queue
from kvengine.registry import discover, own_distribution
from kvengine.testing.engines import TestEngine
from kvengine.testing.sources import checksum_output
from kvengine_plugins.queues.ordered import OrderedQueue, Ranking

REGISTRY = discover()
QUEUES = [
    entry.name for entry in REGISTRY if entry.kind == "queue" and entry.distribution == own_distribution()
]
NO_CACHE = PrefixCacheConfig(mode="off")
S = 1_000_000_000
FAST = settings(max_examples=60, deadline=None, derandomize=True, database=None)


class Table:
    """A predictor and an allocator that answer what a test writes into them, by order, and count the questions."""

    needs_lengths = False

    def __init__(self) -> None:
        self.predicted: dict[int, float] = {}
        self.cached: dict[int, int] = {}
        self.num_lookups = 0

    def predict(self, seq: Sequence) -> float:
        return self.predicted.get(seq.order, 0.0)

    def cached_tokens(self, seq: Sequence) -> int:
        self.num_lookups += 1
        return self.cached.get(seq.order, 0)


def queue_named(name: str, table: Table | None = None, **options: Any) -> Queue:
    entry = REGISTRY.get("queue", name)
    build: Any = SimpleNamespace(predictor=table or Table(), allocator=table or Table())
    return entry.factory(from_mapping(entry.schema, options, "queue"), build)


def waiting(
    order: int, *, priority: int = 0, tenant: str | None = None, arrival_ns: int = 0, prompt: int = 4
) -> Sequence:
    """A sequence that nobody has admitted yet."""
    request = Request(
        id=f"r{order}",
        prompt_token_ids=(1,) * prompt,
        priority=priority,
        tenant=tenant,
        arrival_ns=arrival_ns,
    )
    return Sequence(request, choice=0, order=order, max_tokens_total=10**6, stop_ids=frozenset(), seed=0)


def preempt(seq: Sequence, num_output: int = 0) -> Sequence:
    """`seq` as it comes back to the queue after it ran."""
    seq.state = SequenceState.PREEMPTED
    seq.token_ids += [0] * num_output
    return seq


def names(seqs: Iterable[Sequence]) -> list[str]:
    return [seq.request.id for seq in seqs]


def plan_of(*seqs: Sequence, forks: int = 0) -> StepPlan:
    """A plan in which each of them samples once, and once for each of its forks."""
    plan = StepPlan(step=0, now_ns=0)
    plan.rows = [ScheduledRow(seq, 0, 1, samples=True, forks=(seq,) * forks) for seq in seqs]
    return plan


# ---- against naive models


class Naive:
    """Any order, found by looking at all who wait."""

    def __init__(self, key: Callable[[Sequence], Any]) -> None:
        self._key = key
        self.entries: list[tuple[Any, int, Sequence]] = []

    def push(self, seq: Sequence) -> None:
        self.entries.append((self._key(seq), seq.order, seq))

    def remove(self, seq: Sequence) -> None:
        self.entries = [entry for entry in self.entries if entry[2] is not seq]

    def admitted(self, seq: Sequence, num_tokens: int) -> None:
        """Of no interest."""

    def committed(self, plan: StepPlan) -> None:
        """Of no interest."""

    def in_order(self) -> list[Sequence]:
        return [seq for _, _, seq in sorted(self.entries, key=lambda entry: entry[:2])]


class NaiveFair(Naive):
    """The words of algorithm 2 of the VTC paper over one list."""

    def __init__(self, prompt_weight: float, output_weight: float) -> None:
        super().__init__(lambda seq: 0)
        self.w_p, self.w_q = prompt_weight, output_weight
        self.counters: dict[str | None, float] = {}
        self.last_left: str | None = None
        self.anybody_left = False

    def queued(self) -> set[str | None]:
        """Clients with a request that never ran."""
        return {s.request.tenant for _, _, s in self.entries if s.state is SequenceState.WAITING}

    def push(self, seq: Sequence) -> None:
        u, others = seq.request.tenant, self.queued()
        mine = self.counters.setdefault(u, 0.0)
        if seq.state is SequenceState.WAITING and u not in others:
            if others:
                self.counters[u] = max(mine, min(self.counters[i] for i in others))
            elif self.anybody_left:
                self.counters[u] = max(mine, self.counters[self.last_left])
        super().push(seq)

    def remove(self, seq: Sequence) -> None:
        before = self.queued()
        super().remove(seq)
        if before - self.queued():
            self.last_left, self.anybody_left = seq.request.tenant, True

    def admitted(self, seq: Sequence, num_tokens: int) -> None:
        self.counters[seq.request.tenant] += self.w_p * num_tokens

    def committed(self, plan: StepPlan) -> None:
        for row in plan.rows:
            self.counters[row.seq.request.tenant] += self.w_q * (1 + len(row.forks))

    def in_order(self) -> list[Sequence]:
        counters, rest, found = dict(self.counters), [seq for _, _, seq in self.entries], []
        while rest:
            seq = min(rest, key=lambda s: (counters[s.request.tenant], self._oldest(rest, s), s.order))
            rest.remove(seq)
            found.append(seq)
            if seq.state is SequenceState.WAITING:
                counters[seq.request.tenant] += self.w_p * seq.num_prompt_tokens
        return found

    def _oldest(self, rest: list[Sequence], seq: Sequence) -> int:
        return min(s.order for s in rest if s.request.tenant == seq.request.tenant)


class NaiveLongestPrefix(Naive):
    def __init__(self, table: Table, window: int, max_skips: int) -> None:
        super().__init__(lambda seq: 0)
        self.table, self.window, self.max_skips = table, window, max_skips
        self.skips: dict[Sequence, int] = {}

    def remove(self, seq: Sequence) -> None:
        super().remove(seq)
        self.skips.pop(seq, None)

    def admitted(self, seq: Sequence, num_tokens: int) -> None:
        self._pass_over(self._seen([s for _, _, s in self.entries]), seq, self.skips)

    def in_order(self) -> list[Sequence]:
        rest, skips, found = [seq for _, _, seq in self.entries], dict(self.skips), []
        while rest:
            seen = self._seen(rest)
            due = [s for s in seen if skips.get(s, 0) >= self.max_skips]
            seq = due[0] if due else min(seen, key=lambda s: (-self.table.cached.get(s.order, 0), s.order))
            rest.remove(seq)
            found.append(seq)
            if seq.state is SequenceState.WAITING:
                self._pass_over(self._seen([*rest, seq]), seq, skips)
        return found

    def _seen(self, rest: list[Sequence]) -> list[Sequence]:
        return sorted(rest, key=lambda s: s.order)[: self.window]

    def _pass_over(self, seen: list[Sequence], seq: Sequence, skips: dict[Sequence, int]) -> None:
        for other in seen:
            if other.order < seq.order:
                skips[other] = skips.get(other, 0) + 1


@dataclass
class Pair:
    """A queue, the model it must agree with, and the table that both ask."""

    queue: Queue
    model: Naive
    table: Table = field(default_factory=Table)


def pairs(name: str) -> Pair:
    table = Table()
    if name == "fcfs":
        return Pair(queue_named(name), Naive(lambda seq: 0), table)
    if name == "priority":
        return Pair(queue_named(name), Naive(lambda seq: seq.priority), table)
    if name == "priority, ageing":
        aged = queue_named("priority", ageing_s=2.5)
        return Pair(aged, Naive(lambda seq: seq.priority * 2.5 * S + seq.arrival_ns), table)
    if name == "shortest_job":
        left = Naive(lambda seq: table.predict(seq) - seq.num_output_tokens)
        return Pair(queue_named(name, table), left, table)
    if name == "fair":
        fair = queue_named(name, prompt_weight=1.5, output_weight=4.0)
        return Pair(fair, NaiveFair(1.5, 4.0), table)
    assert name == "longest_prefix", f"{name} needs a model"
    short = queue_named(name, table, window=3, max_skips=2)
    return Pair(short, NaiveLongestPrefix(table, window=3, max_skips=2), table)


def check_agreement(pair: Pair) -> None:
    expected = pair.model.in_order()
    assert names(pair.queue) == names(expected)
    assert len(pair.queue) == len(expected)
    if expected:
        assert pair.queue.peek() is expected[0]
        assert pair.queue.peek() is expected[0]
    else:
        with pytest.raises(IndexError):
            pair.queue.peek()


ACTS = ("arrive", "arrive", "admit", "leave", "preempt", "step")


def run_operations(pair: Pair, acts: list[str], chance: random.Random) -> None:
    both = (pair.queue, pair.model)
    here: list[Sequence] = []
    running: list[Sequence] = []
    now = 0
    for order, act in enumerate(acts):
        if act == "arrive":
            now += chance.randint(0, 3) * S
            here.append(arriving(pair.table, order, now, chance))
            for queue in both:
                queue.push(here[-1])
        elif act == "preempt" and running:
            here.append(preempt(running.pop(chance.randrange(len(running))), num_output=1))
            for queue in both:
                queue.push(here[-1])
        elif act in ("admit", "leave") and here:
            seq = pair.queue.peek() if act == "admit" else chance.choice(here)
            here.remove(seq)
            for queue in both:
                queue.remove(seq)
                if act == "admit" and seq.state is SequenceState.WAITING:
                    queue.admitted(seq, seq.num_prompt_tokens)
            running += [seq] if act == "admit" else []
        elif act == "step":
            plan = plan_of(*running, forks=chance.randint(0, 2))
            pair.table.cached = {seq.order: chance.randint(0, 3) for seq in here}
            for queue in both:
                queue.committed(plan)
        check_agreement(pair)


def arriving(table: Table, order: int, now: int, chance: random.Random) -> Sequence:
    table.predicted[order] = chance.randint(1, 5)
    return waiting(
        order,
        priority=chance.randint(-1, 2),
        tenant=chance.choice([None, "a", "b"]),
        arrival_ns=now,
        prompt=chance.randint(1, 6),
    )


@pytest.mark.parametrize("name", [*QUEUES, "priority, ageing"])
def test_a_queue_is_the_sorted_list_it_stands_for(name: str) -> None:
    @FAST
    @given(acts=st.lists(st.sampled_from(ACTS), max_size=40), seed=st.integers(0, 2**32))
    def agrees(acts: list[str], seed: int) -> None:
        run_operations(pairs(name), acts, random.Random(seed))

    agrees()


@pytest.mark.parametrize("name", QUEUES)
def test_who_is_not_there_cannot_be_removed(name: str) -> None:
    queue = queue_named(name)
    first, second = waiting(0), waiting(1)
    queue.push(first)
    with pytest.raises(ValueError):
        queue.remove(second)
    queue.remove(first)
    with pytest.raises(ValueError):
        queue.remove(first)
    assert len(queue) == 0


@pytest.mark.parametrize("name", QUEUES)
def test_a_preempted_sequence_keeps_its_place(name: str) -> None:
    """Of equals, who arrived first is first again when it comes back."""
    queue = queue_named(name)
    seqs = [waiting(i) for i in range(4)]
    for seq in seqs:
        queue.push(seq)
    first = queue.peek()
    queue.remove(first)
    queue.admitted(first, 4)
    queue.push(preempt(first))
    assert names(queue) == ["r0", "r1", "r2", "r3"]


# ---- what calls cost


class Counted:
    """A key that counts comparisons."""

    num_compared = 0

    def __init__(self, value: int) -> None:
        self.value = value

    def __lt__(self, other: Counted) -> bool:
        Counted.num_compared += 1
        return self.value < other.value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Counted) and self.value == other.value

    __hash__ = None  # pyright: ignore[reportAssignmentType]


class CountingQueue(OrderedQueue):
    def key(self, seq: Sequence) -> Counted:
        return Counted(seq.order * 7919 % 10_007)


def test_calls_of_ordered_queues_cost_log_n() -> None:
    """Comparisons, on average over 1,000 of each with 10,000 waiting; a sort would need 100,000 each."""
    queue = CountingQueue()
    seqs = [waiting(i) for i in range(11_000)]
    for seq in seqs[:10_000]:
        queue.push(seq)
    rounds, log_n = 1_000, math.log2(10_000)
    Counted.num_compared = 0
    for seq in seqs[10_000:]:
        queue.push(seq)
        queue.remove(queue.peek())
    assert Counted.num_compared / rounds < 3 * log_n
    Counted.num_compared = 0
    for seq in seqs[2_000:3_000]:
        if seq in queue._waiting._tickets:
            queue.remove(seq)
    assert Counted.num_compared / rounds < 3 * log_n
    Counted.num_compared = 0
    assert len(list(islice(queue, 8))) == 8
    assert Counted.num_compared < 100


def test_a_ranking_of_many_is_a_sorted_list() -> None:
    chance, ranking, keys = random.Random(0), Ranking[int](), {}
    for _ in range(5_000):
        item = chance.randrange(200)
        if chance.random() < 0.6:
            keys[item] = (chance.randrange(1_000), item)
            ranking.put(item, keys[item])
        else:
            assert ranking.discard(item) == (keys.pop(item, None) is not None)
        if keys:
            assert ranking.first() == min(keys, key=keys.__getitem__)
    assert list(ranking) == sorted(keys, key=keys.__getitem__)
    assert len(ranking) == len(keys) > 50


def test_entries_of_those_who_left_do_not_pile_up() -> None:
    queue = queue_named("priority")
    head = waiting(0)
    queue.push(head)
    for i in range(1, 1_000):
        queue.push(behind := waiting(i, priority=1))
        queue.remove(behind)
        assert len(queue._waiting._heap) <= 16  # pyright: ignore[reportAttributeAccessIssue]
    assert queue.peek() is head


def test_longest_prefix_looks_at_its_window_once_a_step() -> None:
    table = Table()
    queue = queue_named("longest_prefix", table, window=5)
    for i in range(100):
        queue.push(waiting(i))
    for _ in range(3):
        table.num_lookups = 0
        queue.committed(plan_of())
        for _ in range(10):
            queue.peek()
        assert table.num_lookups == 5
        for _ in range(4):  # admissions of one plan: each lets one more into the window
            queue.remove(queue.peek())
        queue.peek()
        assert table.num_lookups == 9


# ---- priority


def test_ageing_makes_seconds_of_waiting_count_like_a_level() -> None:
    """10 s per level: five levels are worth 50 s."""
    queue = queue_named("priority", ageing_s=10)
    old = waiting(0, priority=5, arrival_ns=0)
    queue.push(old)
    queue.push(urgent := waiting(1, priority=0, arrival_ns=49 * S))
    queue.push(level := waiting(2, priority=0, arrival_ns=50 * S))
    queue.push(late := waiting(3, priority=0, arrival_ns=51 * S))
    assert names(queue) == names([urgent, old, level, late])


# ---- shortest job


@pytest.mark.parametrize("name", REGISTRY.names("predictor"))
def test_shortest_job_needs_what_its_predictor_needs(name: str) -> None:
    engine = TestEngine(registry=REGISTRY, policies={"queue": "shortest_job", "predictor": name})
    policies = engine.engine.context.policies
    assert policies.queue.needs_lengths == policies.predictor.needs_lengths == (name == "oracle")


def serve_one_by_one(queue: str, asks: dict[str, dict[str, Any]], **policies: str) -> list[str]:
    """The order in which requests that arrive together end, where one runs at a time."""
    engine = TestEngine(
        registry=REGISTRY, policies={"queue": queue, **policies}, max_num_seqs=1, prefix_cache=NO_CACHE
    )
    for name, ask in asks.items():
        sampling = SamplingParams(max_tokens=ask.pop("max_tokens", None), temperature=0.0)
        request = {"prompt_token_ids": (1, 2, 3), "known_output_tokens": 3, **ask}
        engine.engine.add_request(Request(id=name, sampling=sampling, **request))
    engine.run()
    return names(engine.log.finished_sequences)


def test_shortest_job_serves_by_true_or_by_asked_length() -> None:
    asks = {
        "long": {"known_output_tokens": 9, "max_tokens": 20},
        "short": {"known_output_tokens": 2, "max_tokens": 30},
        "middle": {"known_output_tokens": 5, "max_tokens": 10},
        "same": {"known_output_tokens": 2, "max_tokens": 30},
    }

    def order(predictor: str) -> list[str]:
        again = {name: dict(ask) for name, ask in asks.items()}
        return serve_one_by_one("shortest_job", again, predictor=predictor)

    assert order("oracle") == ["short", "same", "middle", "long"]
    assert order("max_tokens") == ["middle", "long", "short", "same"]
    assert order("history") == ["middle", "long", "short", "same"]  # nothing ended yet: 256, or max_tokens


def test_priority_serves_the_most_urgent_first() -> None:
    asks = {"b": {"priority": 1}, "c": {"priority": 1}, "a": {"priority": 0}, "z": {"priority": -3}}
    assert serve_one_by_one("priority", asks) == ["z", "a", "b", "c"]


# ---- fair


def test_fair_takes_turns_by_what_was_served() -> None:
    """Prompts cost 1 a token, outputs 2: a is charged 4 at admission, b 1, so b has three more turns."""
    queue = queue_named("fair")
    for i in range(3):
        queue.push(waiting(i, tenant="a", prompt=4))
    for i in range(3, 9):
        queue.push(waiting(i, tenant="b", prompt=1))
    # a: 0, b: 0 -> r0 (a 4); b up to 4 in four turns -> then both at 4, and a's r1 is older.
    assert names(queue) == ["r0", "r3", "r4", "r5", "r6", "r1", "r7", "r8", "r2"]
    first = queue.peek()
    queue.remove(first)
    queue.admitted(first, 4)
    second = queue.peek()
    assert second.request.id == "r3"
    queue.remove(second)
    queue.admitted(second, 1)
    queue.committed(plan_of(second, second))  # b: 1 + 2 * 2 = 5, above the 4 of a
    assert queue.peek().request.id == "r1"
    queue.committed(plan_of(first, forks=2))  # a: 4 + 2 * 3 = 10
    assert queue.peek().request.id == "r4"


def served(queue: Queue, seq: Sequence, num_output: int) -> None:
    """`seq` is admitted, and generates so much."""
    queue.remove(seq)
    queue.admitted(seq, seq.num_prompt_tokens)
    for _ in range(num_output):
        queue.committed(plan_of(seq))


def test_fair_lifts_a_newcomer_to_the_least_of_those_who_wait() -> None:
    queue = queue_named("fair")
    a, b = waiting(0, tenant="a", prompt=10), waiting(1, tenant="b", prompt=30)
    for seq in (a, b, waiting(2, tenant="a"), waiting(3, tenant="b")):
        queue.push(seq)
    served(queue, a, 0)  # a: 10
    served(queue, b, 0)  # b: 30
    queue.push(waiting(4, tenant="new", prompt=1))  # lifted to 10: a's older request goes before it
    assert names(islice(queue, 2)) == ["r2", "r4"]


def test_fair_lifts_whoever_finds_an_empty_queue_to_the_last_who_left_it() -> None:
    queue = queue_named("fair")
    a = waiting(0, tenant="a", prompt=10)
    queue.push(a)
    served(queue, a, 5)  # a: 20, and nobody waits
    queue.push(b := waiting(1, tenant="b", prompt=1))  # lifted to 20, not 0
    queue.push(waiting(2, tenant="a"))  # a is not lifted: 20
    served(queue, b, 0)  # b: 21
    queue.push(waiting(3, tenant="b"))
    assert names(queue) == ["r2", "r3"]


def test_fair_gives_no_credit_for_time_without_queued_requests() -> None:
    """b runs one request for long, with none queued; what it asks then competes from where a is."""
    queue = queue_named("fair")
    b = waiting(0, tenant="b", prompt=1)
    queue.push(b)
    served(queue, b, 1)  # b: 3, and runs on
    for i in range(1, 5):
        queue.push(waiting(i, tenant="a", prompt=50))
    for _ in range(3):
        served(queue, queue.peek(), 0)  # a: 3 (lifted), 53, 103, 153
    for i in range(5, 8):
        queue.push(waiting(i, tenant="b", prompt=50))
    assert names(queue) == ["r4", "r5", "r6", "r7"]  # both at 153: with credit all of b would go first


def test_fair_does_not_take_a_preempted_sequence_for_an_arrival() -> None:
    """b comes back first, since it was served least, but neither it nor a newcomer gains by that."""
    queue = queue_named("fair")
    b = waiting(0, tenant="b", prompt=1)
    queue.push(b)
    served(queue, b, 0)  # b: 1, and runs
    queue.push(a := waiting(1, tenant="a", prompt=100))
    queue.push(waiting(2, tenant="a", prompt=1))
    served(queue, a, 0)  # a: 101
    queue.push(preempt(b, 1))
    assert names(queue) == ["r0", "r2"]
    queue.push(waiting(3, tenant="c", prompt=1))  # lifted to a, the only one with a queued request
    assert names(queue) == ["r0", "r2", "r3"]
    queue.push(waiting(4, tenant="b", prompt=1))  # so is b, whose only waiting sequence was no queued request
    assert names(queue) == ["r0", "r2", "r3", "r4"]  # all at 101, ties by arrival


def bound(limits: dict[str, Any], longest_prompt: int) -> float:
    """2 * max(w_p * L_input, w_q * M), the theorem of the VTC paper; w_p = 1, w_q = 2."""
    return 2 * max(1 * longest_prompt, 2 * limits["num_blocks"] * limits["block_size"])


def differences(engine: TestEngine, prompts: dict[str, int], first_step: int) -> list[float]:
    """Service of a minus that of b before `first_step`, and after every step from there on as long as both have
    requests queued."""
    entered: set[str] = set()
    difference, seen = 0.0, []
    for step in engine.log.steps:
        if step.step >= first_step:
            seen.append(difference)
            if not all(any(name[0] == t for name in prompts if name not in entered) for t in "ab"):
                break
        for name in step.scheduled:
            if name not in entered:
                entered.add(name)
                difference += prompts[name] * (1 if name[0] == "a" else -1)
        difference += sum(2 if name[0] == "a" else -2 for name in step.sampled)
    return seen or [0.0]


def run_two_tenants(
    queue: str, scheduler: str, limits: dict[str, Any], asks: list[tuple[str, int, int]], late: int = 0
) -> list[float]:
    """The `differences` where all that b asks for arrives before step `late`, and that of a before step 0."""
    engine = TestEngine(
        registry=REGISTRY,
        policies={"queue": queue, "scheduler": scheduler, "admission": "reserve_worst_case"},
        prefix_cache=NO_CACHE,
        **limits,
    )
    prompts = {f"{tenant}{i}": prompt for i, (tenant, prompt, _) in enumerate(asks)}
    for now, tenant in ((0, "a"), (late, "b")):
        for _ in range(now):
            engine.step()
        for i, (whose, prompt, output) in enumerate(asks):
            if whose == tenant:
                engine.add(f"{whose}{i}", [(i + j) % 251 for j in range(prompt)], output, tenant=whose)
    engine.run()
    assert engine.log.num_preemptions == 0
    return differences(engine, prompts, late)


def unlike_asks(chance: random.Random) -> list[tuple[str, int, int]]:
    """60 requests each of a and of b, who differ in what they ask for."""
    longest = {tenant: (chance.randint(1, 12), chance.randint(1, 12)) for tenant in "ab"}
    tenants = ["a"] * 60 + ["b"] * 60
    return [(t, chance.randint(1, longest[t][0]), chance.randint(1, longest[t][1])) for t in tenants]


@pytest.mark.parametrize("scheduler", ["chunked", "continuous", "static"])
def test_fair_keeps_the_published_bound(scheduler: str) -> None:
    @settings(max_examples=12, deadline=None, derandomize=True, database=None)
    @given(
        seed=st.integers(0, 2**32),
        num_blocks=st.integers(12, 20),
        seats=st.integers(1, 8),
        late=st.sampled_from([0, 30, 60]),
    )
    def keeps(seed, num_blocks, seats, late) -> None:
        limits = {
            "num_blocks": num_blocks,
            "block_size": 2,
            "max_num_seqs": seats,
            "max_model_len": 24,
            "max_num_batched_tokens": 24,
        }
        seen = run_two_tenants("fair", scheduler, limits, unlike_asks(random.Random(seed)), late)
        assert max(seen) - min(seen) <= bound(limits, longest_prompt=12)

    keeps()


def test_first_come_first_served_breaks_that_bound() -> None:
    limits = {"num_blocks": 24, "block_size": 1, "max_num_seqs": 8, "max_model_len": 24}
    asks = [(tenant, 4, 4) for tenant in "ab" for _ in range(40)]
    fcfs = run_two_tenants("fcfs", "chunked", limits, asks)
    # Three fit at a time, so all but the last of a are served before none of a is queued, and b has got nothing.
    assert max(fcfs) - min(fcfs) == 39 * (4 + 2 * 4)
    assert max(fcfs) - min(fcfs) > bound(limits, longest_prompt=4)
    fair = run_two_tenants("fair", "chunked", limits, asks)
    assert max(fair) - min(fair) <= bound(limits, longest_prompt=4)


# ---- longest prefix


def prefix_engine(**options: Any) -> TestEngine:
    return TestEngine(
        registry=REGISTRY,
        policies={"queue": "longest_prefix"},
        settings={"queue": options},
        block_size=4,
        max_num_seqs=1,
        prefix_cache=PrefixCacheConfig(mode="on"),
    )


COMMON = list(range(1, 13))


def test_longest_prefix_first_and_ties_by_arrival() -> None:
    engine = prefix_engine()
    engine.add("base", COMMON, 1)
    engine.run()
    engine.add("none", [99] * 9, 1)
    engine.add("one", [*COMMON[:4], 99, 98, 97, 96, 95], 1)
    engine.add("two", [*COMMON[:8], 99, 98], 1)
    engine.add("two again", [*COMMON[:8], 97, 96], 1)
    engine.run()
    ended = engine.log.finished_sequences[1:]
    assert names(ended) == ["two", "two again", "one", "none"]
    assert [seq.num_cached_tokens for seq in ended] == [8, 8, 4, 0]


@pytest.mark.parametrize(("window", "order"), [(2, ["other", "last", "hit"]), (3, ["hit", "other", "last"])])
def test_longest_prefix_looks_no_further_than_its_window(window: int, order: list[str]) -> None:
    engine = prefix_engine(window=window)
    engine.add("base", COMMON, 1)
    engine.run()
    engine.add("other", [99] * 9, 1)
    engine.add("last", [98] * 9, 1)
    engine.add("hit", COMMON, 1)
    engine.run()
    # With a window of 2 the hit is seen when one of the others has gone, so it is second.
    assert names(engine.log.finished_sequences[1:]) == (order if window == 3 else ["other", "hit", "last"])


def test_nobody_is_passed_over_for_ever() -> None:
    engine = prefix_engine(max_skips=3)
    engine.add("base", COMMON, 1)
    engine.run()
    engine.add("poor", [99] * 9, 1)
    for i in range(6):
        engine.add(f"rich{i}", [*COMMON, i], 1)
    engine.run()
    assert names(engine.log.finished_sequences)[1:] == [
        "rich0", "rich1", "rich2", "poor", "rich3", "rich4", "rich5"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "options", [{"prefix_cache": NO_CACHE}, {"policies": {"allocator": "contiguous_max"}}]
)
def test_longest_prefix_without_a_prefix_cache_is_refused(options: dict[str, Any]) -> None:
    policies = {"queue": "longest_prefix", **options.pop("policies", {})}
    with pytest.raises(ConfigError, match=r"queue=longest_prefix: orders by what is cached"):
        TestEngine(registry=REGISTRY, policies=policies, **options)


def test_what_is_on_the_host_counts_like_what_is_cached() -> None:
    table = Table()
    queue = queue_named("longest_prefix", table)
    table.cached = {0: 8}
    queue.push(waiting(0, prompt=20))
    swapped = waiting(1, prompt=20)
    swapped.state, swapped.num_computed_tokens = SequenceState.SWAPPED, 12
    queue.push(swapped)
    assert names(queue) == ["r1", "r0"]


def test_who_comes_back_has_not_been_passed_over() -> None:
    queue = queue_named("longest_prefix", table := Table(), max_skips=1)
    first, second = waiting(0), waiting(1)
    table.cached = {1: 4, 2: 4}
    queue.push(first)
    queue.push(second)
    for seq in (second, first):  # the second goes first, and then the other, who was passed over once
        queue.remove(seq)
        queue.admitted(seq, 4)
    queue.push(preempt(first))
    queue.push(waiting(2))
    assert names(queue) == ["r2", "r0"]


# ---- settings, and every queue in an engine


@pytest.mark.parametrize(
    ("name", "options", "key"),
    [
        ("priority", {"ageing_s": 0.0}, "queue.ageing_s"),
        ("priority", {"ageing_s": -1.0}, "queue.ageing_s"),
        ("priority", {"ageing_s": math.inf}, "queue.ageing_s"),
        ("fair", {"prompt_weight": 0.0}, "queue.prompt_weight"),
        ("fair", {"output_weight": -2.0}, "queue.output_weight"),
        ("longest_prefix", {"window": 0}, "queue.window"),
        ("longest_prefix", {"max_skips": 0}, "queue.max_skips"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_key(name: str, options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as error:
        queue_named(name, **options)
    assert error.value.key == key


@pytest.mark.parametrize("scheduler", ["chunked", "continuous", "static"])
@pytest.mark.parametrize("name", QUEUES)
def test_outputs_under_preemption_do_not_depend_on_the_queue(name: str, scheduler: str) -> None:
    engine = TestEngine(
        registry=REGISTRY, block_size=4, num_blocks=6, policies={"queue": name, "scheduler": scheduler}
    )
    prompts = {f"r{i}": list(range(10 * i + 1, 10 * i + 9)) for i in range(5)}
    for i, (request_id, prompt) in enumerate(prompts.items()):
        engine.add(request_id, prompt, 8, tenant=f"t{i % 2}")
    engine.run(max_steps=120)
    assert engine.outputs == {name: checksum_output(prompt, 8) for name, prompt in prompts.items()}
    assert engine.log.num_preemptions > 0
    assert len(engine.engine.context.waiting) == 0
