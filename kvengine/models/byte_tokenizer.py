"""A tokenizer without a vocabulary: one token id per byte of UTF-8, plus an end and a padding id."""

from __future__ import annotations

from collections.abc import Iterable

NUM_BYTES = 256


class ByteTokenizer:
    """Ids 0..255 are bytes, 256 ends a sequence, 257 is padding that nothing ever produces."""

    eos_token_id = NUM_BYTES
    eos_token_ids: tuple[int, ...] = (NUM_BYTES,)
    vocab_size: int = NUM_BYTES + 2

    def encode(self, text: str) -> list[int]:
        """The bytes of `text` in UTF-8; raises UnicodeEncodeError for a lone surrogate."""
        return list(text.encode())

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`: special ids give nothing, broken UTF-8 gives U+FFFD; ValueError if negative."""
        return b"".join(map(self.token_bytes, ids)).decode(errors="replace")

    def apply_chat(self, text: str) -> list[int]:
        """The ids of one user message, which are those of plain `text`: there is no chat template."""
        return self.encode(text)

    def token_bytes(self, token_id: int) -> bytes:
        """The byte that `token_id` stands for, or none for a special id; raises ValueError if negative."""
        return bytes([token_id]) if token_id < NUM_BYTES else b""
