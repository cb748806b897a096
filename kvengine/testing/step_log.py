"""A recorder that keeps every step as plain data, for tests to read."""

from __future__ import annotations

from dataclasses import dataclass

from kvengine.core.errors import RequestError
from kvengine.core.plan import StepPlan, StepResult
from kvengine.core.request import Request
from kvengine.core.sequence import Sequence
from kvengine.engine.recording import PoolState


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """One step: tokens scheduled per sequence id, who sampled, who was preempted or refused for good, and the pool
    after it."""

    step: int
    scheduled: dict[str, int]
    sampled: tuple[str, ...]
    preempted: tuple[str, ...]
    refused: tuple[str, ...]
    num_idle_rows: int
    num_padding_tokens: int
    copies: tuple[tuple[int, int], ...]
    swap_outs: tuple[tuple[int, int], ...]
    swap_ins: tuple[tuple[int, int], ...]
    pool: PoolState


class StepLog:
    """Keeps all steps, finished sequences and rejections."""

    def __init__(self) -> None:
        self.steps: list[LoggedStep] = []
        self.finished_sequences: list[Sequence] = []
        self.rejections: list[RequestError] = []

    def step(self, plan: StepPlan, result: StepResult, pool: PoolState, end_ns: int) -> None:
        self.steps.append(
            LoggedStep(
                step=plan.step,
                scheduled={row.seq.id: row.num_tokens for row in plan.rows},
                sampled=tuple(seq.id for row in plan.rows if row.samples for seq in (row.seq, *row.forks)),
                preempted=tuple(seq.id for seq in plan.preempted),
                refused=tuple(seq.id for seq in plan.refused),
                num_idle_rows=len(plan.idle_rows),
                num_padding_tokens=plan.padding_tokens,
                copies=tuple(plan.copies),
                swap_outs=tuple(plan.swap_outs),
                swap_ins=tuple(plan.swap_ins),
                pool=pool,
            )
        )

    def idle(self, plan: StepPlan) -> None:
        """Not a step."""

    def finished(self, seq: Sequence, now: int) -> None:
        self.finished_sequences.append(seq)

    def rejected(self, request: Request, error: RequestError, now: int) -> None:
        self.rejections.append(error)

    @property
    def num_preemptions(self) -> int:
        return sum(len(step.preempted) for step in self.steps)

    @property
    def num_copies(self) -> int:
        """Blocks that were copied on write."""
        return sum(len(step.copies) for step in self.steps)
