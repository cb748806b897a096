"""Spans made from the columns after the run, as OTLP JSON lines of the official encoder.

One trace per request (root, and a child per phase of each choice) and one engine trace with the sampled
steps, linked to the requests that were in them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from opentelemetry.exporter.otlp.json.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from kvengine.analysis.timeline import Part, Timeline
from kvengine.telemetry import names
from kvengine.telemetry.phases import Life
from kvengine.telemetry.step_sampling import StepSample, sample_steps

MAX_LINKS = 128
SPANS_PER_LINE = 512
OPERATION = "text_completion"
STEP_COLUMNS = (
    "num_rows", "num_sampled", "num_prefill_tokens", "num_decode_tokens", "num_idle_rows", "num_padding_tokens",
    "num_preempted", "num_running", "num_waiting", "num_free_blocks", "num_slots_held",
)  # fmt: skip
WINDOW_SUMS = ("num_sampled", "num_prefill_tokens", "num_decode_tokens", "num_preempted")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What every span of a run shares. `epoch_unix_ns` is the wall-clock time of the engine's moment zero."""

    run_id: str
    model: str
    version: str
    epoch_unix_ns: int
    policies: dict[str, str]
    max_step_spans: int
    step_span_interval: int


def write_spans(path: Path, tables: dict[str, pa.Table], facts: RunFacts) -> dict[str, Any]:
    """Write spans.jsonl at `path`; how many spans it holds, how many were dropped, and how steps were sampled.

    Raises OSError when the file cannot be written; then there is none, and one of an earlier run stays.
    """
    timeline = Timeline(tables)
    sample = sample_steps(tables["steps"], at_most=facts.max_step_spans, every=facts.step_span_interval)
    num_spans = _write_lines(path, _all_spans(_SpanMaker(facts), tables, timeline, sample))
    return {"num_spans": num_spans, "num_dropped": 0, "steps": sample.said}


def _write_lines(path: Path, spans: Iterator[ReadableSpan]) -> int:
    """Write `spans` as one TracesData per line; their number.

    The official file exporter would print a traceback for each line that a full disk does not take.
    """
    num_spans = 0
    partial = path.with_suffix(".partial")
    try:
        with open(partial, "w", encoding="utf-8") as file:
            while batch := list(islice(spans, SPANS_PER_LINE)):
                file.write(json.dumps(encode_spans(batch).to_dict(), separators=(",", ":")) + "\n")
                num_spans += len(batch)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return num_spans


class _SpanMaker:
    """Makes finished spans with ids that depend on the run and on what the span stands for."""

    def __init__(self, facts: RunFacts) -> None:
        self.facts = facts
        self._scope = InstrumentationScope("kvengine", facts.version)
        policies = {names.POLICY + kind: name for kind, name in facts.policies.items()}
        self._resource = Resource(
            {
                "service.name": "kvengine",
                "service.version": facts.version,
                names.RUN_ID: facts.run_id,
                **policies,
            }
        )

    def request(self, request_id: str, span: str = "request") -> SpanContext:
        """The ids of a span in the trace of a request; of its root if no other is named."""
        return self.context(f"request {request_id}", span)

    def context(self, trace: str, span: str) -> SpanContext:
        """The ids of `span` in `trace`, both named by what they stand for."""
        trace_id, span_id = self._digest(16, trace), self._digest(8, trace, span)
        return SpanContext(trace_id, span_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))

    def span(
        self,
        name: str,
        context: SpanContext,
        start_ns: int,
        end_ns: int,
        attributes: dict[str, Any],
        *,
        parent: SpanContext | None = None,
        links: Iterable[Link] = (),
        events: Iterable[Event] = (),
        problem: str | None = None,
    ) -> ReadableSpan:
        """A span between two moments of the engine's clock."""
        return ReadableSpan(
            name=name,
            context=context,
            parent=parent,
            resource=self._resource,
            attributes=attributes,
            links=tuple(links),
            events=tuple(events),
            kind=SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR, problem) if problem else Status(StatusCode.UNSET),
            start_time=self.facts.epoch_unix_ns + start_ns,
            end_time=self.facts.epoch_unix_ns + end_ns,
            instrumentation_scope=self._scope,
        )

    def event(self, name: str, moment_ns: int, attributes: dict[str, Any]) -> Event:
        """What happened at a moment of the engine's clock."""
        return Event(name, attributes, self.facts.epoch_unix_ns + moment_ns)

    def _digest(self, size: int, *parts: str) -> int:
        text = "\0".join((self.facts.run_id, *parts))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=size).digest(), "big")


def _all_spans(
    maker: _SpanMaker, tables: dict[str, pa.Table], timeline: Timeline, sample: StepSample
) -> Iterator[ReadableSpan]:
    by_request: dict[str, list[Life]] = {}
    for (request_id, _), life in timeline.lives.items():
        by_request.setdefault(request_id, []).append(life)
    for request_id, group in by_request.items():
        yield from _request_spans(maker, request_id, group, timeline)
    for number, row in enumerate(tables["requests"].to_pylist()):
        if row["status"] == "rejected":
            yield _rejected_span(maker, row, number)
    if len(tables["steps"]):
        yield from _engine_spans(maker, tables["steps"], timeline.lives, sample)


def _request_spans(
    maker: _SpanMaker, request_id: str, group: list[Life], timeline: Timeline
) -> Iterator[ReadableSpan]:
    """A root over all choices, and each choice's phases under it."""
    root = maker.request(request_id)
    first = group[0].request
    rows = [life.request for life in group]
    failed = {row["status"] for row in rows} - {"finished"}
    yield maker.span(
        f"{OPERATION} {maker.facts.model}",
        root,
        first["arrival_ns"],
        max(life.phases[-1][2] for life in group),
        {
            names.OPERATION_NAME: OPERATION,
            names.PROVIDER_NAME: "kvengine",
            names.REQUEST_MODEL: maker.facts.model,
            names.USAGE_INPUT_TOKENS: first["num_prompt_tokens"],
            names.USAGE_OUTPUT_TOKENS: sum(row["num_output_tokens"] for row in rows),
            names.RESPONSE_FINISH_REASONS: [row["finish_reason"] or "none" for row in rows],
            names.REQUEST_ID: request_id,
            names.PAIR_KEY: first["pair_key"],
            names.PRIORITY: first["priority"],
            **({names.TENANT: first["tenant"]} if first["tenant"] is not None else {}),
            names.NUM_PREEMPTIONS: sum(row["num_preemptions"] for row in rows),
            names.NUM_RECOMPUTED_TOKENS: sum(row["num_recomputed_tokens"] for row in rows),
            **({names.ERROR_TYPE: sorted(failed)[0]} if failed else {}),
        },
        problem=f"request is {', '.join(sorted(failed))}" if failed else None,
    )
    for life in group:
        choice = life.request["choice"]
        waits = iter(timeline.waits((request_id, choice)))
        for i, (phase, start, end) in enumerate(life.phases):
            context = maker.request(request_id, f"{choice}/{i}/{phase}")
            events = _wait_events(maker, life, next(waits)) if phase in ("queued", "preempted") else ()
            yield maker.span(phase, context, start, end, {names.CHOICE: choice}, parent=root, events=events)


def _wait_events(maker: _SpanMaker, life: Life, wait: Part) -> Iterator[Event]:
    """The preemption, if it was one, and then every reason of the wait when it first held, with the time it held
    in all."""
    of = wait.preemption
    if of is not None:
        about = {
            names.VICTIM: life.request["request_id"],
            names.BENEFICIARY: of.beneficiary,
            names.PREEMPTION_REASON: of.reason,
            names.PREEMPTION_POLICY: of.policy,
            names.PREEMPTION_STEP: of.step,
            names.SWAPPED: of.swapped,
            names.BLOCKS_FREED: of.num_blocks_freed,
            names.TOKENS_LOST: of.num_tokens_lost,
            names.MOVED_BLOCKS: of.num_moved_blocks,
            names.FREE_BEFORE: of.num_free_before,
            names.FREE_AFTER: of.num_free_after,
        }
        yield maker.event(names.PREEMPTED, wait.begin_ns, about)
    for share in wait.shares:
        about = {names.DETAIL: share.detail, names.HELD_NS: share.ns}
        yield maker.event(share.name, share.first_ns, about)


def _rejected_span(maker: _SpanMaker, row: dict[str, Any], number: int) -> ReadableSpan:
    """A trace of its own, named by its row: its id may be that of a request which lives."""
    attributes = {
        names.OPERATION_NAME: OPERATION,
        names.PROVIDER_NAME: "kvengine",
        names.REQUEST_MODEL: maker.facts.model,
        names.USAGE_INPUT_TOKENS: row["num_prompt_tokens"],
        names.REQUEST_ID: row["request_id"],
        names.PAIR_KEY: row["pair_key"],
        names.ERROR_TYPE: "rejected",
    }
    context = maker.context(f"rejected {number}", "request")
    moment = row["arrival_ns"]
    name = f"{OPERATION} {maker.facts.model}"
    return maker.span(name, context, moment, moment, attributes, problem=row["problem"])


def _engine_spans(
    maker: _SpanMaker, steps: pa.Table, found: dict[tuple[str, int], Life], sample: StepSample
) -> Iterator[ReadableSpan]:
    start, end = steps["start_ns"].to_numpy(), steps["end_ns"].to_numpy()
    root = maker.context("engine", "engine.run")
    about = {names.NUM_STEPS: len(steps), names.SAMPLING: sample.said, names.RUN_ID: maker.facts.run_id}
    yield maker.span("engine.run", root, int(start[0]), int(end[-1]), about)
    links = _links(maker, steps["step"].to_numpy(), found, sample)
    rows = steps.take(pa.array(sample.chosen, type=pa.int64())).to_pylist()
    for (index, reason), row in zip(sample.chosen.items(), rows, strict=True):
        attributes = {names.STEP + name: row[name] for name in ("step", *STEP_COLUMNS)}
        attributes[names.STEP_SAMPLED_FOR] = reason
        linked = links[index]
        if len(linked) > MAX_LINKS:
            attributes[names.STEP + "num_links_left_out"] = len(linked) - MAX_LINKS
        yield maker.span(
            "engine.step",
            maker.context("engine", f"step {row['step']}"),
            row["start_ns"],
            row["end_ns"],
            attributes,
            parent=root,
            links=[Link(context) for context in linked[:MAX_LINKS]],
        )
    for first, last in sample.windows:
        inside = steps.slice(first, last - first + 1)
        attributes = {names.STEP + name: int(inside[name].to_numpy().sum()) for name in WINDOW_SUMS}
        attributes[names.NUM_STEPS] = last - first + 1
        context = maker.context("engine", f"window {first}")
        yield maker.span("engine.window", context, int(start[first]), int(end[last]), attributes, parent=root)


def _links(
    maker: _SpanMaker, numbers: np.ndarray, found: dict[tuple[str, int], Life], sample: StepSample
) -> dict[int, list[SpanContext]]:
    """For every sampled step (by index), the root spans of the requests that were in it."""
    sampled = np.fromiter(sample.chosen, dtype=np.int64)
    owners = [request_id for (request_id, _), life in found.items() for _ in life.steps]
    ranges = np.array([steps for life in found.values() for steps in life.steps], dtype=np.int64).reshape(
        -1, 2
    )
    begin = np.searchsorted(numbers[sampled], ranges[:, 0])
    end = np.searchsorted(numbers[sampled], ranges[:, 1], side="right")
    links: dict[int, dict[str, SpanContext]] = {index: {} for index in sample.chosen}
    for i in np.flatnonzero(end > begin).tolist():
        request_id = owners[i]
        context = maker.request(request_id)
        for index in sampled[begin[i] : end[i]].tolist():
            links[index][request_id] = context
    return {index: list(contexts.values()) for index, contexts in links.items()}
