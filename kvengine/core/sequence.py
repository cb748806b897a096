"""The mutable life of one choice of a request: its tokens, what of them is computed, and its blocks."""

from __future__ import annotations

from enum import Enum, auto
from typing import Any

from kvengine.core.reasons import FinishReason
from kvengine.core.request import Request


class SequenceState(Enum):
    """Where a sequence is in its life."""

    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    SWAPPED = auto()
    FINISHED = auto()


class BlockTable:
    """The blocks of one sequence in token order: token i lies in `blocks[i // block_size]`."""

    __slots__ = ("blocks", "earlier", "host_blocks", "num_dropped", "num_slots", "prefix", "since")

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.num_slots = 0
        """Slots it may write: how many tokens fit without asking the allocator again."""
        self.num_dropped = 0
        """Blocks at the front that fell out of the sliding window: the scratch block stands in their places."""
        self.since = 0
        """The step since which it has `num_slots`."""
        self.earlier: list[tuple[int, int]] = []
        """(since, slots) of before, where those were not full when it got more."""
        self.host_blocks: list[int] = []
        """Where the KV of its computed tokens is while it is swapped out."""
        self.prefix: Any = None
        """What a sharing allocator remembers of its place in the prefix cache."""


class Sequence:
    """One choice of a request.

        0 ........ num_computed_tokens ........ num_tokens
        |-- KV is written --|-- uncomputed -----|
                            |-- num_scheduled_tokens of these are in the plan being made

    Only two hands change it: the context while it plans (state, block table, scheduled tokens) and commit
    while it takes results (token ids, computed tokens, finish).
    """

    __slots__ = (
        "arrival_ns", "block_table", "choice", "deferred", "finish_reason", "max_tokens_total",
        "num_cached_tokens", "num_computed_peak", "num_computed_tokens", "num_preemptions", "num_prompt_tokens",
        "num_recomputed_tokens", "num_scheduled_tokens", "num_tokens_at_entry", "order", "prefill_runs",
        "priority", "request", "seed", "siblings", "state", "stop_ids", "times", "token_ids", "token_runs",
    )  # fmt: skip

    def __init__(
        self,
        request: Request,
        *,
        choice: int,
        order: int,
        max_tokens_total: int,
        stop_ids: frozenset[int],
        seed: int,
    ) -> None:
        self.request = request
        self.choice = choice
        """Which of the request's n choices this is, from 0."""
        self.order = order
        """Place in the order of arrival over the engine's whole life; unique."""
        self.seed = seed
        self.stop_ids = stop_ids
        self.max_tokens_total = max_tokens_total
        """Prompt plus new tokens at which it ends with LENGTH."""
        self.token_ids: list[int] = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        self.num_computed_peak = 0
        """The most tokens ever computed: computing below it again is recomputation."""
        self.num_scheduled_tokens = 0
        self.num_cached_tokens = 0
        """Tokens it never computed, since the pool held their KV when it was first admitted or forked."""
        self.priority = request.priority
        self.deferred = False
        """Whether an admission policy let all others go first: not to be refused for that reason again."""
        self.num_tokens_at_entry = 0
        """num_tokens when it last began to run; as long as they are equal it has gained nothing by it."""
        self.siblings: list[Sequence] = []
        """Choices of its request that wait to be forked from it when its prompt is computed."""
        self.num_preemptions = 0
        self.num_recomputed_tokens = 0
        self.block_table = BlockTable()
        self.state = SequenceState.WAITING
        self.finish_reason: FinishReason | None = None
        self.arrival_ns = request.arrival_ns
        self.times = SequenceTimes()
        self.token_runs: list[list[int]] = []
        """[first step, number of steps] for each run of consecutive steps that gave one token each."""
        self.prefill_runs: list[list[int]] = []
        """[first step, number of steps, tokens] for each run of consecutive steps that prefilled it."""

    @property
    def id(self) -> str:
        """The request's id, and the choice where there are several: `r3` or `r3/1`."""
        return self.request.id if self.request.sampling.n == 1 else f"{self.request.id}/{self.choice}"

    @property
    def num_tokens(self) -> int:
        """Prompt and accepted new tokens."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Accepted new tokens."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_prefilling(self) -> bool:
        """Whether more than the newest token is uncomputed (also true while recomputing)."""
        return len(self.token_ids) - self.num_computed_tokens > 1 or self.num_computed_tokens == 0

    def __repr__(self) -> str:
        return f"<{self.id} {self.state.name} {self.num_computed_tokens}/{self.num_tokens} tokens>"


class SequenceTimes:
    """Moments of one sequence in ns on the engine's clock; None until they happen."""

    __slots__ = ("admitted_ns", "finished_ns", "first_token_ns", "last_token_ns")

    def __init__(self) -> None:
        self.admitted_ns: int | None = None
        self.first_token_ns: int | None = None
        """When its first token was delivered (for a static batch: when the batch ended)."""
        self.last_token_ns: int | None = None
        self.finished_ns: int | None = None
