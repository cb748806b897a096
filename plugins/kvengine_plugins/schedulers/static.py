"""Static batching: collect a batch, pad its prompts, run it until the longest member ends, then the next.

Source: request-level batching as Orca (Yu et al., OSDI 2022, section 3) describes and criticises it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Literal

from kvengine.core.errors import ConfigError
from kvengine.core.reasons import Reason
from kvengine.core.sequence import Sequence, SequenceState
from kvengine.policies import Scheduler, SchedulingView


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticConfig:
    """`batch_size` rows at most (null: max_num_seqs); wait up to `max_wait_s` for a full batch; hand answers
    over at `batch_end`, or each `token` as it comes."""

    batch_size: int | None = None
    max_wait_s: float = 0.0
    deliver: Literal["batch_end", "token"] = "batch_end"

    def __post_init__(self) -> None:
        if self.batch_size is not None and self.batch_size < 1:
            raise ConfigError("scheduler.batch_size", self.batch_size, "must be at least 1")
        if not 0 <= self.max_wait_s < float("inf"):
            raise ConfigError(
                "scheduler.max_wait_s", self.max_wait_s, "must be a number of seconds, at least 0"
            )


class StaticScheduler(Scheduler):
    """Finished rows go on costing a row per step, and every prompt is padded to the longest of its batch.

    A batch whose padded prompts exceed the token budget is prefilled over several steps; its decodes begin
    when all its prompts are done.
    """

    chunks = False
    holds_finished = True

    def __init__(self, config: StaticConfig) -> None:
        self.delivers_at_batch_end = config.deliver == "batch_end"
        self._batch_size = config.batch_size
        self._max_wait_ns = round(config.max_wait_s * 1e9)
        self._members: list[Sequence] = []
        self._width = 0

    @property
    def batch_open(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return bool(self._members)

    def schedule(self, view: SchedulingView) -> None:
        self._members = [seq for seq in self._members if seq.state is not SequenceState.FINISHED]
        if not (self._members or view.held or any(view.running)):
            self._form_batch(view)
            if not self._members:
                return
        if self._members and self._prefill(view):
            view.stop(Reason.BATCH_FORMING)
            return
        self._decode(view)
        view.stop(Reason.BATCH_DRAINING)

    def _form_batch(self, view: SchedulingView) -> None:
        """Choose the members, or wait: for more of them, or for the oldest to have waited long enough."""
        if not len(view.waiting):
            return
        limits = view.limits
        rows = min(
            self._batch_size or limits.max_num_seqs, limits.max_num_seqs, limits.max_num_batched_tokens
        )
        deadline = view.waiting.peek().arrival_ns + self._max_wait_ns
        if len(view.waiting) < rows and view.now < deadline:
            view.stop(Reason.BATCH_FORMING)
            view.wake_at(deadline)
            return
        self._members = list(islice(view.waiting, rows))
        self._width = max(view.uncomputed(seq) for seq in self._members)

    def _prefill(self, view: SchedulingView) -> bool:
        """Enter as many members as the budget holds padded; memory that is refused closes the batch."""
        members = self._members
        entered = 0
        while members and view.token_budget_left >= self._width:
            tokens = view.admit(members[0])
            if not tokens:
                members = []
                break
            view.pad(self._width - tokens)
            members.pop(0)
            entered += 1
        self._members = members
        return entered > 0

    def _decode(self, view: SchedulingView) -> None:
        view.schedule_decodes()
        for seq in view.prefilling:  # a branch of a live request begins with tokens of its own
            view.schedule(seq, view.token_budget_left)
        for seq in view.held:
            view.idle_row(seq)
