"""Prompts that are text: of a .txt file (one a line), of a JSON Lines file, or the 32 packaged ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import resources

from kvengine.core.errors import ConfigError
from kvengine.policies import Build
from kvengine.workloads.arrivals import ArrivalConfig, arrival_times, check_counts, chosen_seed
from kvengine_plugins.workloads.jsonl import PROMPT_RULES, FileWorkload, JsonlConfig, RequestFile

DEMO = "demo_prompts.jsonl"
DEFAULT_MAX_TOKENS = 64
"""New tokens where neither the line nor `sampling.max_tokens` limits them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptsConfig(JsonlConfig):
    """The settings of workload=jsonl (`path` null: packaged prompts) and `arrival`, seeded by engine.seed.

    Lines are like those of workload=jsonl, but without token ids, known lengths and arrival times. Of two
    `max_tokens` the smaller holds; without any it is 64.
    """

    arrival: ArrivalConfig = field(default_factory=ArrivalConfig)

    def __post_init__(self) -> None:
        check_counts(self.num_requests, self.concurrency, self.arrival)


def prompts_workload(config: PromptsConfig, build: Build) -> FileWorkload:
    """The workload of `config.path`; ConfigError names the file, the line and the field that is wrong."""
    if config.path == "":
        raise ConfigError("workload.path", "", "names no file; null takes the packaged prompts")
    packaged = resources.files("kvengine.workloads") / DEMO if config.path is None else None
    seed = chosen_seed(build.seed)
    return FileWorkload(
        config,
        build,
        RequestFile(config.path or DEMO, PROMPT_RULES, packaged),
        arrivals=lambda: arrival_times(config.arrival, seed),
        max_tokens=DEFAULT_MAX_TOKENS,
    )
