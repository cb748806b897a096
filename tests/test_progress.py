"""What a terminal shows while a run goes on."""

from __future__ import annotations

import io

from rich.console import Console
from rich.progress import Progress, TextColumn

from kvengine.core.plan import RequestOutput
from kvengine.core.reasons import FinishReason
from kvengine.core.request import Request
from kvengine.core.sequence import Sequence
from kvengine.models.byte_tokenizer import ByteTokenizer
from kvengine.progress import Progressing


def sequence(name: str, prompt: str | None) -> Sequence:
    request = Request(id=name, prompt_token_ids=(1,), prompt=prompt)
    return Sequence(request, choice=0, order=0, max_tokens_total=9, stop_ids=frozenset(), seed=0)


def output(seq: Sequence, text: str, ends: bool = False) -> RequestOutput:
    reason = FinishReason.STOP if ends else None
    return RequestOutput(seq.request.id, 0, list(text.encode()), reason, seq)


def followed(*steps: list[RequestOutput]) -> list[str]:
    """The words shown after each step."""
    console = Console(file=io.StringIO(), force_terminal=True)
    progress = Progress(TextColumn("{task.fields[words]}"), console=console)
    shown = Progressing(progress, 2, ByteTokenizer)
    words = []
    for outputs in steps:
        shown.show(outputs)
        words.append(progress.tasks[0].fields["words"])
    return words


def test_one_text_is_followed_to_its_end_and_then_the_next() -> None:
    a, b = sequence("a", "?"), sequence("b", "?")
    steps = [
        [output(a, "one "), output(b, "uno ")],
        [output(b, "dos "), output(a, "two", ends=True)],
        [output(b, "tres")],
    ]
    assert followed(*steps) == ["a: one", "a: one two", "b: tres"]


def test_what_a_model_says_cannot_reach_the_terminal_as_control_codes() -> None:
    assert followed([output(sequence("a", "?"), "\x1b[31mred\n[bold]x\x07")]) == [r"a: [31mred \[bold]x"]


def test_requests_without_a_text_are_not_shown() -> None:
    assert followed([output(sequence("a", None), "ids")]) == [""]
