"""A Mooncake trace: real arrivals and lengths, and which 512-token blocks of the prompts were the same.

The trace holds no texts. A prompt is made up of its hash ids, so that two prompts have the same tokens exactly
where the trace says they had.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

from kvengine.core.errors import ConfigError
from kvengine.core.request import Request, SamplingParams
from kvengine.policies import Build, Workload
from kvengine.workloads.arrivals import check_counts
from kvengine.workloads.lengths import LONGEST
from kvengine_plugins.workloads.lines import (
    MAX_ARRIVAL_S,
    LineFile,
    Rule,
    real_number,
    whole_number,
    whole_numbers,
)
from kvengine_plugins.workloads.parts import (
    check_no_stop_tokens,
    check_range,
    check_sampling,
    plain_vocabulary,
)

NS_PER_MS = 1_000_000
HASH_ID_LIMIT = 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeConfig:
    """`path` of the trace; its first `num_requests` (null: all); `block_tokens` that a hash id stands for;
    `rate_scale`: so many times as many requests per second; `output`: as long as in the `trace`, or `one`
    token, for what depends on prompts only; `concurrency`: a closed loop, in which the trace's arrival times
    are not used; `sampling` of every request, whose `max_tokens` caps outputs."""

    path: str | None = None
    num_requests: int | None = None
    block_tokens: int = 512
    rate_scale: float = 1.0
    output: Literal["trace", "one"] = "trace"
    concurrency: int | None = None
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))

    def __post_init__(self) -> None:
        check_counts(self.num_requests, self.concurrency)
        check_range("block_tokens", self.block_tokens, 1, LONGEST)
        check_range("rate_scale", self.rate_scale, 1e-6, 1e6)
        check_no_stop_tokens(self.sampling, "mooncake")
        if self.concurrency is not None and self.rate_scale != 1:
            problem = "a closed loop sends when a place is free, at no rate; drop one of the two"
            raise ConfigError("workload.rate_scale", self.rate_scale, problem)


class MooncakeWorkload(Workload):
    """The requests of a trace, which is checked here once and read again as they are asked for.

    Raises ConfigError, naming the line and what is wrong in it, and for settings that cannot work. A prompt
    longer than max_model_len is left to the engine, which refuses it by name.
    """

    knows_lengths = True

    def __init__(self, config: MooncakeConfig, build: Build) -> None:
        assert build.model is not None
        if not config.path:
            problem = "workload=mooncake needs a trace, like workload.path=conversation_trace.jsonl"
            raise ConfigError("workload.path", "null", problem)
        check_sampling(config.sampling, build)
        self._config = config
        self._file = TraceFile(config.path, config.block_tokens)
        self._blocks = BlockIds(plain_vocabulary(build.model.shape()).tolist(), config.block_tokens)
        self.concurrency = config.concurrency
        self.num_requests, _ = self._file.check(config.num_requests)

    def requests(self) -> Iterator[Request]:
        """Each request as its line is read, called by the number of the line."""
        config = self._config
        for values in islice(self._file, self.num_requests):
            yield Request(
                id=values["id"],
                prompt_token_ids=self._blocks.prompt(values["hash_ids"], values["input_length"]),
                sampling=config.sampling,
                arrival_ns=round(values["arrival_ns"] / config.rate_scale),
                known_output_tokens=1 if config.output == "one" else values["output_length"],
            )


class BlockIds:
    """Turns hash ids into blocks of token ids, any two of which differ within their first `num_digits`.

    A block is its hash id written in digits of the vocabulary, the lowest first, over and over. ConfigError
    when a block is too short to hold all digits.
    """

    def __init__(self, vocabulary: list[int], block_tokens: int) -> None:
        self._vocabulary = vocabulary
        self._block_tokens = block_tokens
        base, reach = len(vocabulary), 1
        self.num_digits = 0
        while reach < HASH_ID_LIMIT and base > 1:
            reach *= base
            self.num_digits += 1
        if base < 2 or block_tokens < self.num_digits:
            problem = f"must be at least {self.num_digits} for a vocabulary of {base}, to tell hash ids apart"
            raise ConfigError("workload.block_tokens", block_tokens, problem)
        self._repeats = -(-block_tokens // self.num_digits)

    def prompt(self, hash_ids: Iterable[int], num_tokens: int) -> tuple[int, ...]:
        """The blocks of `hash_ids` one after the other, cut to `num_tokens`."""
        ids: list[int] = []
        for hash_id in hash_ids:
            ids += self.block(hash_id)
        return tuple(ids[:num_tokens])

    def block(self, hash_id: int) -> list[int]:
        """The token ids that stand for `hash_id`."""
        digits = []
        for _ in range(self.num_digits):
            hash_id, digit = divmod(hash_id, len(self._vocabulary))
            digits.append(self._vocabulary[digit])
        return (digits * self._repeats)[: self._block_tokens]


class TraceFile(LineFile):
    """The lines of a Mooncake trace with `block_tokens` to a hash id."""

    time_name = "timestamp"
    example = '{"timestamp": 0, "input_length": 600, "output_length": 20, "hash_ids": [0, 1]}'

    def __init__(self, path: str, block_tokens: int) -> None:
        super().__init__(path, TRACE_RULES)
        self._block_tokens = block_tokens

    def refuse_together(self, values: Mapping[str, Any]) -> None:
        """ValueError for what is missing, and unless there is a hash id for each block of the prompt."""
        for name in TRACE_RULES:
            if (name if name != self.time_name else "arrival_ns") not in values:
                raise ValueError(f"has no {name}")
        num_ids, length = len(values["hash_ids"]), values["input_length"]
        num_blocks = -(-length // self._block_tokens)
        if num_ids != num_blocks:
            blocks = f"{num_blocks} blocks of {self._block_tokens} tokens"
            raise ValueError(f"input_length={length} is {blocks}, but there are {num_ids} hash_ids")


def _length(value: Any) -> int:
    if not 1 <= whole_number(value) <= LONGEST:
        raise ValueError(f"must be between 1 and {LONGEST:,}")
    return int(value)


def _hash_ids(value: Any) -> tuple[int, ...]:
    ids = whole_numbers(value)
    if not all(0 <= item < HASH_ID_LIMIT for item in ids):
        raise ValueError("must lie between 0 and 2**63 - 1")
    return ids


def _milliseconds(value: Any) -> int:
    if not 0 <= real_number(value) <= MAX_ARRIVAL_S * 1000:
        raise ValueError(f"must be ms after the start, 0 to {MAX_ARRIVAL_S * 1000:g}; a Unix time is not")
    return round(value * NS_PER_MS)


TRACE_RULES: Mapping[str, Rule] = {
    "timestamp": _milliseconds,
    "input_length": _length,
    "output_length": _length,
    "hash_ids": _hash_ids,
}
