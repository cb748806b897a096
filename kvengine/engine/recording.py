"""What the engine tells whoever records it, and the recorder that keeps nothing."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from kvengine.core.errors import RequestError
from kvengine.core.plan import StepPlan, StepResult
from kvengine.core.request import Request
from kvengine.core.sequence import Sequence


class PoolState(NamedTuple):
    """Counts after a step was committed; blocks and slots are of the KV pool."""

    num_running: int
    num_held: int
    num_waiting: int
    num_free_blocks: int
    """Held by no sequence: free, or cached."""
    num_cached_blocks: int
    """Those of them that keep a prefix."""
    num_saved_blocks: int
    """What sharing saves: for each block the tables that hold it, less one."""
    num_slots_held: int
    """Slots with the KV of a computed token of a live sequence."""
    num_slots_owned: int
    """Those, and the ones reserved for tokens to come; all others are external."""
    num_host_blocks: int
    """Blocks of host memory in use."""


class Recorder(Protocol):
    """Called on the step thread, so every call must be cheap; a recorder never raises into the engine."""

    def step(self, plan: StepPlan, result: StepResult, pool: PoolState, end_ns: int) -> None:
        """`plan` was executed (result.token_ids row by row) and committed at `end_ns`."""
        ...

    def idle(self, plan: StepPlan) -> None:
        """`plan` had nothing to execute; its decisions say why the waiting wait."""
        ...

    def finished(self, seq: Sequence, now: int) -> None:
        """`seq` ended: delivered in full, or aborted."""
        ...

    def rejected(self, request: Request, error: RequestError, now: int) -> None:
        """`request` was refused when it was added."""
        ...


class NullRecorder:
    """Keeps nothing."""

    def step(self, plan: StepPlan, result: StepResult, pool: PoolState, end_ns: int) -> None: ...

    def idle(self, plan: StepPlan) -> None: ...

    def finished(self, seq: Sequence, now: int) -> None: ...

    def rejected(self, request: Request, error: RequestError, now: int) -> None: ...
