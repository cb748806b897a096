"""What is seen while a run goes on: a bar, and the words of one request as they come."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvengine.core.plan import RequestOutput
from kvengine.core.sequence import Sequence
from kvengine.engine.detokenizer import Detokenizer
from kvengine.policies import Tokenizer

WORDS_WIDTH = 60


class Progressing:
    """A bar on stderr if that is a terminal, else nothing. It follows one sequence at a time, word by word."""

    def __init__(self, progress: Progress, total: int, tokenizer: Callable[[], Tokenizer]) -> None:
        self._progress = progress
        self._task = progress.add_task("requests", total=total, words="")
        self._tokenizer = tokenizer
        self._followed: Sequence | None = None
        self._detokenizer: Detokenizer | None = None
        self._words = ""

    def advance(self, requests: float) -> None:
        """So many more requests are done."""
        self._progress.advance(self._task, requests)

    def show(self, outputs: list[RequestOutput]) -> None:
        """Let the followed sequence say what it got; follow another text when it has ended."""
        texts = [output for output in outputs if output.sequence.request.prompt is not None]
        if self._progress.disable or not texts:
            return
        if self._detokenizer is None:
            self._follow(texts[0].sequence)
        for output in texts:
            if output.sequence is self._followed and self._detokenizer is not None:
                words = self._words + self._detokenizer.push(output.token_ids)
                self._words = words[-2 * WORDS_WIDTH :]
                said = f"{output.sequence.id}: {_one_line(self._words)[-WORDS_WIDTH:]}"
                self._progress.update(self._task, words=escape(said))
                if output.finish_reason is not None:
                    self._detokenizer = None

    def _follow(self, seq: Sequence) -> None:
        self._followed, self._detokenizer, self._words = seq, Detokenizer(self._tokenizer()), ""


def _one_line(text: str) -> str:
    """`text` without what a model could do to a terminal."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


@contextmanager
def progressing(total: int, tokenizer: Callable[[], Tokenizer]) -> Iterator[Progressing]:
    """The display of a run of `total` requests; `tokenizer` is asked only if one of them is a text."""
    console = Console(file=sys.stderr)
    columns = (
        TextColumn("requests"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[words]}"),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        yield Progressing(progress, total, tokenizer)
