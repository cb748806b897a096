"""The contracts of scheduling: order, admission, victims, how they leave, and the view these act through."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Protocol

from kvengine.core.limits import EngineLimits
from kvengine.core.reasons import Reason, Refusal
from kvengine.core.sequence import Sequence


class Queue(Protocol):
    """The order of the waiting. A preempted sequence is pushed again; a policy may look past the head."""

    def push(self, seq: Sequence) -> None: ...

    def peek(self) -> Sequence:
        """The next in order; IndexError when empty."""
        ...

    def remove(self, seq: Sequence) -> None:
        """Take `seq` out, wherever it stands; ValueError when it is not there."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Sequence]:
        """All waiting, in order."""
        ...


class SchedulingView(Protocol):
    """What a policy sees of the engine while a step is planned (engine/context.py is the one)."""

    now: int
    limits: EngineLimits
    waiting: Queue
    token_budget_left: int

    @property
    def running(self) -> Iterator[Sequence]:
        """Running sequences in order of admission; one that is preempted meanwhile is not yielded again."""
        ...

    @property
    def held(self) -> list[Sequence]:
        """Finished rows of a static batch that still keep their blocks and seats."""
        ...

    @property
    def num_free_blocks(self) -> int: ...

    @property
    def num_promised_blocks(self) -> int:
        """Blocks that running prefills still need for tokens they already have."""
        ...

    def uncomputed(self, seq: Sequence) -> int:
        """Tokens of `seq` neither computed nor scheduled in this plan."""
        ...

    def blocks_needed(self, seq: Sequence, num_tokens: int) -> int:
        """Blocks beyond those owned that the first `num_tokens` tokens of `seq` take."""
        ...

    def schedule(self, seq: Sequence, max_tokens: int) -> int:
        """Compute up to `max_tokens` more tokens of a running sequence; what was scheduled, 0 if refused.

        When blocks run out, victims are preempted until it fits or `seq` itself is the victim. Under a scheduler
        that does not split prefills it is all of its tokens or none.
        """
        ...

    def admit(self, seq: Sequence, max_tokens: int | None = None) -> int:
        """Let a waiting (or preempted) sequence run, with up to `max_tokens` now; 0 if refused.

        Under a scheduler that does not split prefills it is all of its tokens or none.
        """
        ...

    def idle_row(self, seq: Sequence) -> bool:
        """Compute a held row for nothing, as a static batch does; False when the budget is spent."""
        ...

    def pad(self, num_tokens: int) -> None:
        """Compute that many padding tokens, as far as the budget goes."""
        ...

    def stop(self, reason: Reason) -> None:
        """State why none of the waiting that were not visited enters in this step."""
        ...

    def wake_at(self, moment_ns: int) -> None:
        """Ask to be planned again at `moment_ns` even if nothing else happens."""
        ...


class Scheduler(Protocol):
    """Who runs this step, and for how many tokens.

    It acts only through the view, never touches memory or sequences, and must be deterministic. A plan that
    schedules nothing although it could ends the run by name. Subclass this Protocol to have the defaults.
    """

    chunks: bool = False
    """Whether a prefill may be split over steps."""
    holds_finished: bool = False
    """Whether finished rows keep seat and blocks until no row of their batch runs (static batching)."""
    batch_open: bool = False
    """Whether more rows will join the batch whose finished rows are held."""
    delivers_at_batch_end: bool = False
    """Whether outputs are handed over only when such a batch has drained."""

    def schedule(self, view: SchedulingView) -> None: ...


class Admission(Protocol):
    """Whether a waiting sequence may enter now, seats and token budget apart."""

    def refuses(self, seq: Sequence, view: SchedulingView) -> Refusal | None:
        """None to let it in. Must let the head in when nothing runs, since it fits an empty pool."""
        ...


class Victim(Protocol):
    """Whom to preempt."""

    def choose(self, candidates: list[Sequence], needy: Sequence) -> Sequence:
        """One of `candidates` (never empty; may contain `needy`, which then gives way itself)."""
        ...


class Mechanism(StrEnum):
    """How a preempted sequence gets its KV back."""

    RECOMPUTE = "recompute"
    SWAP = "swap"
    """Its KV goes to host memory and comes back; recompute where that is full."""


class Preemption(Protocol):
    """How a victim leaves."""

    def mechanism(self, victim: Sequence) -> Mechanism: ...
