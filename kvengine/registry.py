"""Which plug-ins exist: the registry, and the discovery of packages that register into it."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pluggy

from kvengine import hookspecs
from kvengine.config import NoOptions
from kvengine.core.errors import ConfigError, choices_hint

KINDS = (
    "allocator", "eviction", "scheduler", "queue", "admission", "victim", "preemption", "predictor", "attention",
    "executor", "workload", "model",
)  # fmt: skip
"""Every plug-in kind; each has a contract in kvengine/policies and a config group of the same name."""

ENTRY_POINT_GROUP = "kvengine.plugins"


@dataclass(frozen=True, slots=True)
class Entry:
    """One registered plug-in: `factory(config, build)` makes it, `config` being an instance of `schema`."""

    kind: str
    name: str
    factory: Callable[[Any, Any], Any]
    schema: type
    summary: str
    distribution: str


@dataclass(frozen=True, slots=True)
class BrokenPlugin:
    """A package that was found but could not be used, and why."""

    name: str
    distribution: str
    problem: str


class Registry:
    """All plug-ins by kind and name."""

    def __init__(self, distribution: str = "") -> None:
        self._entries: dict[tuple[str, str], Entry] = {}
        self.distribution = distribution
        """Who is registering: stamped on every entry that is added."""
        self.broken: list[BrokenPlugin] = []

    def add(
        self,
        kind: str,
        name: str,
        factory: Callable[[Any, Any], Any],
        *,
        summary: str,
        schema: type = NoOptions,
    ) -> None:
        """Register `factory(config, build)` under `kind` and `name`.

        `schema` is the frozen dataclass of its settings and `summary` one line for `kvengine plugins`. Raises
        ValueError for an unknown kind, and for a name that is taken (naming both distributions).
        """
        if kind not in KINDS:
            raise ValueError(f"unknown plug-in kind '{kind}'; {choices_hint(kind, KINDS)}")
        entry = Entry(kind, name, factory, schema, summary, self.distribution)
        taken = self._entries.get((kind, name))
        if taken is not None:
            raise ValueError(
                f"{kind} '{name}' is registered by {taken.distribution} and {entry.distribution}"
            )
        self._entries[kind, name] = entry

    def absorb(self, other: Registry) -> None:
        """Take over all entries of `other`, or none of them when a name is taken (ValueError)."""
        for (kind, name), entry in other._entries.items():
            taken = self._entries.get((kind, name))
            if taken is not None:
                raise ValueError(
                    f"{kind} '{name}' is registered by {taken.distribution} and {entry.distribution}"
                )
        self._entries.update(other._entries)

    def get(self, kind: str, name: str) -> Entry:
        """The entry, or ConfigError with the nearest name (and the plug-ins that failed to load)."""
        entry = self._entries.get((kind, name))
        if entry is None:
            hint = choices_hint(name, self.names(kind)) + self.broken_hint(name)
            raise ConfigError(kind, name, f"no such {kind}; {hint}")
        return entry

    def broken_hint(self, name: object) -> str:
        """What to add to the error over a missing `name`: it may belong to a package that did not load."""
        named = [broken for broken in self.broken if broken.name == name]
        if named:
            return f"; plug-in {named[0].name} did not load: {named[0].problem}"
        if self.broken:
            return f"; {len(self.broken)} plug-ins did not load, see python -m kvengine plugins"
        return ""

    def names(self, kind: str) -> list[str]:
        """The names registered for `kind`, sorted."""
        return sorted(name for entry_kind, name in self._entries if entry_kind == kind)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(sorted(self._entries.values(), key=lambda entry: (KINDS.index(entry.kind), entry.name)))


def discover() -> Registry:
    """A new registry of every installed plug-in package; a package that fails is listed in `broken`.

    The built-ins come through the same entry point group as everybody's, and first, so that a third party
    that takes a built-in's name is the one that is refused.
    """
    registry = Registry()
    found = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    for point in sorted(found, key=lambda p: (_distribution(p) != own_distribution(), p.name)):
        try:
            registry.absorb(_load(point))
        except (Exception, SystemExit) as error:
            problem = f"{type(error).__name__}: {error}".replace("\n", " ")
            registry.broken.append(BrokenPlugin(point.name, _distribution(point), problem))
    return registry


def _load(point: importlib.metadata.EntryPoint) -> Registry:
    """The registry that one entry point fills; raises whatever is wrong with it."""
    plugin = point.load()
    _check_version(plugin)
    manager = pluggy.PluginManager("kvengine")
    manager.add_hookspecs(hookspecs)
    manager.register(plugin, name=point.name)
    manager.check_pending()
    registry = Registry(_distribution(point))
    manager.hook.kvengine_register(registry=registry)
    if not len(registry):
        raise RuntimeError("registers nothing: is its kvengine_register marked with @hookimpl?")
    return registry


def _check_version(plugin: Any) -> None:
    """RuntimeError unless `plugin` states our version of the contracts; what to change, and where."""
    ours, stated = hookspecs.API_VERSION, getattr(plugin, "KVENGINE_API", None)
    if stated == ours:
        return
    file = getattr(plugin, "__file__", None) or getattr(plugin, "__name__", repr(plugin))
    says = "states no KVENGINE_API" if stated is None else f"states KVENGINE_API={stated!r}"
    if isinstance(stated, int) and stated > ours:
        todo = f"install a kvengine that has it, or a version of the package with KVENGINE_API = {ours}"
    else:
        todo = f'docs/plugins.md, "API version", says what is new; then write KVENGINE_API = {ours} in {file}'
    raise RuntimeError(f"{says}, and {own_distribution()} has version {ours} of the contracts: {todo}")


def _distribution(point: importlib.metadata.EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else "unknown"


def own_distribution() -> str:
    return f"kvengine {importlib.metadata.version('kvengine')}"
