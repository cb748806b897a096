"""Requests from a JSON Lines file, one object a line: prompt or token ids, length, arrival, sampling, tenant,
priority.

A line that is no JSON or holds a wrong type ends the run before a model is loaded. One that is well formed
but cannot be served (an empty prompt, `max_tokens` 0) becomes a request, which the engine refuses by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from kvengine.core.errors import ConfigError
from kvengine.core.request import Request, SamplingParams
from kvengine.policies import Build, Tokenizer, Workload
from kvengine.workloads.arrivals import NS_PER_S, check_counts
from kvengine_plugins.workloads.lines import (
    MAX_ARRIVAL_S,
    LineFile,
    Rule,
    real_number,
    whole_number,
    whole_numbers,
)
from kvengine_plugins.workloads.parts import check_sampling


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
        self.num_requests, names = file.check(config.num_requests)
        self.knows_lengths = "output_tokens" in names

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
                cache_salt=values.get("cache_salt"),
                tenant=values.get("tenant"),
                priority=values.get("priority", 0),
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


class RequestFile(LineFile):
    """The lines of a JSON Lines file of requests, or of a .txt file of prompts."""

    time_name = "arrival_s"
    example = '{"prompt": "..."}'
    takes_text = True

    def refuse_together(self, values: Mapping[str, Any]) -> None:
        """ValueError unless there is one prompt, and for stop tokens beside a known length."""
        sources = [name for name in ("prompt", "prompt_token_ids") if name in self._rules]
        if sum(name in values for name in sources) != 1:
            raise ValueError(f"needs {' or '.join(sources)}, and only one")
        if "output_tokens" in values and values.get("stop_token_ids"):
            raise ValueError("has output_tokens, so that stop_token_ids can end nothing")

    def hint(self, name: str) -> str:
        """What to do about the unknown `name`."""
        return "workload=jsonl reads it" if name in LINE_RULES else super().hint(name)


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError("must be true or false")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or re.search("[\ud800-\udfff]", value):
        raise ValueError("must be a string, without half surrogate pairs")
    return value


def _name(value: Any) -> str:
    if not _text(value) or not value.isprintable():
        raise ValueError("must be printable and not empty")
    return value


def _nanoseconds(value: Any) -> int:
    if not 0 <= real_number(value) <= MAX_ARRIVAL_S:
        raise ValueError(f"must be seconds after the start, 0 to {MAX_ARRIVAL_S:g}; a Unix time is not")
    return round(value * NS_PER_S)


SAMPLING_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("max_tokens", "top_k", "seed", "n"), whole_number),
    **dict.fromkeys(("temperature", "top_p", "min_p"), real_number),
    "stop_token_ids": whole_numbers,
    "ignore_eos": _flag,
}
PROMPT_RULES: Mapping[str, Rule] = {
    "id": _name,
    "prompt": _text,
    "cache_salt": _name,
    "tenant": _name,
    "priority": whole_number,
    **SAMPLING_RULES,
}
LINE_RULES: Mapping[str, Rule] = {
    **PROMPT_RULES,
    "prompt_token_ids": whole_numbers,
    "output_tokens": whole_number,
    "arrival_s": _nanoseconds,
}
