"""Why a sequence was refused, preempted or finished: enums that are part of the public interface."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Reason(StrEnum):
    """Why a waiting sequence did not enter, or why a running one had to leave."""

    NO_BLOCKS = "NO_BLOCKS"
    """Fewer blocks are free than it needs (promised blocks of prefills in progress subtracted)."""
    FRAGMENTED = "FRAGMENTED"
    """Enough blocks are free in total, but no free region is large enough."""
    NO_TOKEN_BUDGET = "NO_TOKEN_BUDGET"
    """The step's token budget is spent, or what is left is too small for a prefill that cannot be split."""
    MAX_NUM_SEQS = "MAX_NUM_SEQS"
    """All `max_num_seqs` seats are taken."""
    BATCH_FORMING = "BATCH_FORMING"
    """A static batch is being collected."""
    BATCH_DRAINING = "BATCH_DRAINING"
    """A static batch runs until its longest member ends."""
    AFTER_PREEMPTION = "AFTER_PREEMPTION"
    """Somebody was preempted in this step, so nobody is admitted in it."""
    PREEMPTED_FOR = "PREEMPTED_FOR"
    """It gave its blocks to the sequence named in the detail."""
    NO_SWAP_SPACE = "NO_SWAP_SPACE"
    """Its KV did not fit the host pool, so that it was dropped and is computed again."""
    NEVER_FITS = "NEVER_FITS"
    """The request was refused for good when it was added; the detail says which limit."""


class Refusal(NamedTuple):
    """A policy's or allocator's no: the reason, and what makes it concrete (numbers, ids)."""

    reason: Reason
    detail: str = ""


class FinishReason(StrEnum):
    """Why a sequence ended, in the words clients know."""

    STOP = "stop"
    """It produced an end-of-sequence or stop token."""
    LENGTH = "length"
    """It reached max_tokens or max_model_len."""
    ABORT = "abort"
    """It was aborted, or the run was interrupted."""
