"""What turns a request into sequences, or refuses it by name before it can hurt anybody."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable

from kvengine.core.errors import RequestError
from kvengine.core.limits import EngineLimits
from kvengine.core.request import Request
from kvengine.core.sequence import Sequence


class Intake:
    """Checks requests against the model, the limits and the pool, and makes their sequences.

    A request of P prompt tokens and M new ones needs P + M - 1 slots, since the last new token is never fed
    back. Each of its n sequences must fit an empty pool alone: they are scheduled singly; where nobody is ever
    preempted (`choices_must_fit_together`), all of them at once, in whole blocks of `block_size`. `refuses_for_good`
    is the allocator's word on that, asked for each of them.
    """

    def __init__(
        self,
        *,
        limits: EngineLimits,
        capacity: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        seed: int | None,
        refuses_for_good: Callable[[Sequence], str | None] | None = None,
        choices_must_fit_together: bool = False,
        block_size: int = 1,
    ) -> None:
        self._limits = limits
        self._capacity = capacity
        self._vocab_size = vocab_size
        self._eos = frozenset(eos_token_ids)
        self._seed = secrets.randbits(64) if seed is None else seed
        self._refuses_for_good = refuses_for_good
        self._together = choices_must_fit_together
        self._block_size = block_size
        self._num_requests = 0
        self._num_sequences = 0

    def sequences(self, request: Request) -> list[Sequence]:
        """The n sequences of `request`; RequestError, naming the limit and both numbers, if it cannot run."""
        ordinal = self._num_requests if request.ordinal is None else request.ordinal
        self._num_requests += (
            1  # counted even if refused, so that the seeds of the others do not depend on it
        )
        self._check_prompt(request)
        problem = request.sampling.problem(self._vocab_size)
        if problem:
            name, rule = problem
            raise RequestError(request.id, f"{name}={getattr(request.sampling, name)}: {rule}")
        known = request.known_output_tokens
        if known is not None and known < 1:
            raise RequestError(request.id, f"known_output_tokens={known}: must be at least 1")
        total = self._max_tokens_total(request)
        stop_ids = frozenset(request.sampling.stop_token_ids)
        if not request.ignore_eos:
            stop_ids |= self._eos
        elif request.known_output_tokens is not None:
            stop_ids = frozenset()
        seed = request.sampling.seed
        if seed is None:
            seed = derive_seed(self._seed, ordinal)
        made = []
        for choice in range(request.sampling.n):
            made.append(
                Sequence(
                    request,
                    choice=choice,
                    order=self._num_sequences,
                    max_tokens_total=total,
                    stop_ids=stop_ids,
                    seed=seed,
                )
            )
            self._num_sequences += 1
        self._check_fits(made)
        return made

    def _check_fits(self, sequences: list[Sequence]) -> None:
        """RequestError when an empty pool could not serve one of them."""
        if self._refuses_for_good is None:
            return
        for seq in sequences:
            problem = self._refuses_for_good(seq)
            if problem:
                raise RequestError(seq.request.id, f"NEVER_FITS: {problem}")

    def _check_prompt(self, request: Request) -> None:
        if not request.prompt_token_ids:
            raise RequestError(request.id, "the prompt is empty")
        prompt = request.prompt_token_ids
        if min(prompt) >= 0 and max(prompt) < self._vocab_size:
            return
        for token in prompt:
            if not 0 <= token < self._vocab_size:
                raise RequestError(
                    request.id, f"prompt token {token} is outside the vocabulary 0..{self._vocab_size - 1}"
                )

    def _max_tokens_total(self, request: Request) -> int:
        """Prompt plus new tokens at which the request ends; RequestError when that cannot be held."""
        prompt, new = len(request.prompt_token_ids), request.max_new_tokens
        longest = self._limits.max_model_len
        if prompt + (new or 1) > longest:
            raise RequestError(
                request.id,
                f"NEVER_FITS: {prompt} prompt tokens and {new or 1} new ones exceed max_model_len={longest}",
            )
        if prompt + (new or 1) - 1 > self._capacity:
            raise RequestError(
                request.id,
                f"NEVER_FITS: {prompt} prompt tokens and {new or 1} new ones need {prompt + (new or 1) - 1} slots, "
                f"the whole KV pool can give one sequence {self._capacity}",
            )
        total = min(longest, self._capacity + 1) if new is None else prompt + new
        n = request.sampling.n
        slots = n * -(-(total - 1) // self._block_size) * self._block_size
        if self._together and n > 1 and slots > self._capacity:
            raise RequestError(
                request.id,
                f"NEVER_FITS: n={n} choices of up to {total} tokens need {slots} slots if none is ever preempted, "
                f"the whole KV pool has {self._capacity}",
            )
        return total


def derive_seed(*parts: int) -> int:
    """A 64-bit seed that depends on every part and on their order (BLAKE2b)."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
