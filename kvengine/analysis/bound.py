"""One line that says what bound a run, from the reasons it recorded, and the setting to try."""

from __future__ import annotations

import pyarrow as pa

from kvengine.core.decision import Action
from kvengine.core.reasons import Reason

ADVICE: dict[str, str] = {
    Reason.MAX_NUM_SEQS: "all seats were taken; try a higher max_num_seqs if P99 latency allows",
    Reason.NO_BLOCKS: "KV memory was short; try a larger kv_memory_bytes, kv=fp8, or (if not in use) allocator=paged",
    Reason.FRAGMENTED: "free KV memory lay in pieces too small; try allocator=paged",
    Reason.NO_TOKEN_BUDGET: "the token budget of a step was spent; try a higher max_num_batched_tokens",
    Reason.AFTER_PREEMPTION: "KV memory ran out while running; try a lower max_num_seqs or a larger pool",
    Reason.NO_SWAP_SPACE: "host memory for swapping was full; try a larger swap_space_bytes",
    Reason.WATERMARK: "admission kept blocks free for those that run; try a lower admission.watermark, "
    "or a larger pool",
    Reason.PREFILL_INTERVAL: "steps were kept for decodes; try a smaller prefill_interval, or a higher "
    "max_consecutive_prefills, of the scheduler",
    Reason.PARTIAL_PREFILLS: "prompts waited for others to be prefilled; try a higher scheduler.max_partial_prefills",
    Reason.LONG_PREFILL_CAP: "long prompts waited for each other; try a higher scheduler.max_long_prefills",
    Reason.QUANTUM: "time slices were used up; try a longer scheduler.quantum",
    Reason.DEADLINE: "deadlines could not be met; try a later one, or fewer requests at once",
    Reason.POLICY: "a policy had a reason of its own; the detail in the table decisions is its text",
    Reason.BATCH_FORMING: "static batches were being collected; try scheduler=continuous",
    Reason.BATCH_DRAINING: "requests waited for a static batch to end; try scheduler=continuous",
}


NEGLIGIBLE = 0.05
"""A reason that held in a smaller share of steps did not bind."""


def bound_line(tables: dict[str, pa.Table]) -> str:
    """The reason that kept requests waiting in most steps, as a sentence."""
    if not len(tables["steps"]):
        return "Bound by: nothing; no request ran."
    shares = {reason: len(steps) for reason, steps in steps_by_reason(tables["decisions"]).items()}
    shares.pop(Reason.HEAD_OF_LINE, None)  # they waited for what the head waited for
    num_steps = max(len(tables["steps"]), 1)
    reason = max(shares, key=lambda name: shares[name], default="")
    share = min(shares.get(reason, 0) / num_steps, 1.0)
    if share < NEGLIGIBLE:
        return "Bound by: the model and the arrivals alone; no limit kept requests waiting."
    advice = ADVICE.get(reason, "a plug-in's own reason; see the table decisions")
    return f"Bound by: {reason} in {share:.0%} of steps: {advice}."


def steps_by_reason(decisions: pa.Table) -> dict[str, set[int]]:
    """The steps in which each reason kept somebody waiting."""
    found: dict[str, set[int]] = {}
    actions, reasons = (decisions[name].cast(pa.string()).to_pylist() for name in ("action", "reason"))
    first, last = decisions["first_step"].to_pylist(), decisions["last_step"].to_pylist()
    for action, reason, begin, end in zip(actions, reasons, first, last, strict=True):
        if action in (Action.REFUSE, Action.STOP):
            found.setdefault(reason, set()).update(range(begin, end + 1))
    return found
