"""What the engine asks of a tokenizer, and the one that reads a Hugging Face checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kvengine.core.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Tokenizer(Protocol):
    """Text to token ids and back; `decode(encode(text))` is `text` for text without special tokens."""

    @property
    def vocab_size(self) -> int:
        """The number of token ids: every id is at least 0 and below it."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every id that ends a sequence, ascending; empty when the model has none."""
        ...

    def encode(self, text: str) -> list[int]:
        """The ids of a plain prompt, with whatever the model wants before it."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens left out."""
        ...

    def apply_chat(self, text: str) -> list[int]:
        """The ids of a prompt that asks for the answer to one user message."""
        ...


class HfTokenizer:
    """The tokenizer saved in `directory`; raises ModelError when there is none or it cannot be read."""

    def __init__(self, directory: str | Path) -> None:
        directory = Path(directory)
        self._tokenizer = _load(directory)
        self.vocab_size = len(self._tokenizer)
        self.eos_token_ids = _eos_token_ids(directory, self._tokenizer.eos_token_id)

    def encode(self, text: str) -> list[int]:
        """The ids of a plain prompt, with the special tokens its model expects around it."""
        return self._tokenizer.encode(text, verbose=False)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, special tokens left out and spaces as they are."""
        text = self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def apply_chat(self, text: str) -> list[int]:
        """The ids of one user message in the model's chat template; of plain `text` when it has none."""
        if self._tokenizer.chat_template is None:
            return self.encode(text)
        messages = [{"role": "user", "content": text}]
        rendered = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return self._tokenizer.encode(str(rendered), add_special_tokens=False, verbose=False)


def _load(directory: Path) -> PreTrainedTokenizerBase:
    """Read tokenizer.json as it stands: AutoTokenizer may rebuild it from the vocabulary alone.

    For SmolLM2 as published (tokenizer_class GPT2Tokenizer) transformers 5 then no longer splits digits.
    """
    if not directory.is_dir():
        raise ModelError(f"model '{directory}': no such directory")
    try:
        if (directory / "tokenizer.json").is_file():
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # transformers raises whatever the file format happens to trip over
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"model '{directory}': its tokenizer cannot be loaded: {reason}") from error


def _eos_token_ids(directory: Path, of_tokenizer: int | None) -> tuple[int, ...]:
    found = {of_tokenizer}
    for name in ("generation_config.json", "config.json"):
        declared = _read_json(directory / name).get("eos_token_id")
        found.update(declared if isinstance(declared, list) else [declared])
    return tuple(sorted(token_id for token_id in found if token_id is not None))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"model '{path.parent}': {path.name} is not JSON: {error}") from error
