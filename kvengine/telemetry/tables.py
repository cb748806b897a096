"""The columns of a recorded run: what each table holds, in which unit."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

I32, I64, STR = pa.int32(), pa.int64(), pa.string()
WORD = pa.dictionary(pa.int32(), pa.string())

STEPS = pa.schema(
    [
        ("step", I64),
        ("start_ns", I64),
        ("end_ns", I64),
        ("num_rows", I32),
        ("num_sampled", I32),
        ("num_prefill_tokens", I32),
        ("num_decode_tokens", I32),
        ("num_idle_rows", I32),
        ("num_padding_tokens", I32),
        ("num_recomputed_tokens", I32),
        ("num_admitted", I32),
        ("num_preempted", I32),
        ("num_running", I32),
        ("num_held", I32),
        ("num_waiting", I32),
        ("num_free_blocks", I32),
        ("num_cached_blocks", I32),
        ("num_saved_blocks", I32),
        ("num_slots_held", I64),
        ("num_slots_owned", I64),
        ("num_host_blocks", I32),
        ("num_copied_blocks", I32),
        ("num_swapped_out_blocks", I32),
        ("num_swapped_in_blocks", I32),
    ]
)
"""One row per executed step. Counts of running, held, waiting, blocks and slots are after its commit, as
kvengine.engine.recording.PoolState explains them; blocks copied and swapped are of this step."""

REQUESTS = pa.schema(
    [
        ("request_id", STR),
        ("choice", I32),
        ("pair_key", STR),
        ("tenant", WORD),
        ("priority", I32),
        ("status", WORD),
        ("finish_reason", WORD),
        ("problem", STR),
        ("num_prompt_tokens", I32),
        ("num_cached_tokens", I32),
        ("num_output_tokens", I32),
        ("arrival_ns", I64),
        ("admitted_ns", I64),
        ("first_token_ns", I64),
        ("last_token_ns", I64),
        ("finished_ns", I64),
        ("num_preemptions", I32),
        ("num_recomputed_tokens", I32),
    ]
)
"""One row per sequence that ended, and one per rejected request. `status`: finished, aborted, unfinished, refused
(for good, while it waited) or rejected (when it was added). Times are of delivery; null where it did not happen.
`num_cached_tokens` of its prompt were not computed: the pool held them when it was first admitted, or it was forked
from a sequence that had them."""

TOKENS = pa.schema([("request_id", STR), ("choice", I32), ("first_step", I64), ("num_steps", I32)])
"""One row per run of consecutive steps that gave a sequence one token each; a token's time is its step's end."""

PREFILLS = pa.schema(
    [("request_id", STR), ("choice", I32), ("first_step", I64), ("num_steps", I32), ("num_tokens", I64)]
)
"""One row per run of consecutive steps that computed tokens which the sequence knew already: of its prompt, or
lost by preemption. The last of these steps may be the one that gave it its next token, too."""

DECISIONS = pa.schema(
    [
        ("first_step", I64),
        ("last_step", I64),
        ("time_ns", I64),
        ("last_ns", I64),
        ("request_id", STR),
        ("choice", I32),
        ("action", WORD),
        ("reason", WORD),
        ("detail", STR),
        ("policy", WORD),
        ("num_blocks", I32),
        ("num_tokens", I32),
        ("num_free_before", I32),
        ("num_free_after", I32),
        ("num_cached", I32),
        ("num_moved_blocks", I32),
    ]
)
"""One row per admission, resumption, fork, preemption, deferral, refusal for good and abort, and per run of
consecutive plans (idle ones too) with the same refusal, at whose first plan the numbers and the detail are those
of the row; `time_ns` and `last_ns` are the times of its first and its last plan. `request_id` is null where the
reason holds for all waiting that have none of their own; core.decision explains the numbers. An idle plan has the
number of the next step."""

UNWRITTEN = pa.schema(
    [("request_id", STR), ("choice", I32), ("first_step", I64), ("last_step", I64), ("num_slots", I64)]
)
"""Slots that a sequence owned in all of these steps and gave back without ever writing them: what was reserved
for nothing, known when it ended or was preempted."""

SCHEMAS = {
    "steps": STEPS, "requests": REQUESTS, "tokens": TOKENS, "prefills": PREFILLS, "decisions": DECISIONS,
    "unwritten": UNWRITTEN,
}  # fmt: skip


def in_order(decisions: pa.Table) -> pa.Table:
    """Decisions in order of steps: the order in which refusals were closed depends on when parts were."""
    keys = ("first_step", "time_ns", "request_id", "choice", "action", "reason")
    plain = pa.schema([(field.name, STR if field.type == WORD else field.type) for field in DECISIONS])
    order = [(name, "ascending") for name in keys]
    indices = pc.sort_indices(decisions.cast(plain), sort_keys=order)  # pyright: ignore[reportAttributeAccessIssue]
    return decisions.take(indices)


def columns(name: str, rows: list[tuple]) -> pa.Table:
    """Rows of table `name` as columns."""
    schema = SCHEMAS[name]
    values = list(zip(*rows, strict=True)) or [() for _ in schema]
    arrays = [pa.array(column, type=field.type) for column, field in zip(values, schema, strict=True)]
    return pa.Table.from_arrays(arrays, schema=schema)
