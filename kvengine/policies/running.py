"""The contracts of what runs: models, attention, executors and workloads; and what factories are given."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvengine.core.limits import EngineLimits
from kvengine.core.plan import RequestOutput, StepPlan, StepResult
from kvengine.core.request import Request
from kvengine.core.shapes import KvShape, ModelShape, PrefixCacheConfig
from kvengine.policies.memory import Allocator, Eviction, HostPool
from kvengine.policies.scheduling import Predictor


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """What is assembled before a factory runs; a field is None where its part comes later.

    Order: model, kv, eviction, predictor, scheduler, limits, allocator, the other policies, attention, workload,
    executor.
    """

    seed: int | None = 0
    model: Model | None = None
    limits: EngineLimits | None = None
    kv: KvShape | None = None
    prefix_cache: PrefixCacheConfig = field(default_factory=PrefixCacheConfig)
    host_pool: HostPool | None = None
    eviction: Eviction | None = None
    predictor: Predictor | None = None
    allocator: Allocator | None = None
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
    times are ignored and a request is sent as soon as fewer than that many are unfinished. Subclass this
    Protocol to have the defaults.
    """

    num_requests: int
    concurrency: int | None
    knows_lengths: bool = False
    """Whether every request has `known_output_tokens`."""
    forks: bool = False
    """Whether it branches live requests, so that the allocator must share blocks."""
    reacts: bool = False
    """Whether `after` is to be called."""

    def requests(self) -> Iterator[Request]: ...

    def after(self, output: RequestOutput, now_ns: int) -> Iterable[Request]:
        """Requests that follow from what `output` delivers, each at its own `arrival_ns` (from the start, like
        those of `requests`, and not before `now_ns`). They count in `num_requests`.

        Since the order in which they are sent depends on timing, a workload that reacts sets the `ordinal` of
        every request, by which two runs are paired and seeds derived.
        """
        return ()
