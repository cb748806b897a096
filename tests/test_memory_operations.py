"""The executors carry out a plan's memory operations in order, and sample the forks of a row by their own draws."""

from __future__ import annotations

import pytest
import torch

from kvengine.core.plan import ScheduledRow, StepPlan
from kvengine.core.request import Request, SamplingParams
from kvengine.core.sequence import Sequence
from kvengine.executors.null import NullConfig, NullExecutor
from kvengine.executors.sampling import sample, sample_rows
from kvengine.testing.sources import ChecksumSource, ScriptSource, checksum_output

BLOCK_SIZE = 4
PROMPT = [5, 3, 8, 1, 9, 2]


def sequence(
    tokens: list[int],
    blocks: list[int],
    *,
    name: str = "r",
    choice: int = 0,
    seed: int = 0,
    **sampling: float,
) -> Sequence:
    params = SamplingParams(**sampling)  # pyright: ignore[reportArgumentType]
    request = Request(id=name, prompt_token_ids=tuple(tokens), sampling=params)
    seq = Sequence(request, choice=choice, order=0, max_tokens_total=10**9, stop_ids=frozenset(), seed=seed)
    seq.block_table.blocks = list(blocks)
    return seq


def row_of(seq: Sequence, start: int = 0, forks: tuple[Sequence, ...] = ()) -> ScheduledRow:
    """From `start` to the newest token."""
    return ScheduledRow(seq, start, seq.num_tokens - start, samples=True, forks=forks)


def plan_of(*rows: ScheduledRow, **operations: list[tuple[int, int]]) -> StepPlan:
    return StepPlan(0, 0, list(rows), **operations)  # pyright: ignore[reportArgumentType]


# ---- the null executor


def null_executor(source: ChecksumSource | ScriptSource | None) -> NullExecutor:
    return NullExecutor(NullConfig(), block_size=BLOCK_SIZE, source=source, filler_id=7)


def test_null_moves_blocks_out_and_in_before_it_copies_and_writes():
    """Every operation uses what the one before it left: any other order reads a block too early or too late."""
    executor = null_executor(ChecksumSource())
    seq, other = sequence(PROMPT, [0, 1]), sequence([7, 7, 7, 7], [0], name="other")
    first = executor.execute(plan_of(row_of(seq)))
    assert first.token_ids == [checksum_output(PROMPT, 1)]
    seq.token_ids += first.token_ids[0]
    seq.block_table.blocks = [4, 5]
    result = executor.execute(
        plan_of(
            row_of(other),
            row_of(seq, start=6),
            swap_outs=[(0, 2), (1, 0)],
            swap_ins=[(2, 0), (0, 3)],
            copies=[(0, 4), (3, 5)],
        )
    )
    assert result.token_ids == [checksum_output([7, 7, 7, 7], 1), checksum_output(PROMPT, 2)[1:]]


def test_null_carries_out_operations_without_rows():
    executor = null_executor(ChecksumSource())
    seq = sequence(PROMPT, [0, 1])
    executor.execute(plan_of(row_of(seq)))
    result = executor.execute(plan_of(copies=[(0, 3), (1, 2)]))
    assert result.token_ids == []
    seq.block_table.blocks = [3, 2]
    assert executor.execute(plan_of(row_of(seq, start=5))).token_ids == [checksum_output(PROMPT, 1)]


def test_a_copied_slot_that_was_never_written_leaves_nothing_stale():
    """Block 1 of PROMPT is half full: its copy must not keep what lay behind it in the destination."""
    source = ChecksumSource()
    executor = null_executor(source)
    executor.execute(plan_of(row_of(sequence([1, 2, 3, 4], [3], name="old"))))
    executor.execute(plan_of(row_of(sequence(PROMPT, [0, 1]))))
    executor.execute(plan_of(copies=[(1, 3)]))
    source.next_token([12, 13], sequence(PROMPT, []))
    with pytest.raises(KeyError):
        source.next_token([14], sequence(PROMPT, []))


@pytest.mark.parametrize(
    ("source", "ids"),
    [
        (None, [7] * 3),
        (ChecksumSource(), checksum_output(PROMPT, 1) * 3),
        (ScriptSource({"r": [9]}, 0), [9] * 3),
    ],
    ids=["filler", "checksum", "script"],
)
def test_null_gives_a_row_one_id_and_each_fork_one(source, ids):
    forks = tuple(sequence(PROMPT, [], choice=choice) for choice in (1, 2))
    half = ScheduledRow(sequence(PROMPT, [2]), 0, 4, samples=False)
    result = null_executor(source).execute(plan_of(half, row_of(sequence(PROMPT, [0, 1]), forks=forks)))
    assert result.token_ids == [[], ids]


# ---- the checksum model under a sliding window


def test_a_windowed_checksum_sees_the_last_positions_only():
    """Slots before the window were never written, and block 9 stands for freed ones."""
    source = ChecksumSource(window=3)
    tokens = list(range(10, 22))
    want = checksum_output(tokens, 1, window=3)
    assert want == [sum((tokens[i] + 1) * (i + 1) for i in (9, 10, 11)) % 251]
    source.write([0, 1, 2], tokens[9:], first_position=9)
    assert source.next_token([36, 37, 38, 39] * 2 + [36, 0, 1, 2], sequence(tokens, [])) == want[0]


@pytest.mark.parametrize("window", [1, 4, 6, 100])
def test_windowed_output_is_that_of_the_source(window):
    executor = null_executor(ChecksumSource(window=window))
    seq = sequence(PROMPT, [0, 1, 2])
    for _ in range(5):
        start = 0 if seq.num_tokens == len(PROMPT) else seq.num_tokens - 1
        seq.token_ids += executor.execute(plan_of(row_of(seq, start))).token_ids[0]
    assert seq.token_ids[len(PROMPT) :] == checksum_output(PROMPT, 5, window)
    assert (checksum_output(PROMPT, 5, window) == checksum_output(PROMPT, 5)) == (window == 100)


@pytest.mark.parametrize("window", [0, -1])
def test_a_window_below_one_is_refused(window):
    with pytest.raises(ValueError, match="window"):
        ChecksumSource(window=window)


# ---- forks


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_k": 9, "top_p": 0.9}], ids=str)
def test_forks_sample_as_separate_rows_would(params):
    """Two rows with forks, one without, one partial prefill: each id is that of its sequence sampled alone."""
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    groups = [
        [sequence(PROMPT, [], name=f"r{i}", choice=choice, seed=i, **params) for choice in range(count)]
        for i, count in enumerate((3, 1, 2))
    ]
    rows = [ScheduledRow(group[0], 0, 6, True, tuple(group[1:])) for group in groups]
    rows.insert(1, ScheduledRow(sequence(PROMPT, []), 0, 3, False))
    want = [[sample(logits[i : i + 1], [seq])[0] for seq in group] for i, group in enumerate(groups)]
    got = sample_rows(logits, rows)
    assert got == [want[0], [], *want[1:]]
    assert params or len(set(got[0])) > 1


def test_nothing_to_sample_needs_no_logits():
    assert sample_rows(torch.empty(0, 50), [ScheduledRow(sequence(PROMPT, []), 0, 3, False)]) == [[]]
    assert sample_rows(torch.empty(0, 50), []) == []
