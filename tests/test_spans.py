"""Spans: the OTLP JSON rules, a tree per request, phases that sum to its latency, links, sampled steps."""

from __future__ import annotations

import errno
import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvengine.analysis.timeline import WAITING_FOR_PROMPT
from kvengine.core.errors import RequestError
from kvengine.core.reasons import Reason
from kvengine.core.sequence import SequenceState
from kvengine.engine.recording import PoolState
from kvengine.policies import SchedulingView
from kvengine.registry import discover
from kvengine.telemetry import spans as spans_module
from kvengine.telemetry.phases import lives
from kvengine.telemetry.recorder import ColumnRecorder
from kvengine.telemetry.spans import MAX_LINKS, SPANS_PER_LINE, RunFacts, write_spans
from kvengine.telemetry.step_sampling import WINDOW_NS, StepSample, sample_steps
from kvengine.telemetry.tables import columns
from kvengine.testing.engines import TestEngine
from kvengine_plugins.schedulers.chunked import ChunkedScheduler
from kvengine_plugins.schedulers.continuous import ContinuousScheduler

MS = 1_000_000
EPOCH = 1_700_000_000_123_456_789
ERROR, UNSET = 2, 0
PRESSED = {"num_blocks": 7, "block_size": 4}
CHUNKED = {"policies": {"scheduler": "chunked"}, "max_num_batched_tokens": 11, **PRESSED}
POLICIES = {
    "chunked": CHUNKED,
    "chunked_tight": {**CHUNKED, "max_num_batched_tokens": 3, "max_num_seqs": 3},
    "continuous": {"policies": {"scheduler": "continuous"}, **PRESSED},
    "admit_first": {"policies": {"scheduler": "admit_first"}, **PRESSED},
    "static": {"policies": {"scheduler": "static"}, "max_num_seqs": 3, "num_blocks": 9, "block_size": 4},
}


class AdmitFirst(ContinuousScheduler):
    """A plug-in that lets newcomers in before the running grow, so that a plan may admit and preempt one."""

    def schedule(self, view: SchedulingView) -> None:
        running = list(view.running)
        while len(view.waiting) and view.admit(view.waiting.peek()):
            pass
        for seq in running:
            if seq.state is SequenceState.RUNNING:
                view.schedule(seq, max_tokens=1)


class NowAndThen(ChunkedScheduler):
    """A plug-in that gives prefills a chunk of four tokens in every third step."""

    def schedule(self, view: SchedulingView) -> None:
        for seq in view.running:
            if not seq.is_prefilling:
                view.schedule(seq, max_tokens=1)
            elif view.now % (30 * MS) == 0:
                view.schedule(seq, max_tokens=4)
        if len(view.waiting):
            view.admit(view.waiting.peek(), 4)


class ByTurns(ChunkedScheduler):
    """A plug-in that has several prefills unfinished and gives a chunk of four tokens to one of them a step."""

    def schedule(self, view: SchedulingView) -> None:
        view.schedule_decodes()
        for seq in view.heads:
            if not view.admit(seq, 1):
                break
        prefilling = list(view.prefilling)
        if prefilling:
            view.schedule(prefilling[view.now // (10 * MS) % len(prefilling)], max_tokens=4)


class Tee:
    """Tells several recorders the same."""

    def __init__(self, *recorders: Any) -> None:
        self._recorders = recorders

    def __getattr__(self, name: str) -> Any:
        calls = [getattr(recorder, name) for recorder in self._recorders]
        return lambda *told: [call(*told) for call in calls]


class Recorded:
    """A run that is over: its engine with the step log, its tables, its spans and what was said of them."""

    def __init__(self, path: Path, test_engine: TestEngine, recorder: ColumnRecorder, **facts: Any) -> None:
        self.test_engine = test_engine
        recorder.flush()
        self.tables = recorder.tables()
        self.said = write_spans(path, self.tables, run_facts(**facts))
        self.lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        self.spans = [
            span
            for line in self.lines
            for of_resource in line["resourceSpans"]
            for of_scope in of_resource["scopeSpans"]
            for span in of_scope["spans"]
        ]
        self.by_id = {(span["traceId"], span["spanId"]): span for span in self.spans}

    def named(self, name: str) -> list[dict[str, Any]]:
        return [span for span in self.spans if span["name"] == name]

    @property
    def roots(self) -> list[dict[str, Any]]:
        """The roots of requests."""
        return self.named("text_completion tiny")

    def children(self, root: dict[str, Any]) -> list[dict[str, Any]]:
        inside = [span for span in self.spans if span.get("parentSpanId") == root["spanId"]]
        return [span for span in inside if span["traceId"] == root["traceId"]]


def run_facts(**changed: Any) -> RunFacts:
    facts = {
        "run_id": "run-1", "model": "tiny", "version": "9.9", "epoch_unix_ns": EPOCH,
        "policies": {"scheduler": "chunked", "allocator": "paged"}, "max_step_spans": 2000,
        "step_span_interval": 100,
    }  # fmt: skip
    return RunFacts(**{**facts, **changed})


def engine(**policies: Any) -> tuple[TestEngine, ColumnRecorder]:
    registry = discover()
    for name, scheduler in (("admit_first", AdmitFirst), ("now_and_then", NowAndThen), ("by_turns", ByTurns)):
        registry.add("scheduler", name, lambda config, build, made=scheduler: made(), summary="for tests")
    test_engine, recorder = TestEngine(registry=registry, **policies), ColumnRecorder()
    tee: Any = Tee(test_engine.log, recorder)
    test_engine.engine.recorder = tee
    return test_engine, recorder


def load(test_engine: TestEngine) -> None:
    """More work than the pool holds: one of three choices, one named like the engine's own trace, one that
    cannot be served, one that is aborted while it runs and one while it waits."""
    for i in range(4):
        test_engine.add(f"r{i}", range(10 * i, 10 * i + 8), 8)
    test_engine.add("many", range(6), 8, n=3)
    test_engine.add("engine", range(20), 2)
    for request_id, max_tokens in (("long", 100), ("r0", 8), ("r0", 8)):
        with pytest.raises(RequestError):
            test_engine.add(request_id, range(200), max_tokens)
    test_engine.add("waiter", range(8), 8)
    for _ in range(3):
        test_engine.step()
    test_engine.engine.abort("r1")
    test_engine.engine.abort("waiter")
    test_engine.run()


@pytest.fixture(scope="module", params=POLICIES)
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    test_engine, recorder = engine(**POLICIES[request.param])
    load(test_engine)
    path = tmp_path_factory.mktemp("spans") / "spans.jsonl"
    return Recorded(path, test_engine, recorder, step_span_interval=1)


def attributes(of: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a span or resource as plain values."""
    return {item["key"]: plain(item["value"]) for item in of.get("attributes", [])}


def plain(value: dict[str, Any]) -> Any:
    [(kind, content)] = value.items()
    if kind == "arrayValue":
        return [plain(item) for item in content["values"]]
    return int(content) if kind == "intValue" else content


def start(span: dict[str, Any]) -> int:
    return int(span["startTimeUnixNano"]) - EPOCH


def end(span: dict[str, Any]) -> int:
    return int(span["endTimeUnixNano"]) - EPOCH


def status(span: dict[str, Any]) -> int:
    return span.get("status", {}).get("code", UNSET)


# ---- the format: opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding, and specs/otel/protocol/file-exporter

SPAN_FIELDS = {
    "traceId", "spanId", "traceState", "parentSpanId", "flags", "name", "kind", "startTimeUnixNano",
    "endTimeUnixNano", "attributes", "droppedAttributesCount", "events", "droppedEventsCount", "links",
    "droppedLinksCount", "status",
}  # fmt: skip
LINK_FIELDS = {"traceId", "spanId", "traceState", "attributes", "droppedAttributesCount", "flags"}
VALUE_FIELDS = {
    "stringValue": str, "boolValue": bool, "intValue": str, "doubleValue": float, "arrayValue": dict,
}  # fmt: skip


def check_ids(of: dict[str, Any]) -> None:
    """Hex, of the right length, and not all zeros."""
    assert re.fullmatch("[0-9a-f]{32}", of["traceId"])
    assert re.fullmatch("[0-9a-f]{16}", of["spanId"])
    assert int(of["traceId"], 16)
    assert int(of["spanId"], 16)


def check_attributes(of: dict[str, Any]) -> None:
    items = of.get("attributes", [])
    keys = [item["key"] for item in items]
    assert len(keys) == len(set(keys)) <= 128
    for item in items:
        assert set(item) == {"key", "value"}
        check_value(item["value"])


def check_value(value: dict[str, Any]) -> None:
    [(kind, content)] = value.items()
    assert type(content) is VALUE_FIELDS[kind]
    if kind == "intValue":
        assert re.fullmatch("-?[0-9]+", content)
    if kind == "arrayValue":
        for item in content["values"]:
            check_value(item)


def check_span(span: dict[str, Any]) -> None:
    assert set(span) <= SPAN_FIELDS
    check_ids(span)
    check_attributes(span)
    assert span["name"]
    assert type(span["kind"]) is int
    assert span["kind"] == 1, "INTERNAL"
    for name in ("startTimeUnixNano", "endTimeUnixNano"):
        assert re.fullmatch("[0-9]+", span[name])
    assert int(span["startTimeUnixNano"]) <= int(span["endTimeUnixNano"])
    assert type(span.get("flags", 0)) is int
    assert set(span.get("status", {})) <= {"code", "message"}
    assert type(status(span)) is int
    assert status(span) in (UNSET, ERROR)
    for link in span.get("links", []):
        assert set(link) <= LINK_FIELDS
        check_ids(link)
        check_attributes(link)
    for event in span.get("events", []):
        assert set(event) <= {"timeUnixNano", "name", "attributes", "droppedAttributesCount"}
        assert event["name"]
        assert span["startTimeUnixNano"] <= event["timeUnixNano"] <= span["endTimeUnixNano"]
        check_attributes(event)


def test_every_line_is_a_traces_data_by_the_rules_of_otlp_json(recorded: Recorded) -> None:
    assert len(recorded.lines) == -(-len(recorded.spans) // SPANS_PER_LINE)
    for line in recorded.lines:
        assert set(line) == {"resourceSpans"}
        for of_resource in line["resourceSpans"]:
            assert set(of_resource) <= {"resource", "scopeSpans", "schemaUrl"}
            check_attributes(of_resource["resource"])
            for of_scope in of_resource["scopeSpans"]:
                assert set(of_scope) <= {"scope", "spans", "schemaUrl"}
                assert of_scope["scope"] == {"name": "kvengine", "version": "9.9"}
                for span in of_scope["spans"]:
                    check_span(span)


def test_the_resource_says_which_run_and_which_policies(recorded: Recorded) -> None:
    for line in recorded.lines:
        [of_resource] = line["resourceSpans"]
        assert attributes(of_resource["resource"]) == {
            "service.name": "kvengine",
            "service.version": "9.9",
            "kvengine.run.id": "run-1",
            "kvengine.policy.scheduler": "chunked",
            "kvengine.policy.allocator": "paged",
        }


def test_ids_are_unique_and_differ_from_those_of_another_run(recorded: Recorded, tmp_path: Path) -> None:
    assert len(recorded.by_id) == len(recorded.spans) == recorded.said["num_spans"]
    for run_id, equal in (("run-1", True), ("run-2", False)):
        path = tmp_path / run_id
        write_spans(path, recorded.tables, run_facts(run_id=run_id, step_span_interval=1))
        ids = set(re.findall('"traceId":"([0-9a-f]+)"', path.read_text()))
        assert (ids & {span["traceId"] for span in recorded.spans} == ids) == equal


# ---- trees


def test_every_trace_is_one_tree_and_a_child_lies_within_its_parent(recorded: Recorded) -> None:
    roots = Counter(span["traceId"] for span in recorded.spans if not span.get("parentSpanId"))
    assert roots == dict.fromkeys({span["traceId"] for span in recorded.spans}, 1)
    for span in recorded.spans:
        if span.get("parentSpanId"):
            parent = recorded.by_id[span["traceId"], span["parentSpanId"]]
            assert start(parent) <= start(span) <= end(span) <= end(parent)


def test_phases_follow_each_other_and_sum_to_the_latency(recorded: Recorded) -> None:
    finished = {(s.request.id, s.choice): s for s in recorded.test_engine.log.finished_sequences}
    seen = set()
    for root in recorded.roots:
        by_choice = defaultdict(list)
        for phase in recorded.children(root):
            by_choice[attributes(phase)["kvengine.choice"]].append(phase)
        for choice, phases in by_choice.items():
            key = (attributes(root)["kvengine.request.id"], choice)
            seq = finished[key]
            assert seq.times.finished_ns is not None
            assert sum(end(p) - start(p) for p in phases) == seq.times.finished_ns - seq.arrival_ns
            assert start(phases[0]) == seq.arrival_ns
            assert all(end(before) == start(after) for before, after in pairwise(phases))
            assert end(phases[-1]) == seq.times.finished_ns
            words = [p["name"] for p in phases]
            assert words.count("preempted") == seq.num_preemptions
            assert re.fullmatch("queued( prefill( decode)?( preempted|$))*", " ".join(words)), words
            seen.add(key)
    assert seen == set(finished)


def test_phases_change_when_the_step_log_says_so(recorded: Recorded) -> None:
    """Queued until the first step with it, prefill until its first token, preempted until it is back.

    A fork's first token comes from the row of `many/0` that ends the prompt: all of its prefill is that step.
    """
    log = recorded.test_engine.log
    forked_in = next(s.step for s in log.steps if "many/0" in s.sampled)
    num_decodes = num_forks = 0
    for root in recorded.roots:
        for phase in recorded.children(root):
            request_id, choice = attributes(root)["kvengine.request.id"], attributes(phase)["kvengine.choice"]
            key = f"many/{choice}" if request_id == "many" else request_id
            during = [s for s in log.steps if start(phase) <= s.step * 10 * MS < end(phase)]
            before = log.steps[start(phase) // (10 * MS) - 1]
            forked = request_id == "many" and choice > 0
            if phase["name"] in ("queued", "preempted"):
                assert not any(key in s.scheduled for s in during)
            elif phase["name"] == "prefill" and forked and [s.step for s in during] == [forked_in]:
                assert key not in during[0].scheduled
                num_forks += 1
            elif start(phase) == end(phase):  # let in and preempted by one plan
                assert key in log.steps[start(phase) // (10 * MS)].preempted
            elif phase["name"] == "prefill":
                assert key in during[0].scheduled
                assert not any(key in s.sampled for s in during[:-1])
            else:
                assert key in before.sampled or (forked and before.step == forked_in)
                num_decodes += 1
    assert num_decodes >= len(log.finished_sequences) - 2
    assert num_forks == 2


def test_the_root_says_what_the_request_was(recorded: Recorded) -> None:
    sequences = defaultdict(list)
    for seq in recorded.test_engine.log.finished_sequences:
        sequences[seq.request.id].append(seq)
    served = [root for root in recorded.roots if "kvengine.num_preemptions" in attributes(root)]
    assert len(served) == len(sequences) == 7
    for root in served:
        about = attributes(root)
        group = sequences[about["kvengine.request.id"]]
        aborted = about["kvengine.request.id"] in ("r1", "waiter")
        assert status(root) == (ERROR if aborted else UNSET)
        assert about.get("error.type") == ("aborted" if aborted else None)
        assert about["gen_ai.operation.name"] == "text_completion"
        assert about["gen_ai.request.model"] == "tiny"
        assert about["gen_ai.usage.input_tokens"] == group[0].num_prompt_tokens
        assert about["gen_ai.usage.output_tokens"] == sum(seq.num_output_tokens for seq in group)
        assert about["gen_ai.response.finish_reasons"] == [str(seq.finish_reason) for seq in group]
        assert about["kvengine.num_preemptions"] == sum(seq.num_preemptions for seq in group)
        assert about["kvengine.num_recomputed_tokens"] == sum(seq.num_recomputed_tokens for seq in group)
        assert about["kvengine.pair.key"] == group[0].request.pair_key
        assert start(root) == group[0].arrival_ns
        assert end(root) == max(seq.times.finished_ns or 0 for seq in group)


def test_a_rejected_request_is_a_trace_with_an_error(recorded: Recorded) -> None:
    """Also one that took the id of a request which lives, twice."""
    rejected = [root for root in recorded.roots if attributes(root).get("error.type") == "rejected"]
    assert [attributes(root)["kvengine.request.id"] for root in rejected] == ["long", "r0", "r0"]
    rows = [row for row in recorded.tables["requests"].to_pylist() if row["status"] == "rejected"]
    assert [root["status"]["message"] for root in rejected] == [row["problem"] for row in rows]
    for root in rejected:
        assert status(root) == ERROR
        assert start(root) == end(root)
        assert recorded.children(root) == []


def test_unfinished_requests_have_phases_up_to_the_end_of_the_run(tmp_path: Path) -> None:
    test_engine, recorder = engine(max_num_seqs=2)
    test_engine.add("decoding", range(4), 200)
    test_engine.step()
    test_engine.add("prefilling", range(250), 4)
    test_engine.add("waiting", range(4), 4)
    test_engine.step()
    test_engine.engine.clock.advance(7 * MS)
    test_engine.add("late", range(4), 4)
    for seq in test_engine.engine.live_sequences():
        recorder.finished(seq, test_engine.engine.clock.now())
    run = Recorded(tmp_path / "spans.jsonl", test_engine, recorder)
    found = {
        attributes(root)["kvengine.request.id"]: [
            (p["name"], start(p) // MS, end(p) // MS) for p in run.children(root)
        ]
        for root in run.roots
    }
    assert found == {
        "decoding": [("queued", 0, 0), ("prefill", 0, 10), ("decode", 10, 20)],
        "prefilling": [("queued", 10, 10), ("prefill", 10, 20)],
        "waiting": [("queued", 10, 20)],
        "late": [("queued", 27, 27)],
    }
    assert {status(root) for root in run.roots} == {ERROR}
    assert {attributes(root)["error.type"] for root in run.roots} == {"unfinished"}


# ---- events


def events(span: dict[str, Any]) -> list[tuple[str, int, dict[str, Any]]]:
    """Name, moment and attributes of each."""
    return [
        (event["name"], int(event["timeUnixNano"]) - EPOCH, attributes(event))
        for event in span.get("events", [])
    ]


def test_every_wait_says_why_and_for_how_long(recorded: Recorded) -> None:
    """An event for each reason, when it first held; together they held as long as the wait was."""
    for span in [*recorded.named("queued"), *recorded.named("preempted")]:
        reasons = [event for event in events(span) if event[0] != "preempted"]
        assert len({name for name, _, _ in reasons}) == len(reasons)
        assert sum(about["kvengine.reason.held_ns"] for _, _, about in reasons) == end(span) - start(span)
        for name, moment, about in reasons:
            assert name in set(Reason) | {WAITING_FOR_PROMPT}
            assert start(span) <= moment < end(span)
            assert set(about) == {"kvengine.reason.held_ns", "kvengine.reason.detail"}
        moments = [moment for _, moment, _ in events(span)]
        assert moments == sorted(moments)
    for span in [*recorded.named("prefill"), *recorded.named("decode")]:
        assert not events(span)


def test_every_preemption_is_an_event_with_all_its_numbers(recorded: Recorded) -> None:
    decisions = {
        (row["request_id"], row["choice"], row["time_ns"]): row
        for row in recorded.tables["decisions"].to_pylist()
        if row["action"] == "preempt"
    }
    seen = set()
    for root in recorded.roots:
        for span in recorded.children(root):
            found = [event for event in events(span) if event[0] == "preempted"]
            assert len(found) == (span["name"] == "preempted")
            for _, moment, about in found:
                victim = attributes(root)["kvengine.request.id"]
                key = (victim, attributes(span)["kvengine.choice"], moment)
                row = decisions[key]
                assert {name.rpartition(".")[2]: value for name, value in about.items()} == {
                    "victim": victim,
                    "beneficiary": row["detail"],
                    "reason": "PREEMPTED_FOR",
                    "policy": "latest_arrival",
                    "step": row["first_step"],
                    "swapped": False,
                    "num_blocks_freed": row["num_free_after"] - row["num_free_before"],
                    "num_tokens_lost": row["num_tokens"],
                    "num_moved_blocks": 0,
                    "num_free_before": row["num_free_before"],
                    "num_free_after": row["num_free_after"],
                }
                seen.add(key)
    assert seen == set(decisions)


# ---- steps and their links


def test_a_step_span_is_the_step(recorded: Recorded) -> None:
    [root] = recorded.named("engine.run")
    sample = sample_steps(recorded.tables["steps"], at_most=2000, every=1)
    steps = recorded.named("engine.step")
    assert [attributes(s)["kvengine.step.step"] for s in steps] == list(range(len(recorded.tables["steps"])))
    assert (start(root), end(root)) == (start(steps[0]), end(steps[-1]))
    about = attributes(root)
    assert about["kvengine.num_steps"] == len(steps)
    assert about["kvengine.step_sampling"] == recorded.said["steps"]
    for span, row in zip(steps, recorded.tables["steps"].to_pylist(), strict=True):
        assert (start(span), end(span)) == (row["start_ns"], row["end_ns"])
        assert span["parentSpanId"] == root["spanId"]
        about = {key.removeprefix("kvengine.step."): value for key, value in attributes(span).items()}
        assert about.pop("sampled_for") == sample.chosen[row["step"]]
        assert about == {key: row[key] for key in about}
        assert len(about) == 12


def test_links_point_to_exactly_the_requests_of_the_step(recorded: Recorded) -> None:
    log = recorded.test_engine.log.steps
    for span in recorded.named("engine.step"):
        linked = [recorded.by_id[link["traceId"], link["spanId"]] for link in span.get("links", [])]
        assert all(not root.get("parentSpanId") for root in linked)
        found = [attributes(root)["kvengine.request.id"] for root in linked]
        assert len(found) == len(set(found))
        scheduled = log[attributes(span)["kvengine.step.step"]].scheduled
        assert set(found) == {key.partition("/")[0] for key in scheduled}


def test_a_prefill_that_is_aborted_or_preempted_is_linked_to_its_chunks(tmp_path: Path) -> None:
    """`b` is preempted before it has a token, `c` aborted before it has one."""
    test_engine, recorder = engine(num_blocks=8, block_size=4, max_num_batched_tokens=5)
    test_engine.add("a", range(4), 20)
    test_engine.step()
    test_engine.add("b", range(100, 122), 2)
    for _ in range(40):
        test_engine.step()
        if "b" in test_engine.log.steps[-1].preempted:
            break
    assert test_engine.log.num_preemptions == 1
    assert not any("b" in step.sampled for step in test_engine.log.steps)
    test_engine.run()
    test_engine.add("c", range(200, 230), 2)
    test_engine.step()
    test_engine.step()
    test_engine.engine.abort("c")
    test_engine.add("d", range(4), 2)
    test_engine.run()
    run = Recorded(tmp_path / "spans.jsonl", test_engine, recorder, step_span_interval=1)
    test_links_point_to_exactly_the_requests_of_the_step(run)


def test_a_prefill_that_pauses_is_linked_to_its_own_steps(tmp_path: Path) -> None:
    test_engine, recorder = engine(policies={"scheduler": "now_and_then"})
    test_engine.add("decoding", range(4), 30)
    test_engine.step()
    test_engine.add("prefilling", range(22), 2)
    test_engine.run()
    assert sum("prefilling" in step.scheduled for step in test_engine.log.steps) == 7
    run = Recorded(tmp_path / "spans.jsonl", test_engine, recorder, step_span_interval=1)
    test_links_point_to_exactly_the_requests_of_the_step(run)


def test_each_of_several_prefills_is_linked_to_its_own_steps(tmp_path: Path) -> None:
    """Four at once, each in every few steps, and prefill steps of the others between."""
    test_engine, recorder = engine(policies={"scheduler": "by_turns"}, num_blocks=40, block_size=4)
    for i in range(4):
        test_engine.add(f"r{i}", range(30 * i, 30 * i + 20 + i), 3)
    test_engine.run()
    prefills = [set(step.scheduled) - set(step.sampled) for step in test_engine.log.steps]
    assert max(map(len, prefills)) > 1
    assert len({frozenset(names) for names in prefills}) > 4
    run = Recorded(tmp_path / "spans.jsonl", test_engine, recorder, step_span_interval=1)
    test_links_point_to_exactly_the_requests_of_the_step(run)
    steps = {name: [s.step for s in test_engine.log.steps if name in s.scheduled] for name in prefills[0]}
    for (name, _), life in lives(run.tables).items():
        assert [step for first, last in life.steps for step in range(first, last + 1)] == steps[name]


def test_who_is_preempted_by_the_plan_that_lets_it_in_was_in_no_step(tmp_path: Path) -> None:
    """`b` is let in by two plans in which `a` then needs its only block; `c` holds the third one meanwhile."""
    test_engine, recorder = engine(policies={"scheduler": "admit_first"}, num_blocks=3, block_size=4)
    test_engine.add("a", range(4), 9)
    test_engine.step()
    test_engine.add("c", range(1), 4)
    test_engine.add("b", range(4), 1)
    test_engine.run()
    steps = test_engine.log.steps
    assert [step.step for step in steps if step.preempted == ("b",)] == [1, 5]
    assert [step.step for step in steps if "b" in step.scheduled] == [9]
    run = Recorded(tmp_path / "spans.jsonl", test_engine, recorder, step_span_interval=1)
    test_links_point_to_exactly_the_requests_of_the_step(run)
    [root] = [root for root in run.roots if attributes(root)["kvengine.request.id"] == "b"]
    assert [(p["name"], start(p) // MS, end(p) // MS) for p in run.children(root)] == [
        ("queued", 10, 10),
        ("prefill", 10, 10),
        ("preempted", 10, 50),
        ("prefill", 50, 50),
        ("preempted", 50, 90),
        ("prefill", 90, 100),
    ]
    decisions = run.tables["decisions"]
    backwards = {**run.tables, "decisions": decisions.take(list(range(len(decisions)))[::-1])}
    assert lives(backwards) == lives(run.tables), "the order of the table does not matter"


def test_many_links_are_cut_and_counted(tmp_path: Path) -> None:
    num_requests = MAX_LINKS + 7
    test_engine, recorder = engine(max_num_seqs=200, max_num_batched_tokens=2000)
    for i in range(num_requests):
        test_engine.add(f"r{i}", [1], 2)
    test_engine.run()
    run = Recorded(tmp_path / "spans.jsonl", test_engine, recorder)
    for span in run.named("engine.step"):
        assert len(span["links"]) == MAX_LINKS
        assert attributes(span)["kvengine.step.num_links_left_out"] == 7


@pytest.mark.parametrize("at_most", [1, 3, 20])
def test_at_most_so_many_steps_have_a_span(tmp_path: Path, at_most: int) -> None:
    test_engine, recorder = engine(**POLICIES["continuous"])
    load(test_engine)
    run = Recorded(
        tmp_path / "spans.jsonl", test_engine, recorder, max_step_spans=at_most, step_span_interval=1
    )
    assert len(run.named("engine.step")) == min(at_most, len(run.tables["steps"]))
    assert 1 <= len(run.named("engine.window")) <= at_most
    assert run.said["steps"].startswith(f"{at_most} of {len(run.tables['steps'])} steps: ")


def test_windows_sum_what_is_in_them(tmp_path: Path) -> None:
    test_engine, recorder = engine()
    for i in range(3):
        test_engine.add(f"r{i}", range(20), 100)
    test_engine.run()
    run = Recorded(
        tmp_path / "spans.jsonl", test_engine, recorder, max_step_spans=10, step_span_interval=1000
    )
    windows = run.named("engine.window")
    sums = [attributes(w) for w in windows]
    assert len(windows) == 4
    assert sum(w["kvengine.num_steps"] for w in sums) == len(test_engine.log.steps) == 100
    assert sum(w["kvengine.step.num_sampled"] for w in sums) == 300
    assert sum(w["kvengine.step.num_prefill_tokens"] for w in sums) == 60
    assert sum(w["kvengine.step.num_decode_tokens"] for w in sums) == 3 * 99
    assert [(start(w) // MS, end(w) // MS) for w in windows] == [
        (0, 250),
        (250, 500),
        (500, 750),
        (750, 1000),
    ]


# ---- the sample


def steps_table(durations_ms: list[float], **changed: dict[int, int]) -> pa.Table:
    """Steps of one decoding row, end to end; `changed` sets a column at some steps."""
    ends = np.cumsum([round(d * MS) for d in durations_ms]).tolist()
    starts = [0, *ends][: len(ends)]
    names = ("num_prefill_tokens", "num_decode_tokens", "num_idle_rows", "num_preempted")
    usual = dict.fromkeys(names, 0) | {"num_decode_tokens": 1}
    rows = []
    for i, (begin, stop) in enumerate(zip(starts, ends, strict=True)):
        prefill, decode, idle, preempted = (changed.get(name, {}).get(i, usual[name]) for name in names)
        counts = (1, 1, prefill, decode, idle, 0, 0, 0, preempted)
        rows.append((i, begin, stop, *counts, *PoolState(1, 0, 0, 9, 0, 0, 9, 9, 0), 0, 0, 0))
    return columns("steps", rows)


def by_reason(sample: StepSample) -> dict[str, list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    for index, reason in sample.chosen.items():
        found[reason].append(index)
    return dict(found)


def test_the_slowest_the_changes_and_every_nth_are_sampled() -> None:
    slow = [33, 77, 150, 151, 480, 700, 701, 800, 950, 999]
    durations = [50.0 if i in slow else 10.0 + i % 7 for i in range(1000)]
    steps = steps_table(
        durations,
        num_prefill_tokens=dict.fromkeys(range(500, 510), 5),
        num_decode_tokens=dict.fromkeys(range(505, 515), 0),
        num_idle_rows=dict.fromkeys([*range(505, 515), *range(560, 570)], 2),
        num_preempted={640: 1, 77: 1},
    )
    sample = sample_steps(steps, at_most=2000, every=100)
    assert by_reason(sample) == {
        "slow": slow,
        "phase change": [0, 500, 505, 510, 515, 560, 570, 640],
        "interval": [100, 200, 300, 400, 600, 900],
    }
    assert list(sample.chosen) == sorted(sample.chosen)
    assert sample.said.startswith("24 of 1000 steps: slowest 1%, phase changes, every 100th, at most 2000; ")


def test_the_slowest_stay_when_there_is_little_room() -> None:
    slow = list(range(5, 1000, 100))
    steps = steps_table(
        [50.0 if i in slow else 10.0 for i in range(1000)], num_preempted=dict.fromkeys(range(300, 600), 1)
    )
    tight = by_reason(sample_steps(steps, at_most=14, every=10))
    assert tight["slow"] == slow
    assert tight["phase change"][0] == 0
    assert tight["phase change"][-1] == 599
    assert len(tight["phase change"]) == 4
    assert by_reason(sample_steps(steps, at_most=4, every=10)) == {"slow": [5, 305, 605, 905]}


def check_windows(steps: pa.Table, sample: StepSample, at_most: int) -> None:
    """They follow each other, hold every step that was not sampled once, and none holds sampled ones only."""
    begin = steps["start_ns"].to_numpy()
    covered = [i for first, last in sample.windows for i in range(first, last + 1)]
    assert len(covered) == len(set(covered))
    assert set(range(len(steps))) - set(sample.chosen) <= set(covered)
    assert covered == sorted(covered)
    assert all(set(range(a, b + 1)) - set(sample.chosen) for a, b in sample.windows)
    assert len(sample.windows) <= at_most
    width = WINDOW_NS
    while (begin[-1] - begin[0]) // width >= at_most:
        width *= 2
    numbers = [{int(begin[i] - begin[0]) // width for i in (a, b)} for a, b in sample.windows]
    assert all(len(n) == 1 for n in numbers), "both ends start in the same window"
    assert sample.said.endswith(f"; the others in {len(sample.windows)} windows of {width / 1e6:.0f} ms")


@settings(deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 1.0, 10.0, 300.0, 5000.0]), min_size=1, max_size=80),
    st.integers(1, 30),
    st.integers(1, 40),
    st.data(),
)
def test_windows_hold_every_other_step_once(
    durations: list[float], at_most: int, every: int, data: st.DataObject
) -> None:
    preempted = data.draw(st.dictionaries(st.integers(0, 80), st.integers(0, 2), max_size=9))
    steps = steps_table(durations, num_preempted=preempted)
    sample = sample_steps(steps, at_most=at_most, every=every)
    assert 1 <= len(sample.chosen) <= at_most
    check_windows(steps, sample, at_most)
    slowest = max(range(len(durations)), key=lambda i: (durations[i], -i))
    assert slowest in sample.chosen
    if len(sample.chosen) < at_most:
        assert set(range(0, len(durations), every)) <= set(sample.chosen)
        assert {i for i, n in preempted.items() if n and i < len(durations)} <= set(sample.chosen)


def test_no_steps_no_sample() -> None:
    assert sample_steps(steps_table([]), at_most=5, every=5) == StepSample({}, [], "no steps")


# ---- files


def test_a_run_without_a_step_has_the_spans_of_its_requests(tmp_path: Path) -> None:
    test_engine, recorder = engine()
    with pytest.raises(RequestError):
        test_engine.add("long", range(300), 1)
    run = Recorded(tmp_path / "spans.jsonl", test_engine, recorder)
    assert [attributes(span)["kvengine.request.id"] for span in run.spans] == ["long"]
    assert run.said == {"num_spans": 1, "num_dropped": 0, "steps": "no steps"}
    empty = Recorded(tmp_path / "none.jsonl", *engine())
    assert (empty.lines, empty.said["num_spans"]) == ([], 0)


@pytest.mark.parametrize("policies", POLICIES)
def test_a_killed_run_has_lives_as_far_as_its_tables_go(policies: str) -> None:
    """Steps are missing at the end, or all of them; requests and tokens go on."""
    test_engine, recorder = engine(**POLICIES[policies])
    load(test_engine)
    recorder.flush()
    tables = recorder.tables()
    for kept in range(len(tables["steps"])):
        found = lives({**tables, "steps": tables["steps"].slice(0, kept)})
        assert len(found) == len(test_engine.log.finished_sequences)
        for life in found.values():
            assert all(0 <= first <= last for first, last in life.steps)
            assert all(before[2] == after[1] for before, after in pairwise(life.phases))


def test_a_second_run_replaces_the_file(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    for _ in range(2):
        test_engine, recorder = engine()
        test_engine.add("a", range(4), 3)
        test_engine.run()
        run = Recorded(path, test_engine, recorder)
    assert len(run.spans) == run.said["num_spans"]
    assert [p.name for p in tmp_path.iterdir()] == ["spans.jsonl"]


def test_a_full_disk_raises_and_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test_engine, recorder = engine()
    test_engine.add("a", range(4), 3)
    test_engine.run()
    recorder.flush()

    class FullDisk:
        def __init__(self, *args: Any, **named: Any) -> None:
            self.file = open(*args, **named)  # noqa: SIM115

        def __enter__(self) -> FullDisk:
            return self

        def __exit__(self, *args: Any) -> None:
            self.file.close()

        def write(self, text: str) -> None:
            self.file.write(text[:50])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(spans_module, "open", FullDisk, raising=False)
    with pytest.raises(OSError, match="No space left"):
        write_spans(tmp_path / "spans.jsonl", recorder.tables(), run_facts())
    assert list(tmp_path.iterdir()) == []


def test_lines_hold_a_bounded_number_of_spans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans_module, "SPANS_PER_LINE", 10)
    test_engine, recorder = engine()
    for i in range(9):
        test_engine.add(f"r{i}", range(4), 3)
    test_engine.run()
    run = Recorded(tmp_path / "spans.jsonl", test_engine, recorder)
    sizes = [len(scope["spans"]) for line in run.lines for scope in line["resourceSpans"][0]["scopeSpans"]]
    assert sizes[:-1] == [10] * (-(-run.said["num_spans"] // 10) - 1)
    assert sum(sizes) == run.said["num_spans"] > 30


def test_iteration_of_lives_is_in_the_order_of_the_table(recorded: Recorded) -> None:
    rows: Iterator[dict[str, Any]] = iter(recorded.tables["requests"].to_pylist())
    served = [(row["request_id"], row["choice"]) for row in rows if row["status"] != "rejected"]
    assert list(lives(recorded.tables)) == served
