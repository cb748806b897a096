"""Requests from a JSON Lines file, one object a line: prompt or token ids, known length, arrival, sampling.

A line that is no JSON or holds a wrong type ends the run before a model is loaded. One that is well formed
but cannot be served (an empty prompt, `max_tokens` 0) becomes a request, which the engine refuses by name.
"""

from __future__ import annotations

import json
import os
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.resources.abc import Traversable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from kvengine.core.errors import ConfigError, choices_hint
from kvengine.core.request import Request, SamplingParams
from kvengine.policies import Build, Tokenizer, Workload
from kvengine.workloads.arrivals import NS_PER_S, check_counts
from kvengine_plugins.workloads.synthetic import check_sampling

MAX_ARRIVAL_S = 1e8
"""Three years: a later arrival is a Unix time, for which a run would wait till doomsday."""

Rule = Callable[[Any], Any]
"""Takes a value as JSON gives it and returns it as a request holds it; ValueError says what it must be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonlConfig:
    """`path` of the file; its first `num_requests` (null: all); `chat`: put each `prompt` into the model's
    chat template; `concurrency`: a closed loop, in which the file's arrival times are not used; `sampling`:
    what holds where a line says nothing. Of two `max_tokens`, the line's and this, the smaller holds; without
    any, a request may grow to max_model_len."""

    path: str | None = None
    num_requests: int | None = None
    chat: bool = True
    concurrency: int | None = None
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))

    def __post_init__(self) -> None:
        check_counts(self.num_requests, self.concurrency)


def jsonl_workload(config: JsonlConfig, build: Build) -> FileWorkload:
    """The workload of `config.path`; ConfigError names the file, the line and the field that is wrong."""
    if not config.path:
        raise ConfigError("workload.path", "null", "workload=jsonl needs a file, like workload.path=my.jsonl")
    return FileWorkload(config, build, RequestFile(config.path, LINE_RULES))


class FileWorkload(Workload):
    """The requests of a RequestFile, which is checked here once and read again as they are asked for.

    `arrivals` gives arrival times in ns in place of the file's; `max_tokens` limits a line where neither it
    nor the sampling settings do. Raises ConfigError for whatever is wrong in the file or the settings.
    """

    def __init__(
        self,
        config: JsonlConfig,
        build: Build,
        file: RequestFile,
        *,
        arrivals: Callable[[], Iterator[int]] | None = None,
        max_tokens: int | None = None,
    ) -> None:
        assert build.model is not None
        check_sampling(config.sampling, build)
        self._model = build.model
        self._file = file
        self._chat = config.chat
        self._sampling = config.sampling
        self._arrivals = arrivals
        self._max_tokens = max_tokens
        self.concurrency = config.concurrency
        self.num_requests = file.check(config.num_requests)

    def requests(self) -> Iterator[Request]:
        """Each request as its line is read; the tokenizer is loaded at the first prompt that is text."""
        tokenizer: Tokenizer | None = None
        arrivals = self._arrivals() if self._arrivals else None
        for values in islice(self._file, self.num_requests):
            text = values.get("prompt")
            if text and tokenizer is None:
                tokenizer = self._model.tokenizer()
            yield Request(
                id=values["id"],
                prompt_token_ids=values.get("prompt_token_ids") or self._encode(tokenizer, text),
                sampling=self._sampling_of(values),
                arrival_ns=next(arrivals) if arrivals else values["arrival_ns"],
                known_output_tokens=values.get("output_tokens"),
                prompt=text,
            )

    def _encode(self, tokenizer: Tokenizer | None, text: str | None) -> tuple[int, ...]:
        """Nothing stays nothing: an empty prompt must not pass as a chat template around it."""
        if not text or tokenizer is None:
            return ()
        return tuple(tokenizer.apply_chat(text) if self._chat else tokenizer.encode(text))

    def _sampling_of(self, values: Mapping[str, Any]) -> SamplingParams:
        given = {name: values[name] for name in SAMPLING_RULES if name in values}
        limits = (given.get("max_tokens"), self._sampling.max_tokens)
        given["max_tokens"] = min((m for m in limits if m is not None), default=self._max_tokens)
        return replace(self._sampling, **given)


class RequestFile:
    """The lines of a file as checked values; each iteration reads it anew, so that nothing stays in memory.

    Every line gives a dict of the names in `rules` that it holds, its `line` number, an `id` (`line-N` if it
    has none) and `arrival_ns` (that of the line before if it has none). A .txt file holds one prompt a line.
    Blank lines and nulls count as absent. ConfigError `workload.path` names the line and what is wrong.
    """

    def __init__(self, path: str, rules: Mapping[str, Rule], source: Traversable | None = None) -> None:
        self._shown = path
        self._source = source or Path(os.path.expanduser(path))
        self._rules = rules
        self._is_text = self._source.name.lower().endswith(".txt")

    def check(self, num_requests: int | None) -> int:
        """Read the first `num_requests` lines (None: all); how many there are. ConfigError."""
        hashes = array("q", (hash(values["id"]) for values in islice(self, num_requests)))
        if not hashes:
            raise ConfigError("workload.path", self._shown, "there is no request in it")
        if num_requests is not None and num_requests > len(hashes):
            raise ConfigError("workload.num_requests", num_requests, f"{self._shown} has only {len(hashes)}")
        ids, counts = np.unique(np.frombuffer(hashes, dtype=np.int64), return_counts=True)
        repeated = frozenset(ids[counts > 1].tolist())
        if repeated:
            self._refuse_repeated(repeated, islice(self, len(hashes)))
        return len(hashes)

    def _refuse_repeated(self, hashes: frozenset[int], lines: Iterable[Mapping[str, Any]]) -> None:
        """ConfigError for the first id that is there twice; only those with such a hash can be."""
        seen: dict[str, int] = {}
        for values in lines:
            name, number = values["id"], values["line"]
            if name in seen:
                note = " (a line without an id is called line-N)" if name.startswith("line-") else ""
                raise self._problem(number, f"id={name!r}: line {seen[name]} has the same id{note}")
            if hash(name) in hashes:
                seen[name] = number

    def __iter__(self) -> Iterator[dict[str, Any]]:
        before_ns = 0
        for number, text in self._lines():
            values: dict[str, Any] = {"prompt": text} if self._is_text else self._parsed(number, text)
            values.setdefault("id", f"line-{number}")
            values["line"] = number
            if values.setdefault("arrival_ns", before_ns) < before_ns:
                times = f"{values['arrival_ns'] / NS_PER_S:g} s after {before_ns / NS_PER_S:g} s"
                raise self._problem(number, f"arrival_s goes back in time, {times}: sort the file")
            before_ns = values["arrival_ns"]
            yield values

    def _lines(self) -> Iterator[tuple[int, str]]:
        """(number from 1, text) of every line that is not blank, without byte order marks and line ends."""
        for number, raw in enumerate(self._raw_lines(), 1):
            text = self._decoded(number, raw).removeprefix("\ufeff").rstrip("\r\n")
            if text.strip():
                yield number, text

    def _raw_lines(self) -> Iterator[bytes]:
        try:
            if isinstance(self._source, Path) and self._source.is_fifo():
                raise ConfigError("workload.path", self._shown, "must be a file, for it is read twice")
            with self._source.open("rb") as file:
                yield from file
        except OSError as error:
            raise ConfigError("workload.path", self._shown, error.strerror or str(error)) from error
        except ValueError as error:  # a zero byte in the path
            raise ConfigError("workload.path", repr(self._shown), str(error)) from error

    def _decoded(self, number: int, raw: bytes) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            guess = "; the file looks like UTF-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else ""
            where = f"byte 0x{raw[error.start]:02x} at position {error.start + 1}{guess}"
            raise self._problem(number, f"is not UTF-8: {where}") from error

    def _parsed(self, number: int, text: str) -> dict[str, Any]:
        try:
            value = json.loads(text, object_pairs_hook=_once_each, parse_constant=_no_constant)
        except json.JSONDecodeError as error:
            hint = "; a file of plain prompts must end in .txt" if number == 1 else ""
            raise self._problem(number, f"is not JSON: {error.msg} at column {error.colno}{hint}") from error
        except (ValueError, RecursionError) as error:
            raise self._problem(number, f"is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise self._problem(number, f'{_short(value)} is not an object like {{"prompt": "..."}}')
        return self._checked(number, value)

    def _checked(self, number: int, given: dict[str, Any]) -> dict[str, Any]:
        """The values that are not null, as a request holds them; arrival_s has become arrival_ns."""
        values: dict[str, Any] = {}
        for name, value in given.items():
            rule = self._rules.get(name)
            if rule is None:
                hint = "workload=jsonl reads it" if name in LINE_RULES else choices_hint(name, self._rules)
                raise self._problem(number, f"unknown key {_short(name)}; {hint}")
            if value is None:
                continue
            try:
                values["arrival_ns" if name == "arrival_s" else name] = rule(value)
            except (ValueError, OverflowError) as error:
                raise self._problem(number, f"{name}={_short(value)}: {error}") from error
        sources = [name for name in ("prompt", "prompt_token_ids") if name in self._rules]
        if sum(name in values for name in sources) != 1:
            raise self._problem(number, f"needs {' or '.join(sources)}, and only one")
        if "output_tokens" in values and values.get("stop_token_ids"):
            raise self._problem(number, "has output_tokens, so that stop_token_ids can end nothing")
        return values

    def _problem(self, number: int, text: str) -> ConfigError:
        return ConfigError("workload.path", self._shown, f"line {number}: {text}")


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise ValueError(f"{_short(next(n for n in names if names.count(n) > 1))} is there twice")
    return dict(pairs)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def _whole(value: Any) -> int:
    if type(value) is int or (type(value) is float and value.is_integer()):
        return int(value)
    raise ValueError("must be a whole number")


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise ValueError("must be a number")
    return float(value)


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError("must be true or false")
    return value


def _ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise ValueError("must be a list of whole numbers")
    return tuple(value)


def _text(value: Any) -> str:
    if not isinstance(value, str) or re.search("[\ud800-\udfff]", value):
        raise ValueError("must be a string, without half surrogate pairs")
    return value


def _name(value: Any) -> str:
    if not _text(value) or not value.isprintable():
        raise ValueError("must be printable and not empty")
    return value


def _nanoseconds(value: Any) -> int:
    if not 0 <= _number(value) <= MAX_ARRIVAL_S:
        raise ValueError(f"must be seconds after the start, 0 to {MAX_ARRIVAL_S:g}; a Unix time is not")
    return round(value * NS_PER_S)


SAMPLING_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("max_tokens", "top_k", "seed", "n"), _whole),
    **dict.fromkeys(("temperature", "top_p", "min_p"), _number),
    "stop_token_ids": _ids,
    "ignore_eos": _flag,
}
PROMPT_RULES: Mapping[str, Rule] = {"id": _name, "prompt": _text, **SAMPLING_RULES}
LINE_RULES: Mapping[str, Rule] = {
    **PROMPT_RULES,
    "prompt_token_ids": _ids,
    "output_tokens": _whole,
    "arrival_s": _nanoseconds,
}
