"""The prefix cache on published traces: exactly as many blocks are hit as an unlimited cache can hit.

The traces (Mooncake, FAST'25) are read from ../shared/data and not copied; without them these tests are skipped.
"""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import pytest

from kvengine.assemble import blueprint
from kvengine.compose import composer
from kvengine.core.plan import RequestOutput
from kvengine.core.shapes import KvShape
from kvengine.engine.driver import Driver
from kvengine.overrides import expand
from kvengine.registry import discover
from kvengine_plugins.models.checksum import ChecksumModel

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
BLOCK = 512
"""Tokens that a hash id of the trace stands for, and that a block of our pool holds."""

WORK = [
    "executor=null", "model=checksum", "prefix_cache=on", "workload=mooncake", f"workload.block_tokens={BLOCK}",
    "workload.output=one", "workload.concurrency=1", "max_model_len=200000", "max_num_batched_tokens=200000",
    f"block_size={BLOCK}", "num_blocks=300000",
]  # fmt: skip
"""One request after the other, and more blocks than either trace has hash ids: nothing is ever evicted."""


class SilentModel(ChecksumModel):
    """As many positions as a trace needs, and no tokens computed: that would take most of the time."""

    def token_source(self, kv: KvShape) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        return None


class Replay(NamedTuple):
    """What an engine made of a trace."""

    num_finished: int
    num_rejected: int
    num_hits: float
    """Blocks that were cached."""


def trace(name: str) -> Path:
    path = DATA / f"mooncake_{name}_trace.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is absent: the published traces lie beside the checkout, not in it")
    return path


def replay(path: Path, *words: str) -> Replay:
    registry = discover()
    registry.add("model", "silent", lambda config, build: SilentModel(), summary="no tokens")
    with composer() as compose:
        config = compose(expand([*WORK, f"workload.path={path}", *words]))
    plan = blueprint({**config, "model": {"name": "silent"}}, registry)
    cached: list[int] = []

    def note(outputs: list[RequestOutput]) -> None:
        cached.extend(output.sequence.num_cached_tokens for output in outputs if output.finish_reason)

    report = Driver(plan.engine(), plan.workload, on_outputs=note).run()
    return Replay(len(cached), len(report.rejected), sum(cached) / BLOCK)


def countable(path: Path, num_requests: int | None = None) -> tuple[int, int]:
    """Blocks that an unlimited cache hits, and all hash ids, by counting in the file.

    A hit is a block of the longest prefix of which every block was whole in an earlier prompt; the block with the
    last token of a prompt is computed in any case, for that token's sake.
    """
    whole: set[int] = set()
    num_hits = num_ids = 0
    with path.open(encoding="utf-8") as lines:
        for line in islice(lines, num_requests):
            row = json.loads(line)
            ids, length = row["hash_ids"], row["input_length"]
            num_ids += len(ids)
            for hash_id in ids[: (length - 1) // BLOCK]:
                if hash_id not in whole:
                    break
                num_hits += 1
            whole.update(ids[: length // BLOCK])
    return num_hits, num_ids


def test_synthetic_trace() -> None:
    path = trace("synthetic")
    assert countable(path) == (77_740, 121_877)  # 63.8%
    assert replay(path) == Replay(3_993, 0, 77_740)


def test_the_first_2000_requests_of_the_conversation_trace() -> None:
    path = trace("conversation")
    num_hits, num_ids = countable(path, 2000)
    assert num_hits > 0.2 * num_ids
    assert replay(path, "workload.num_requests=2000") == Replay(2000, 0, num_hits)


@pytest.mark.slow
def test_conversation_trace() -> None:
    path = trace("conversation")
    assert countable(path) == (105_592, 288_500)  # 36.6%
    assert replay(path) == Replay(12_031, 0, 105_592)


@pytest.mark.slow
def test_the_longest_prompt_of_both_traces_fits() -> None:
    longest = 0
    for name in ("synthetic", "conversation"):
        with trace(name).open(encoding="utf-8") as lines:
            longest = max(longest, *(json.loads(line)["input_length"] for line in lines))
    assert longest == 191_378
