"""Workloads: distributions, golden values, bad settings, bad lines, open and closed loops, streaming."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import time
from dataclasses import fields, is_dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvengine.config import from_mapping
from kvengine.core.errors import ConfigError
from kvengine.core.limits import EngineLimits
from kvengine.core.request import SamplingParams
from kvengine.core.shapes import ModelShape
from kvengine.engine.driver import Driver
from kvengine.models.byte_tokenizer import ByteTokenizer
from kvengine.policies import Build
from kvengine.registry import Registry
from kvengine.testing.engines import TestEngine
from kvengine.workloads.arrivals import ArrivalConfig, arrival_times, random_stream
from kvengine.workloads.lengths import LengthConfig, lengths
from kvengine_plugins.workloads import register_workloads

CONF = Path(__file__).parents[1] / "conf" / "workload"
MS = 1_000_000
NUM_DRAWS = 20_000
EOS, CHAT_MARK = 256, 257


class ChatTokenizer(ByteTokenizer):
    num_prompts = 0

    def apply_chat(self, text: str) -> list[int]:
        self.num_prompts += 1
        return [CHAT_MARK, *self.encode(text), CHAT_MARK]


class StubModel:
    name = "stub"

    def __init__(self) -> None:
        self.num_loads = 0
        self.the_tokenizer = ChatTokenizer()

    def shape(self) -> ModelShape:
        return ModelShape(
            num_layers=1, num_kv_heads=1, head_dim=8, vocab_size=258, max_position=4096, dtype="fp32",
            eos_token_ids=(EOS,),
        )  # fmt: skip

    def weight_bytes(self) -> int:
        raise AssertionError("a workload asked for the weights")

    def tokenizer(self) -> Any:
        self.num_loads += 1
        return self.the_tokenizer

    def load(self, build: Build) -> Any: ...

    def token_source(self, kv: Any) -> Any: ...


def register() -> Registry:
    registry = Registry("test")
    register_workloads(registry)
    return registry


def make(
    name: str, *, model: Any = None, max_model_len: int = 256, engine_seed: int | None = 0, **settings: Any
):
    entry = register().get("workload", name)
    limits = EngineLimits(max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=max_model_len)
    build = Build(seed=engine_seed, model=model or StubModel(), limits=limits)
    return entry.factory(from_mapping(entry.schema, settings, "workload"), build)


def refused(name: str, **settings: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        make(name, **settings)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write_file(content: bytes | list[dict[str, Any]], name: str = "work.jsonl") -> str:
        if not isinstance(content, bytes):
            content = "".join(json.dumps(line) + "\n" for line in content).encode()
        (tmp_path / name).write_bytes(content)
        return str(tmp_path / name)

    return write_file


def drawn(count: int = NUM_DRAWS, **config: Any) -> list[int]:
    return list(islice(lengths(LengthConfig(**config), random_stream(1, "test")), count))


def gaps_s(**config: Any) -> list[float]:
    times = list(islice(arrival_times(ArrivalConfig(**config), 1), NUM_DRAWS))
    assert all(type(t) is int for t in times)
    return [(b - a) / 1e9 for a, b in pairwise([0, *times])]


# Bounds are about four standard errors of the mean of 20,000 draws.


def test_uniform_reaches_both_ends_and_each_length_alike() -> None:
    values = drawn(distribution="uniform", min=10, max=19)
    assert sorted(set(values)) == list(range(10, 20))
    assert all(values.count(n) == pytest.approx(2000, abs=170) for n in range(10, 20))


def test_lognormal_has_the_mean_and_the_log_sigma_that_were_asked_for() -> None:
    values = drawn(mean=1000.0, sigma=0.5)
    assert statistics.fmean(values) == pytest.approx(1000, abs=15.1)
    logs = [math.log(v) for v in values]
    assert statistics.pstdev(logs) == pytest.approx(0.5, abs=0.01)
    assert statistics.fmean(logs) == pytest.approx(math.log(1000) - 0.125, abs=0.015)


def test_exponential_has_its_mean_and_its_tail() -> None:
    values = drawn(distribution="exponential", mean=1000.0)
    assert statistics.fmean(values) == pytest.approx(1000, abs=28)
    assert statistics.pstdev(values) == pytest.approx(1000, abs=40)
    assert sum(v > 1000 for v in values) / NUM_DRAWS == pytest.approx(0.3679, abs=0.0137)


def test_fixed_and_clipping() -> None:
    assert drawn(3, distribution="fixed", mean=7.0) == [7, 7, 7]
    free = drawn(distribution="exponential", mean=50.0)
    assert drawn(distribution="exponential", mean=50.0, min=20, max=60) == [max(20, min(60, v)) for v in free]
    assert min(drawn(distribution="exponential", mean=1.0)) == 1


@pytest.mark.parametrize("config", [
    {"distribution": "exponential", "mean": 128.0, "max": 32}, {"mean": 50.0, "min": 20, "max": 60},
])  # fmt: skip
def test_redrawing_leaves_out_what_is_above_max(config: dict[str, Any]) -> None:
    longest = config["max"]
    free = drawn(20 * NUM_DRAWS, **{**config, "mean": config["mean"], "max": None})
    kept = drawn(NUM_DRAWS, **config, above_max="redraw")
    assert kept == [value for value in free if value <= longest][:NUM_DRAWS]
    assert max(kept) == longest


@pytest.mark.parametrize(("cap", "published"), [(32, 15), (128, 54), (512, 118), (1536, 125)])
def test_redrawn_exponential_has_the_mean_that_integration_gives(cap: int, published: float) -> None:
    """E[X | X < c] = m - c / (exp(c / m) - 1) with c half a token above the cap, for rounding; 0 becomes 1.

    Published are the realised means of the 1,000 requests of Anyscale's study of continuous batching (2023).
    """
    limit, m = cap + 0.5, 128.0
    expected = m - limit / math.expm1(limit / m) + (1 - math.exp(-0.5 / m)) / (1 - math.exp(-limit / m))
    assert expected == pytest.approx(published, rel=0.04)
    values = drawn(distribution="exponential", mean=m, max=cap, above_max="redraw")
    assert statistics.fmean(values) == pytest.approx(expected, abs=4 * expected / NUM_DRAWS**0.5)


@pytest.mark.parametrize(("config", "cv"), [({"process": "poisson"}, 1), ({"process": "gamma", "cv": 1.0}, 1),
                                            ({"process": "gamma", "cv": 2.0}, 2),
                                            ({"process": "gamma", "cv": 0.25}, 0.25)])  # fmt: skip
def test_gaps_have_the_rate_and_the_cv(config: dict[str, Any], cv: float) -> None:
    gaps = gaps_s(rate=5.0, **config)
    mean = statistics.fmean(gaps)
    assert mean == pytest.approx(0.2, abs=4 * cv * 0.2 / NUM_DRAWS**0.5)
    assert statistics.pstdev(gaps) / mean == pytest.approx(cv, rel=0.06)
    if cv == 1:
        assert sum(gap > 0.2 for gap in gaps) / NUM_DRAWS == pytest.approx(0.3679, abs=0.0137)


def test_cv_0_is_evenly_spaced_and_all_at_once_is_zero() -> None:
    even = arrival_times(ArrivalConfig(process="gamma", rate=8.0, cv=0.0), 3)
    assert list(islice(even, 3)) == [125 * MS, 250 * MS, 375 * MS]
    assert list(islice(arrival_times(ArrivalConfig(), 3), 3)) == [0, 0, 0]


def test_golden_values() -> None:
    """Found alike with Python 3.11 to 3.13 and numpy 2.0.0, 2.4.6 and 2.5.5."""
    poisson, gamma = (
        ArrivalConfig(process="poisson", rate=4.0),
        ArrivalConfig(process="gamma", rate=4.0, cv=2.0),
    )
    assert list(islice(arrival_times(poisson, 7), 3)) == [57984220, 78719776, 498762100]
    assert list(islice(arrival_times(gamma, 7), 3)) == [6724033, 202679435, 203307179]
    for config, golden in (
        (LengthConfig(distribution="uniform", min=3, max=9), [8, 8, 4, 6, 5]),
        (LengthConfig(mean=100.0, sigma=0.5), [167, 74, 183, 82, 236]),
        (LengthConfig(distribution="exponential", mean=100.0), [96, 108, 97, 4, 76]),
    ):
        assert list(islice(lengths(config, random_stream(7, "prompt_len")), 5)) == golden
    assert random_stream(7, "prompt", 1).integers(256, size=5).tolist() == [136, 228, 193, 234, 91]


def test_synthetic_streams_are_independent_and_repeatable() -> None:
    base = list(make("synthetic", num_requests=50).requests())
    assert len(base) == 50
    assert [r.id for r in base[:2]] == ["r0", "r1"]
    workload = make("synthetic", num_requests=50, arrival={"process": "poisson", "rate": 3.0})
    poisson = list(workload.requests())
    assert poisson == list(workload.requests())
    assert [(r.prompt_token_ids, r.known_output_tokens) for r in poisson] == [
        (r.prompt_token_ids, r.known_output_tokens) for r in base
    ]
    unclipped = list(make("synthetic", num_requests=50, max_model_len=9999).requests())
    assert sum(len(r.prompt_token_ids) == r.known_output_tokens for r in unclipped) < 10
    assert poisson[0].arrival_ns > 0
    assert list(make("synthetic", num_requests=20).requests()) == base[:20]
    other = list(make("synthetic", num_requests=50, output_len={"mean": 9.0}).requests())
    assert [r.prompt_token_ids for r in other] == [r.prompt_token_ids for r in base]
    assert [r.known_output_tokens for r in other] != [r.known_output_tokens for r in base]


def test_seed_is_the_workloads_else_the_engines_else_random() -> None:
    def first(**settings: Any) -> Any:
        return next(make("synthetic", **settings).requests()).prompt_token_ids

    assert first(engine_seed=5) == first(engine_seed=5) != first(engine_seed=6)
    assert first(engine_seed=9, seed=5) == first(engine_seed=5)
    assert first(engine_seed=None) != first(engine_seed=None)
    assert first(engine_seed=-1)
    unseeded = make("synthetic", engine_seed=None)
    assert list(unseeded.requests()) == list(unseeded.requests())


def test_synthetic_clips_output_first_then_prompt() -> None:
    def pair(prompt: int, output: int, **settings: Any) -> tuple[int, int | None]:
        fixed = {"prompt_len": {"distribution": "fixed", "mean": prompt}}
        fixed["output_len"] = {"distribution": "fixed", "mean": output}
        request = next(make("synthetic", max_model_len=100, **fixed, **settings).requests())
        assert not set(request.prompt_token_ids) & {EOS}
        assert request.ignore_eos
        return len(request.prompt_token_ids), request.known_output_tokens

    assert pair(60, 40) == (60, 40)
    assert pair(60, 41) == (60, 40)
    assert pair(99, 50) == (99, 1)
    assert pair(150, 50) == (99, 1)
    assert pair(150, 50, clip_to_model_len=False) == (150, 50)


def test_synthetic_prompts_cover_the_vocabulary_without_end_tokens() -> None:
    requests = make(
        "synthetic", num_requests=100, prompt_len={"distribution": "fixed", "mean": 100}
    ).requests()
    assert {token for r in requests for token in r.prompt_token_ids} == {*range(256), 257}


def test_synthetic_draws_tenants_and_priorities_by_their_shares() -> None:
    """Of 2,000 draws, within four standard errors of 3/4 (0.039); nothing else changes by it."""
    base = list(make("synthetic", num_requests=2_000).requests())
    assert {(r.tenant, r.priority) for r in base} == {(None, 0)}
    workload = make("synthetic", num_requests=2_000, tenants=[3, 1], priorities=[0, 0.5, 1.5])
    drawn_by = list(workload.requests())
    assert drawn_by == list(workload.requests())
    assert {r.tenant for r in drawn_by} == {"tenant0", "tenant1"}
    assert abs(sum(r.tenant == "tenant0" for r in drawn_by) / 2_000 - 0.75) < 0.039
    assert {r.priority for r in drawn_by} == {1, 2}
    assert abs(sum(r.priority == 2 for r in drawn_by) / 2_000 - 0.75) < 0.039
    both = sum(r.tenant == "tenant0" and r.priority == 2 for r in drawn_by) / 2_000
    assert abs(both - 0.75 * 0.75) < 0.045  # one says nothing about the other
    assert [replace(r, tenant=None, priority=0) for r in drawn_by] == base
    one = make("synthetic", num_requests=3, tenants=[2]).requests()
    assert [r.tenant for r in one] == ["tenant0"] * 3


LEN, ARR = "workload.prompt_len", "workload.arrival"
UNIFORM, EXPONENTIAL = {"distribution": "uniform", "min": 1, "max": 9}, {"distribution": "exponential"}


@pytest.mark.parametrize(("name", "settings", "key"), [
    ("synthetic", {"arrival": {"rate": 2.0}}, f"{ARR}.rate"),
    ("synthetic", {"arrival": {"process": "poisson"}}, f"{ARR}.rate"),
    ("synthetic", {"arrival": {"process": "poisson", "rate": 0.0}}, f"{ARR}.rate"),
    ("synthetic", {"arrival": {"process": "poisson", "rate": float("inf")}}, f"{ARR}.rate"),
    ("synthetic", {"arrival": {"process": "poisson", "rate": 1.0, "cv": 1.0}}, f"{ARR}.cv"),
    ("synthetic", {"arrival": {"process": "gamma", "rate": 1.0}}, f"{ARR}.cv"),
    ("prompts", {"arrival": {"process": "gamma", "rate": 1.0, "cv": -1.0}}, f"{ARR}.cv"),
    ("prompts", {"arrival": {"process": "poison"}}, f"{ARR}.process"),
    ("prompts", {"concurrency": 2, "arrival": {"process": "poisson", "rate": 1.0}}, "workload.concurrency"),
    ("synthetic", {"concurrency": 2, "arrival": {"process": "poisson", "rate": 1.0}}, "workload.concurrency"),
    ("synthetic", {"concurrency": 0}, "workload.concurrency"),
    ("jsonl", {"path": "x", "concurrency": 0}, "workload.concurrency"),
    ("synthetic", {"num_requests": 0}, "workload.num_requests"),
    ("prompts", {"num_requests": 33}, "workload.num_requests"),
    ("jsonl", {}, "workload.path"),
    ("synthetic", {"prompt_len": {"distribution": "fixed", "sigma": 1.0}}, f"{LEN}.sigma"),
    ("synthetic", {"prompt_len": {"distribution": "fixed", "mean": 2.5}}, f"{LEN}.mean"),
    ("synthetic", {"prompt_len": {"distribution": "fixed", "max": 9}}, f"{LEN}.max"),
    ("synthetic", {"prompt_len": {"distribution": "uniform", "min": 1}}, f"{LEN}.max"),
    ("synthetic", {"prompt_len": {**UNIFORM, "mean": 4}}, f"{LEN}.mean"),
    ("synthetic", {"prompt_len": {"distribution": "uniform", "min": 9, "max": 1}}, f"{LEN}.min"),
    ("synthetic", {"prompt_len": {"min": 0}}, f"{LEN}.min"),
    ("synthetic", {"prompt_len": {"max": 32}}, f"{LEN}.mean"),
    ("synthetic", {"prompt_len": {"sigma": -1.0}}, f"{LEN}.sigma"),
    ("synthetic", {"prompt_len": {"above_max": "drop"}}, f"{LEN}.above_max"),
    ("synthetic", {"prompt_len": {"above_max": "redraw"}}, f"{LEN}.above_max"),
    ("synthetic", {"prompt_len": {"distribution": "fixed", "above_max": "redraw"}}, f"{LEN}.above_max"),
    ("synthetic", {"prompt_len": {**UNIFORM, "above_max": "redraw"}}, f"{LEN}.above_max"),
    ("synthetic", {"prompt_len": {"max": 9, "min": 10, "above_max": "redraw"}}, f"{LEN}.min"),
    ("synthetic", {"prompt_len": {"mean": 4, "max": 9, "min": 5, "above_max": "redraw"}}, f"{LEN}.mean"),
    ("synthetic", {"prompt_len": {"mean": 9999, "max": 9, "above_max": "redraw"}}, f"{LEN}.above_max"),
    ("synthetic", {"output_len": {**EXPONENTIAL, "mean": 9999, "max": 9, "above_max": "redraw"}},
     "workload.output_len.above_max"),
    ("synthetic", {"output_len": {"mean": float("inf")}}, "workload.output_len.mean"),
    ("synthetic", {"tenants": [1.0, -1.0]}, "workload.tenants"),
    ("synthetic", {"tenants": [0, 0]}, "workload.tenants"),
    ("synthetic", {"priorities": [float("inf")]}, "workload.priorities"),
    ("synthetic", {"priorities": ["high"]}, "workload.priorities[0]"),
    ("synthetic", {"sampling": {"temperature": -1.0}}, "workload.sampling.temperature"),
    ("synthetic", {"sampling": {"stop_token_ids": [3]}}, "workload.sampling.stop_token_ids"),
    ("prompts", {"sampling": {"stop_token_ids": [258]}}, "workload.sampling.stop_token_ids"),
    ("prompts", {"sampling": {"max_tokens": 0}}, "workload.sampling.max_tokens"),
    ("prompts", {"sampling": {"top_q": 0}}, "workload.sampling.top_q"),
    ("synthetic", {"max_model_len": 1}, "engine.max_model_len"),
])  # fmt: skip
def test_settings_that_cannot_work_are_refused_by_key(name: str, settings: dict[str, Any], key: str) -> None:
    assert refused(name, **settings).key == key


def test_num_requests_says_how_many_there_are() -> None:
    assert str(refused("prompts", num_requests=33)) == (
        "workload.num_requests=33: demo_prompts.jsonl has only 32"
    )


GOOD = b'{"prompt": "a"}\n'


@pytest.mark.parametrize(("line", "problem"), [
    (b"hello", "is not JSON: Expecting value at column 1"),
    (b'{"prompt": "a"', "is not JSON: Expecting ',' delimiter at column 15"),
    (b"[" * 100_000, "is not JSON: "),
    (b'["prompt"]', "['prompt'] is not an object like {\"prompt\": \"...\"}"),
    (b'{"promt": "a"}', "unknown key 'promt'; did you mean 'prompt'? choices: arrival_s, cache_salt, id, "),
    (b'{"prompt": "a", "prompt": "b"}', "is not JSON: 'prompt' is there twice"),
    (b'{"prompt": 7}', "prompt=7: must be a string"),
    (b'{"prompt": "\\ud83d"}', "prompt='\\ud83d': must be a string, without half surrogate pairs"),
    (b'{"prompt": "\xff"}', "is not UTF-8: byte 0xff at position 13"),
    (b"\xff\xfe{\x00", "is not UTF-8: byte 0xff at position 1; the file looks like UTF-16"),
    (b'{"max_tokens": 3}', "needs prompt or prompt_token_ids, and only one"),
    (b'{"prompt": "a", "prompt_token_ids": [1]}', "needs prompt or prompt_token_ids, and only one"),
    (b'{"prompt_token_ids": [1, 2.5]}', "prompt_token_ids=[1, 2.5]: must be a list of whole numbers"),
    (b'{"prompt_token_ids": [true]}', "prompt_token_ids=[True]: must be a list of whole numbers"),
    (b'{"prompt": "a", "id": 7}', "id=7: must be a string"),
    (b'{"prompt": "a", "id": ""}', "id='': must be printable and not empty"),
    (b'{"prompt": "a", "max_tokens": "ten"}', "max_tokens='ten': must be a whole number"),
    (b'{"prompt": "a", "n": true}', "n=True: must be a whole number"),
    (b'{"prompt": "a", "priority": "high"}', "priority='high': must be a whole number"),
    (b'{"prompt": "a", "seed": 1.5}', "seed=1.5: must be a whole number"),
    (b'{"prompt": "a", "temperature": "0"}', "temperature='0': must be a number"),
    (b'{"prompt": "a", "top_p": NaN}', "is not JSON: NaN is no number"),
    (b'{"prompt": "a", "ignore_eos": 1}', "ignore_eos=1: must be true or false"),
    (b'{"prompt": "a", "stop_token_ids": 3}', "stop_token_ids=3: must be a list of whole numbers"),
    (b'{"prompt": "a", "arrival_s": -1}', "arrival_s=-1: must be seconds after the start"),
    (b'{"prompt": "a", "arrival_s": 1.7e9}', "arrival_s=1700000000.0: must be seconds after the start"),
    (b'{"prompt": "a", "output_tokens": 2, "stop_token_ids": [1]}', "has output_tokens, so that"),
])  # fmt: skip
def test_a_bad_line_is_refused_with_file_and_number(write: Any, line: bytes, problem: str) -> None:
    model, path = StubModel(), write(GOOD + b"\n" + line + b"\n" + GOOD)
    error = refused("jsonl", path=path, model=model)
    assert (error.key, error.value) == ("workload.path", path)
    assert error.problem.startswith(f"line 3: {problem}")
    assert model.num_loads == 0


def test_what_only_whole_files_can_get_wrong(write: Any) -> None:
    def problem(*lines: dict[str, Any]) -> str:
        return refused("jsonl", path=write([{"prompt": "a", **line} for line in lines])).problem

    assert problem({"id": "x"}, {"id": "y"}, {"id": "x"}) == "line 3: id='x': line 1 has the same id"
    assert problem({}, {"id": "line-1"}).startswith(
        "line 2: id='line-1': line 1 has the same id (a line without"
    )
    back = problem({"arrival_s": 1}, {"arrival_s": 2.5}, {}, {"arrival_s": 2})
    assert back == "line 4: arrival_s goes back in time, 2 s after 2.5 s: sort the file"
    assert problem() == "there is no request in it"
    mistaken = refused("prompts", path=write([{"prompt": "a", "arrival_s": 1}])).problem
    assert mistaken == "line 1: unknown key 'arrival_s'; workload=jsonl reads it"


def test_a_file_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "fifo")
    for name in ("jsonl", "prompts"):
        assert refused(name, path=str(tmp_path / "no.jsonl")).problem == "No such file or directory"
        assert refused(name, path=str(tmp_path)).problem == "Is a directory"
        assert refused(name, path=str(tmp_path / "fifo")).problem == "must be a file, for it is read twice"
        assert refused(name, path="a\0b").key == "workload.path"

    def no_permission(*args: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", no_permission)
    assert refused("jsonl", path="x.jsonl").problem == "Permission denied"


def test_every_field_of_a_line_reaches_the_request(write: Any) -> None:
    line = {
        "id": "x", "prompt": "né", "max_tokens": 5, "arrival_s": 0.25, "temperature": 1, "top_k": 3,
        "top_p": 0.5, "min_p": 0.1, "seed": 9, "stop_token_ids": [4], "ignore_eos": True, "n": 2,
    }  # fmt: skip
    ids = {"prompt_token_ids": [1, 2], "output_tokens": 7, "max_tokens": None}
    content = b"\xef\xbb\xbf" + json.dumps(line).encode() + b"\r\n\r\n  \n" + json.dumps(ids).encode()
    full, known = make("jsonl", path=write(content), sampling={"temperature": 0.5, "top_k": 8}).requests()
    assert (full.id, full.prompt, full.arrival_ns) == ("x", "né", 250 * MS)
    assert full.prompt_token_ids == (CHAT_MARK, ord("n"), 0xC3, 0xA9, CHAT_MARK)
    assert full.sampling == SamplingParams(
        max_tokens=5, temperature=1.0, top_k=3, top_p=0.5, min_p=0.1, seed=9, stop_token_ids=(4,),
        ignore_eos=True, n=2,
    )  # fmt: skip
    assert (known.id, known.prompt_token_ids, known.known_output_tokens) == ("line-4", (1, 2), 7)
    assert known.sampling == SamplingParams(temperature=0.5, top_k=8)
    assert known.arrival_ns == 250 * MS
    assert known.prompt is None


def test_whose_request_it_is_and_whether_all_lengths_are_known(write: Any) -> None:
    line = {"prompt": "a", "cache_salt": "pepper", "tenant": "acme"}
    path = write([{**line, "output_tokens": 3}, {"prompt": "b", "output_tokens": 1}, line])
    for workload in (
        make("jsonl", path=path),
        make("prompts", path=write([line, {"prompt": "b"}, line], "p.jsonl")),
    ):
        whose = [(r.cache_salt, r.tenant) for r in workload.requests()]
        assert whose == [("pepper", "acme"), (None, None), ("pepper", "acme")]
        assert not workload.knows_lengths
    assert make("jsonl", path=path, num_requests=2).knows_lengths
    assert not make("prompts").knows_lengths
    assert not make("jsonl", path=write([{"prompt": "a"}, {"prompt": "a", "output_tokens": 1}])).knows_lengths
    urgent = make("jsonl", path=write([{"prompt": "a", "priority": -2}, {"prompt": "b"}]))
    assert [r.priority for r in urgent.requests()] == [-2, 0]
    nothing = write([{"prompt": "a", "tenant": ""}])
    assert refused("jsonl", path=nothing).problem == "line 1: tenant='': must be printable and not empty"


def test_of_two_max_tokens_the_smaller_holds(write: Any) -> None:
    path = write([{"prompt": "a", "max_tokens": 8}, {"prompt": "b"}])

    def limits(name: str, **sampling: Any) -> list[int | None]:
        return [r.sampling.max_tokens for r in make(name, path=path, sampling=sampling).requests()]

    assert limits("prompts") == [8, 64]
    assert limits("prompts", max_tokens=4) == [4, 4]
    assert limits("prompts", max_tokens=100) == [8, 100]
    assert limits("jsonl") == [8, None]


def test_text_file_and_chat(write: Any) -> None:
    path = write("\ufeffone\r\n\n{two}\n".encode(), "work.TXT")
    chat, plain = make("prompts", path=path), make("prompts", path=path, chat=False)
    assert [r.prompt for r in chat.requests()] == ["one", "{two}"]
    assert next(chat.requests()).prompt_token_ids == (CHAT_MARK, *b"one", CHAT_MARK)
    assert next(plain.requests()).prompt_token_ids == tuple(b"one")


def test_the_demo_set_fits_a_byte_tokenizer() -> None:
    requests = list(make("prompts").requests())
    assert len({r.id for r in requests}) == len({r.prompt for r in requests}) == 32
    sizes = [len((r.prompt or "").encode()) for r in requests]
    assert min(sizes) >= 10
    assert max(sizes) <= 1500
    new = [r.sampling.max_tokens or 0 for r in requests]
    assert (min(new), max(new)) == (4, 256)
    assert sum(new) == pytest.approx(2000, rel=0.05)
    assert all(r.arrival_ns == 0 for r in requests)
    arriving = make("prompts", engine_seed=7, arrival={"process": "poisson", "rate": 4.0}).requests()
    assert [r.arrival_ns for r in islice(arriving, 3)] == [57984220, 78719776, 498762100]


def test_open_loop_keeps_arrival_times(write: Any) -> None:
    """Steps take 10 ms: who arrives at 5 ms enters at 10 ms; at 100 ms nobody runs, and the clock jumps."""
    path = write([{"prompt": "a", "output_tokens": 3, "arrival_s": at} for at in (0, 0.005, 0.1, 0.1)])
    test_engine = TestEngine()
    test_engine.engine.clock.wait_until(50 * MS)
    Driver(test_engine.engine, make("jsonl", path=path)).run()
    finished = {seq.id: seq for seq in test_engine.log.finished_sequences}
    times = [finished[f"line-{n}"] for n in (1, 2, 3, 4)]
    assert [seq.arrival_ns // MS for seq in times] == [50, 55, 150, 150]
    assert [(seq.times.admitted_ns or 0) // MS for seq in times] == [50, 60, 150, 150]
    assert [seq.num_output_tokens for seq in times] == [3, 3, 3, 3]


@pytest.mark.parametrize("concurrency", [1, 3])
def test_closed_loop_never_exceeds_its_concurrency(write: Any, concurrency: int) -> None:
    """The file's arrival times, a minute apart, are not used; one at a time takes a step per new token."""
    lengths_ = [3, 9, 1, 4, 12, 2, 2, 7]
    lines = [{"prompt": "a", "output_tokens": n, "arrival_s": 60 * i} for i, n in enumerate(lengths_)]
    fixed = {"distribution": "fixed", "mean": 5}
    for workload in (
        make("jsonl", path=write(lines), concurrency=concurrency),
        make("prompts", num_requests=8, sampling={"max_tokens": 5}, concurrency=concurrency),
        make("synthetic", num_requests=8, output_len=fixed, concurrency=concurrency),
    ):
        test_engine = TestEngine(max_model_len=2048)
        report = Driver(test_engine.engine, workload).run()
        rows = [len(step.scheduled) for step in test_engine.log.steps]
        new = [r.max_new_tokens or 0 for r in workload.requests()]
        assert (report.num_sent, report.rejected) == (8, [])
        assert max(rows) == rows[0] == concurrency
        assert math.ceil(sum(new) / concurrency) <= len(rows) <= sum(new)
        assert len(rows) == sum(new) or concurrency > 1
        assert test_engine.engine.clock.now() == len(rows) * 10 * MS


def test_a_request_that_cannot_be_served_is_refused_alone(write: Any) -> None:
    bad = [
        {"prompt": ""}, {"prompt": "a", "max_tokens": 0}, {"prompt_token_ids": []},
        {"prompt_token_ids": [258]}, {"prompt": "a", "output_tokens": 0}, {"prompt": "a", "top_p": 2},
    ]  # fmt: skip
    path = write([*bad, {"id": "good", "prompt": "a", "max_tokens": 2}])
    for concurrency in (None, 1):
        test_engine = TestEngine()
        report = Driver(test_engine.engine, make("jsonl", path=path, concurrency=concurrency)).run()
        assert [e.request_id for e in report.rejected] == [f"line-{n}" for n in range(1, 7)]
        assert [e.problem.partition(":")[0] for e in report.rejected][:2] == [
            "the prompt is empty",
            "max_tokens=0",
        ]
        assert [seq.id for seq in test_engine.log.finished_sequences] == ["good"]


def test_files_and_draws_are_streamed(write: Any) -> None:
    model = StubModel()
    lines = (b'{"id": "q%d", "prompt": "p%d", "arrival_s": %d}\n' % (i, i, i) for i in range(200_000))
    workload = make("jsonl", path=write(b"".join(lines)), model=model)
    assert (workload.num_requests, model.num_loads) == (200_000, 0)
    started = time.perf_counter()
    three = list(islice(workload.requests(), 3))
    endless = list(islice(make("synthetic", num_requests=10**8).requests(), 3))
    assert time.perf_counter() - started < 0.5
    assert [r.id for r in three] == ["q0", "q1", "q2"]
    assert (model.num_loads, model.the_tokenizer.num_prompts) == (1, 3)
    assert len(endless) == 3


def test_token_ids_need_no_tokenizer(write: Any) -> None:
    model = StubModel()
    assert list(make("jsonl", path=write([{"prompt_token_ids": [1]}]), model=model).requests())
    assert list(make("synthetic", model=model).requests())
    assert model.num_loads == 0


@pytest.mark.parametrize("name", ["prompts", "synthetic", "jsonl", "chat", "tree", "mooncake", "azure"])
def test_yaml_holds_every_setting_with_its_default(name: str) -> None:
    def check(values: dict[str, Any], default: Any) -> None:
        assert set(values) == {f.name for f in fields(default)}
        for key, value in values.items():
            if is_dataclass(getattr(default, key)):
                check(value, getattr(default, key))

    schema = register().get("workload", name).schema
    values = yaml.safe_load((CONF / f"{name}.yaml").read_text(encoding="utf-8"))
    assert values.pop("name") == name
    assert from_mapping(schema, values, "workload") == schema()
    check(values, schema())


def test_neither_torch_nor_transformers_is_imported() -> None:
    code = (
        "import sys, kvengine_plugins.workloads; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
