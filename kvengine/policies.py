"""The contracts that plug-ins satisfy: one Protocol per kind, each with its invariants.

A factory registered for a kind is called as `factory(config, build)`: `config` is an instance of the plug-in's
own schema, `build` a `Build` with what is assembled so far. Nothing of a plug-in is looked up by name while
the engine steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from kvengine.core.limits import EngineLimits
from kvengine.core.plan import StepPlan, StepResult
from kvengine.core.reasons import Reason, Refusal
from kvengine.core.request import Request
from kvengine.core.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What memory and limits depend on: sizes of a decoder-only transformer, no weights."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    dtype: str
    """Of weights and activations: fp32, bf16 or fp16; also of the KV pool under kv.dtype=auto."""
    eos_token_ids: tuple[int, ...] = ()

    def kv_bytes_per_token(self, bytes_per_value: int) -> int:
        """Bytes of K and V that one token holds over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * bytes_per_value


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """The KV pool: how many blocks of how many token slots, stored as which dtype (`fp8_e4m3`, `bf16`, ...)."""

    num_blocks: int
    block_size: int
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """What is assembled before a factory runs; a field is None where its part comes later.

    Order: model, scheduler, limits, kv, the other policies, attention, workload, executor.
    """

    seed: int | None = 0
    model: Model | None = None
    limits: EngineLimits | None = None
    kv: KvShape | None = None
    attention: Attention | None = None


class Tokenizer(Protocol):
    """Text to ids and back."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without special tokens."""
        ...

    def decode(self, ids: list[int]) -> str:
        """The text of `ids`; special tokens give nothing, broken UTF-8 gives U+FFFD."""
        ...

    def apply_chat(self, text: str) -> list[int]:
        """The ids of `text` as one user message under the model's chat template, if it has one."""
        ...


class Model(Protocol):
    """A model by name: its shape without loading it, its tokenizer, and how an executor gets it.

    `load(build)` imports torch and returns a transformers module whose attention is dispatched to
    `kvengine.executors.hf_model`; `token_source(kv)` returns a `kvengine.executors.null.TokenSource`, or None
    when the model has no exact stand-in. `weight_bytes()` is what the weights take in memory. All but `name`
    and `shape` may read or fetch files. All may raise ModelError.
    """

    name: str

    def shape(self) -> ModelShape: ...

    def weight_bytes(self) -> int: ...

    def tokenizer(self) -> Tokenizer: ...

    def load(self, build: Build) -> Any: ...

    def token_source(self, kv: KvShape) -> Any: ...


class Allocator(Protocol):
    """Which slots a sequence owns.

    Invariants: all-or-nothing (a refusal changes nothing); a block belongs to one table unless `shares`;
    free + in use = num_blocks; `num_free_blocks` and the fast path of `allocate` do not depend on pool size.
    """

    num_blocks: int
    block_size: int
    shares: bool
    """Whether a sequence can be forked and blocks be cached."""
    grows: bool
    """Whether a running sequence asks for more as it gets longer (so that preemption can happen)."""

    @property
    def num_free_blocks(self) -> int:
        """Blocks owned by nobody."""
        ...

    @property
    def capacity(self) -> int:
        """The most slots one sequence can own in an empty pool."""
        ...

    def blocks_needed(self, seq: Sequence, num_tokens: int) -> int:
        """Blocks beyond those that `seq` owns which `allocate(seq, num_tokens)` would take."""
        ...

    def allocate(self, seq: Sequence, num_tokens: int) -> Refusal | None:
        """Make `seq.block_table` hold slots for its first `num_tokens` tokens; None on success."""
        ...

    def free(self, seq: Sequence) -> int:
        """Give back all blocks of `seq`, emptying its table; the number of blocks freed."""
        ...

    def check_integrity(self, tables: Iterable[list[int]]) -> None:
        """Raise AssertionError unless free lists and `tables` (of all live sequences) account for the pool."""
        ...


class Queue(Protocol):
    """The order of the waiting. A preempted sequence is pushed again; a policy may look past the head."""

    def push(self, seq: Sequence) -> None: ...

    def peek(self) -> Sequence:
        """The next in order; IndexError when empty."""
        ...

    def remove(self, seq: Sequence) -> None:
        """Take `seq` out, wherever it stands; ValueError when it is not there."""
        ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Sequence]:
        """All waiting, in order."""
        ...


class SchedulingView(Protocol):
    """What a policy sees of the engine while a step is planned (engine/context.py is the one)."""

    now: int
    limits: EngineLimits
    waiting: Queue
    token_budget_left: int

    @property
    def running(self) -> Iterator[Sequence]:
        """Running sequences in order of admission; one that is preempted meanwhile is not yielded again."""
        ...

    @property
    def held(self) -> list[Sequence]:
        """Finished rows of a static batch that still keep their blocks and seats."""
        ...

    @property
    def num_free_blocks(self) -> int: ...

    @property
    def num_promised_blocks(self) -> int:
        """Blocks that running prefills still need for tokens they already have."""
        ...

    def uncomputed(self, seq: Sequence) -> int:
        """Tokens of `seq` neither computed nor scheduled in this plan."""
        ...

    def blocks_needed(self, seq: Sequence, num_tokens: int) -> int:
        """Blocks beyond those owned that the first `num_tokens` tokens of `seq` take."""
        ...

    def schedule(self, seq: Sequence, max_tokens: int) -> int:
        """Compute up to `max_tokens` more tokens of a running sequence; what was scheduled, 0 if refused.

        When blocks run out, victims are preempted until it fits or `seq` itself is the victim.
        """
        ...

    def admit(self, seq: Sequence, max_tokens: int | None = None) -> int:
        """Let a waiting (or preempted) sequence run, with up to `max_tokens` now; 0 if refused.

        Under a scheduler that does not split prefills it is all of its tokens or none.
        """
        ...

    def idle_row(self, seq: Sequence) -> bool:
        """Compute a held row for nothing, as a static batch does; False when the budget is spent."""
        ...

    def pad(self, num_tokens: int) -> None:
        """Compute that many padding tokens, as far as the budget goes."""
        ...

    def stop(self, reason: Reason) -> None:
        """State why none of the waiting that were not visited enters in this step."""
        ...

    def wake_at(self, moment_ns: int) -> None:
        """Ask to be planned again at `moment_ns` even if nothing else happens."""
        ...


class Scheduler(Protocol):
    """Who runs this step, and for how many tokens.

    It acts only through the view, never touches memory or sequences, and must be deterministic. A plan that
    schedules nothing although it could ends the run by name. Subclass this Protocol to have the defaults.
    """

    chunks: bool = False
    """Whether a prefill may be split over steps."""
    holds_finished: bool = False
    """Whether finished rows keep seat and blocks until no row of their batch runs (static batching)."""
    batch_open: bool = False
    """Whether more rows will join the batch whose finished rows are held."""
    delivers_at_batch_end: bool = False
    """Whether outputs are handed over only when such a batch has drained."""

    def schedule(self, view: SchedulingView) -> None: ...


class Admission(Protocol):
    """Whether a waiting sequence may enter now, seats and token budget apart."""

    def refuses(self, seq: Sequence, view: SchedulingView) -> Refusal | None:
        """None to let it in. Must let the head in when nothing runs, since it fits an empty pool."""
        ...


class Victim(Protocol):
    """Whom to preempt."""

    def choose(self, candidates: list[Sequence], needy: Sequence) -> Sequence:
        """One of `candidates` (never empty; may contain `needy`, which then gives way itself)."""
        ...


class Mechanism(StrEnum):
    """How a preempted sequence gets its KV back."""

    RECOMPUTE = "recompute"


class Preemption(Protocol):
    """How a victim leaves."""

    def mechanism(self, victim: Sequence) -> Mechanism: ...


class Attention(Protocol):
    """How attention over the cache is computed.

    `backend()` imports and returns an object (or module) with `plan(metadata)`, called once per step, and
    `run(plan, q, k_cache, v_cache, *, scale, sliding_window, softcap, sinks)`, called once per layer; the
    reference is kvengine_kernels.reference, whose results every backend must reach.
    """

    def backend(self) -> Any: ...


class Executor(Protocol):
    """What a step yields and how long it takes.

    `execute` returns one list of ids per row of the plan: [] unless the row samples. `virtual_time` says
    whether `duration_ns` moves the engine's clock, or the clock moves by itself.
    """

    virtual_time: bool

    def execute(self, plan: StepPlan) -> StepResult: ...

    def close(self) -> None: ...


class Workload(Protocol):
    """What arrives and when.

    `requests()` yields requests in order of `arrival_ns`. With `concurrency` set it is a closed loop: arrival
    times are ignored and a request is sent as soon as fewer than that many are unfinished.
    """

    num_requests: int
    concurrency: int | None

    def requests(self) -> Iterator[Request]: ...
