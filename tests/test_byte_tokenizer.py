"""The byte tokenizer, which is also the test double of every suite that needs exact token counts."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvengine.models.byte_tokenizer import ByteTokenizer


@given(st.text())
def test_every_text_survives_the_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    assert all(0 <= token_id < 256 for token_id in ids)
    assert tokenizer.decode(ids) == text
    assert tokenizer.apply_chat(text) == ids


@given(st.lists(st.integers(0, ByteTokenizer.vocab_size - 1)))
def test_every_list_of_ids_decodes_to_some_text(ids: list[int]) -> None:
    assert ByteTokenizer().decode(ids) == ByteTokenizer().decode([i for i in ids if i < 256])


def test_special_ids_give_nothing_and_half_a_character_gives_the_replacement() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.eos_token_ids == (tokenizer.eos_token_id,) == (256,)
    assert tokenizer.decode([*tokenizer.encode("é"), 256, 257]) == "é"
    assert tokenizer.decode(tokenizer.encode("é")[:1]) == "\ufffd"
    assert [tokenizer.token_bytes(i) for i in (0, 255, 256, 257)] == [b"\x00", b"\xff", b"", b""]


def test_a_negative_id_is_an_error() -> None:
    with pytest.raises(ValueError):
        ByteTokenizer().decode([-1])


def test_it_imports_neither_torch_nor_transformers() -> None:
    program = (
        "import sys, kvengine.models.byte_tokenizer; print({'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
