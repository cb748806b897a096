"""Token ids to text as they come: every character is handed over once no later id can change it."""

from __future__ import annotations

from functools import lru_cache

from kvengine.policies import Tokenizer

REPLACEMENT = "\ufffd"

MAX_INCOMPLETE = 3
"""A character of UTF-8 lacks its end for three bytes at most, so older replacement characters are final."""

MAX_HELD = 32
"""So many ids may wait for a run of byte tokens to end (see `_byte_0x80`)."""

MAX_WINDOW = 32
MIN_CONTEXT = 16
"""How many ids are decoded again with every new one, and how many stay when they are cut down: more than
MAX_INCOMPLETE characters have bytes."""

MAX_SCANNED = 1024
"""Where a vocabulary has byte tokens, they follow its special tokens, before all others."""


class Detokenizer:
    """The text of one sequence of ids, in pieces: all pieces joined are `tokenizer.decode` of all ids.

        ids     ... forgotten ... | window: decoded again with every new id
        text    ... handed over ............... | unsent: could still change

    What could still change is an unfinished character at the end. A window that starts in the middle of the
    text decodes to a wrong beginning (half a character, a space stripped), but to the right end, and only its
    end is ever read. So one id costs a few decodes of some MAX_WINDOW ids, however long the text is.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode = tokenizer.decode
        self._breaker = _byte_0x80(tokenizer)
        self._window: list[int] = []
        self._text = ""
        self._num_sent = 0
        """Characters of `_text` that were handed over."""
        self._num_held = 0
        """Ids since everything was handed over."""

    def push(self, ids: list[int]) -> str:
        """Take the next ids; the text that became certain with them."""
        return "".join([self._take(token_id) for token_id in ids])

    def finish(self) -> str:
        """The rest of the text: what was held back for an id that never came."""
        rest = self._text[self._num_sent :]
        self._num_sent = len(self._text)
        return rest

    def _take(self, token_id: int) -> str:
        text = self._decode([*self._window, token_id])
        if text == self._text and not self._decode([token_id, token_id]):
            return ""  # a special id, without any text wherever it stands
        self._window.append(token_id)
        self._text = text
        self._num_held += 1
        certain = max(self._num_certain(), self._num_sent)
        piece = text[self._num_sent : certain]
        self._num_sent = certain
        if certain == len(text):
            self._num_held = 0
        if len(self._window) > MAX_WINDOW and len(text) - certain <= MAX_INCOMPLETE:
            self._cut_window()
        return piece

    def _num_certain(self) -> int:
        """Characters of the window's text that no later id can change."""
        text = self._text
        num_broken = len(text) - len(text.rstrip(REPLACEMENT))
        if self._breaker is not None and self._waits_for_run(num_broken):
            return self._num_sent
        return len(text) - min(num_broken, MAX_INCOMPLETE)

    def _waits_for_run(self, num_broken: int) -> bool:
        """Whether the window ends in byte tokens that a broken byte after them would break, too.

        After MAX_HELD ids it waits no longer than for the character at the end.
        """
        if num_broken:
            return self._num_held <= MAX_HELD + MAX_INCOMPLETE
        if self._num_held > MAX_HELD:
            return False
        assert self._breaker is not None
        return not self._decode([*self._window, self._breaker]).startswith(self._text)

    def _cut_window(self) -> None:
        """Forget ids, keeping an end of the window that decodes to the same end of the text.

        It starts between two characters where it can, so that a run of byte tokens stays whole.
        """
        unsent = len(self._text) - self._num_sent
        for size in range(MIN_CONTEXT, MIN_CONTEXT + MAX_INCOMPLETE + 1):
            window = self._window[-size:]
            text = self._decode(window)
            if not text.startswith(REPLACEMENT):
                break
        self._window, self._text = window, text
        self._num_sent = max(len(text) - unsent, 0)


@lru_cache(maxsize=8)
def _byte_0x80(tokenizer: Tokenizer) -> int | None:
    """The token of byte 0x80, if a broken byte makes the whole run of byte tokens before it broken text.

    That is how vocabularies of SentencePiece spell what they lack (`ByteFallback`): <0xE4><0xB8><0x96> is one
    character, and one more <0xE4> turns it into four replacement characters until the next one is complete.
    None for all other tokenizers, where text never changes but in its last character.
    """
    before = ""
    for token_id in range(min(tokenizer.vocab_size, MAX_SCANNED)):
        text = tokenizer.decode([token_id])
        if text == REPLACEMENT and before == "\x7f":
            return token_id if tokenizer.decode([token_id - 1, token_id])[0] == REPLACEMENT else None
        before = text
    return None
