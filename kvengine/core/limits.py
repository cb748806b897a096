"""The engine's limits: as the user writes them (EngineConfig) and as they hold in a run (EngineLimits)."""

from __future__ import annotations

from dataclasses import dataclass

from kvengine.core.errors import ConfigError

CHUNKED_TOKEN_BUDGET = 512
WHOLE_PROMPT_TOKEN_BUDGET = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The `engine` group of the configuration; None means: derive it.

    Raises ConfigError for a value that cannot work under any policy.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    max_model_len: int = 2048
    gpu_memory_utilization: float = 0.9
    kv_memory_bytes: int | None = None
    num_blocks: int | None = None
    swap_space_bytes: int | None = None
    num_host_blocks: int | None = None
    enable_chunked_prefill: bool | None = None
    seed: int | None = 0

    def __post_init__(self) -> None:
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_model_len",
            "kv_memory_bytes",
            "num_blocks",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"engine.{name}", value, "must be at least 1")
        for name in ("swap_space_bytes", "num_host_blocks"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"engine.{name}", value, "must be at least 0")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                "engine.gpu_memory_utilization", self.gpu_memory_utilization, "must be above 0 and at most 1"
            )
        if self.kv_memory_bytes is not None and self.num_blocks is not None:
            raise ConfigError(
                "engine.num_blocks", self.num_blocks, "give num_blocks or kv_memory_bytes, not both"
            )
        if self.swap_space_bytes is not None and self.num_host_blocks is not None:
            raise ConfigError(
                "engine.num_host_blocks",
                self.num_host_blocks,
                "give num_host_blocks or swap_space_bytes, not both",
            )

    def resolve(self, *, chunks: bool, scheduler: str) -> EngineLimits:
        """The limits of a run under a scheduler that splits prefills (`chunks`) or does not.

        Raises ConfigError when the token budget is below max_model_len and prefills cannot be split, and when
        `enable_chunked_prefill` contradicts the scheduler.
        """
        if self.enable_chunked_prefill is not None and self.enable_chunked_prefill != chunks:
            says = "splits prefills" if chunks else "does not split prefills"
            better = "continuous" if chunks else "chunked"
            raise ConfigError(
                "engine.enable_chunked_prefill",
                self.enable_chunked_prefill,
                f"scheduler={scheduler} {says}; drop one of the two, or take scheduler={better}",
            )
        budget = self.max_num_batched_tokens
        if budget is None:
            budget = CHUNKED_TOKEN_BUDGET if chunks else max(self.max_model_len, WHOLE_PROMPT_TOKEN_BUDGET)
        if not chunks and budget < self.max_model_len:
            raise ConfigError(
                "engine.max_num_batched_tokens",
                budget,
                f"scheduler={scheduler} does not split prefills, so it must be at least "
                f"max_model_len={self.max_model_len}; raise it, lower max_model_len, or take scheduler=chunked",
            )
        return EngineLimits(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=self.max_model_len,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DebugConfig:
    """The `debug` group. `integrity`: check after every step that every block and token is accounted for."""

    integrity: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SloConfig:
    """The `slo` group: latencies (ms) within which a request counts as well served; None: not judged by it."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def __post_init__(self) -> None:
        for name in ("ttft_ms", "tpot_ms"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"slo.{name}", value, "must be a positive number of milliseconds")

    @property
    def is_set(self) -> bool:
        return self.ttft_ms is not None or self.tpot_ms is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Limits that the scheduling context enforces, whatever a policy asks for."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
