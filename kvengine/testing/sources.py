"""Stand-in models for the null executor whose answers are exact integers."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as ListLike

from kvengine.core.sequence import Sequence


class ChecksumSource:
    """next = sum((token + 1) * (position + 1)) mod 251 over all slots of the sequence.

    A missing, stale, doubled or misplaced slot changes the answer; batch composition and float order cannot.
    A slot that was never written raises KeyError. With a `window` only the last so many positions count, and
    the slots before them may be anything.
    """

    VOCAB_SIZE = 251

    def __init__(self, window: int | None = None) -> None:
        if window is not None and window < 1:
            raise ValueError(f"window must be at least 1, not {window}")
        self._window = window
        self._slots: dict[int, tuple[int, int]] = {}

    def copy(self, source_slots: list[int], destination_slots: list[int]) -> None:
        """What lies in the sources, the unwritten ones included: a destination keeps nothing of its own."""
        for source, destination in zip(source_slots, destination_slots, strict=True):
            if source in self._slots:
                self._slots[destination] = self._slots[source]
            else:
                self._slots.pop(destination, None)

    def write(self, slots: list[int], token_ids: list[int], first_position: int) -> None:
        for i, (slot, token) in enumerate(zip(slots, token_ids, strict=True)):
            self._slots[slot] = (token, first_position + i)

    def next_token(self, slots: list[int], seq: Sequence) -> int:
        seen = slots if self._window is None else slots[-self._window :]
        stored = [self._slots[slot] for slot in seen]
        return sum((token + 1) * (position + 1) for token, position in stored) % self.VOCAB_SIZE


def checksum_output(prompt: ListLike[int], max_tokens: int, window: int | None = None) -> list[int]:
    """What the checksum model generates for `prompt` alone: the reference for every test that uses it."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        first = 0 if window is None else max(0, len(tokens) - window)
        seen = enumerate(tokens[first:], first)
        tokens.append(sum((t + 1) * (i + 1) for i, t in seen) % ChecksumSource.VOCAB_SIZE)
    return tokens[len(prompt) :]


class ScriptSource:
    """Answers each request with the token list given for its id, then with `end` for ever."""

    def __init__(self, scripts: Mapping[str, ListLike[int]], end: int) -> None:
        self._scripts = scripts
        self._end = end

    def copy(self, source_slots: list[int], destination_slots: list[int]) -> None:
        """Nothing: the script does not depend on what was read."""

    def write(self, slots: list[int], token_ids: list[int], first_position: int) -> None:
        """Nothing: the script does not depend on what was read."""

    def next_token(self, slots: list[int], seq: Sequence) -> int:
        script = self._scripts[seq.request.id]
        return script[seq.num_output_tokens] if seq.num_output_tokens < len(script) else self._end
