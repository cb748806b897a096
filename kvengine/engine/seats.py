"""Who runs, and how many more may: the seats of max_num_seqs."""

from __future__ import annotations

from collections.abc import Iterator

from kvengine.core.sequence import Sequence, SequenceState


class Seats:
    """Running sequences in order of admission, held rows of a static batch, and seats kept for choices to come.

    A request with n choices takes n seats when its first choice is admitted, or all there are if they are fewer.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.running: dict[Sequence, None] = {}
        self.prefilling: dict[Sequence, None] = {}
        """Those of them with more than their newest token uncomputed."""
        self.held: list[Sequence] = []
        self._kept: dict[Sequence, int] = {}
        self._num_of_priority: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        return self.count - len(self.running) - len(self.held) - sum(self._kept.values())

    def wanted(self, seq: Sequence) -> int:
        """One for itself, and one for each choice that will be forked from it, as far as there are seats."""
        return min(1 + len(seq.siblings), self.count)

    def kept_for(self, leader: Sequence) -> tuple[Sequence, ...]:
        """The siblings of `leader` that will have a seat when its prompt is computed."""
        return tuple(leader.siblings[: self._kept.get(leader, 0)]) if leader.siblings else ()

    def take(self, seq: Sequence, now: int) -> None:
        """Let `seq` run from `now` (ns) on."""
        seq.state = SequenceState.RUNNING
        self.running[seq] = None
        seq.num_tokens_at_entry = len(seq.token_ids)
        self._num_of_priority[seq.priority] = self._num_of_priority.get(seq.priority, 0) + 1
        if seq.siblings:
            self._kept[seq] = self.wanted(seq) - 1
        if seq.times.admitted_ns is None:
            seq.times.admitted_ns = now

    def leave(self, seq: Sequence) -> None:
        """`seq` does not run any more."""
        del self.running[seq]
        self.prefilling.pop(seq, None)
        self._kept.pop(seq, None)
        left = self._num_of_priority[seq.priority] - 1
        if left:
            self._num_of_priority[seq.priority] = left
        else:
            del self._num_of_priority[seq.priority]

    def all_but_the_protected(self) -> list[Sequence]:
        """Running sequences that may give way: the oldest of the highest static priority goes on whatever
        happens."""
        protected = min(self.running, key=lambda seq: (seq.priority, seq.order))
        return [seq for seq in self.running if seq is not protected]

    def outranked_by(self, seq: Sequence) -> list[Sequence]:
        """Running sequences of strictly lower static priority than `seq`."""
        if not self.running or max(self._num_of_priority) <= seq.priority:
            return []
        return [other for other in self.running if other.priority > seq.priority]

    def could_seat(self, seq: Sequence) -> bool:
        """Whether there would be seats for `seq` if all that it outranks gave way."""
        wanted = self.wanted(seq)
        if wanted <= self.num_free:
            return True
        given = sum(1 + self._kept.get(other, 0) for other in self.outranked_by(seq))
        return wanted <= self.num_free + given

    def give_to_siblings(self, leader: Sequence) -> list[Sequence]:
        """The kept seats are free for whom they were kept; the siblings of `leader`, which has none any more."""
        self._kept.pop(leader, None)
        siblings, leader.siblings = leader.siblings, []
        return siblings

    def __iter__(self) -> Iterator[Sequence]:
        """All running, as they are now; one that loses its seat meanwhile is not yielded."""
        return (seq for seq in list(self.running) if seq.state is SequenceState.RUNNING)
