"""Random loads over everything that memory can do at once: forks, shared prefixes, swaps, offload, windows, aborts.

Whatever happens, outputs are those of each request alone, every block is accounted for after every step, and
nothing is left at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from memory_support import assert_idle, check_contents, paged_with, registry_with

from kvengine.core.errors import RequestError
from kvengine.core.shapes import PrefixCacheConfig
from kvengine.policies import SchedulingView
from kvengine.testing.engines import TestEngine
from kvengine.testing.sources import ChecksumSource, checksum_output
from kvengine_plugins.schedulers.chunked import ChunkedScheduler

FAST = settings(
    max_examples=120, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)


class AdmitsFirst(ChunkedScheduler):
    """Admits before it lets anybody grow, so that whoever was just let in may have to leave in the same plan."""

    def schedule(self, view: SchedulingView) -> None:
        while len(view.waiting) and view.admit(view.waiting.peek(), view.token_budget_left):
            pass
        for seq in view.running:
            view.schedule(seq, view.token_budget_left)


REGISTRY = registry_with(allocator=paged_with(lambda data: sum(data) % 5))
REGISTRY.add("scheduler", "admits_first", lambda config, build: AdmitsFirst(), summary="for tests")
Mode = Literal["auto", "on", "off"]
MODES: list[Mode] = ["auto", "on", "off"]
SCHEDULERS = ("chunked", "continuous", "static", "admits_first")


@dataclass(frozen=True)
class Ask:
    """What happens before a step: a request arrives, a live one is branched, or one is aborted."""

    kind: str
    step: int
    length: int
    new: int
    n: int
    stem: int
    salt: str | None


asks = st.builds(
    Ask,
    kind=st.sampled_from(["add", "add", "add", "add", "fork", "fork", "abort"]),
    step=st.integers(0, 8),
    length=st.integers(2, 14),
    new=st.integers(3, 12),
    n=st.sampled_from([1, 1, 1, 2, 3]),
    stem=st.integers(0, 2),
    salt=st.sampled_from([None, None, None, "s"]),
)


@st.composite
def setups(draw: st.DrawFn) -> dict[str, Any]:
    block_size = draw(st.integers(1, 4))
    window = draw(st.sampled_from([None, None, None, 1, 3, 6]))
    host = draw(st.sampled_from([0, 0, 1, 3, 8, 40]))
    mode: Mode = "auto" if window else draw(st.sampled_from(MODES))
    cache = PrefixCacheConfig(mode=mode, offload=bool(host) and draw(st.booleans()))
    colliding = window is None and mode == "auto" and not cache.offload and draw(st.booleans())
    return {
        "block_size": block_size,
        "num_blocks": -(-26 // block_size) + draw(st.integers(0, 6)),
        "max_model_len": 26,
        "max_num_seqs": draw(st.integers(1, 6)),
        "max_num_batched_tokens": 40,
        "num_host_blocks": host,
        "sliding_window": window,
        "prefix_cache": cache,
        "policies": {
            "allocator": "test" if colliding else "paged",
            "preemption": draw(st.sampled_from(["recompute", "swap" if host else "hopeful", "either"])),
            "eviction": draw(st.sampled_from(["lru", "lfu", "fifo"])),
        },
    }


def prompt_of(ask: Ask, ordinal: int) -> list[int]:
    """Prompts of one stem begin alike, for as long as the stem is."""
    stem = [ask.stem + 1] * (3 * ask.stem + 4)
    return (stem + [(5 * ordinal + i) % 251 for i in range(14)])[: ask.length]


class Load:
    """Drives an engine through its asks, and knows what every sequence must say."""

    def __init__(self, engine: TestEngine, source: ChecksumSource) -> None:
        self.engine = engine
        self.source = source
        self.prompts: dict[str, list[int]] = {}
        self.aborted: dict[str, int] = {}

    def act(self, ask: Ask, ordinal: int) -> None:
        name, engine = f"r{ordinal}", self.engine
        live = sorted({seq.request.id for seq in engine.engine.live_sequences()})
        prompt = prompt_of(ask, ordinal)
        if ask.kind == "add":
            engine.add(name, prompt, ask.new, n=ask.n, cache_salt=ask.salt)
        elif not live:
            return
        elif ask.kind == "abort":
            self.abort(live[ask.stem % len(live)])
            return
        else:
            parent = live[ask.stem % len(live)]
            prompt = prompt[: ask.length // 4]
            source = next(seq for seq in engine.engine.live_sequences() if seq.request.id == parent)
            if source.choice or source.finish_reason is not None:
                return
            prompt = [*source.token_ids, *prompt]
            try:
                engine.fork(name, parent, prompt[len(source.token_ids) :], ask.new, n=ask.n)
            except RequestError:
                assert len(prompt) + ask.new > 26
                return
        for choice in range(ask.n):
            self.prompts[name if ask.n == 1 else f"{name}/{choice}"] = prompt

    def abort(self, name: str) -> None:
        self.engine.engine.abort(name)
        for key in self.prompts:
            if key.split("/")[0] == name:
                self.aborted[key] = len(self.engine.outputs.get(key, []))

    def run(self, todo: list[Ask]) -> None:
        for step in range(400):
            for ordinal, ask in enumerate(todo):
                if ask.step == step:
                    self.act(ask, ordinal)
            worked = self.engine.step()
            check_contents(self.engine, self.source)
            if not worked and step > 8 and not self.engine.engine.has_unfinished:
                return
        raise AssertionError(str(self.engine.engine.stalled()))

    def check(self, window: int | None) -> None:
        ended = {seq.id: seq for seq in self.engine.log.finished_sequences}
        assert ended.keys() == self.prompts.keys()
        for key, seq in ended.items():
            output = self.engine.outputs.get(key, [])
            new = self.aborted.get(key, seq.max_tokens_total - seq.num_prompt_tokens)
            if seq.finish_reason != "abort":
                new = seq.max_tokens_total - seq.num_prompt_tokens
            assert output == checksum_output(self.prompts[key], new, window), key


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_every_load_has_its_outputs_and_leaves_nothing(scheduler):
    @FAST
    @given(setup=setups(), todo=st.lists(asks, min_size=3, max_size=12))
    def serves(setup: dict[str, Any], todo: list[Ask]) -> None:
        policies = {**setup["policies"], "scheduler": scheduler}
        window = setup["sliding_window"]
        source = ChecksumSource(window)
        engine = TestEngine(registry=REGISTRY, source=source, **{**setup, "policies": policies})
        load = Load(engine, source)
        load.run(todo)
        load.check(window)
        assert all(step.pool.num_host_blocks <= setup["num_host_blocks"] for step in engine.log.steps)
        assert_idle(engine)

    serves()
