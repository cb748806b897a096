"""Static batching: collect a batch, pad its prompts, run it until the longest member ends, then the next.

Source: request-level batching as Orca (Yu et al., OSDI 2022, section 3) describes and criticises it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from kvengine.core.errors import ConfigError
from kvengine.core.reasons import Reason
from kvengine.core.sequence import Sequence, SequenceState
from kvengine.policies import Scheduler, SchedulingView


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticConfig:
    """`batch_size` rows at most (null: max_num_seqs); wait up to `max_wait_s` for a full batch; who arrives while
    one runs waits for the next (`collect`), or stops it (`restart`); hand answers over at `batch_end`, or each
    `token` as it comes."""

    batch_size: int | None = None
    max_wait_s: float = 0.0
    mode: Literal["collect", "restart"] = "collect"
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
    when all its prompts are done. With mode=restart a newcomer for whom there is a row has the batch formed again
    as soon as every row has gained a token: finished rows are handed over, and the others compute their prompts
    and tokens so far again, padded to the longest.
    """

    chunks = False
    holds_finished = True

    def __init__(self, config: StaticConfig) -> None:
        self.delivers_at_batch_end = config.deliver == "batch_end"
        self.preempts = config.mode == "restart"
        self._batch_size = config.batch_size
        self._max_wait_ns = round(config.max_wait_s * 1e9)
        self._members: list[Sequence] = []
        self._width = 0
        self._newcomers: deque[Sequence] = deque()
        """Who arrived since the batch was formed, in mode restart."""
        self._restarts = False

    @property
    def batch_open(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return bool(self._members)

    def schedule(self, view: SchedulingView) -> None:
        self._members = [seq for seq in self._members if seq.state is not SequenceState.FINISHED]
        if not (self._members or view.held or any(view.running)):
            self._form_batch(view)
            if not self._members:
                return
        if self._restart(view):
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
        rows = self._num_rows(view)
        deadline = view.waiting.peek().arrival_ns + self._max_wait_ns
        if len(view.waiting) < rows and view.now < deadline and not self._restarts:
            view.stop(Reason.BATCH_FORMING)
            view.wake_at(deadline)
            return
        self._members = list(islice(view.waiting, rows))
        self._width = max(view.uncomputed(seq) for seq in self._members)
        self._newcomers.clear()
        self._restarts = False

    def _restart(self, view: SchedulingView) -> bool:
        """Stop the batch for a newcomer, if there is one, a row for it, and no row that has gained nothing yet."""
        newcomers, running = self._newcomers, list(view.running)
        while newcomers and newcomers[0].state is not SequenceState.WAITING:
            newcomers.popleft()
        if self._members or not newcomers or not 0 < len(running) < self._num_rows(view):
            return False
        if any(seq.num_tokens == seq.num_tokens_at_entry for seq in running):
            return False
        for seq in running:
            view.preempt(seq, Reason.PREEMPTED_FOR, newcomers[0])
        self._restarts = True
        return True

    def _num_rows(self, view: SchedulingView) -> int:
        """Rows of a batch at most: as many as one step can decode."""
        seats = view.limits.max_num_seqs
        return min(self._batch_size or seats, seats, view.limits.max_num_batched_tokens)

    def waits(self, seq: Sequence, now: int) -> None:
        if self.preempts and seq.state is SequenceState.WAITING:
            self._newcomers.append(seq)

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
        view.schedule_running()
        for seq in view.held:
            view.idle_row(seq)
