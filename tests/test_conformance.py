"""The conformance suite passes sound policies, and says of a broken one of each kind what is wrong with it."""

from __future__ import annotations

import random
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase, settings

from kvengine.core.errors import PolicyError
from kvengine.core.reasons import Reason, Refusal
from kvengine.core.sequence import Sequence
from kvengine.kv.free_list_arena import FreeListArena
from kvengine.kv.prefix_index import PrefixIndex
from kvengine.policies import Admission, Eviction, Mechanism, Predictor, Preemption, Victim
from kvengine.registry import BrokenPlugin, Entry, Registry, discover, own_distribution
from kvengine.testing import conformance
from kvengine.testing import conformance_suite as suite
from kvengine_kernels import reference
from kvengine_plugins.admissions.whole_prompt import WholePromptAdmission
from kvengine_plugins.allocators.contiguous import ContiguousAllocator, reservation
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


class Peeks(ChunkedScheduler):
    """Looks at everybody who waits, in every step."""

    def schedule(self, view) -> None:
        list(view.waiting)
        super().schedule(view)


class Sorts(FcfsQueue):
    def peek(self) -> Sequence:
        return min(self._waiting, key=lambda seq: seq.order)


class Twists(FcfsQueue):
    """Iterates in another order than that of its heads."""

    def __iter__(self):
        return reversed(self._waiting)


class Swallows(FcfsQueue):
    """Does not say that nobody waits."""

    def peek(self) -> Sequence:
        return self._waiting[0] if self._waiting else None  # pyright: ignore[reportReturnType]


class Tolerates(FcfsQueue):
    """Does not say that somebody does not wait."""

    def remove(self, seq: Sequence) -> None:
        if seq in self._waiting:
            super().remove(seq)


class Miscounts(PagedAllocator):
    def blocks_needed(self, seq: Sequence, num_tokens: int) -> int:
        return super().blocks_needed(seq, num_tokens) + 1


class Hides(PagedAllocator):
    """Claims one free block less than there are."""

    @property
    def num_free_blocks(self) -> int:
        return max(0, super().num_free_blocks - (self.num_cached_blocks > 1))


class TakesAllTheSame(ContiguousAllocator):
    """Notes the slots of whom it refuses."""

    def allocate(self, seq: Sequence, num_tokens: int) -> Refusal | None:
        refusal = super().allocate(seq, num_tokens)
        if refusal is not None:
            seq.block_table.num_slots = num_tokens
        return refusal

    def check_integrity(self, sequences, *, thorough: bool = True) -> None:
        """Sees nothing, as an author's own check may."""


class Despairs(Predictor):
    def predict(self, seq: Sequence) -> float:
        return float("nan")


DETERMINISM = suite.test_it_is_deterministic
SERVES = suite.test_it_serves_every_workload
KEEPS = suite.test_it_keeps_nothing_of_what_has_ended
COSTS = suite.test_a_step_costs_the_same_however_many_wait
ORDER = suite.test_it_keeps_the_order_and_everybody_in_it
ACCOUNTS = suite.test_it_accounts_for_every_block
PREDICTS = suite.test_it_predicts_numbers
YAML = suite.test_its_yaml_holds_its_settings
ATTENDS = suite.test_it_computes_what_the_reference_computes


def paged(cls: type[PagedAllocator]) -> Callable[[Any, Any], PagedAllocator]:
    return lambda config, build: cls(build.kv, PrefixIndex(build.kv.block_size, build.eviction))


def regions(config: Any, build: Any) -> TakesAllTheSame:
    arena = FreeListArena(build.kv.num_blocks, "first")
    reserve = reservation("max", build.limits.max_model_len)
    return TakesAllTheSame("broken", arena, build.kv.block_size, reserve)


BROKEN = [
    ("scheduler", lambda config, build: Forgets(), SERVES, "starves"),
    ("scheduler", lambda config, build: Overspends(), SERVES, "exceeds the token budget"),
    ("scheduler", lambda config, build: Tosses(), DETERMINISM, "is not deterministic"),
    ("scheduler", lambda config, build: Hoards(), KEEPS, "leaks: 200 of 200 sequences that have ended"),
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
    ("victim", lambda config, build: Remembers(), KEEPS, r"leaks: \d+ of 200 sequences"),
    ("preemption", lambda config, build: Mumbles(), SERVES, "breaks its contract: .* answered 'perhaps'"),
    ("preemption", lambda config, build: Either(), DETERMINISM, "is not deterministic"),
    ("eviction", lambda config, build: Incomparable(), SERVES, "breaks its contract: .* cannot be compared"),
    ("eviction", lambda config, build: Dice(), DETERMINISM, "is not deterministic"),
    (
        "allocator",
        paged(Leaks),
        SERVES,
        "breaks an invariant: (blocks counted more often than held|a block that nobody holds)",
    ),
    (
        "allocator",
        paged(GivesTwice),
        SERVES,
        "breaks an invariant: (blocks counted more often than held|a block that nobody holds)",
    ),
    ("predictor", lambda config, build: Guesses(), DETERMINISM, "is not deterministic"),
    ("predictor", lambda config, build: Learns(), KEEPS, "leaks: 200"),
    ("scheduler", lambda config, build: Peeks(), COSTS, r"visits everybody who waits: .* \d+ with 1024"),
    ("queue", lambda config, build: Sorts(), COSTS, r"visits everybody who waits: .* \d+ with 1024"),
    ("queue", lambda config, build: Twists(), ORDER, "is not led by its head"),
    ("queue", lambda config, build: Loses(), ORDER, r"counts \d where \d wait"),
    ("queue", lambda config, build: Swallows(), ORDER, "gives no IndexError for peek of an empty queue"),
    ("queue", lambda config, build: Tolerates(), ORDER, "gives no ValueError for remove of who is not there"),
    ("allocator", paged(Miscounts), ACCOUNTS, r"counts wrong: blocks_needed said 2, allocate took 1"),
    ("allocator", paged(Hides), ACCOUNTS, r"counts \d+ free blocks, the tables leave \d+"),
    ("allocator", regions, ACCOUNTS, "changes something though it refuses"),
    ("predictor", lambda config, build: Despairs(), PREDICTS, "predicts nan, which is no finite number"),
    (
        "victim",
        lambda config, build: LatestArrivalVictim(),
        YAML,
        "cannot|breaks its contract: .* brings no YAML",
    ),
]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch):
    """Register a plug-in as `broken`, for the suite; 40 workloads suffice to find a gross fault."""

    def put(kind: str, factory: Callable[[Any, Any], Any], examples: int = 40) -> Entry:
        registry = discover()
        registry.add(kind, "broken", factory, summary="of this test")
        monkeypatch.setattr(suite, "registry", lambda: registry)
        monkeypatch.setattr(
            suite, "MANY", settings(suite.MANY, max_examples=examples, phases=[Phase.generate])
        )
        return registry.get(kind, "broken")

    return put


@pytest.mark.parametrize(
    ("kind", "factory", "check", "said"),
    BROKEN,
    ids=[f"{kind}-{said.split(' ')[0]}-{i}" for i, (kind, _, _, said) in enumerate(BROKEN)],
)
def test_a_broken_policy_is_caught_and_its_fault_named(kind, factory, check, said, install) -> None:
    with pytest.raises(pytest.fail.Exception, match=f"{kind}=broken {said}"):
        check(install(kind, factory))


def test_an_error_in_a_policy_is_shown_with_its_line(install) -> None:
    with pytest.raises(pytest.fail.Exception, match=r'test_conformance.py:\d+: raise KeyError\("limit"\)'):
        SERVES(install("admission", lambda config, build: Raises()))


def test_what_is_printed_is_a_program_that_shows_the_fault(install, monkeypatch) -> None:
    plugin = install("queue", lambda config, build: Loses())
    with pytest.raises(pytest.fail.Exception) as failed:
        SERVES(plugin)
    program = textwrap.dedent(str(failed.value).partition("A small workload that shows it:\n\n")[2])
    monkeypatch.setattr("kvengine.testing.engines.discover", suite.registry)
    with pytest.raises(PolicyError, match=r"queue=broken \(Loses\), step \d+: holds"):
        exec(program, {})


def test_a_policy_is_checked_beside_what_it_goes_with(monkeypatch) -> None:
    never = discover().get("preemption", "never")
    with pytest.raises(
        pytest.fail.Exception, match=r"admission=reserve_worst_case.* \(--kvengine-with KIND=NAME"
    ):
        SERVES(never)
    monkeypatch.setattr(suite, "MANY", settings(suite.MANY, max_examples=10))
    monkeypatch.setattr(suite, "BESIDE", {})
    suite.configure(None, {"admission": "reserve_worst_case", "scheduler": "continuous"})
    SERVES(never)
    assert suite.schedulers(never) == ("continuous",)


# ---- attention


class Altered:
    """The reference with what a backend is likely to get wrong."""

    plan = staticmethod(reference.plan)

    def __init__(self, change: Callable[..., Any]) -> None:
        self._change = change

    def backend(self) -> Altered:
        return self

    def run(self, *args: Any, **options: Any) -> Any:
        return self._change(reference.run, *args, **options)


def without(option: str) -> Callable[..., Any]:
    return lambda run, *args, **options: run(*args, **{**options, option: None})


def wide_window(run, *args, sliding_window=None, **options):
    return run(*args, sliding_window=sliding_window and sliding_window + 1, **options)


def own_scale(run, plan, q, k, v, *, scale, **options):
    return run(plan, q, k, v, scale=q.shape[-1] ** -0.5, **options)


def heads_in_turn(run, plan, q, k, v, **options):
    """Gives query head h the KV head h mod Hkv, not h div G."""
    groups = q.shape[1] // k.shape[1]
    turned = q.unflatten(1, (groups, k.shape[1])).transpose(1, 2).flatten(1, 2)
    out = run(plan, turned, k, v, **{**options, "sinks": None})
    return out.unflatten(1, (k.shape[1], groups)).transpose(1, 2).flatten(1, 2)


def whole_blocks(run, plan, q, k, v, **options):
    """Adds to every output 0 times what lies in the pool beyond what was written."""
    return run(plan, q, k, v, **options) + 0 * v.float().sum()


def garbage_for_padding(run, plan, q, k, v, **options):
    out = run(plan, q, k, v, **options)
    out[plan.meta.num_tokens :] = 1
    return out


def in_half(run, plan, q, k, v, **options):
    return run(plan, q, k, v, **options).bfloat16()


def scales_q_in_place(run, plan, q, k, v, *, scale, **options):
    return run(plan, q.mul_(scale), k, v, scale=1.0, **options)


class RemembersOptions(Altered):
    """Takes the options of a step's first layer for all of them."""

    def plan(self, meta):  # pyright: ignore[reportIncompatibleVariableOverride]
        self._options = {}
        return reference.plan(meta)

    def run(self, *args: Any, **options: Any) -> Any:
        self._options = self._options or options
        return reference.run(*args, **self._options)


WRONG_ATTENTION = {
    "window ignored": (Altered(without("sliding_window")), "computes something else with .*sliding_window"),
    "window one too wide": (Altered(wide_window), "computes something else with .*sliding_window"),
    "softcap ignored": (Altered(without("softcap")), "computes something else with .*softcap"),
    "sinks ignored": (Altered(without("sinks")), "computes something else with .*sinks"),
    "scale of its own": (Altered(own_scale), "computes something else"),
    "KV heads in turn": (Altered(heads_in_turn), "computes something else"),
    "reads what nobody wrote": (
        Altered(whole_blocks),
        "computes something for padding|computes what is not finite",
    ),
    "padding not zero": (Altered(garbage_for_padding), "computes something for padding tokens"),
    "another dtype": (Altered(in_half), "computes torch.bfloat16 from q in torch.float32"),
    "q changed in place": (Altered(scales_q_in_place), "changes q|computes something else"),
    "options of the first layer": (RemembersOptions(without("x")), "computes something else"),
}


@pytest.mark.parametrize("wrong", WRONG_ATTENTION)
def test_a_wrong_attention_backend_is_caught(wrong: str, install) -> None:
    backend, said = WRONG_ATTENTION[wrong]
    with pytest.raises(pytest.fail.Exception, match=f"attention=broken ({said})"):
        ATTENDS(install("attention", lambda config, build: backend))


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("scheduler=contineous", "did you mean 'continuous'?"),
        ("tests", "KIND=NAME, where KIND is one of allocator, eviction, .*; paths go before it"),
        ("executor=null", "KIND is one of"),
    ],
)
def test_a_mistyped_option_is_explained(word: str, said: str) -> None:
    with pytest.raises(pytest.UsageError, match=f"--kvengine-conformance {word}: .*{said}"):
        conformance.chosen([word])


def test_without_a_name_it_is_all_that_do_not_come_with_kvengine(monkeypatch) -> None:
    registry = discover()
    ours = [entry for entry in registry if entry.distribution == own_distribution()]
    monkeypatch.setattr("kvengine.registry.discover", lambda: registry)
    registry.distribution = "another 1.0"
    registry.add("victim", "novel", lambda config, build: None, summary="")
    found = [(entry.kind, entry.name) for entry in conformance.chosen([""])]
    assert ("victim", "novel") in found
    assert not {(entry.kind, entry.name) for entry in ours} & set(found)


def test_where_none_is_installed_it_says_so_and_what_did_not_load(monkeypatch) -> None:
    registry = Registry()
    registry.broken.append(BrokenPlugin("mine", "kvengine-mine 0.1.0", "ImportError: torhc"))
    monkeypatch.setattr("kvengine.registry.discover", lambda: registry)
    with pytest.raises(pytest.UsageError, match=r"no plug-in is installed .* 1 plug-ins did not load"):
        conformance.chosen([""])
