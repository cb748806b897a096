"""The pytest plug-in behind `pytest --kvengine-conformance`: checks of any policy against its contract.

    pytest --kvengine-conformance scheduler=mine      # one plug-in
    pytest --kvengine-conformance                     # all that do not come with kvengine
    pytest --kvengine-conformance queue=mine --kvengine-examples 5000      # for a night
    pytest --kvengine-conformance preemption=never --kvengine-with admission=reserve_worst_case

Loaded by every pytest where kvengine is installed, so it imports nothing until it is asked.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from kvengine.registry import Entry

OPTION = "--kvengine-conformance"
WITH = "--kvengine-with"
SUITE = Path(__file__).with_name("conformance_suite.py")
KINDS = (
    "allocator", "eviction", "scheduler", "queue", "admission", "victim", "preemption", "predictor", "attention"
)  # fmt: skip
"""The kinds that it checks."""
CHOSEN = pytest.StashKey[list["Entry"]]()
BESIDE = pytest.StashKey[dict[str, str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kvengine")
    group.addoption(
        OPTION,
        action="append",
        nargs="?",
        const="",
        metavar="KIND=NAME",
        help="check this plug-in of kvengine against its contract; without one, all that do not come with it",
    )
    group.addoption(
        "--kvengine-examples",
        type=int,
        metavar="N",
        help="random workloads of each of its checks, under each scheduler (200)",
    )
    group.addoption(
        WITH,
        action="append",
        default=[],
        metavar="KIND=NAME",
        help="check it beside this policy instead of the default one, where it goes only with that",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Run the suite instead of what would be collected, or beside the paths that were named."""
    given = config.getoption(OPTION)
    if given is None:
        return
    count = config.getoption("--kvengine-examples")
    if count is not None and count < 1:
        raise pytest.UsageError(f"--kvengine-examples {count}: must be at least 1")
    config.stash[CHOSEN] = chosen(given)
    beside = config.getoption(WITH)
    config.stash[BESIDE] = {entry.kind: entry.name for entry in (chosen(beside, WITH) if beside else [])}
    named = config.args if config.args_source is pytest.Config.ArgsSource.ARGS else []
    config.args = [str(SUITE), *named]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per plug-in for whoever asks for `plugin`, of the kinds that the suite names in `KINDS_OF`."""
    if metafunc.definition.path != SUITE:
        return
    suite: Any = metafunc.module
    suite.configure(metafunc.config.getoption("--kvengine-examples"), metafunc.config.stash[BESIDE])
    kinds = suite.KINDS_OF.get(metafunc.definition.originalname, KINDS)
    entries = [entry for entry in metafunc.config.stash[CHOSEN] if entry.kind in kinds]
    metafunc.parametrize("plugin", entries, ids=[f"{entry.kind}={entry.name}" for entry in entries])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of kinds that nobody asked for, which pytest would count as skipped."""
    idle = [item for item in items if item.path == SUITE and "NOTSET" in item.name]
    if idle:
        config.hook.pytest_deselected(items=idle)
        items[:] = [item for item in items if item not in idle]


def chosen(given: list[str], option: str = OPTION) -> list[Entry]:
    """The entries that an option names, all that do not come with kvengine for ""; UsageError when there is none."""
    from kvengine.core.errors import ConfigError
    from kvengine.registry import discover, own_distribution

    if find_spec("hypothesis") is None:
        raise pytest.UsageError(f"{OPTION}: needs hypothesis, as in: pip install 'kvengine[test]'")
    registry = discover()
    words = [word for word in given if word]
    if not words:
        found = [
            entry for entry in registry if entry.distribution != own_distribution() and entry.kind in KINDS
        ]
        if not found:
            problem = "no plug-in is installed that does not come with kvengine" + registry.broken_hint("")
            raise pytest.UsageError(f"{OPTION}: {problem}")
        return found
    found = []
    for word in words:
        kind, _, name = word.partition("=")
        if kind not in KINDS:
            problem = f"KIND=NAME, where KIND is one of {', '.join(KINDS)}; paths go before it"
            raise pytest.UsageError(f"{option} {word}: {problem}")
        try:
            found.append(registry.get(kind, name))
        except ConfigError as error:
            raise pytest.UsageError(f"{option} {word}: {error}") from error
    return found
