"""What users type, made into what Hydra composes, and Hydra's complaints made into one line."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from kvengine.core.errors import ConfigError, choices_hint, nearest

LIMITS = {
    "max_num_seqs": "engine.max_num_seqs",
    "max_num_batched_tokens": "engine.max_num_batched_tokens",
    "max_model_len": "engine.max_model_len",
    "gpu_memory_utilization": "engine.gpu_memory_utilization",
    "kv_memory_bytes": "engine.kv_memory_bytes",
    "num_blocks": "engine.num_blocks",
    "swap_space_bytes": "engine.swap_space_bytes",
    "num_host_blocks": "engine.num_host_blocks",
    "enable_chunked_prefill": "engine.enable_chunked_prefill",
    "seed": "engine.seed",
    "block_size": "kv.block_size",
}
"""Limits under the names users know from other engines, and where they stand in the configuration."""

_CHUNKING = {
    "true": "chunked",
    "1": "chunked",
    "yes": "chunked",
    "false": "continuous",
    "0": "continuous",
    "no": "continuous",
}

_ON_OFF = {"true": "on", "1": "on", "yes": "on", "false": "off", "0": "off", "no": "off"}


def expand(words: Iterable[str]) -> list[str]:
    """The overrides with short names of limits written out.

    `enable_chunked_prefill` picks the scheduler when none is chosen, nor a preset; otherwise it stays, to be held
    against the chosen one. `executor=null` names a choice, where Hydra would read it as no choice.
    """
    words = list(words)
    picks_scheduler = not any(key_of(word) in ("scheduler", "preset") for word in words)
    return [_expand_one(word, picks_scheduler) for word in words]


def _expand_one(word: str, picks_scheduler: bool) -> str:
    key, equals, value = word.partition("=")
    if not equals:
        return word
    if key == "prefix_cache":
        return f"{key}=" + ",".join(_ON_OFF.get(choice.lower(), choice) for choice in value.split(","))
    if key == "executor":
        return "executor=" + re.sub(r"(?:(?<=^)|(?<=,))null(?=,|$)", "'null'", value)
    long = LIMITS.get(key, key)
    values = value.lower().split(",")
    if long == LIMITS["enable_chunked_prefill"] and picks_scheduler and all(v in _CHUNKING for v in values):
        return "scheduler=" + ",".join(_CHUNKING[v] for v in values)
    return f"{long}={value}"


def key_of(word: str) -> str:
    """The key that an override sets, without Hydra's + and ~."""
    return word.partition("=")[0].lstrip("+~").partition("@")[0]


def explain(error: Exception, words: list[str], known_keys: Iterable[str]) -> ConfigError:
    """Hydra's or OmegaConf's `error` over the overrides `words` as one line with key, value and nearest key."""
    if isinstance(error, OverrideParseException):
        key, _, value = error.override.partition("=")
        problem = "cannot be read; quote values with special characters, as in 'KEY=\"a=b, c\"'"
        return ConfigError(key, value, problem)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        key = group or "configuration"
        return ConfigError(key, name, f"no such {key}; {choices_hint(name, error.options or ())}")
    if isinstance(error, MissingMandatoryValue):
        return ConfigError(error.full_key or "?", "???", "must be given")
    text = " ".join(str(error).split())
    found = re.search(r"(?:override|argument|append|delete|specify) '(?:config\.)?([^'=]+)", text)
    key = found[1].lstrip("+~") if found else ""
    value = next((word.partition("=")[2] for word in words if key_of(word) == key), "")
    if "Ambiguous value" in text:
        return ConfigError(
            key, value, f"several values need -m (a sweep); a list is written '{key}=[{value}]'"
        )
    if "You must specify" in text:
        options = text.partition("Available options:")[2].split()
        return ConfigError(key, value, f"must be given; {choices_hint('', options)}")
    if key:
        return ConfigError(key, value, f"no such setting{_hint(key, known_keys)}")
    return ConfigError("configuration", None, text)


def _hint(key: str, known_keys: Iterable[str]) -> str:
    """What `key` may have meant: its neighbours in the same group if that exists, else any key that is close."""
    known = list(known_keys)
    group, dot, _ = key.rpartition(".")
    if group in known:
        siblings = [
            name for name in known if name.startswith(group + dot) and "." not in name[len(group) + 1 :]
        ]
        return f"; {choices_hint(key, siblings)}"
    meant = nearest(key, known)
    groups = [name for name in known if "." not in name]
    return f"; did you mean '{meant}'?" if meant else f"; groups and limits: {', '.join(sorted(set(groups)))}"


def flatten(config: dict[str, Any], prefix: str = "") -> Iterable[str]:
    """Every key of a nested mapping, groups included, dotted."""
    for key, value in config.items():
        yield prefix + key
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")


HYDRA_ERRORS = (HydraException, OmegaConfBaseException)
"""What composing can raise over a user's words."""
