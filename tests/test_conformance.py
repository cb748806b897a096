"""The conformance suite passes sound policies, and says of a broken one of each kind what is wrong with it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.errors import Flaky

from kvengine.core.reasons import Reason, Refusal
from kvengine.core.sequence import Sequence
from kvengine.kv.prefix_index import PrefixIndex
from kvengine.policies import Admission, Eviction, Mechanism, Predictor, Preemption, Victim
from kvengine.registry import discover
from kvengine.testing import conformance_suite as suite
from kvengine_plugins.admissions.whole_prompt import WholePromptAdmission
from kvengine_plugins.allocators.paged import PagedAllocator
from kvengine_plugins.queues.fcfs import FcfsQueue
from kvengine_plugins.schedulers.chunked import ChunkedScheduler
from kvengine_plugins.victims.latest_arrival import LatestArrivalVictim

CHANCE = random.Random()
"""Shared by all that are not deterministic, so that two runs differ."""


class Forgets(ChunkedScheduler):
    """Lets nobody in who came third or later."""

    def __init__(self) -> None:
        self._admitted = 0

    def schedule(self, view) -> None:
        view.schedule_decodes()
        for seq in view.prefilling:
            view.schedule(seq, view.token_budget_left)
        for seq in view.heads:
            if self._admitted < 2 and view.admit(seq, view.token_budget_left):
                self._admitted += 1


class Overspends(ChunkedScheduler):
    def schedule(self, view) -> None:
        view.token_budget_left += 3
        super().schedule(view)


class Tosses(ChunkedScheduler):
    def schedule(self, view) -> None:
        if CHANCE.random() < 0.5 or not any(view.running):
            super().schedule(view)
        else:
            view.schedule_decodes()
            if view.token_budget_left != view.limits.max_num_batched_tokens:
                return
            super().schedule(view)


class Hoards(ChunkedScheduler):
    """Remembers everybody."""

    def __init__(self) -> None:
        self._seen: list[Sequence] = []

    def waits(self, seq: Sequence, now: int) -> None:
        self._seen.append(seq)


class Loses(FcfsQueue):
    """Drops every third that comes."""

    def __init__(self) -> None:
        super().__init__()
        self._count = 0

    def push(self, seq: Sequence) -> None:
        self._count += 1
        if self._count % 3:
            super().push(seq)


class Shuffles(FcfsQueue):
    def push(self, seq: Sequence) -> None:
        self._waiting.insert(CHANCE.randint(0, len(self._waiting)), seq)


class Keeps(FcfsQueue):
    def __init__(self) -> None:
        super().__init__()
        self._gone: list[Sequence] = []

    def remove(self, seq: Sequence) -> None:
        super().remove(seq)
        self._gone.append(seq)


class Bars(WholePromptAdmission):
    def refuses(self, seq: Sequence, view) -> Refusal | None:
        return Refusal(Reason.NO_BLOCKS) if seq.num_prompt_tokens > 3 else super().refuses(seq, view)


class Moody(WholePromptAdmission):
    def refuses(self, seq: Sequence, view) -> Refusal | None:
        if any(view.running) and CHANCE.random() < 0.5:
            return Refusal(Reason.POLICY, "not now")
        return super().refuses(seq, view)


class Invents(Victim):
    def choose(self, candidates: list[Sequence], needy: Sequence) -> Sequence:
        return None  # pyright: ignore[reportReturnType]


class Anybody(Victim):
    def choose(self, candidates: list[Sequence], needy: Sequence) -> Sequence:
        return CHANCE.choice(candidates)


class Remembers(LatestArrivalVictim):
    def __init__(self) -> None:
        self._chosen: list[Sequence] = []

    def choose(self, candidates: list[Sequence], needy: Sequence) -> Sequence:
        self._chosen += candidates
        return super().choose(candidates, needy)


class Mumbles(Preemption):
    def mechanism(self, victim: Sequence) -> Mechanism:
        return "perhaps"  # pyright: ignore[reportReturnType]


class Either(Preemption):
    def mechanism(self, victim: Sequence) -> Mechanism:
        return CHANCE.choice(list(Mechanism))


class Incomparable(Eviction):
    def rank(self, block) -> Any:
        return object()


class Dice(Eviction):
    def rank(self, block) -> Any:
        return CHANCE.random()


class Leaks(PagedAllocator):
    """Forgets the last block of whoever has three and more."""

    def free(self, seq: Sequence) -> None:
        if len(seq.block_table.blocks) > 2:
            seq.block_table.blocks.pop()
        super().free(seq)


class GivesTwice(PagedAllocator):
    """Gives the block that it gave before, where a table gets longer by one."""

    def allocate(self, seq: Sequence, num_tokens: int) -> Refusal | None:
        before = len(seq.block_table.blocks)
        refusal = super().allocate(seq, num_tokens)
        if refusal is None and 0 < before < len(seq.block_table.blocks):
            seq.block_table.blocks[-1] = seq.block_table.blocks[0]
        return refusal


class Guesses(Predictor):
    def predict(self, seq: Sequence) -> float:
        return CHANCE.random()


class Learns(Predictor):
    def __init__(self) -> None:
        self._seen: list[Sequence] = []

    def predict(self, seq: Sequence) -> float:
        return 1.0

    def finished(self, seq: Sequence) -> None:
        self._seen.append(seq)


class Raises(Admission):
    def refuses(self, seq: Sequence, view) -> Refusal | None:
        raise KeyError("limit")


DETERMINISM = suite.test_it_is_deterministic
SERVES = suite.test_it_serves_every_workload
KEEPS = suite.test_it_keeps_nothing_of_what_has_ended


def paged(cls: type[PagedAllocator]) -> Callable[[Any, Any], PagedAllocator]:
    return lambda config, build: cls(build.kv, PrefixIndex(build.kv.block_size, build.eviction))


BROKEN = [
    ("scheduler", lambda config, build: Forgets(), SERVES, "starves"),
    ("scheduler", lambda config, build: Overspends(), SERVES, "exceeds the token budget"),
    ("scheduler", lambda config, build: Tosses(), DETERMINISM, "is not deterministic"),
    ("scheduler", lambda config, build: Hoards(), KEEPS, "leaks: 200 sequences that have ended"),
    (
        "queue",
        lambda config, build: Loses(),
        SERVES,
        r"breaks its contract: queue=broken \(Loses\), step \d+: holds",
    ),
    ("queue", lambda config, build: Shuffles(), DETERMINISM, "is not deterministic"),
    ("queue", lambda config, build: Keeps(), KEEPS, "leaks: 200"),
    ("admission", lambda config, build: Bars(), SERVES, "starves"),
    ("admission", lambda config, build: Moody(), DETERMINISM, "is not deterministic"),
    ("admission", lambda config, build: Raises(), SERVES, "breaks its contract: .* raised KeyError"),
    ("victim", lambda config, build: Invents(), SERVES, "breaks its contract: .* chose None"),
    ("victim", lambda config, build: Anybody(), DETERMINISM, "is not deterministic"),
    ("victim", lambda config, build: Remembers(), KEEPS, r"leaks: \d+ sequences that have ended"),
    ("preemption", lambda config, build: Mumbles(), SERVES, "breaks its contract: .* answered 'perhaps'"),
    ("preemption", lambda config, build: Either(), DETERMINISM, "is not deterministic"),
    ("eviction", lambda config, build: Incomparable(), SERVES, "breaks its contract: .* cannot be compared"),
    ("eviction", lambda config, build: Dice(), DETERMINISM, "is not deterministic"),
    ("allocator", paged(Leaks), SERVES, "breaks an invariant: blocks counted more often than held"),
    ("allocator", paged(GivesTwice), SERVES, "breaks an invariant: blocks counted more often than held"),
    ("predictor", lambda config, build: Guesses(), DETERMINISM, "is not deterministic"),
    ("predictor", lambda config, build: Learns(), KEEPS, "leaks: 200"),
]


@pytest.mark.parametrize(
    ("kind", "factory", "check", "said"),
    BROKEN,
    ids=[f"{kind}-{said.split(' ')[0]}-{i}" for i, (kind, _, _, said) in enumerate(BROKEN)],
)
def test_a_broken_policy_is_caught_and_its_fault_named(kind, factory, check, said, monkeypatch) -> None:
    def with_broken():
        registry = discover()
        registry.add(kind, "broken", factory, summary="of this test")
        return registry

    monkeypatch.setattr("kvengine.testing.engines.discover", with_broken)
    few = settings(suite.MANY, max_examples=40, phases=[Phase.generate])  # not shrunk: any example will do
    monkeypatch.setattr(suite, "MANY", few)
    with pytest.raises((AssertionError, Flaky), match=f"{kind}=broken {said}"):
        check(with_broken().get(kind, "broken"))
