"""What a step decided about single sequences, for the record: one tuple each."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from kvengine.core.sequence import Sequence


class Action(StrEnum):
    """What happened to a sequence; success in scheduling is in the plan and needs no record of its own."""

    ADMIT = "admit"
    RESUME = "resume"
    FORK = "fork"
    """It began with the computed tokens of the sequence named in the detail, in the same blocks."""
    REFUSE = "refuse"
    """It asked to enter (or to grow) and was refused; equal refusals of consecutive steps are one row."""
    STOP = "stop"
    """The scheduler gave a reason for all waiting that it did not visit."""
    PREEMPT = "preempt"
    """Its KV was dropped."""
    SWAP_OUT = "swap_out"
    """It was preempted, and its KV went to the host."""
    DEFER = "defer"
    """An admission policy lets all others go first."""
    REJECT = "reject"
    """An admission policy refused it for good while it waited."""
    ABORT = "abort"


class Decision(NamedTuple):
    """`num_blocks` are blocks taken (admit, resume), shared (fork) or freed (preempt, swap_out, abort);
    `num_tokens` tokens scheduled (admit, resume), shared (fork), moved (swap_out) or to be recomputed (preempt);
    `num_free_before` and `num_free_after` the free blocks around it; `num_cached` the tokens of an admission or
    resumption that were found in the pool or on the host; `num_moved_blocks` the blocks that a swap-out moves;
    `policy` the name of the policy that chose the victim, or refused."""

    action: Action
    seq: Sequence | None
    reason: str = ""
    detail: str = ""
    num_blocks: int = 0
    num_tokens: int = 0
    num_free_before: int = 0
    num_cached: int = 0
    num_free_after: int = 0
    num_moved_blocks: int = 0
    policy: str = ""
