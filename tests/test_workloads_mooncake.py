"""workload=mooncake: prompts that share what the trace says they share, lengths, arrivals, and bad rows."""

from __future__ import annotations

import json
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_workloads import EOS, MS, StubModel, make, refused

from kvengine_plugins.workloads.mooncake import HASH_ID_LIMIT, BlockIds

TINY = str(Path(__file__).parent / "mooncake_tiny.jsonl")
DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
TRACES = {"conversation": 12_031, "synthetic": 3_993}
ROW = {"timestamp": 0, "input_length": 600, "output_length": 20, "hash_ids": [0, 1]}


def mooncake(**options: Any) -> Any:
    return make("mooncake", **{"path": TINY, **options})


def trace(name: str) -> str:
    path = DATA / f"mooncake_{name}_trace.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is absent: the published traces lie beside the checkout, not in it")
    return str(path)


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write_file(*rows: Any) -> str:
        lines = [row if isinstance(row, str) else json.dumps({**ROW, **row}) for row in rows]
        (tmp_path / "trace.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        return str(tmp_path / "trace.jsonl")

    return write_file


def test_a_small_trace_by_hand():
    workload = mooncake()
    assert (workload.num_requests, workload.concurrency, workload.knows_lengths) == (3, None, True)
    a, b, c = workload.requests()
    assert [r.id for r in (a, b, c)] == ["line-1", "line-2", "line-3"]
    assert [len(r.prompt_token_ids) for r in (a, b, c)] == [1030, 1024, 520]
    assert [r.known_output_tokens for r in (a, b, c)] == [3, 1, 2]
    assert [r.arrival_ns for r in (a, b, c)] == [0, 1500 * MS, 1500 * MS]
    assert a.prompt_token_ids[:1024] == b.prompt_token_ids
    assert c.prompt_token_ids[:512] == a.prompt_token_ids[:512]
    assert c.prompt_token_ids[512:] != a.prompt_token_ids[512:520]
    assert not any(EOS in r.prompt_token_ids for r in (a, b, c))
    # 70000 = 1 * 257**2 + 15 * 257 + 96; the vocabulary without 256 puts 257 in place 256
    assert c.prompt_token_ids[512:] == (96, 15, 1, 0, 0, 0, 0, 0)
    assert list(workload.requests()) == [a, b, c]


def test_rate_scale_output_and_limits():
    assert [r.arrival_ns for r in mooncake(rate_scale=3.0).requests()] == [0, 500 * MS, 500 * MS]
    assert [r.known_output_tokens for r in mooncake(output="one").requests()] == [1, 1, 1]
    assert [r.id for r in mooncake(num_requests=2).requests()] == ["line-1", "line-2"]
    assert mooncake(concurrency=2).concurrency == 2
    (request, *_) = mooncake(sampling={"max_tokens": 2, "top_k": 5}).requests()
    assert (request.max_new_tokens, request.sampling.top_k) == (2, 5)


def test_another_block_size(write: Any):
    path = write({"input_length": 25, "hash_ids": [5, 6, 7]}, {"input_length": 12, "hash_ids": [5, 6]})
    a, b = mooncake(path=path, block_tokens=10).requests()
    assert (len(a.prompt_token_ids), a.prompt_token_ids[:12]) == (25, b.prompt_token_ids)
    assert a.prompt_token_ids[:10] == (5, 0, 0, 0, 0, 0, 0, 0, 5, 0)
    assert refused("mooncake", path=path, block_tokens=7).key == "workload.block_tokens"


@given(
    base=st.integers(2, 300) | st.just(49_152),
    hash_ids=st.lists(st.integers(0, HASH_ID_LIMIT - 1), min_size=2, max_size=2, unique=True)
    | st.integers(0, 10**6).map(lambda first: [first, first + 1]),
    extra=st.integers(0, 100),
)
def test_two_hash_ids_never_give_the_same_block(base, hash_ids, extra):
    blocks = BlockIds(list(range(7, 7 + base)), 63 + extra)
    one, other = (blocks.block(hash_id) for hash_id in hash_ids)
    few = blocks.num_digits
    assert base ** (few - 1) < HASH_ID_LIMIT <= base**few
    assert one[:few] != other[:few]
    for start in range(0, 63 + extra - few, few):
        assert one[start : start + few] != other[start : start + few]
    assert len(one) == 63 + extra
    assert set(one) <= set(range(7, 7 + base))
    assert blocks.prompt(hash_ids, 70) == tuple(one + other)[:70]


def test_a_vocabulary_of_one_token_cannot_tell_blocks_apart():
    with pytest.raises(Exception, match="to tell hash ids apart"):
        BlockIds([3], 512)


@pytest.mark.parametrize(("row", "problem"), [
    ({"hash_ids": [0]}, "input_length=600 is 2 blocks of 512 tokens, but there are 1 hash_ids"),
    ({"hash_ids": [0, 1, 2]}, "input_length=600 is 2 blocks of 512 tokens, but there are 3 hash_ids"),
    ({"input_length": 1025}, "input_length=1025 is 3 blocks of 512 tokens, but there are 2 hash_ids"),
    ({"input_length": 512}, "input_length=512 is 1 blocks of 512 tokens, but there are 2 hash_ids"),
    ({"input_length": 0, "hash_ids": []}, "input_length=0: must be between 1 and"),
    ({"input_length": -5}, "input_length=-5: must be between 1 and"),
    ({"input_length": 600.5}, "input_length=600.5: must be a whole number"),
    ({"output_length": 0}, "output_length=0: must be between 1 and"),
    ({"output_length": "20"}, "output_length='20': must be a whole number"),
    ({"timestamp": -1}, "timestamp=-1: must be ms after the start"),
    ({"timestamp": 1.7e12}, "timestamp=1700000000000.0: must be ms after the start"),
    ({"timestamp": True}, "timestamp=True: must be a number"),
    ({"timestamp": 3}, "timestamp goes back in time, 0.003 s after 0.004 s: sort the file"),
    ({"timestamp": None}, "has no timestamp"),
    ({"input_length": None}, "has no input_length"),
    ({"output_length": None}, "has no output_length"),
    ({"hash_ids": None}, "has no hash_ids"),
    ({"hash_ids": [0, -1]}, "hash_ids=[0, -1]: must lie between 0 and 2**63 - 1"),
    ({"hash_ids": [0, 2**63]}, "hash_ids=[0, 9223372036854775808]: must lie between"),
    ({"hash_ids": [0, 1.5]}, "hash_ids=[0, 1.5]: must be a list of whole numbers"),
    ({"hash_id": [0]}, "unknown key 'hash_id'; did you mean 'hash_ids'?"),
    ('{"timestamp": 0', "is not JSON: Expecting ',' delimiter at column 16"),
    ("hello", "is not JSON: Expecting value at column 1"),
    ("[1]", '[1] is not an object like {"timestamp": 0,'),
])  # fmt: skip
def test_a_bad_row_is_refused_with_file_and_line(write: Any, row: Any, problem: str):
    path = write({"timestamp": 4}, row if isinstance(row, str) else {"timestamp": 4, **row})
    model = StubModel()
    error = refused("mooncake", path=path, model=model)
    assert (error.key, error.value, model.num_loads) == ("workload.path", path, 0)
    assert error.problem.startswith(f"line 2: {problem}")
    assert mooncake(path=path, num_requests=1).num_requests == 1


def test_a_bad_first_row_gets_no_hint_about_prompts(write: Any):
    assert refused("mooncake", path=write("x")).problem == "line 1: is not JSON: Expecting value at column 1"


@pytest.mark.parametrize(("options", "key"), [
    ({"path": None}, "path"), ({"path": "nowhere.jsonl"}, "path"), ({"num_requests": 4}, "num_requests"),
    ({"num_requests": 0}, "num_requests"), ({"block_tokens": 0}, "block_tokens"),
    ({"rate_scale": 0.0}, "rate_scale"), ({"rate_scale": 2.0, "concurrency": 1}, "rate_scale"),
    ({"output": "two"}, "output"), ({"sampling": {"stop_token_ids": [1]}}, "sampling.stop_token_ids"),
    ({"sampling": {"min_p": 2.0}}, "sampling.min_p"),
])  # fmt: skip
def test_settings_that_cannot_work(options, key):
    assert refused("mooncake", **{"path": TINY, **options}).key == f"workload.{key}"


@pytest.mark.parametrize("name", TRACES)
def test_the_published_traces_are_well_formed(name):
    path = trace(name)
    workload = mooncake(path=path)
    assert workload.num_requests == TRACES[name]
    rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    requests = list(islice(workload.requests(), 500))
    for row, request in zip(rows, requests, strict=False):
        assert len(request.prompt_token_ids) == row["input_length"]
        assert request.known_output_tokens == row["output_length"]
        assert request.arrival_ns == row["timestamp"] * MS
    for (row, request), (next_row, follower) in pairwise(zip(rows[:500], requests, strict=True)):
        common = next((i for i, (x, y) in enumerate(zip(row["hash_ids"], next_row["hash_ids"], strict=False))
                       if x != y), min(len(row["hash_ids"]), len(next_row["hash_ids"])))  # fmt: skip
        same = min(512 * common, len(request.prompt_token_ids), len(follower.prompt_token_ids))
        assert request.prompt_token_ids[:same] == follower.prompt_token_ids[:same]


@pytest.mark.parametrize(
    ("name", "hits", "num_ids"),
    [
        pytest.param("conversation", 105_592, 288_500, marks=pytest.mark.slow),
        ("synthetic", 77_740, 121_877),
    ],
)
def test_the_published_hit_rate_is_that_of_full_blocks_over_all_hash_ids(name, hits, num_ids):
    """36.6% and 63.8%: blocks of 512 whose whole prefix some earlier prompt had, by the tokens themselves."""
    seen: set[bytes] = set()
    found = total = 0
    for request in mooncake(path=trace(name), output="one").requests():
        ids = np.asarray(
            request.prompt_token_ids[: len(request.prompt_token_ids) // 512 * 512], dtype=np.int16
        )
        total += -(-len(request.prompt_token_ids) // 512)
        prefix, hitting = b"", True
        for block in ids.reshape(-1, 512)[:, :8]:
            prefix = str(hash((prefix, block.tobytes()))).encode()
            hitting = hitting and prefix in seen
            found += hitting
            seen.add(prefix)
    assert (found, total) == (hits, num_ids)
