"""From a StepPlan to the flat tensors of one forward pass.

T_all: tokens of all rows, idle rows and padding; S: rows; B: slots per block.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch

from kvengine.core.plan import StepPlan
from kvengine_kernels.metadata import AttentionMetadata


@dataclass(frozen=True, slots=True, kw_only=True)
class InputBatch:
    """`token_ids` and `positions` [T_all] int64; `sample_at` [rows that sample] int64 indices into T_all."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    attention: AttentionMetadata
    sample_at: torch.Tensor


class _Rows:
    """Flat lists that grow row by row."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.positions: list[int] = []
        self.slots: list[int] = []
        self.query_lens: list[int] = []
        self.seq_lens: list[int] = []
        self.tables: list[list[int]] = []
        self.sample_at: list[int] = []


def input_batch(plan: StepPlan, *, block_size: int, scratch_block: int, device: torch.device) -> InputBatch:
    """The tensors of `plan`.

    Idle rows run their last token again and attend to all they hold, but write to the scratch block; padding
    tokens run through every layer and write there too, and are attended to by nobody.
    """
    rows = _Rows()
    for row in plan.rows:
        seq, end = row.seq, row.start + row.num_tokens
        blocks = seq.block_table.blocks
        rows.token_ids += seq.token_ids[row.start : end]
        rows.positions += range(row.start, end)
        rows.slots += [blocks[i // block_size] * block_size + i % block_size for i in range(row.start, end)]
        rows.query_lens.append(row.num_tokens)
        rows.seq_lens.append(end)
        rows.tables.append(blocks[: -(-end // block_size)])
        if row.samples:
            rows.sample_at.append(len(rows.token_ids) - 1)
    _add_idle_rows(rows, plan, block_size, scratch_block)
    for i in range(plan.padding_tokens):
        rows.token_ids.append(0)
        rows.positions.append(0)
        rows.slots.append(scratch_block * block_size + i % block_size)
    return _tensors(rows, block_size, device)


def _add_idle_rows(rows: _Rows, plan: StepPlan, block_size: int, scratch_block: int) -> None:
    scratch_slot = scratch_block * block_size
    for seq in plan.idle_rows:
        length = max(seq.num_computed_tokens, 1)
        rows.token_ids.append(seq.token_ids[-1])
        rows.positions.append(length - 1)
        rows.slots.append(scratch_slot)
        rows.query_lens.append(1)
        rows.seq_lens.append(length)
        rows.tables.append(seq.block_table.blocks[: -(-length // block_size)] or [scratch_block])


def _tensors(rows: _Rows, block_size: int, device: torch.device) -> InputBatch:
    width = max(len(table) for table in rows.tables)
    tables = [table + table[-1:] * (width - len(table)) for table in rows.tables]

    def tensor(values: list) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    metadata = AttentionMetadata(
        query_start=tensor(list(accumulate(rows.query_lens, initial=0))),
        query_lens=tuple(rows.query_lens),
        seq_lens=tuple(rows.seq_lens),
        block_tables=tensor(tables),
        slot_mapping=tensor(rows.slots),
        block_size=block_size,
    )
    return InputBatch(
        token_ids=tensor(rows.token_ids),
        positions=tensor(rows.positions),
        attention=metadata,
        sample_at=tensor(rows.sample_at),
    )
