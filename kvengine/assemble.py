"""The composition root: a checked configuration and the registry become an engine and its workload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvengine import policies
from kvengine.combinations import check_policies, check_workload
from kvengine.config import from_mapping
from kvengine.core.errors import ConfigError, KvEngineError, PolicyError, choices_hint
from kvengine.core.limits import DebugConfig, EngineConfig, EngineLimits, SloConfig
from kvengine.core.shapes import KvShape, ModelShape, PrefixCacheConfig
from kvengine.engine.clock import VirtualClock, WallClock
from kvengine.engine.context import SchedulingContext
from kvengine.engine.engine import Engine
from kvengine.engine.intake import Intake
from kvengine.engine.policy_set import KINDS as POLICY_KINDS
from kvengine.engine.policy_set import PolicySet
from kvengine.engine.recording import Recorder
from kvengine.executors.config import TorchConfig
from kvengine.executors.device_memory import check_host_memory, gpu_kv_bytes, uses_gpu
from kvengine.kv.host_pool import SwapPool
from kvengine.kv.sizing import KvConfig, kv_shape
from kvengine.policies import Build, Model, Workload
from kvengine.registry import KINDS, Entry, Registry
from kvengine.telemetry.config import TelemetryConfig

CONTEXT_KINDS = ("queue", "admission", "victim", "preemption")
"""Policies of the scheduling context that are built last, and know the limits and the allocator."""

DEFAULT_EVICTION = "lru"
"""What conf/config.yaml chooses: no sign that somebody wants it."""

GROUPS = ("engine", "kv", "prefix_cache", "telemetry", "slo", "debug", *KINDS)
"""Every group that a configuration consists of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blueprint:
    """A run that is checked and built as far as it goes without loading a model."""

    engine_config: EngineConfig
    limits: EngineLimits
    model: Model
    shape: ModelShape
    kv: KvShape
    context: SchedulingContext
    workload: Workload
    telemetry: TelemetryConfig
    slo: SloConfig
    debug: DebugConfig
    build: Build
    executor: tuple[Entry, Any]
    notes: tuple[str, ...]
    """What the user set that has no effect in this run, a line each."""

    def engine(self, recorder: Recorder | None = None) -> Engine:
        """Load the model and put the engine together; ModelError when the model cannot be served."""
        executor = make(self.executor, self.build)
        return Engine(
            context=self.context,
            executor=executor,
            intake=Intake(
                limits=self.limits,
                capacity=self.context.allocator.capacity,
                vocab_size=self.shape.vocab_size,
                eos_token_ids=self.shape.eos_token_ids,
                seed=self.engine_config.seed,
                refuses_for_good=self.context.allocator.refuses_for_good,
                choices_must_fit_together=not self.context.policies.preemption.preempts,
                block_size=self.context.allocator.block_size,
            ),
            clock=VirtualClock() if executor.virtual_time else WallClock(),
            recorder=recorder,
            check_every_step=self.debug.integrity,
        )


def blueprint(config: Mapping[str, Any], registry: Registry) -> Blueprint:
    """Check the whole of `config` and build everything but the executor.

    `config` has one mapping per group (plain containers, no OmegaConf); a plug-in's group holds its `name` and
    its settings. Raises ConfigError, naming the key, for whatever cannot work.
    """
    for group in config:
        if group not in GROUPS:
            raise ConfigError(group, config[group], f"no such group; {choices_hint(group, GROUPS)}")
    engine_config = from_mapping(EngineConfig, config.get("engine", {}), "engine")
    build = Build(seed=engine_config.seed)
    chosen = {kind: choose(registry, config, kind) for kind in KINDS}
    model = make(chosen["model"], build)
    shape = model.shape()
    check_model_len(engine_config, model.name, shape)
    kv = _pool(config, engine_config, model, shape, chosen["executor"][1])
    build = replace(build, model=model, kv=kv)
    cache = from_mapping(PrefixCacheConfig, config.get("prefix_cache", {}), "prefix_cache")
    limits, parts, host_pool = build_policies(registry, config, engine_config, kv, cache)
    build = replace(build, limits=limits)
    build = replace(build, attention=make(chosen["attention"], build))
    workload = make(chosen["workload"], build)
    check_workload(parts, workload, chosen["workload"][0].name)
    return Blueprint(
        engine_config=engine_config,
        limits=limits,
        model=model,
        shape=shape,
        kv=kv,
        context=SchedulingContext(limits=limits, policies=parts, host_pool=host_pool),
        workload=workload,
        telemetry=from_mapping(TelemetryConfig, config.get("telemetry", {}), "telemetry"),
        slo=from_mapping(SloConfig, config.get("slo", {}), "slo"),
        debug=from_mapping(DebugConfig, config.get("debug", {}), "debug"),
        build=build,
        executor=chosen["executor"],
        notes=_notes(engine_config, chosen, cache, parts, kv),
    )


def _notes(
    engine: EngineConfig,
    chosen: Mapping[str, tuple[Entry, Any]],
    cache: PrefixCacheConfig,
    parts: PolicySet,
    kv: KvShape,
) -> tuple[str, ...]:
    notes = []
    allocator = parts.allocator
    executor = chosen["executor"][1]
    set_by_user = engine.gpu_memory_utilization != EngineConfig().gpu_memory_utilization
    if set_by_user and not (isinstance(executor, TorchConfig) and uses_gpu(executor)):
        notes.append("engine.gpu_memory_utilization is unused without a GPU; the pool is kv_memory_bytes")
    if not allocator.caches:
        eviction = chosen["eviction"][0].name
        for word, is_set in (
            (f"eviction={eviction}", eviction != DEFAULT_EVICTION),
            ("prefix_cache.isolate_tenants", cache.isolate_tenants),
            ("prefix_cache.offload", cache.offload),
        ):
            if is_set:
                notes.append(f"{word} is unused: there is no prefix cache in this run")
    offloads = cache.offload and allocator.caches
    if kv.num_host_blocks and not offloads and not parts.preemption.swaps:
        name = parts.name("preemption")
        notes.append(f"the host pool is unused: preemption={name} swaps nothing, and nothing is offloaded")
    return tuple(notes)


def _pool(
    config: Mapping[str, Any], engine: EngineConfig, model: Model, shape: ModelShape, executor: Any
) -> KvShape:
    """The KV pool, from the user's size or from what the executor's device has; ConfigError."""
    kv_config = from_mapping(KvConfig, config.get("kv", {}), "kv")
    if not isinstance(executor, TorchConfig):
        return kv_shape(kv_config, engine, shape)
    on_gpu = uses_gpu(executor)
    sized = engine.num_blocks is not None or engine.kv_memory_bytes is not None
    default = gpu_kv_bytes(model, engine.gpu_memory_utilization) if on_gpu and not sized else None
    kv = kv_shape(kv_config, engine, shape, default)
    check_host_memory(kv, shape, pool_on_gpu=on_gpu)
    return kv


def build_policies(
    registry: Registry,
    config: Mapping[str, Any],
    engine: EngineConfig,
    kv: KvShape,
    prefix_cache: PrefixCacheConfig,
) -> tuple[EngineLimits, PolicySet, SwapPool]:
    """The limits under the chosen scheduler, and the scheduler, the other policies and the host pool of the
    context."""
    host_pool = SwapPool(kv.num_host_blocks)
    build = Build(seed=engine.seed, kv=kv, prefix_cache=prefix_cache, host_pool=host_pool)
    build = replace(build, eviction=make(choose(registry, config, "eviction"), build))
    build = replace(build, predictor=make(choose(registry, config, "predictor"), build))
    scheduler = make(choose(registry, config, "scheduler"), build)
    limits = engine.resolve(chunks=scheduler.chunks, scheduler=config["scheduler"]["name"])
    build = replace(build, limits=limits)
    allocator = make(choose(registry, config, "allocator"), build)
    build = replace(build, allocator=allocator)
    parts = {kind: make(choose(registry, config, kind), build) for kind in CONTEXT_KINDS}
    parts |= {
        "scheduler": scheduler, "allocator": allocator, "eviction": build.eviction, "predictor": build.predictor
    }  # fmt: skip
    if prefix_cache.mode == "on" and not allocator.shares:
        problem = (
            f"allocator={config['allocator']['name']} does not share blocks; take allocator=paged, or auto"
        )
        raise ConfigError("prefix_cache", "on", problem)
    policies = PolicySet(**parts, names={kind: config[kind]["name"] for kind in POLICY_KINDS})
    check_policies(policies)
    return limits, policies, host_pool


def choose(registry: Registry, config: Mapping[str, Any], kind: str) -> tuple[Entry, Any]:
    """The registry entry that `config` names for `kind`, and its checked settings; ConfigError."""
    group = config.get(kind)
    if not isinstance(group, Mapping) or "name" not in group:
        raise ConfigError(kind, group, f"names no {kind}; {choices_hint('', registry.names(kind))}")
    entry = registry.get(kind, group["name"])
    options = {key: value for key, value in group.items() if key != "name"}
    return entry, from_mapping(entry.schema, options, kind)


def make(choice: tuple[Entry, Any], build: Build) -> Any:
    """What the chosen factory builds; PolicyError, naming the plug-in, when that is not what its kind needs."""
    entry, config = choice
    plugin = f"{entry.kind} '{entry.name}' of {entry.distribution}"
    try:
        made = entry.factory(config, build)
    except KvEngineError:
        raise
    except Exception as error:
        raise PolicyError(f"{plugin} cannot be built: {type(error).__name__}: {error}") from error
    contract = getattr(policies, entry.kind.capitalize())
    wanted = {*contract.__annotations__, *vars(contract)}
    missing = sorted(name for name in wanted if not name.startswith("_") and not hasattr(made, name))
    if missing:
        name = contract.__name__
        raise PolicyError(
            f"{plugin} lacks {', '.join(missing)} of its contract; subclass kvengine.policies.{name} to have what it "
            "gives a default, and write the rest"
        )
    return made


def check_model_len(engine: EngineConfig, model_name: str, shape: ModelShape) -> None:
    """ConfigError when sequences could grow longer than the model's positions reach."""
    if engine.max_model_len > shape.max_position:
        raise ConfigError(
            "engine.max_model_len",
            engine.max_model_len,
            f"model={model_name} has {shape.max_position} positions; the largest valid value is that",
        )
