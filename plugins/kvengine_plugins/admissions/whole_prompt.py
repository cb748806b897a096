"""Admit only where the whole known context has room, blocks promised to prefills in progress subtracted.

Admitting when only the next chunk fits makes prefills evict each other (vLLM issue 25538).
"""

from __future__ import annotations

from kvengine.core.reasons import Reason, Refusal
from kvengine.core.sequence import Sequence
from kvengine.policies import Admission, SchedulingView


class WholePromptAdmission(Admission):
    """Optimistic about what a sequence will generate, exact about what it already has.

    The other choices of a request get a block each for their own copy of the prompt's end, unless nothing runs.
    """

    def refuses(self, seq: Sequence, view: SchedulingView) -> Refusal | None:
        needed, promised, free = self.needs(seq, view), view.num_promised_blocks, view.num_free_blocks
        if needed + promised > free:
            return Refusal(Reason.NO_BLOCKS, f"{needed} needed, {free} free, {promised} of them promised")
        return None

    def needs(self, seq: Sequence, view: SchedulingView) -> int:
        """Blocks for all that `seq` already has."""
        needed = view.blocks_needed(seq, seq.num_tokens)
        if seq.siblings and any(view.running):
            needed += len(seq.siblings)
        return needed
