"""What admission policies share that reserve for growth: room for the newcomer and for all that run."""

from __future__ import annotations

from kvengine.core.reasons import Reason, Refusal
from kvengine.core.sequence import Sequence
from kvengine.policies import Admission, SchedulingView


class ReservingAdmission(Admission):
    """Nothing is set aside: what those that run will still take is counted anew each time, so shared and cached
    blocks count once. Where nobody runs the newcomer enters."""

    def refuses(self, seq: Sequence, view: SchedulingView) -> Refusal | None:
        running = list(view.running)
        if not running:
            return None
        reserved = sum(self.lacks(other, view) for other in running)
        needed, free = self.lacks(seq, view), view.num_free_blocks
        if needed + reserved > free:
            room = f"{needed} needed, {free} free, {reserved} of them reserved{self.basis}"
            return Refusal(Reason.NO_BLOCKS, room)
        return None

    @property
    def basis(self) -> str:
        """What a refusal adds to say by what it reserves."""
        return ""

    def lacks(self, seq: Sequence, view: SchedulingView) -> int:
        """Blocks that are reserved for what `seq`, and siblings not yet forked from it, may still take."""
        raise NotImplementedError
