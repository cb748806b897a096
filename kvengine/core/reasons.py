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
    WATERMARK = "WATERMARK"
    """It would fit, but fewer free blocks would remain than the admission policy keeps for those that run."""
    HEAD_OF_LINE = "HEAD_OF_LINE"
    """It stands behind the sequence named in the detail, which was refused."""
    LONG_PREFILL_CAP = "LONG_PREFILL_CAP"
    """As many long prompts as may be prefilled at once already are."""
    PARTIAL_PREFILLS = "PARTIAL_PREFILLS"
    """As many prompts as may be prefilled at once already are."""
    PREFILL_INTERVAL = "PREFILL_INTERVAL"
    """Prefills have their turn only every few steps, and this is not one of them."""
    BATCH_FORMING = "BATCH_FORMING"
    """A static batch is being collected."""
    BATCH_DRAINING = "BATCH_DRAINING"
    """A static batch runs until its longest member ends."""
    AFTER_PREEMPTION = "AFTER_PREEMPTION"
    """Somebody was preempted in this step, so nobody is admitted in it."""
    PREEMPTED_FOR = "PREEMPTED_FOR"
    """It gave its blocks or its seat to the sequence named in the detail."""
    QUANTUM = "QUANTUM"
    """It had used up its time slice while others waited."""
    DEADLINE = "DEADLINE"
    """It cannot meet its deadline any more, so it is refused, or served after those that can."""
    STEP_IN_PROGRESS = "STEP_IN_PROGRESS"
    """It arrived while a step was executed; the next plan is the first that could see it."""
    POLICY = "POLICY"
    """A policy's own reason; the detail is its text."""
    NO_SWAP_SPACE = "NO_SWAP_SPACE"
    """Its KV did not fit the host pool, so that it was dropped and is computed again."""
    NEVER_FITS = "NEVER_FITS"
    """The request was refused for good when it was added; the detail says which limit."""


class Verdict(StrEnum):
    """What becomes of a sequence that is refused."""

    WAIT = "wait"
    """It keeps its place and asks again."""
    DEFER = "defer"
    """It waits until nobody else does, and then is not refused for this reason again."""
    REFUSE = "refuse"
    """It will never run: its request ends with FinishReason.REFUSED."""


class Refusal(NamedTuple):
    """A policy's or allocator's no: the reason, what makes it concrete (numbers, ids), and what follows."""

    reason: Reason
    detail: str = ""
    verdict: Verdict = Verdict.WAIT


class FinishReason(StrEnum):
    """Why a sequence ended, in the words clients know."""

    STOP = "stop"
    """It produced an end-of-sequence or stop token."""
    LENGTH = "length"
    """It reached max_tokens or max_model_len."""
    ABORT = "abort"
    """It was aborted, or the run was interrupted."""
    REFUSED = "refused"
    """An admission policy refused it for good while it waited."""
