"""Admit only where all that run and the newcomer fit at their full length, so that nobody ever has to give way.

Source: Yu et al., "Orca", OSDI 2022, section 4.2 (algorithm 1), which reserves max_tokens slots at admission.
"""

from __future__ import annotations

from kvengine.core.sequence import Sequence
from kvengine.policies import SchedulingView
from kvengine_plugins.admissions.reserving import ReservingAdmission


class ReserveWorstCaseAdmission(ReservingAdmission):
    """A sequence takes max_tokens_total - 1 slots in the end, its last token having no KV.

    Choices that are yet to be forked count in full, as if they shared nothing.
    """

    reserves_worst_case = True

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def lacks(self, seq: Sequence, view: SchedulingView) -> int:
        """Blocks that `seq` and its siblings may still take."""
        slots = seq.max_tokens_total - 1
        return view.blocks_needed(seq, slots) + len(seq.siblings) * -(-slots // self._block_size)
