"""The only hand that changes sequences after a step: ids, computed tokens, finishing, delivery."""

from __future__ import annotations

from kvengine.core.plan import RequestOutput, ScheduledRow, StepPlan, StepResult
from kvengine.core.reasons import FinishReason
from kvengine.core.sequence import Sequence, SequenceState
from kvengine.engine.context import SchedulingContext


def commit(context: SchedulingContext, plan: StepPlan, result: StepResult, now: int) -> list[RequestOutput]:
    """Take the results of `plan`, which ended at `now`; what is delivered to users by it."""
    delivers_late = context.scheduler.delivers_at_batch_end
    outputs = []
    context.memory.executed()
    for row, token_ids in zip(plan.rows, result.token_ids, strict=True):
        _account(context, plan, row)
        if row.num_tokens > 1 or row.start < row.seq.num_prompt_tokens or not row.samples:
            _extend_prefill_run(row.seq, plan.step, row.num_tokens)
        if not row.samples:
            continue
        if row.seq.siblings:
            context.fork_choices(row.seq, row.forks)
        for seq, token_id in zip((row.seq, *row.forks), token_ids, strict=True):
            seq.token_ids.append(token_id)
            _extend_token_run(seq, plan.step)
            reason = _finish_reason(seq)
            if reason is not None:
                context.finish(seq, reason)
            if not delivers_late:
                outputs.append(_deliver(seq, [token_id], now))
    if context.held and not context.num_running and not context.scheduler.batch_open:
        released = context.release_held()
        if delivers_late:
            wanted = [seq for seq in released if seq.finish_reason is not FinishReason.ABORT]
            outputs += [_deliver(seq, seq.token_ids[seq.num_prompt_tokens :], now) for seq in wanted]
    context.committed(plan)
    return outputs + _refused(plan, now)


def _refused(plan: StepPlan, now: int) -> list[RequestOutput]:
    """What is delivered of those that were refused for good: the reason, and no token."""
    outputs = []
    for leader in plan.refused:
        siblings, leader.siblings = leader.siblings, []
        for seq in (leader, *siblings):
            seq.finish_reason = FinishReason.REFUSED
            seq.state = SequenceState.FINISHED
            seq.times.finished_ns = now
            outputs.append(RequestOutput(seq.request.id, seq.choice, [], FinishReason.REFUSED, seq))
    return outputs


def _account(context: SchedulingContext, plan: StepPlan, row: ScheduledRow) -> None:
    """The row's tokens are computed now; those below the sequence's peak were computed before."""
    seq = row.seq
    context.advanced(seq, row.num_tokens)
    seq.num_scheduled_tokens -= row.num_tokens
    again = min(seq.num_computed_tokens, seq.num_computed_peak) - row.start
    if again > 0:
        seq.num_recomputed_tokens += again
        plan.recomputed_tokens += again
    seq.num_computed_peak = max(seq.num_computed_peak, seq.num_computed_tokens)


def _extend_token_run(seq: Sequence, step: int) -> None:
    """Note that `step` gave `seq` a token, lengthening its current run of consecutive steps if it can."""
    if seq.token_runs and sum(seq.token_runs[-1]) == step:
        seq.token_runs[-1][1] += 1
    else:
        seq.token_runs.append([step, 1])


def _extend_prefill_run(seq: Sequence, step: int, num_tokens: int) -> None:
    """Note that `step` computed `num_tokens` that `seq` knew already: of its prompt, or lost by preemption."""
    run = seq.prefill_runs[-1] if seq.prefill_runs else None
    if run is not None and run[0] + run[1] == step:
        run[1] += 1
        run[2] += num_tokens
    else:
        seq.prefill_runs.append([step, 1, num_tokens])


def _finish_reason(seq: Sequence) -> FinishReason | None:
    if seq.token_ids[-1] in seq.stop_ids:
        return FinishReason.STOP
    if len(seq.token_ids) >= seq.max_tokens_total:
        return FinishReason.LENGTH
    return None


def _deliver(seq: Sequence, token_ids: list[int], now: int) -> RequestOutput:
    times = seq.times
    if times.first_token_ns is None:
        times.first_token_ns = now
    times.last_token_ns = now
    if seq.finish_reason is not None:
        times.finished_ns = now
    return RequestOutput(seq.request.id, seq.choice, token_ids, seq.finish_reason, seq)
