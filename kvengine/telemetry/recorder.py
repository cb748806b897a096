"""Columns of a run while it runs: one tuple per step and event, flushed as closed Parquet files."""

from __future__ import annotations

import time
from typing import Protocol

import pyarrow as pa

from kvengine.core.decision import Action, Decision
from kvengine.core.errors import RequestError
from kvengine.core.plan import StepPlan, StepResult
from kvengine.core.reasons import FinishReason, Reason
from kvengine.core.request import Request
from kvengine.core.sequence import Sequence
from kvengine.engine.recording import PoolState
from kvengine.telemetry.tables import SCHEMAS, columns, in_order

ROWS_PER_PART = 4096

FLUSH_INTERVAL_NS = 5_000_000_000
"""What a killed run can lose: the last 5 s."""


TOLD_APART_BY_DETAIL = (Reason.HEAD_OF_LINE, Reason.POLICY)
"""Reasons whose detail says what they are; that of others is a number which changes from plan to plan."""

_STATUS = {FinishReason.ABORT: "aborted", FinishReason.REFUSED: "refused"}


class TableSink(Protocol):
    """Where closed parts of a table go."""

    def write_part(self, name: str, part: pa.Table) -> None: ...


class NoSink:
    """Keeps nothing beyond the recorder's own memory."""

    def write_part(self, name: str, part: pa.Table) -> None: ...


class _Refusal:
    """A refusal that holds plan after plan: its row, and the number of the last plan that had it."""

    __slots__ = ("first", "last_ns", "last_plan", "last_step")

    def __init__(self, first: tuple, plan: StepPlan, number: int) -> None:
        self.first = first
        self.lengthen(plan, number)

    def lengthen(self, plan: StepPlan, number: int) -> None:
        self.last_step, self.last_ns, self.last_plan = plan.step, plan.now_ns, number

    @property
    def row(self) -> tuple:
        first_step, _, time_ns, _, *rest = self.first
        return (first_step, self.last_step, time_ns, self.last_ns, *rest)


class ColumnRecorder:
    """Records steps, requests, runs of tokens and of prefills, and decisions.

    Parts of ROWS_PER_PART rows go to `sink` as they fill, so that a killed run keeps them; all parts stay in
    memory, as columns, for the summary. `seconds` is the time spent in here on the step thread.
    """

    def __init__(self, sink: TableSink | None = None) -> None:
        self._sink = sink or NoSink()
        self._rows: dict[str, list[tuple]] = {name: [] for name in SCHEMAS}
        self._parts: dict[str, list[pa.Table]] = {name: [] for name in SCHEMAS}
        self._open: dict[tuple[str, ...], _Refusal] = {}
        self._num_plans = 0
        """Executed and idle ones."""
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
        self._num_plans += 1
        self._flush_parts(all_tables=began >= self._flush_due_ns)
        self._spent_ns += time.perf_counter_ns() - began

    def idle(self, plan: StepPlan) -> None:
        began = time.perf_counter_ns()
        for decision in plan.decisions:
            self._decision(plan, decision)
        self._note_unwritten(plan)
        self._num_plans += 1
        self._spent_ns += time.perf_counter_ns() - began

    def finished(self, seq: Sequence, now: int) -> None:
        began = time.perf_counter_ns()
        times, reason = seq.times, seq.finish_reason
        if times.finished_ns is None:  # also the end of a static batch's row that was not handed over
            status, reason = "unfinished", None
        else:
            status = _STATUS.get(reason or FinishReason.STOP, "finished")
        key = (seq.request.id, seq.choice)
        self._rows["requests"].append(
            (
                *key, seq.request.pair_key, seq.request.tenant, seq.priority, status, reason and reason.value, None,
                seq.num_prompt_tokens, seq.num_cached_tokens, seq.num_output_tokens, seq.arrival_ns,
                times.admitted_ns, times.first_token_ns, times.last_token_ns, times.finished_ns,
                seq.num_preemptions, seq.num_recomputed_tokens,
            )
        )  # fmt: skip
        self._rows["tokens"] += [(*key, *run) for run in seq.token_runs]
        self._rows["prefills"] += [(*key, *run) for run in seq.prefill_runs]
        self._spent_ns += time.perf_counter_ns() - began

    def rejected(self, request: Request, error: RequestError, now: int) -> None:
        began = time.perf_counter_ns()
        self._rows["requests"].append(
            (
                request.id, 0, request.pair_key, request.tenant, request.priority, "rejected", None, error.problem,
                len(request.prompt_token_ids), 0, 0, request.arrival_ns, None, None, None, None, 0, 0,
            )
        )  # fmt: skip
        self._spent_ns += time.perf_counter_ns() - began

    def flush(self) -> None:
        """Write all that is pending as parts, refusals that still run included."""
        self._close_refusals(running=True)
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
        """Record it; a refusal equal to one of the plan before lengthens that one instead."""
        action, seq, reason, detail = decision[:4]
        row = (
            plan.step, plan.step, plan.now_ns, plan.now_ns, seq and seq.request.id, seq and seq.choice, action.value,
            reason and str(reason), detail, decision.policy, decision.num_blocks, decision.num_tokens,
            decision.num_free_before, decision.num_free_after, decision.num_cached, decision.num_moved_blocks,
        )  # fmt: skip
        if action not in (Action.REFUSE, Action.STOP):
            self._rows["decisions"].append(row)
            return
        told_apart = action is Action.STOP or reason in TOLD_APART_BY_DETAIL
        key = (action, seq.id if seq else "", reason, detail if told_apart else "")
        running = self._open.get(key)
        if running is not None and running.last_plan >= self._num_plans - 1:
            running.lengthen(plan, self._num_plans)
            return
        if running is not None:
            self._rows["decisions"].append(running.row)
        self._open[key] = _Refusal(row, plan, self._num_plans)

    def _note_unwritten(self, plan: StepPlan) -> None:
        self._rows["unwritten"] += [
            (seq.request.id, seq.choice, since, plan.step - 1, slots) for seq, since, slots in plan.unwritten
        ]

    def _close_refusals(self, *, running: bool) -> None:
        """Move refusals to the table that the last plan did not have any more, or all, those still `running` too."""
        for key, refusal in list(self._open.items()):
            if running or refusal.last_plan < self._num_plans - 1:
                self._rows["decisions"].append(refusal.row)
                del self._open[key]

    def _flush_parts(self, *, all_tables: bool) -> None:
        """Write the tables that have a part's worth of rows, or all; refusals of the last plan may go on and
        stay."""
        for name, rows in self._rows.items():
            if all_tables or len(rows) >= ROWS_PER_PART:
                if name == "decisions":
                    self._close_refusals(running=False)
                self._flush(name)
        if all_tables:
            self._flush_due_ns = time.perf_counter_ns() + FLUSH_INTERVAL_NS

    def _flush(self, name: str) -> None:
        rows, self._rows[name] = self._rows[name], []
        if rows:
            part = columns(name, rows)
            self._parts[name].append(part)
            self._sink.write_part(name, part)
