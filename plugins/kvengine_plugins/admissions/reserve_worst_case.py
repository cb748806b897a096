"""Admit only where all that run and the newcomer fit at their full length, so that nobody ever has to give way.

Source: Yu et al., "Orca", OSDI 2022, section 4.2 (algorithm 1), which reserves max_tokens slots at admission.
"""

from __future__ import annotations

from kvengine.core.reasons import Reason, Refusal
from kvengine.core.sequence import Sequence
from kvengine.policies import Admission, SchedulingView


class ReserveWorstCaseAdmission(Admission):
    """A sequence takes max_tokens_total - 1 slots in the end, its last token having no KV.

    Nothing is set aside: what those that run will still take is counted anew each time, so shared and cached blocks
    count once. Choices that are yet to be forked count in full, as if they shared nothing.
    """

    reserves_worst_case = True

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def refuses(self, seq: Sequence, view: SchedulingView) -> Refusal | None:
        running = list(view.running)
        if not running:
            return None
        reserved = sum(self._lacks(other, view) for other in running)
        needed, free = self._lacks(seq, view), view.num_free_blocks
        if needed + reserved > free:
            return Refusal(Reason.NO_BLOCKS, f"{needed} needed, {free} free, {reserved} of them reserved")
        return None

    def _lacks(self, seq: Sequence, view: SchedulingView) -> int:
        """Blocks that `seq` and its siblings may still take."""
        slots = seq.max_tokens_total - 1
        return view.blocks_needed(seq, slots) + len(seq.siblings) * -(-slots // self._block_size)
