"""What KV memory management costs per block, and that it does not depend on the size of the pool.

    python benchmarks/kv_memory.py

Prints medians and exits with 1 where a limit is passed: 1 us per block taken or freed, 3 us per block taken where
each one evicts a cached block, 1 s and 100 MB to build a pool of a million blocks, and 1.5 times the time per step
at a million blocks against a thousand. Needs a quiet machine.
"""

from __future__ import annotations

import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable
from itertools import count

from kvengine.core.request import Request
from kvengine.core.sequence import Sequence
from kvengine.core.shapes import KvShape, PrefixCacheConfig
from kvengine.executors.null import NullConfig, NullExecutor
from kvengine.kv.prefix_index import PrefixIndex
from kvengine.testing.engines import TestEngine
from kvengine_plugins.allocators.paged import PagedAllocator
from kvengine_plugins.evictions.lru import LruEviction

BLOCK_SIZE = 16
SMALL, LARGE = 1_000, 1_000_000
BLOCKS_PER_SEQUENCE = 100
REPEATS = 51
_fresh = count()


def sequence(num_tokens: int = BLOCK_SIZE) -> Sequence:
    """One whose tokens nobody else has."""
    number = next(_fresh)
    tokens = tuple(range(number * num_tokens, (number + 1) * num_tokens))
    request = Request(id=f"r{number}", prompt_token_ids=tokens)
    return Sequence(request, choice=0, order=number, max_tokens_total=10**9, stop_ids=frozenset(), seed=0)


def median_us(work: Callable[[], tuple[float, int]]) -> float:
    """Of REPEATS runs of `work`, which returns (seconds, blocks): us per block."""
    times = [seconds / blocks for seconds, blocks in (work() for _ in range(REPEATS))]
    return statistics.median(times) * 1e6


def timed(calls: Callable[[], object]) -> float:
    start = time.perf_counter()
    calls()
    return time.perf_counter() - start


def build(num_blocks: int) -> tuple[float, float]:
    """Seconds, and peak MB, to build a pool."""
    kv = KvShape(num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype="bf16")
    seconds = statistics.median(timed(lambda: PagedAllocator(kv)) for _ in range(5))
    tracemalloc.start()
    pool = PagedAllocator(kv)
    peak = tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()
    assert pool.num_free_blocks == num_blocks
    return seconds, peak


def take_and_free(num_blocks: int) -> tuple[float, float]:
    """us per block: one sequence grows block by block, then frees them all."""
    allocator = PagedAllocator(KvShape(num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype="bf16"))
    seq = sequence()
    freed: list[float] = []

    def take() -> tuple[float, int]:
        seconds = timed(
            lambda: [allocator.allocate(seq, i * BLOCK_SIZE) for i in range(1, BLOCKS_PER_SEQUENCE + 1)]
        )
        freed.append(timed(lambda: allocator.free(seq)) / BLOCKS_PER_SEQUENCE)
        return seconds, BLOCKS_PER_SEQUENCE

    taken = median_us(take)
    return taken, statistics.median(freed) * 1e6


def take_evicting(num_blocks: int) -> tuple[float, float]:
    """us per block: the same in a pool full of cached blocks, so that each one taken evicts one."""
    kv = KvShape(num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype="bf16")
    allocator = PagedAllocator(kv, PrefixIndex(BLOCK_SIZE, LruEviction()))
    size = BLOCKS_PER_SEQUENCE * BLOCK_SIZE
    freed: list[float] = []

    def use(seq: Sequence) -> float:
        seconds = timed(
            lambda: [allocator.allocate(seq, i * BLOCK_SIZE) for i in range(1, BLOCKS_PER_SEQUENCE + 1)]
        )
        seq.num_computed_tokens = size
        allocator.publish(seq)
        freed.append(timed(lambda: allocator.free(seq)) / BLOCKS_PER_SEQUENCE)
        return seconds

    for _ in range(num_blocks // BLOCKS_PER_SEQUENCE):
        use(sequence(size))
    assert allocator.num_cached_blocks == num_blocks
    freed.clear()
    taken = median_us(lambda: (use(sequence(size)), BLOCKS_PER_SEQUENCE))
    return taken, statistics.median(freed) * 1e6


def step_us(num_blocks: int) -> float:
    """us per engine step of 32 decoding sequences, prefix cache on."""
    engine = TestEngine(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        prefix_cache=PrefixCacheConfig(mode="on"),
        max_model_len=512,
        max_num_seqs=32,
        vocab_size=10**6,
    )
    engine.engine.executor = NullExecutor(NullConfig(), block_size=BLOCK_SIZE)
    for i in range(32):
        engine.add(f"r{i}", range(i * 16, i * 16 + 16), 450)
    for _ in range(50):
        engine.engine.step()
    return statistics.median(timed(engine.engine.step) for _ in range(350)) * 1e6


def main() -> int:
    problems = []

    def line(what: str, value: float, unit: str, limit: float) -> None:
        verdict = "" if value <= limit else "  TOO MUCH"
        print(f"{what:58} {value:9.3f} {unit:5} (limit {limit:g}){verdict}")
        if verdict:
            problems.append(what)

    seconds, megabytes = build(LARGE)
    line(f"build a pool of {LARGE:,} blocks", seconds, "s", 1)
    line(f"memory of a pool of {LARGE:,} blocks", megabytes, "MB", 100)
    for num_blocks in (SMALL, LARGE):
        taken, freed = take_and_free(num_blocks)
        line(f"take a block, pool of {num_blocks:,}", taken, "us", 1)
        line(f"free a block, pool of {num_blocks:,}", freed, "us", 1)
        taken, freed = take_evicting(num_blocks)
        line(f"take a block that evicts a cached one, pool of {num_blocks:,}", taken, "us", 3)
        line(f"free a block that stays cached, pool of {num_blocks:,}", freed, "us", 3)
    small, large = step_us(SMALL * 2), step_us(LARGE)
    print(f"a step of 32 decodes: {small:.1f} us with {2 * SMALL:,} blocks, {large:.1f} us with {LARGE:,}")
    line("the same step, large pool over small", large / small, "", 1.5)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
