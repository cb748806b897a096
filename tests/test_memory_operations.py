"""The executors carry out a plan's memory operations in order, and sample the forks of a row by their own draws."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvengine.core.plan import ScheduledRow, StepPlan
from kvengine.core.request import Request, SamplingParams
from kvengine.core.sequence import Sequence
from kvengine.core.shapes import KvShape
from kvengine.executors.hf_model import HfLogitsModel
from kvengine.executors.input_batch import InputBatch
from kvengine.executors.null import NullConfig, NullExecutor
from kvengine.executors.sampling import sample, sample_rows
from kvengine.executors.torch_executor import TorchExecutor
from kvengine.models.tiny import TinyConfig, TinyModel
from kvengine.policies import Build
from kvengine.testing.sources import ChecksumSource, ScriptSource, checksum_output
from kvengine.testing.table_model import TableModel
from kvengine_kernels import reference, sdpa

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
        for i, count in enumerate((1, 3, 2))
    ]
    rows = [ScheduledRow(group[0], 0, 6, True, tuple(group[1:])) for group in groups]
    rows.insert(1, ScheduledRow(sequence(PROMPT, []), 0, 3, False))
    want = [[sample(logits[i : i + 1], [seq])[0] for seq in group] for i, group in enumerate(groups)]
    got = sample_rows(logits, rows)
    assert got == [want[0], [], *want[1:]]
    assert params or len(set(got[2])) > 1


def test_nothing_to_sample_needs_no_logits():
    assert sample_rows(torch.empty(0, 50), [ScheduledRow(sequence(PROMPT, []), 0, 3, False)]) == [[]]
    assert sample_rows(torch.empty(0, 50), []) == []


# ---- the torch executor


class Tiny:
    """TinyModel in a torch executor, 8 blocks and 4 on the host; `logits` are those of the last step."""

    def __init__(self, backend: Any = sdpa, kv_dtype: str = "fp32") -> None:
        model = TinyModel(TinyConfig())
        kv = KvShape(num_blocks=8, block_size=BLOCK_SIZE, dtype=kv_dtype, num_host_blocks=4)
        self._model = HfLogitsModel(
            model.load(Build()).eval(),
            shape=model.shape(),
            kv=kv,
            backend=backend,
            device=torch.device("cpu"),
            max_model_len=128,
        )
        self.device = self._model.device
        self.move = self._model.move
        self.logits = torch.empty(0)
        self._executor = TorchExecutor(self, block_size=BLOCK_SIZE, scratch_block=8)

    def forward(self, batch: InputBatch) -> torch.Tensor:
        self.logits = self._model.forward(batch)
        return self.logits

    def run(self, *rows: ScheduledRow, **operations: list[tuple[int, int]]) -> list[list[int]]:
        return self._executor.execute(plan_of(*rows, **operations)).token_ids


NEXT = [4, 4]
"""Tokens that go on after PROMPT: what is computed by a later step."""


def undisturbed(tokens: list[int], backend: Any = sdpa, kv_dtype: str = "fp32") -> torch.Tensor:
    """Logits after `tokens`, all but the last two of which were computed by a step of their own."""
    tiny = Tiny(backend, kv_dtype)
    tiny.run(row_of(sequence(tokens[:-2], [0, 1])))
    tiny.run(row_of(sequence(tokens, [0, 1]), start=len(tokens) - 2))
    return tiny.logits


BACKENDS = pytest.mark.parametrize("backend", [reference, sdpa], ids=["reference", "sdpa"])
KV_TYPES = pytest.mark.parametrize("kv_dtype", ["fp32", "bf16", "fp8_e4m3", "fp8_e5m2"])


@BACKENDS
@KV_TYPES
def test_a_victims_blocks_are_reused_in_the_plan_that_swaps_it_out(backend: Any, kv_dtype: str):
    tiny = Tiny(backend, kv_dtype)
    tiny.run(row_of(sequence(PROMPT, [0, 1])))
    other = sequence([7] * 8, [0, 1], name="other")
    tiny.run(row_of(other), swap_outs=[(0, 3), (1, 1)])
    tiny.run(row_of(sequence(PROMPT + NEXT, [6, 2]), start=6), swap_ins=[(3, 6), (1, 2)])
    assert torch.equal(tiny.logits, undisturbed(PROMPT + NEXT, backend, kv_dtype))


def test_swapped_bytes_are_the_same_in_other_blocks():
    tiny = Tiny(kv_dtype="fp8")
    tiny.run(row_of(sequence(PROMPT, [0, 1])))
    pool = tiny._model._pool.view(torch.uint8)
    before = pool[:, :2].clone()
    assert before.any()
    assert tiny.run(swap_outs=[(0, 0), (1, 2)]) == []
    pool.zero_()
    assert tiny.run(swap_ins=[(0, 5), (2, 4)]) == []
    assert torch.equal(pool[:, [5, 4]], before)
    assert not pool[:, [0, 1, 2, 3, 6, 7, 8]].any()


@KV_TYPES
def test_torch_moves_blocks_out_and_in_before_it_copies_and_writes(kv_dtype: str):
    """As for the null executor: every operation uses what the one before it left."""
    tiny = Tiny(kv_dtype=kv_dtype)
    tiny.run(row_of(sequence(PROMPT, [0, 1])))
    tiny.run(
        row_of(sequence([7, 7, 7, 7], [0], name="other")),
        row_of(sequence(PROMPT + NEXT, [4, 5]), start=6),
        swap_outs=[(0, 2), (1, 0)],
        swap_ins=[(2, 0), (0, 3)],
        copies=[(0, 4), (3, 5)],
    )
    # Not bit for bit: its tokens go through the layers in one batch with the other's.
    want = undisturbed(PROMPT + NEXT, kv_dtype=kv_dtype)
    torch.testing.assert_close(tiny.logits[1:], want, rtol=0, atol=1e-3)


@BACKENDS
@KV_TYPES
def test_a_fork_with_a_copied_tail_leaves_the_other_untouched(backend: Any, kv_dtype: str):
    tiny = Tiny(backend, kv_dtype)
    tiny.run(row_of(sequence(PROMPT, [0, 1])))
    ends = ([11, 12], [21, 22])
    for tokens, blocks, copies in ((ends[0], [0, 5], [(1, 5)]), (ends[1], [0, 1], [])):
        tiny.run(row_of(sequence(PROMPT + tokens, blocks), start=6), copies=copies)
        assert torch.equal(tiny.logits, undisturbed(PROMPT + tokens, backend, kv_dtype))
    tiny.run(row_of(sequence([*PROMPT, *ends[0], 1], [0, 5, 2]), start=8))
    tail = Tiny(backend, kv_dtype)
    tail.run(row_of(sequence(PROMPT, [0, 1])))
    tail.run(row_of(sequence(PROMPT + ends[0], [0, 1]), start=6))
    tail.run(row_of(sequence([*PROMPT, *ends[0], 1], [0, 1, 2]), start=8))
    assert torch.equal(tiny.logits, tail.logits)


def test_operations_without_rows_take_no_forward_pass(monkeypatch: pytest.MonkeyPatch):
    table = TableModel.uniform(20)
    moved: list[StepPlan] = []
    monkeypatch.setattr(table, "move", moved.append)
    monkeypatch.setattr(table, "forward", lambda batch: pytest.fail("there is nothing to compute"))
    plan = plan_of(copies=[(0, 1)])
    result = TorchExecutor(table, block_size=4, scratch_block=8).execute(plan)
    assert result.token_ids == []
    assert result.duration_ns > 0
    assert moved == [plan]


def test_torch_gives_each_fork_the_token_it_would_draw_alone():
    executor = TorchExecutor(TableModel.uniform(1000), block_size=BLOCK_SIZE, scratch_block=8)
    choices = [sequence(PROMPT, [0, 1], choice=choice, seed=3) for choice in range(4)]
    together = executor.execute(plan_of(row_of(choices[0], forks=tuple(choices[1:])))).token_ids
    alone = [executor.execute(plan_of(row_of(choice))).token_ids[0] for choice in choices]
    assert together == [[token for ids in alone for token in ids]]
    assert len(set(together[0])) == 4
