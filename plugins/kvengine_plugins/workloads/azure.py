"""The public Azure LLM inference traces of 2023: real arrivals and lengths, with prompts of random token ids.

Source: the Splitwise paper (Patel et al., ISCA 2024) and its data set AzureLLMInferenceTrace_{conv,code}.csv.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import islice
from typing import Any, Literal

from kvengine.core.errors import ConfigError
from kvengine.core.request import Request, SamplingParams
from kvengine.policies import Build, Workload
from kvengine.workloads.arrivals import NS_PER_S, check_counts, chosen_seed, random_stream
from kvengine.workloads.lengths import LONGEST
from kvengine_plugins.workloads.lines import LineFile, Rule
from kvengine_plugins.workloads.parts import (
    check_no_stop_tokens,
    check_range,
    check_sampling,
    plain_vocabulary,
)

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_TIME = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:\.(\d{1,9}))?", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class AzureConfig:
    """`path` of the trace; its first `num_requests` (null: all); `seed` of the prompts' ids (null: engine.seed);
    `arrival` as in the `trace`, counted from its first line, or `all_at_once`; `rate_scale`: so many times as many
    requests per second; `concurrency`: a closed loop, in which `arrival` is not used; `sampling` of every request,
    whose `max_tokens` caps outputs."""

    path: str | None = None
    num_requests: int | None = None
    seed: int | None = None
    arrival: Literal["trace", "all_at_once"] = "trace"
    rate_scale: float = 1.0
    concurrency: int | None = None
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))

    def __post_init__(self) -> None:
        check_counts(self.num_requests, self.concurrency)
        check_range("rate_scale", self.rate_scale, 1e-6, 1e6)
        check_no_stop_tokens(self.sampling, "azure")
        if self.rate_scale != 1 and (self.concurrency is not None or self.arrival != "trace"):
            how = f"arrival={self.arrival}" if self.concurrency is None else "a closed loop"
            raise ConfigError(
                "workload.rate_scale", self.rate_scale, f"{how} has no rate; drop one of the two"
            )


class AzureWorkload(Workload):
    """The requests of a trace, which is checked here once and read again as they are asked for.

    Raises ConfigError, naming the line and what is wrong in it, and for settings that cannot work. A request
    longer than max_model_len is left to the engine, which refuses it by name.
    """

    knows_lengths = True

    def __init__(self, config: AzureConfig, build: Build) -> None:
        assert build.model is not None
        if not config.path:
            problem = "workload=azure needs a trace, like workload.path=AzureLLMInferenceTrace_conv.csv"
            raise ConfigError("workload.path", "null", problem)
        check_sampling(config.sampling, build)
        self._config = config
        self._seed = chosen_seed(build.seed if config.seed is None else config.seed)
        self._vocabulary = plain_vocabulary(build.model.shape())
        self._file = TraceFile(config.path)
        self.concurrency = config.concurrency
        self.num_requests, _ = self._file.check(config.num_requests)

    def requests(self) -> Iterator[Request]:
        """Each request as its line is read, called by the number of the line; the same ones in every call."""
        config = self._config
        for ordinal, values in enumerate(islice(self._file, self.num_requests)):
            stream = random_stream(self._seed, "prompt", ordinal)
            indices = stream.integers(len(self._vocabulary), size=values["ContextTokens"])
            arrives = config.arrival == "trace"
            yield Request(
                id=values["id"],
                prompt_token_ids=tuple(self._vocabulary[indices].tolist()),
                sampling=config.sampling,
                arrival_ns=round(values["arrival_ns"] / config.rate_scale) if arrives else 0,
                known_output_tokens=values["GeneratedTokens"],
            )


class TraceFile(LineFile):
    """The lines of a trace, a CSV file under a header of three names; times count from its first line."""

    time_name = "TIMESTAMP"
    example = "2023-11-16 18:15:46.6805900,374,44"

    def __init__(self, path: str) -> None:
        super().__init__(path, TRACE_RULES)
        self._start_ns: int | None = None

    def _lines(self) -> Iterator[tuple[int, str]]:
        """The lines below the header, which is checked."""
        lines = super()._lines()
        wanted = ",".join(TRACE_RULES)
        for number, text in islice(lines, 1):
            if text != wanted:
                raise self._problem(number, f"must be the header {wanted}, not {text[:60]!r}")
        yield from lines

    def _parsed(self, number: int, text: str) -> dict[str, Any]:
        cells = text.split(",")
        if len(cells) != len(TRACE_RULES):
            shown = text if len(text) <= 60 else f"{text[:57]}..."
            raise self._problem(number, f"{shown!r} has {len(cells)} columns and not 3, like {self.example}")
        values = self._checked(number, dict(zip(TRACE_RULES, cells, strict=True)))
        if self._start_ns is None:
            self._start_ns = values["arrival_ns"]
        values["arrival_ns"] -= self._start_ns
        return values


def _nanoseconds(value: str) -> int:
    """A time of day, UTC as far as it matters, as ns since 1970, with nothing rounded."""
    found = _TIME.fullmatch(value)
    if not found:
        raise ValueError("must be a time like 2023-11-16 18:15:46.6805900")
    moment = datetime.fromisoformat(found[1]).replace(tzinfo=UTC)
    return (moment - _EPOCH) // timedelta(seconds=1) * NS_PER_S + int((found[2] or "0").ljust(9, "0"))


def _tokens(value: str) -> int:
    if not (value.isascii() and value.isdigit()):
        raise ValueError("must be a whole number of tokens")
    if not 1 <= int(value) <= LONGEST:
        raise ValueError(f"must be between 1 and {LONGEST:,}")
    return int(value)


TRACE_RULES: Mapping[str, Rule] = {
    "TIMESTAMP": _nanoseconds,
    "ContextTokens": _tokens,
    "GeneratedTokens": _tokens,
}
