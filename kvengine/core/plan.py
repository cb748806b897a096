"""What one step decides (StepPlan), what it yields (StepResult), and what the user gets (RequestOutput)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from kvengine.core.decision import Decision
from kvengine.core.reasons import FinishReason
from kvengine.core.sequence import Sequence


@dataclass(slots=True)
class ScheduledRow:
    """One sequence's share of a step: tokens [start, start + num_tokens) are computed.

    `samples` is true when the row reaches the newest token, so that its last position yields a new one: one for
    `seq`, and one for each of `forks`, the other choices of its request that begin with the same prompt.
    """

    seq: Sequence
    start: int
    num_tokens: int
    samples: bool
    forks: tuple[Sequence, ...] = ()


@dataclass(slots=True)
class StepPlan:
    """All that one forward pass does.

    `idle_rows` are finished sequences of a static batch that are computed all the same, one token each, and
    `padding_tokens` the tokens that pad its prompts: both cost what real rows cost and yield nothing.
    """

    step: int
    now_ns: int
    rows: list[ScheduledRow] = field(default_factory=list)
    idle_rows: list[Sequence] = field(default_factory=list)
    padding_tokens: int = 0
    swap_outs: list[tuple[int, int]] = field(default_factory=list)
    """(device block, host block) pairs to copy, before everything else."""
    swap_ins: list[tuple[int, int]] = field(default_factory=list)
    """(host block, device block) pairs to copy, after the swap-outs."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """(source block, destination block) pairs to copy on the device, after the swaps and before any write."""
    preempted: list[Sequence] = field(default_factory=list)
    refused: list[Sequence] = field(default_factory=list)
    """Waiting sequences that an admission policy refused for good."""
    deferred: list[Sequence] = field(default_factory=list)
    """Waiting sequences before which an admission policy lets all others go from now on."""
    decisions: list[Decision] = field(default_factory=list)
    recomputed_tokens: int = 0
    unwritten: list[tuple[Sequence, int, int]] = field(default_factory=list)
    """(sequence, first step, slots): given back in this step, owned since `first step` and never written."""
    wake_at: int | None = None
    """Moment (ns) at which a policy wants to be asked again although nothing else happens."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the forward pass computes, idle rows and padding included."""
        return sum(row.num_tokens for row in self.rows) + len(self.idle_rows) + self.padding_tokens

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to execute and nothing was decided."""
        return not (
            self.rows
            or self.preempted
            or self.refused
            or self.deferred
            or self.idle_rows
            or self.swap_outs
            or self.swap_ins
            or self.copies
        )


class MemoryOperations(NamedTuple):
    """Block copies that an allocator asks for in one plan; pairs and order are those of StepPlan."""

    swap_outs: tuple[tuple[int, int], ...] = ()
    swap_ins: tuple[tuple[int, int], ...] = ()
    copies: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True)
class StepResult:
    """What an executor returns: `token_ids[i]` are the accepted ids of plan.rows[i], [] for a partial prefill,
    else one for its sequence and one for each of its forks, in that order.

    `duration_ns` is what the step took on the executor's hardware (real or assumed).
    """

    token_ids: list[list[int]]
    duration_ns: int


@dataclass(frozen=True, slots=True)
class Idle:
    """The answer of a step that had nothing to do: the moment to try again, None if only an arrival helps."""

    wake_at: int | None


@dataclass(slots=True)
class RequestOutput:
    """What one step delivers of one choice: the new ids, and the finish reason with the last of them."""

    request_id: str
    choice: int
    token_ids: list[int]
    finish_reason: FinishReason | None
    sequence: Sequence
