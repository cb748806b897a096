"""A file of one JSON object a line, read as checked values: what is wrong is refused by line and name."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.resources.abc import Traversable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from kvengine.core.errors import ConfigError, choices_hint
from kvengine.workloads.arrivals import NS_PER_S

MAX_ARRIVAL_S = 1e8
"""Three years: a later arrival is a Unix time, for which a run would wait till doomsday."""

Rule = Callable[[Any], Any]
"""Takes a value as JSON gives it and returns it as a request holds it; ValueError says what it must be."""


class LineFile:
    """The lines of a file as checked values; each iteration reads it anew, so that nothing stays in memory.

    Every line gives a dict of the names in `rules` that it holds, its `line` number, an `id` (`line-N` if it
    has none) and `arrival_ns` (that of the line before if it has none). Blank lines and nulls count as absent.
    ConfigError `workload.path` names the line and what is wrong.

    A subclass says what a line's names must be together (`refuse_together`), what its time is called
    (`time_name`; its rule gives nanoseconds), what a line looks like (`example`), who else knows a name
    (`hint`), and whether a .txt file holds one prompt a line (`takes_text`).
    """

    time_name: str
    example: str
    takes_text = False

    def __init__(self, path: str, rules: Mapping[str, Rule], source: Traversable | None = None) -> None:
        self._shown = path
        self._source = source or Path(os.path.expanduser(path))
        self._rules = rules
        self._is_text = self.takes_text and self._source.name.lower().endswith(".txt")

    def refuse_together(self, values: Mapping[str, Any]) -> None:
        """ValueError for values that are right one by one and wrong together."""

    def hint(self, name: str) -> str:
        """What to do about the unknown `name`."""
        return choices_hint(name, self._rules)

    def check(self, num_requests: int | None) -> tuple[int, frozenset[str]]:
        """Read the first `num_requests` lines (None: all); how many there are, and the names that all of them
        have. ConfigError."""
        hashes = array("q")
        common: frozenset[str] | None = None
        for values in islice(self, num_requests):
            hashes.append(hash(values["id"]))
            common = frozenset(values) if common is None else common & values.keys()
        if not hashes:
            raise ConfigError("workload.path", self._shown, "there is no request in it")
        if num_requests is not None and num_requests > len(hashes):
            raise ConfigError("workload.num_requests", num_requests, f"{self._shown} has only {len(hashes)}")
        ids, counts = np.unique(np.frombuffer(hashes, dtype=np.int64), return_counts=True)
        repeated = frozenset(ids[counts > 1].tolist())
        if repeated:
            self._refuse_repeated(repeated, islice(self, len(hashes)))
        return len(hashes), common or frozenset()

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
                raise self._problem(number, f"{self.time_name} goes back in time, {times}: sort the file")
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
            takes = self.takes_text and number == 1
            hint = "; a file of plain prompts must end in .txt" if takes else ""
            raise self._problem(number, f"is not JSON: {error.msg} at column {error.colno}{hint}") from error
        except (ValueError, RecursionError) as error:
            raise self._problem(number, f"is not JSON: {error}") from error
        if not isinstance(value, dict):
            raise self._problem(number, f"{_short(value)} is not an object like {self.example}")
        return self._checked(number, value)

    def _checked(self, number: int, given: dict[str, Any]) -> dict[str, Any]:
        """The values that are not null, as a request holds them; the time has become arrival_ns."""
        values: dict[str, Any] = {}
        for name, value in given.items():
            rule = self._rules.get(name)
            if rule is None:
                raise self._problem(number, f"unknown key {_short(name)}; {self.hint(name)}")
            if value is None:
                continue
            try:
                values["arrival_ns" if name == self.time_name else name] = rule(value)
            except (ValueError, OverflowError) as error:
                raise self._problem(number, f"{name}={_short(value)}: {error}") from error
        try:
            self.refuse_together(values)
        except ValueError as error:
            raise self._problem(number, str(error)) from error
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


def whole_number(value: Any) -> int:
    """The rule of a whole number."""
    if type(value) is int or (type(value) is float and value.is_integer()):
        return int(value)
    raise ValueError("must be a whole number")


def real_number(value: Any) -> float:
    """The rule of a number."""
    if type(value) not in (int, float):
        raise ValueError("must be a number")
    return float(value)


def whole_numbers(value: Any) -> tuple[int, ...]:
    """The rule of a list of whole numbers."""
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise ValueError("must be a list of whole numbers")
    return tuple(value)
