"""The tokenizer of a Hugging Face checkpoint, and the token ids that end its sequences."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvengine.core.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
)
"""Any of them makes a tokenizer; without one transformers returns one that encodes everything to nothing."""


class HfTokenizer:
    """The tokenizer saved in `directory`; raises ModelError when there is none or it cannot be read."""

    def __init__(self, directory: str | Path) -> None:
        self._tokenizer = _load(Path(directory))
        self.vocab_size: int = len(self._tokenizer)
        self.eos_token_ids: tuple[int, ...] = declared_eos_ids(Path(directory))

    def encode(self, text: str) -> list[int]:
        """The ids of `text` and nothing around them; the name of a special token becomes that token."""
        return self._tokenizer.encode(text, add_special_tokens=False, verbose=False)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, special tokens left out and spaces as they are; broken UTF-8 gives U+FFFD."""
        return str(
            self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )

    def apply_chat(self, text: str) -> list[int]:
        """The ids of one user message in the model's chat template; of plain `text` when it has none."""
        if self._tokenizer.chat_template is None:
            return self.encode(text)
        messages = [{"role": "user", "content": text}]
        prompt = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return self.encode(str(prompt))


def declared_eos_ids(directory: Path) -> tuple[int, ...]:
    """Every id that a file of the checkpoint says ends a sequence, ascending: fine-tunes rarely agree on one.

    Raises ModelError for a file that is not JSON; files that are absent declare nothing.
    """
    declared: list[Any] = [_eos_id_of_tokenizer(directory)]
    for name in ("generation_config.json", "config.json"):
        ids = _read_json(directory / name).get("eos_token_id")
        declared += ids if isinstance(ids, list) else [ids]
    return tuple(sorted({token_id for token_id in declared if token_id is not None}))


def _eos_id_of_tokenizer(directory: Path) -> int | None:
    eos = _read_json(directory / "tokenizer_config.json").get("eos_token")
    text = eos.get("content") if isinstance(eos, dict) else eos
    added = _read_json(directory / "tokenizer.json").get("added_tokens", [])
    return next((token["id"] for token in added if token["content"] == text), None)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"model '{path.parent}': {path.name} is not JSON: {error}") from error


def _load(directory: Path) -> PreTrainedTokenizerFast:
    """Read tokenizer.json as it stands: AutoTokenizer may rebuild it from the vocabulary alone.

    For SmolLM2 as published (tokenizer_class GPT2Tokenizer) transformers 5 then no longer splits digits.
    """
    if not directory.is_dir():
        raise ModelError(f"model '{directory}': no such directory")
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError(f"model '{directory}': has no tokenizer; give prompt_token_ids by workload=jsonl")
    try:
        if (directory / "tokenizer.json").is_file():
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # transformers raises whatever the file's format makes it trip over
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"model '{directory}': its tokenizer cannot be loaded: {reason}") from error
