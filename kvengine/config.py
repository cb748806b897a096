"""From plain mappings (YAML, keyword arguments) to the frozen dataclasses that components are built from."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal, Union

from kvengine.core.errors import ConfigError, choices_hint


@dataclass(frozen=True, slots=True, kw_only=True)
class NoOptions:
    """The schema of a plug-in that has nothing to set."""


def from_mapping(cls: type, values: Mapping[str, Any], key: str) -> Any:
    """Build dataclass `cls` from `values`, checking names and types; `key` is where the mapping stands.

    Raises ConfigError with the full key for an unknown name (and the nearest known one), a missing value, a
    value of the wrong type, and for whatever the dataclass itself refuses in `__post_init__`.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(key, _shown(values), "must be a group of settings")
    hints = typing.get_type_hints(cls)
    known = {field.name for field in fields(cls)}
    for name, value in values.items():
        if name not in known:
            raise ConfigError(f"{key}.{name}", value, f"no such setting; {choices_hint(name, known)}")
    defaults = {field.name: field.default for field in fields(cls)}
    built = {
        name: _convert(hints[name], value, f"{key}.{name}", defaults[name]) for name, value in values.items()
    }
    try:
        return cls(**built)
    except TypeError as error:
        raise ConfigError(key, dict(values), str(error)) from error


def _convert(kind: Any, value: Any, key: str, default: Any = None) -> Any:
    """`value` as a `kind`, or ConfigError; a nested group fills up from `default`, if that is one."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        return _convert(next(arg for arg in args if arg is not type(None)), value, key)
    if origin is Literal:
        if value not in args:
            raise ConfigError(key, _shown(value), choices_hint(value, map(str, args)))
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(key, _shown(value), f"must be a list, like '{key}=[...]'")
        return tuple(_convert(args[0], item, f"{key}[{i}]") for i, item in enumerate(value))
    if is_dataclass(kind) and isinstance(kind, type):
        base = (
            {field.name: getattr(default, field.name) for field in fields(default)}
            if is_dataclass(default)
            else {}
        )
        return from_mapping(kind, {**base, **value} if isinstance(value, Mapping) else value, key)
    return _convert_scalar(kind, value, key)


def _shown(value: Any) -> Any:
    """`value` as users write it."""
    return "null" if value is None else value


_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}

_BOOLEANS = {"1": True, "yes": True, "on": True, "0": False, "no": False, "off": False}
"""What users write for true and false besides YAML's own."""


def _convert_scalar(kind: Any, value: Any, key: str) -> Any:
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        if math.isnan(value):
            raise ConfigError(key, value, "must be a number")
        return float(value)
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if kind is bool and str(value).lower() in _BOOLEANS:
        return _BOOLEANS[str(value).lower()]
    if type(value) is kind:
        return value
    raise ConfigError(key, _shown(value), f"must be {_WORDS.get(kind, kind.__name__)}")
