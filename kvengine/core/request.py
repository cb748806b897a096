"""The immutable ask: what to generate from which prompt, and how."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field

MAX_CHOICES = 16_384
"""The most sequences one request may ask for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen.

    `max_tokens=None` means as many as `max_model_len` allows. `temperature=0` is greedy. `top_k` of 0 or -1
    is off. `seed=None` derives a seed from the engine's seed and the request's ordinal, so that two
    submissions of one prompt differ. Values are judged when the request is added (`problem`), so that
    one bad request is refused by name and the others go on.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1

    def problem(self, vocab_size: int) -> tuple[str, str] | None:
        """The first field that no request can have, and the rule it breaks; None when all are fine."""
        last = vocab_size - 1
        checks = (
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "must be at least 1"),
            ("n", 1 <= self.n <= MAX_CHOICES, f"must be between 1 and {MAX_CHOICES}"),
            (
                "temperature",
                math.isfinite(self.temperature) and self.temperature >= 0,
                "must be 0 (greedy) or a positive number",
            ),
            ("top_k", self.top_k >= -1, "must be 0 or -1 (off) or positive"),
            ("top_p", 0 < self.top_p <= 1, "must be above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "must be between 0 and 1"),
            (
                "stop_token_ids",
                all(0 <= token <= last for token in self.stop_token_ids),
                f"must lie in the vocabulary 0..{last}",
            ),
            ("seed", self.seed is None or -(2**63) <= self.seed < 2**64, "must fit 64 bits"),
        )
        return next(((name, rule) for name, good, rule in checks if not good), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One ask: prompt token ids, sampling, and when it arrives (`arrival_ns`, on the engine's clock).

    `known_output_tokens` is the true output length where the workload knows it; it implies `ignore_eos` and
    caps the output at that length. `prompt` is the text, if there was one, kept for the record.

    `cache_salt` keeps its prefix-cache entries to requests of the same salt; `tenant` names whose request it is,
    and does the same under prefix_cache.isolate_tenants. `priority`: the lower, the more urgent (as in vLLM); it
    is static, and orders only where a policy looks at it. `fork_of` names a live request of which this one is a
    branch: its prompt then is that request's tokens so far and `prompt_token_ids` after them.
    """

    id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    arrival_ns: int = 0
    known_output_tokens: int | None = None
    prompt: str | None = None
    cache_salt: str | None = None
    tenant: str | None = None
    priority: int = 0
    fork_of: str | None = None
    ordinal: int | None = None
    """Its place in the workload, from 0; the driver sets it, except for workloads that react."""

    @property
    def max_new_tokens(self) -> int | None:
        """The tighter of `max_tokens` and `known_output_tokens`; None when neither is set."""
        asked = [limit for limit in (self.sampling.max_tokens, self.known_output_tokens) if limit is not None]
        return min(asked, default=None)

    @property
    def ignore_eos(self) -> bool:
        """Whether end-of-sequence tokens are ordinary tokens for this request."""
        return self.sampling.ignore_eos or self.known_output_tokens is not None

    @property
    def pair_key(self) -> str:
        """A key equal for the same work in two runs: a digest of prompt, sampling and place in the workload."""
        work = repr((self.ordinal, self.prompt_token_ids, self.sampling, self.known_output_tokens))
        return hashlib.blake2b(work.encode(), digest_size=8).hexdigest()
