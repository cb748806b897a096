"""What a step decided about single sequences, for the record: one tuple each."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from kvengine.core.sequence import Sequence


class Action(StrEnum):
    """What happened to a sequence; success in scheduling is in the plan and needs no record of its own."""

    ADMIT = "admit"
    RESUME = "resume"
    REFUSE = "refuse"
    """It asked to enter (or to grow) and was refused; equal refusals of consecutive steps are one row."""
    STOP = "stop"
    """The scheduler gave a reason for all waiting that it did not visit."""
    PREEMPT = "preempt"
    ABORT = "abort"


class Decision(NamedTuple):
    """`num_blocks` are blocks taken (admit, resume) or freed (preempt, abort); `num_tokens` tokens scheduled
    (admit, resume) or to be recomputed (preempt); `num_free_before` the free blocks before it."""

    action: Action
    seq: Sequence | None
    reason: str = ""
    detail: str = ""
    num_blocks: int = 0
    num_tokens: int = 0
    num_free_before: int = 0
