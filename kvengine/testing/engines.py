"""Engines for tests in one call, built from the registry, with invariants checked after every step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvengine.assemble import build_policies
from kvengine.core.errors import ConfigError, choices_hint
from kvengine.core.limits import EngineConfig
from kvengine.core.plan import Idle
from kvengine.core.request import Request, SamplingParams
from kvengine.core.shapes import KvShape, PrefixCacheConfig
from kvengine.engine.clock import VirtualClock
from kvengine.engine.context import SchedulingContext
from kvengine.engine.engine import Engine
from kvengine.engine.intake import Intake
from kvengine.executors.null import NullConfig, NullExecutor, TokenSource
from kvengine.registry import Registry, discover
from kvengine.testing.sources import ChecksumSource
from kvengine.testing.step_log import StepLog

DEFAULT_POLICIES = {
    "allocator": "paged",
    "eviction": "lru",
    "scheduler": "chunked",
    "queue": "fcfs",
    "admission": "whole_prompt",
    "victim": "latest_arrival",
    "preemption": "recompute",
    "predictor": "oracle",
}


def _choices(
    policies: Mapping[str, str], settings: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """The groups of a configuration, as files of conf/ would give them."""
    for kind in (*policies, *settings):
        if kind not in DEFAULT_POLICIES:
            raise ConfigError(kind, None, f"no such kind of policy; {choices_hint(kind, DEFAULT_POLICIES)}")
    names = {**DEFAULT_POLICIES, **policies}
    return {kind: {"name": name, **settings.get(kind, {})} for kind, name in names.items()}


class TestEngine:
    """An engine over the null executor with a StepLog; `run` drives it to the end and returns the outputs.

    Policies are named as on the command line (`scheduler="static"`), their settings given by `settings`
    (`{"scheduler": {"deliver": "token"}}`), limits as in the `engine` group.
    """

    __test__ = False

    def __init__(
        self,
        *,
        num_blocks: int = 1024,
        block_size: int = 16,
        source: TokenSource | None = None,
        vocab_size: int = 258,
        eos_token_ids: tuple[int, ...] = (),
        settings: Mapping[str, Mapping[str, Any]] | None = None,
        registry: Registry | None = None,
        policies: Mapping[str, str] | None = None,
        prefix_cache: PrefixCacheConfig | None = None,
        num_host_blocks: int = 0,
        sliding_window: int | None = None,
        **engine_config: Any,
    ) -> None:
        self.log, self.outputs, self.finish_reasons = StepLog(), dict[str, list[int]](), dict[str, str]()
        config = EngineConfig(**{"max_model_len": 256, **engine_config})
        kv = KvShape(
            num_blocks=num_blocks,
            block_size=block_size,
            dtype="fp32",
            num_host_blocks=num_host_blocks,
            sliding_window=sliding_window,
        )
        choices, cache = _choices(policies or {}, settings or {}), prefix_cache or PrefixCacheConfig()
        limits, parts, host_pool = build_policies(registry or discover(), choices, config, kv, cache)
        self.engine = Engine(
            context=SchedulingContext(limits=limits, policies=parts, host_pool=host_pool),
            executor=NullExecutor(NullConfig(), block_size=block_size, source=source or ChecksumSource()),
            intake=Intake(
                limits=limits,
                capacity=parts.allocator.capacity,
                vocab_size=vocab_size,
                eos_token_ids=eos_token_ids,
                seed=config.seed,
                refuses_for_good=parts.allocator.refuses_for_good,
                choices_must_fit_together=not parts.preemption.preempts,
                block_size=parts.allocator.block_size,
            ),
            clock=VirtualClock(),
            recorder=self.log,
        )

    def add(
        self,
        request_id: str,
        prompt: Iterable[int],
        max_tokens: int | None,
        *,
        cache_salt: str | None = None,
        tenant: str | None = None,
        **sampling: Any,
    ) -> None:
        """Add a request; RequestError if it is refused."""
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, **sampling)
        self.engine.add_request(
            Request(
                id=request_id,
                prompt_token_ids=tuple(prompt),
                sampling=params,
                arrival_ns=self.engine.clock.now(),
                cache_salt=cache_salt,
                tenant=tenant,
            )
        )

    def fork(self, request_id: str, of: str, tokens: Iterable[int], max_tokens: int, **sampling: Any) -> None:
        """Branch the live request `of`: its tokens so far, then `tokens`, then up to `max_tokens` new ones."""
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, **sampling)
        now = self.engine.clock.now()
        self.engine.fork(
            Request(
                id=request_id, prompt_token_ids=tuple(tokens), sampling=params, arrival_ns=now, fork_of=of
            )
        )

    def step(self) -> bool:
        """One step, outputs collected and invariants checked; False when there was nothing to do."""
        delivered = self.engine.step()
        self.engine.context.check_integrity()
        if isinstance(delivered, Idle):
            if delivered.wake_at is not None:
                self.engine.clock.wait_until(delivered.wake_at)
            return delivered.wake_at is not None
        for output in delivered:
            key = output.sequence.id
            self.outputs.setdefault(key, []).extend(output.token_ids)
            if output.finish_reason is not None:
                assert key not in self.finish_reasons, f"{key} finished twice"
                self.finish_reasons[key] = output.finish_reason
        return True

    def run(self, max_steps: int = 10_000) -> dict[str, list[int]]:
        """Step until all requests are done; AssertionError after `max_steps`, EngineStalledError if stuck."""
        for _ in range(max_steps):
            if not self.engine.has_unfinished:
                return self.outputs
            if not self.step() and self.engine.has_unfinished:
                raise self.engine.stalled()
        if not self.engine.has_unfinished:
            return self.outputs
        raise AssertionError(f"not done after {max_steps} steps")
