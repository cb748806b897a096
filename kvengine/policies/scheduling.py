"""The contracts of scheduling: order, admission, victims, how they leave, and the view these act through."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Protocol

from kvengine.core.limits import EngineLimits
from kvengine.core.plan import StepPlan
from kvengine.core.reasons import Reason, Refusal
from kvengine.core.sequence import Sequence


class Queue(Protocol):
    """The order of the waiting. A preempted sequence is pushed again; a policy may look past the head.

    Kept in order as sequences come and go: no call may cost as much as there are waiting, `__iter__` apart.
    Subclass this Protocol to have the defaults.
    """

    needs_lengths: bool = False
    """Whether it orders by the true output length, which the workload must know then."""
    needs_cache: bool = False
    """Whether it orders by what is cached, so that there must be a prefix cache."""

    def push(self, seq: Sequence) -> None:
        """`seq` begins to wait: it arrived, or was preempted."""
        ...

    def peek(self) -> Sequence:
        """The next in order, the same until something changes; IndexError when empty."""
        ...

    def remove(self, seq: Sequence) -> None:
        """Take `seq` out, wherever it stands, to run or because it ends; ValueError when it is not there."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Sequence]:
        """All waiting, in order."""
        ...

    def admitted(self, seq: Sequence, num_tokens: int) -> None:
        """`seq` was removed to run for the first time, with `num_tokens` of its prompt to be computed."""

    def committed(self, plan: StepPlan) -> None:
        """`plan` was executed; each row that samples gave a token to its sequence and to each of its forks."""


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
    def prefilling(self) -> Iterator[Sequence]:
        """Those of them with more than their newest token uncomputed that entered before this plan."""
        ...

    @property
    def heads(self) -> Iterator[Sequence]:
        """The head of the waiting, again and again, until one that was yielded is still the head.

        So `for seq in view.heads: view.admit(seq)` admits in order until somebody has to wait.
        """
        ...

    @property
    def held(self) -> list[Sequence]:
        """Finished rows of a static batch that still keep their blocks and seats."""
        ...

    @property
    def num_free_seats(self) -> int:
        """How many more sequences may run."""
        ...

    @property
    def num_blocks(self) -> int:
        """Blocks of the whole pool."""
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

    def schedule_decodes(self) -> None:
        """Schedule the one uncomputed token of each running sequence that is not prefilling, as far as the budget
        goes: what `schedule` would do for each, in order of admission."""
        ...

    def schedule_running(self) -> None:
        """`schedule_decodes`, and then all that those which prefill lack, in order of admission.

        Also under a scheduler of whole prompts: a branch of a live request begins with tokens of its own.
        """
        ...

    def admit(self, seq: Sequence, max_tokens: int | None = None) -> int:
        """Let a waiting (or preempted) sequence run, with up to `max_tokens` now; 0 if refused.

        Under a scheduler that does not split prefills it is all of its tokens or none. At `max_num_seqs`, running
        sequences of strictly lower static priority make room.
        """
        ...

    def refuse(self, seq: Sequence, reason: Reason, detail: str = "") -> None:
        """State why a waiting sequence that was looked at, and not asked for, does not enter in this step."""
        ...

    def preempt(self, seq: Sequence, reason: Reason, beneficiary: Sequence) -> bool:
        """Let a running sequence wait again in favour of another; False where that may not be.

        It may not be before `seq` has gained a token by running, so that work ends whatever a scheduler does, and
        not of a policy set that never preempts. In a plan that preempted nobody but the beneficiary is admitted.
        """
        ...

    def idle_row(self, seq: Sequence) -> bool:
        """Compute a held row for nothing, as a static batch does; False when the budget is spent."""
        ...

    def pad(self, num_tokens: int) -> None:
        """Compute that many padding tokens, as far as the budget goes."""
        ...

    def stop(self, reason: Reason, detail: str = "") -> None:
        """State why none of the waiting that were not visited enters in this step.

        Where a scheduler states none they stand behind whoever was refused last (HEAD_OF_LINE).
        """
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
    preempts: bool = False
    """Whether it preempts by itself, so that preemption=never makes no sense with it."""
    orders: bool = False
    """Whether it orders the waiting by itself, so that only queue=fcfs makes sense with it."""
    holds_finished: bool = False
    """Whether finished rows keep seat and blocks until no row of their batch runs (static batching)."""
    batch_open: bool = False
    """Whether more rows will join the batch whose finished rows are held."""
    delivers_at_batch_end: bool = False
    """Whether outputs are handed over only when such a batch has drained."""

    def schedule(self, view: SchedulingView) -> None: ...

    def waits(self, seq: Sequence, now: int) -> None:
        """`seq` begins to wait at `now` (ns): it arrived, or was preempted."""


class Admission(Protocol):
    """Whether a waiting sequence may enter now, seats and token budget apart.

    Subclass this Protocol to have the defaults.
    """

    reserves_worst_case: bool = False
    """Whether whoever enters can always grow to its full length, so that nobody need ever be preempted."""

    def refuses(self, seq: Sequence, view: SchedulingView) -> Refusal | None:
        """None to let it in. Must let the head in when nothing runs, since it fits an empty pool."""
        ...

    def preempted(self) -> None:
        """Somebody was preempted for want of blocks."""

    def committed(self, plan: StepPlan) -> None:
        """`plan` was executed."""


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
    """How a victim leaves. Subclass this Protocol to have the defaults."""

    preempts: bool = True
    """Whether anybody is ever preempted; if not, who cannot grow waits for others to end."""
    swaps: bool = True
    """Whether `mechanism` may answer SWAP, so that it uses the host pool."""

    def mechanism(self, victim: Sequence) -> Mechanism: ...


class Predictor(Protocol):
    """How long an output will be. Subclass this Protocol to have the defaults."""

    needs_lengths: bool = False
    """Whether it tells the true output length, which the workload must know then."""

    def predict(self, seq: Sequence) -> float:
        """The number of tokens that `seq` will have generated when it ends."""
        ...

    def finished(self, seq: Sequence) -> None:
        """`seq` has generated all its tokens: something to learn from."""
