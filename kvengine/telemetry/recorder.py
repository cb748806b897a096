"""Columns of a run while it runs: one tuple per step and event, flushed as closed Parquet files."""

from __future__ import annotations

import time
from typing import Protocol

import pyarrow as pa

from kvengine.core.decision import Action, Decision
from kvengine.core.errors import RequestError
from kvengine.core.plan import StepPlan, StepResult
from kvengine.core.reasons import FinishReason
from kvengine.core.request import Request
from kvengine.core.sequence import Sequence
from kvengine.engine.recording import PoolState
from kvengine.telemetry.tables import SCHEMAS, columns, in_order

ROWS_PER_PART = 4096

FLUSH_INTERVAL_NS = 5_000_000_000
"""What a killed run can lose: the last 5 s."""


class TableSink(Protocol):
    """Where closed parts of a table go."""

    def write_part(self, name: str, part: pa.Table) -> None: ...


class NoSink:
    """Keeps nothing beyond the recorder's own memory."""

    def write_part(self, name: str, part: pa.Table) -> None: ...


class ColumnRecorder:
    """Records steps, requests, token runs and decisions.

    Parts of ROWS_PER_PART rows go to `sink` as they fill, so that a killed run keeps them; all parts stay in
    memory, as columns, for the summary. `seconds` is the time spent in here on the step thread.
    """

    def __init__(self, sink: TableSink | None = None) -> None:
        self._sink = sink or NoSink()
        self._rows: dict[str, list[tuple]] = {name: [] for name in SCHEMAS}
        self._parts: dict[str, list[pa.Table]] = {name: [] for name in SCHEMAS}
        self._open: dict[tuple[str, str, str], list] = {}
        self._spent_ns = 0
        self._flush_due_ns = time.perf_counter_ns() + FLUSH_INTERVAL_NS

    @property
    def seconds(self) -> float:
        return self._spent_ns / 1e9

    def step(self, plan: StepPlan, result: StepResult, pool: PoolState, end_ns: int) -> None:
        began = time.perf_counter_ns()
        prefill = decode = sampled = 0
        for row in plan.rows:
            sampled += row.samples * (1 + len(row.forks))
            if row.samples and row.num_tokens == 1 and row.start >= row.seq.num_prompt_tokens:
                decode += 1
            else:
                prefill += row.num_tokens
        admitted = 0
        for decision in plan.decisions:
            admitted += decision.action in (Action.ADMIT, Action.RESUME)
            self._decision(plan, decision)
        self._rows["steps"].append(
            (
                plan.step, plan.now_ns, end_ns, len(plan.rows), sampled, prefill, decode,
                len(plan.idle_rows), plan.padding_tokens, plan.recomputed_tokens, admitted, len(plan.preempted),
                *pool, len(plan.copies), len(plan.swap_outs), len(plan.swap_ins),
            )
        )  # fmt: skip
        self._note_unwritten(plan)
        self._flush_parts(plan.step, all_tables=began >= self._flush_due_ns)
        self._spent_ns += time.perf_counter_ns() - began

    def idle(self, plan: StepPlan) -> None:
        began = time.perf_counter_ns()
        for decision in plan.decisions:
            self._decision(plan, decision)
        self._note_unwritten(plan)
        self._spent_ns += time.perf_counter_ns() - began

    def finished(self, seq: Sequence, now: int) -> None:
        began = time.perf_counter_ns()
        times, reason = seq.times, seq.finish_reason
        if times.finished_ns is None:  # also the end of a static batch's row that was not handed over
            status, reason = "unfinished", None
        else:
            status = "aborted" if reason is FinishReason.ABORT else "finished"
        self._rows["requests"].append(
            (
                seq.request.id, seq.choice, seq.request.pair_key, status, reason and reason.value, None,
                seq.num_prompt_tokens, seq.num_cached_tokens, seq.num_output_tokens, seq.arrival_ns,
                times.admitted_ns, times.first_token_ns, times.last_token_ns, times.finished_ns,
                seq.num_preemptions, seq.num_recomputed_tokens,
            )
        )  # fmt: skip
        self._rows["tokens"] += [
            (seq.request.id, seq.choice, first, count) for first, count in seq.token_runs
        ]
        self._spent_ns += time.perf_counter_ns() - began

    def rejected(self, request: Request, error: RequestError, now: int) -> None:
        began = time.perf_counter_ns()
        self._rows["requests"].append(
            (
                request.id, 0, request.pair_key, "rejected", None, error.problem, len(request.prompt_token_ids),
                0, 0, request.arrival_ns, None, None, None, None, 0, 0,
            )
        )  # fmt: skip
        self._spent_ns += time.perf_counter_ns() - began

    def flush(self) -> None:
        """Write all that is pending as parts, refusals that still run included."""
        self._close_refusals(before=None)
        for name in SCHEMAS:
            self._flush(name)

    def tables(self) -> dict[str, pa.Table]:
        """All that was recorded so far; call `flush` first."""
        whole = {
            name: pa.concat_tables([SCHEMAS[name].empty_table(), *parts])
            for name, parts in self._parts.items()
        }
        return whole | {"decisions": in_order(whole["decisions"])}

    def _decision(self, plan: StepPlan, decision: Decision) -> None:
        """Record it; a refusal equal to one of the step before lengthens that one instead."""
        seq = decision.seq
        row = (
            plan.step, plan.step, plan.now_ns, seq and seq.request.id, seq and seq.choice, decision.action.value,
            decision.reason and str(decision.reason), decision.detail, decision.num_blocks, decision.num_tokens,
            decision.num_free_before, decision.num_cached,
        )  # fmt: skip
        if decision.action not in (Action.REFUSE, Action.STOP):
            self._rows["decisions"].append(row)
            return
        key = (decision.action, seq.id if seq else "", decision.reason)
        running = self._open.get(key)
        if running is not None and running[1] >= plan.step - 1:
            running[1] = plan.step
            return
        if running is not None:
            self._rows["decisions"].append(tuple(running))
        self._open[key] = list(row)

    def _note_unwritten(self, plan: StepPlan) -> None:
        self._rows["unwritten"] += [
            (seq.request.id, seq.choice, since, plan.step - 1, slots) for seq, since, slots in plan.unwritten
        ]

    def _close_refusals(self, before: int | None) -> None:
        """Move refusals that ended before step `before` (None: all) to the table."""
        for key, row in list(self._open.items()):
            if before is None or row[1] < before:
                self._rows["decisions"].append(tuple(row))
                del self._open[key]

    def _flush_parts(self, step: int, *, all_tables: bool) -> None:
        """Write the tables that have a part's worth of rows, or all; refusals of this `step` may go on and stay."""
        for name, rows in self._rows.items():
            if all_tables or len(rows) >= ROWS_PER_PART:
                if name == "decisions":
                    self._close_refusals(before=step)
                self._flush(name)
        if all_tables:
            self._flush_due_ns = time.perf_counter_ns() + FLUSH_INTERVAL_NS

    def _flush(self, name: str) -> None:
        rows, self._rows[name] = self._rows[name], []
        if rows:
            part = columns(name, rows)
            self._parts[name].append(part)
            self._sink.write_part(name, part)
