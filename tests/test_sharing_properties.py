"""Whatever is shared, cached, forked, swapped or evicted, every sequence gets the answer that it gets alone."""

from __future__ import annotations

import random
from collections import Counter
from typing import Literal

import pytest

from kvengine.core.shapes import PrefixCacheConfig
from kvengine.policies import Mechanism
from kvengine.registry import Registry, discover
from kvengine.testing.engines import TestEngine
from kvengine.testing.sources import checksum_output

BLOCK_SIZE = 4
MAX_FORKS = 5


class SwapAlways:
    """The preemption policy of these tests: to the host, as long as it fits."""

    def mechanism(self, victim: object) -> Mechanism:
        return Mechanism.SWAP


def registry_with_swap() -> Registry:
    registry = discover()
    registry.add("preemption", "swap_always", lambda config, build: SwapAlways(), summary="of this test")
    return registry


REGISTRY = registry_with_swap()


class RandomUse:
    """Requests with common prefixes, n choices and branches of live ones, against a random set-up."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.num_blocks = rng.choice([8, 10, 14, 30])
        num_host_blocks = rng.choice([0, 1, 3, 8, 40])
        mode: Literal["auto", "off"] = "auto" if rng.random() < 0.5 else "off"
        offload = mode == "auto" and num_host_blocks > 0 and rng.random() < 0.4
        scheduler = rng.choice(["chunked", "continuous", "static"])
        self.engine = TestEngine(
            registry=REGISTRY,
            num_blocks=self.num_blocks,
            block_size=BLOCK_SIZE,
            num_host_blocks=num_host_blocks,
            prefix_cache=PrefixCacheConfig(mode=mode, offload=offload, recompute_rate=1.0),
            policies={
                "scheduler": scheduler,
                "preemption": rng.choice(["recompute", "swap_always"]),
                "eviction": rng.choice(REGISTRY.names("eviction")),
            },
            max_num_seqs=rng.choice([2, 4, 8]),
            max_num_batched_tokens=rng.choice([4, 8, 64]) if scheduler == "chunked" else None,
        )
        self.expected: dict[str, list[int]] = {}
        stems = [[rng.randrange(3) for _ in range(12)] for _ in range(3)]
        self.waiting = [self.request(f"r{i}", rng.choice(stems)) for i in range(8)]
        self.num_forks = 0

    def request(self, name: str, stem: list[int]) -> tuple[str, list[int], int, int]:
        rng = self.rng
        prompt = stem[: rng.randrange(1, 13)] + [rng.randrange(3) for _ in range(rng.randrange(1, 4))]
        return name, prompt, rng.randrange(1, 10), rng.choice([1, 1, 2, 3])

    def add_one(self) -> None:
        name, prompt, max_tokens, n = self.waiting.pop()
        self.engine.add(name, prompt, max_tokens, n=n)
        for choice in range(n):
            self.expected[name if n == 1 else f"{name}/{choice}"] = checksum_output(prompt, max_tokens)

    def fork_one(self) -> None:
        live = [s for s in self.engine.engine.live_sequences() if s.choice == 0 and s.finish_reason is None]
        if not live or self.num_forks == MAX_FORKS:
            return
        parent, max_tokens = self.rng.choice(live), self.rng.randrange(1, 6)
        prompt = [*parent.token_ids, self.rng.randrange(3)]
        if len(prompt) + max_tokens - 1 > self.num_blocks * BLOCK_SIZE:
            return
        name = f"f{self.num_forks}"
        self.num_forks += 1
        self.engine.fork(name, parent.request.id, prompt[-1:], max_tokens)
        self.expected[name] = checksum_output(prompt, max_tokens)

    def run(self) -> None:
        engine = self.engine.engine
        while self.waiting or engine.has_unfinished:
            while self.waiting and self.rng.random() < 0.4:
                self.add_one()
            if self.rng.random() < 0.15:
                self.fork_one()
            if engine.has_unfinished:
                self.engine.step()

    def check(self) -> None:
        assert self.engine.outputs == self.expected
        context = self.engine.engine.context
        assert context.num_free_blocks == self.num_blocks
        kept = len(context.allocator.host_blocks)
        assert context.memory.host_pool.num_free == context.memory.host_pool.num_blocks - kept


@pytest.mark.parametrize("part", range(4))
def test_answers_are_those_of_each_sequence_alone(part: int) -> None:
    counted: Counter[str] = Counter()
    for seed in range(100 * part, 100 * part + 100):
        use = RandomUse(seed)
        use.run()
        use.check()
        log = use.engine.log
        counted["preemptions"] += log.num_preemptions
        counted["copies"] += log.num_copies
        counted["swap-ins"] += sum(len(step.swap_ins) for step in log.steps)
        counted["cached tokens"] += sum(seq.num_cached_tokens for seq in log.finished_sequences)
        counted["forks"] += use.num_forks
    assert min(counted.values()) > 50, counted  # else this would prove nothing
