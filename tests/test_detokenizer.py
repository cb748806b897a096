"""The detokenizer: pieces joined are the one-shot decode, characters come whole, and no id is held for ever."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvengine.engine.detokenizer import MAX_HELD, MAX_WINDOW, Detokenizer
from kvengine.models.byte_tokenizer import ByteTokenizer
from kvengine.models.smollm2 import cached_smollm2

BYTES = ByteTokenizer()
EOS = BYTES.eos_token_id
GRIN = "😀"


class Wrapped:
    """A `tokenizers` tokenizer under the contract of policies.Tokenizer."""

    eos_token_ids: tuple[int, ...] = ()

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.vocab_size: int = inner.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        return self.inner.encode(text).ids

    def decode(self, ids: Iterable[int]) -> str:
        return self.inner.decode(list(ids), skip_special_tokens=True)

    def apply_chat(self, text: str) -> list[int]:
        return self.encode(text)


def metaspace() -> Wrapped:
    """Words that start with ▁, and a decoder that drops the very first ▁."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    pieces = ["<unk>", "▁", "▁▁", "▁the", "▁cat", "s", "▁世", "界", ".", "é", "\ufffd", "▁\ufffd"]
    inner = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    inner.add_special_tokens([AddedToken("<eos>", special=True)])
    return Wrapped(inner)


def byte_fallback() -> Wrapped:
    """As Llama 2 has it: bytes spell what the vocabulary lacks, and one broken byte breaks its whole run."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "▁cat", "s", "世", "\ufffd"]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    inner.add_special_tokens([AddedToken("<unk>", special=True), AddedToken("<eos>", special=True)])
    return Wrapped(inner)


def smollm2() -> Any:
    directory = cached_smollm2()
    if directory is None:
        pytest.skip("SmolLM2 is not in the cache; fetch it with: python -m kvengine pull smollm2-135m")
    from kvengine.models.tokenizer import HfTokenizer

    return HfTokenizer(directory)


MAKERS = {"bytes": ByteTokenizer, "smollm2": smollm2, "metaspace": metaspace, "byte_fallback": byte_fallback}


@pytest.fixture(scope="module", params=MAKERS)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return MAKERS[request.param]()


def stream(tokenizer: Any, chunks: Iterable[list[int]]) -> list[str]:
    """What each chunk gives, and last the rest."""
    detokenizer = Detokenizer(tokenizer)
    return [*[detokenizer.push(chunk) for chunk in chunks], detokenizer.finish()]


def one_by_one(tokenizer: Any, ids: Iterable[int]) -> list[str]:
    return stream(tokenizer, [[i] for i in ids])


def chunked(data: st.DataObject, ids: list[int]) -> list[list[int]]:
    """`ids` cut at random places; empty chunks occur, too."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=8)))
    return [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


def test_a_character_split_over_tokens_comes_with_its_last_byte() -> None:
    assert one_by_one(BYTES, GRIN.encode()) == ["", "", "", GRIN, ""]


def test_an_incomplete_character_at_the_end_is_one_replacement_character() -> None:
    assert one_by_one(BYTES, b"\xf0\x9f") == ["", "", "\ufffd"]
    assert one_by_one(BYTES, b"a\xf0\x9f\x98") == ["a", "", "", "", "\ufffd"]


def test_nothing_comes_twice_around_a_split_character() -> None:
    chunks = [[*b"A "], [0xE4], [0xB8], [0x96], [*b"ab"]]
    assert stream(BYTES, chunks) == ["A ", "", "", "世", "ab", ""]


def test_special_ids_give_nothing_and_split_nothing() -> None:
    assert one_by_one(BYTES, [EOS, 0xF0, EOS, 0x9F, 0x98, EOS, EOS, 0x80, EOS, 65]) == [
        *[""] * 7, GRIN, "", "A", "",
    ]  # fmt: skip
    tokenizer = metaspace()
    eos, the, cat = (tokenizer.inner.token_to_id(piece) for piece in ("<eos>", "▁the", "▁cat"))
    assert one_by_one(tokenizer, [eos, the, eos, cat, eos]) == ["", "the", "", " cat", "", ""]


def test_a_real_replacement_character_is_delivered_in_time() -> None:
    real = "\ufffd".encode()
    assert one_by_one(BYTES, [*real, 65]) == ["", "", "", "\ufffdA", ""]
    assert "".join(one_by_one(BYTES, real)) == "\ufffd"
    pieces = one_by_one(BYTES, real * 50)
    assert "".join(pieces[:-1]).count("\ufffd") == 47


def test_the_first_space_goes_and_later_ones_stay() -> None:
    tokenizer = metaspace()
    the, cat, s, space = (tokenizer.inner.token_to_id(piece) for piece in ("▁the", "▁cat", "s", "▁"))
    assert one_by_one(tokenizer, [the, cat, s, space, cat]) == ["the", " cat", "s", " ", " cat", ""]
    assert one_by_one(tokenizer, [space, the]) == ["", " the", ""]
    assert "".join(one_by_one(tokenizer, [the, cat] * 100)) == " ".join(["the cat"] * 100)


def test_byte_level_bpe_streams_text_of_all_scripts() -> None:
    tokenizer = smollm2()
    text = "Ünïcode, 1 234 and 日本 🙂👩‍👩‍👧 , ok .\n\n  ไทย"
    ids = tokenizer.encode(text)
    pieces = one_by_one(tokenizer, ids)
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)
    assert pieces.count("") > 5, "this text is expected to split characters"
    assert one_by_one(tokenizer, [*tokenizer.encode("Hi"), 2, *tokenizer.encode(" there")])[:4] == [
        "Hi", "", " there", "",
    ]  # fmt: skip


def test_byte_fallback_waits_for_the_end_of_a_run() -> None:
    """<0x0A> is text by itself, and broken by a half character right after it."""
    tokenizer = byte_fallback()
    cat = tokenizer.inner.token_to_id("▁cat")
    ids = [1 + byte for byte in b"\n\xe4\xb8\x96\xe5\xa5"]
    assert one_by_one(tokenizer, [cat, *ids[:4], cat]) == ["cat", "", "", "", "", "\n世 cat", ""]
    assert tokenizer.decode(ids) == "\ufffd" * 6
    assert one_by_one(tokenizer, ids) == [*[""] * 6, "\ufffd" * 6]


def test_byte_fallback_does_not_wait_for_ever() -> None:
    tokenizer = byte_fallback()
    text = "好" * 400
    ids = [1 + byte for byte in text.encode()]
    pieces = one_by_one(tokenizer, ids)
    assert "".join(pieces) == text
    gaps = [i for i, piece in enumerate(pieces) if piece]
    assert max(b - a for a, b in pairwise(gaps)) <= MAX_HELD + 3
    broken = one_by_one(tokenizer, [1 + 0xFF] * 200)
    assert "".join(broken) == "\ufffd" * 200
    assert all(broken[MAX_HELD + 4 : 200])


@pytest.mark.parametrize(
    "broken", [b"\xff", b"\x80", b"\xf0\x9f", b"\xe4\xb8", b"a\xc3", b"\xf4\x90\x80\x80"]
)
def test_broken_bytes_do_not_stall_the_stream(broken: bytes) -> None:
    ids = list(broken * 200)
    detokenizer, text = Detokenizer(BYTES), ""
    for n, token_id in enumerate(ids, 1):
        text += detokenizer.push([token_id])
        assert len(BYTES.decode(ids[:n])) - len(text) <= 3
    assert text + detokenizer.finish() == BYTES.decode(ids)


@settings(deadline=None)
@given(st.data(), st.binary(max_size=120) | st.text(max_size=60).map(str.encode))
def test_random_bytes_joined_are_the_one_shot_decode(data: st.DataObject, content: bytes) -> None:
    pieces = stream(BYTES, chunked(data, list(content)))
    assert "".join(pieces) == content.decode(errors="replace")


@settings(deadline=None)
@given(data=st.data())
def test_random_ids_joined_are_the_one_shot_decode(tokenizer: Any, data: st.DataObject) -> None:
    """Bytes are frequent; a run of them in a tokenizer that waits for its end is no longer than it waits."""
    low = st.integers(0, min(tokenizer.vocab_size, 300) - 1)
    any_id = st.integers(0, tokenizer.vocab_size - 1)
    most = MAX_HELD if isinstance(tokenizer, Wrapped) else 150
    ids = data.draw(st.lists(low | any_id, max_size=most))
    assert "".join(stream(tokenizer, chunked(data, ids))) == tokenizer.decode(ids)


@settings(deadline=None)
@given(st.data(), st.lists(st.text(min_size=1, max_size=6), max_size=30))
def test_random_words_joined_are_the_one_shot_decode(
    tokenizer: Any, data: st.DataObject, words: list[str]
) -> None:
    ids = tokenizer.encode(" ".join(words))
    pieces = stream(tokenizer, chunked(data, ids))
    assert "".join(pieces) == tokenizer.decode(ids)


@pytest.mark.parametrize("content", [b"plain text, no end ", "日本😀é".encode(), b"\xff", bytes([0xF0])])
@pytest.mark.parametrize("special", [False, True])
def test_the_cost_of_a_token_does_not_grow(content: bytes, special: bool) -> None:
    """Counted in ids that are decoded; special ids among the bytes cost no more."""

    class Counting(ByteTokenizer):
        num_decoded = 0

        def decode(self, ids: Iterable[int]) -> str:
            ids = list(ids)
            self.num_decoded += len(ids)
            return super().decode(ids)

    tokenizer = Counting()
    detokenizer = Detokenizer(tokenizer)
    ids = [i for byte in content * (2000 // len(content)) for i in ([byte, EOS, EOS] if special else [byte])]
    costs = []
    for start in range(0, len(ids), 500):
        before = tokenizer.num_decoded
        detokenizer.push(ids[start : start + 500])
        costs.append((tokenizer.num_decoded - before) / 500)
    assert max(costs) <= 2 * MAX_WINDOW
    assert costs[-1] <= 1.2 * costs[1]


def test_leading_special_ids_cost_no_more_either() -> None:
    detokenizer = Detokenizer(BYTES)
    assert detokenizer.push([EOS] * 1000) == ""
    assert detokenizer._window == []


def test_what_finish_gave_does_not_come_again() -> None:
    detokenizer = Detokenizer(BYTES)
    assert detokenizer.push([65, 0xE4]) == "A"
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""
    assert [detokenizer.push([0xB8]), detokenizer.push([65])] == ["", "A"]
    assert stream(BYTES, []) == [""]


def test_it_imports_neither_torch_nor_transformers() -> None:
    program = (
        "import sys, kvengine.engine.detokenizer;"
        "sys.exit(bool({'torch', 'transformers', 'tokenizers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
