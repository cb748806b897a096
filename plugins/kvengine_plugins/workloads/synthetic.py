"""Requests with random token ids, whose lengths and arrival times are drawn from distributions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvengine.core.errors import ConfigError
from kvengine.core.request import Request, SamplingParams
from kvengine.policies import Build, Workload
from kvengine.workloads.arrivals import ArrivalConfig, arrival_times, check_counts, chosen_seed, random_stream
from kvengine.workloads.lengths import LengthConfig, lengths
from kvengine_plugins.workloads.parts import (
    check_no_stop_tokens,
    check_sampling,
    check_shares,
    drawn_by_share,
    plain_vocabulary,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticConfig:
    """`num_requests` with prompts of `prompt_len` and outputs of `output_len` tokens; `seed` of all that is
    drawn (null: engine.seed); `clip_to_model_len`: shorten first the output (to 1 token at least) and then
    the prompt until both fit into max_model_len, else the engine refuses such a request; shares of requests
    that are those of each of the `tenants` tenant0, tenant1, ... (none: no tenants) and that have each of the
    `priorities` 0, 1, ... (none: all 0); `arrival`, or `concurrency` for a closed loop; `sampling` of every request,
    whose `max_tokens` caps drawn outputs.
    """

    num_requests: int = 64
    seed: int | None = None
    prompt_len: LengthConfig = field(default_factory=LengthConfig)
    output_len: LengthConfig = field(default_factory=LengthConfig)
    clip_to_model_len: bool = True
    tenants: tuple[float, ...] = ()
    priorities: tuple[float, ...] = ()
    arrival: ArrivalConfig = field(default_factory=ArrivalConfig)
    concurrency: int | None = None
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))

    def __post_init__(self) -> None:
        check_counts(self.num_requests, self.concurrency, self.arrival)
        self.prompt_len.check("workload.prompt_len")
        self.output_len.check("workload.output_len")
        check_shares("tenants", self.tenants)
        check_shares("priorities", self.priorities)
        check_no_stop_tokens(self.sampling, "synthetic")


class SyntheticWorkload(Workload):
    """Every output length is known, so no end-of-sequence token ends one; prompts hold none either.

    Prompt lengths, output lengths, arrivals, tenants, priorities and the ids of each prompt have random streams of
    their own: one changes without the others, and clipping takes tokens from the end. Raises ConfigError for sampling
    settings that no request can have, and for a max_model_len that holds no request.
    """

    knows_lengths = True

    def __init__(self, config: SyntheticConfig, build: Build) -> None:
        assert build.model is not None
        assert build.limits is not None
        check_sampling(config.sampling, build)
        self._max_model_len = build.limits.max_model_len
        if self._max_model_len < 2:
            problem = "workload=synthetic needs at least 2: a prompt token and a new one"
            raise ConfigError("engine.max_model_len", self._max_model_len, problem)
        self._config = config
        self._seed = chosen_seed(build.seed if config.seed is None else config.seed)
        self._shape = build.model.shape()
        self.num_requests = config.num_requests
        self.concurrency = config.concurrency

    def requests(self) -> Iterator[Request]:
        """Each request as it is asked for; the same ones in every call."""
        config = self._config
        vocabulary = plain_vocabulary(self._shape)
        arrivals = arrival_times(config.arrival, self._seed)
        prompts = lengths(config.prompt_len, random_stream(self._seed, "prompt_len"))
        outputs = lengths(config.output_len, random_stream(self._seed, "output_len"))
        tenants = drawn_by_share(config.tenants, random_stream(self._seed, "tenant"))
        priorities = drawn_by_share(config.priorities, random_stream(self._seed, "priority"))
        for ordinal in range(self.num_requests):
            num_prompt, num_output = self._fitted(next(prompts), next(outputs))
            indices = random_stream(self._seed, "prompt", ordinal).integers(len(vocabulary), size=num_prompt)
            yield Request(
                id=f"r{ordinal}",
                prompt_token_ids=tuple(vocabulary[indices].tolist()),
                sampling=config.sampling,
                arrival_ns=next(arrivals),
                known_output_tokens=num_output,
                tenant=f"tenant{next(tenants)}" if config.tenants else None,
                priority=next(priorities),
            )

    def _fitted(self, num_prompt: int, num_output: int) -> tuple[int, int]:
        """Both lengths, clipped to the model's if that is wanted."""
        if not self._config.clip_to_model_len:
            return num_prompt, num_output
        num_output = min(num_output, max(1, self._max_model_len - num_prompt))
        return min(num_prompt, self._max_model_len - num_output), num_output
