"""Discovery of plug-in packages: good ones work, broken ones are reported and do no harm."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from kvengine.core.errors import ConfigError
from kvengine.hookspecs import API_VERSION
from kvengine.registry import KINDS, Registry, discover
from kvengine.testing.engines import TestEngine
from kvengine.testing.sources import checksum_output

INSTALLED = {(entry.kind, entry.name): entry.distribution for entry in discover()}
"""What is there before a test adds to it: the built-ins, and whatever else the environment has."""

GOOD = """
    from kvengine.hookspecs import hookimpl
    from kvengine_plugins.victims.latest_arrival import LatestArrivalVictim

    KVENGINE_API = 1

    @hookimpl
    def kvengine_register(registry):
        registry.add("victim", "novel", lambda config, build: LatestArrivalVictim(), summary="a new idea")
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Install a distribution with one plug-in module, as pip would leave it."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def put(name: str, code: str, entry_point: str = "") -> None:
        module = name.replace("-", "_")
        (tmp_path / f"{module}.py").write_text(textwrap.dedent(code))
        info = tmp_path / f"{module}-2.5.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.5\n")
        (info / "entry_points.txt").write_text(f"[kvengine.plugins]\n{entry_point or name} = {module}\n")
        monkeypatch.syspath_prepend(str(tmp_path))  # forget cached directory listings

    return put


def assert_others_are_there(registry: Registry) -> None:
    found = {(entry.kind, entry.name): entry.distribution for entry in registry}
    assert INSTALLED.items() <= found.items()


def problem_of(registry: Registry, name: str) -> str:
    """Why the package `name` is broken; its text is one line."""
    (broken,) = [broken for broken in registry.broken if broken.name == name]
    assert broken.distribution == f"{name} 2.5"
    assert "\n" not in broken.problem
    return broken.problem


def assert_broken(registry: Registry, name: str, *said: str) -> None:
    """`name` is broken for the reason `said`; nothing of it is registered, and all the rest is."""
    problem = problem_of(registry, name)
    assert all(text in problem for text in said), problem
    assert {(entry.kind, entry.name) for entry in registry} == INSTALLED.keys()
    assert_others_are_there(registry)


def test_built_ins_come_through_the_entry_point_of_kvengine():
    of_kvengine = {key for key, distribution in INSTALLED.items() if distribution.split()[0] == "kvengine"}
    assert {("allocator", "paged"), ("scheduler", "static"), ("queue", "fcfs")} <= of_kvengine


def test_third_party_plug_in_runs_like_a_built_in(install):
    install("goodpack", GOOD)
    registry = discover()
    entry = registry.get("victim", "novel")
    assert (entry.distribution, entry.summary) == ("goodpack 2.5", "a new idea")
    assert_others_are_there(registry)
    engine = TestEngine(registry=registry, block_size=4, num_blocks=6, policies={"victim": "novel"})
    for name, prompt in {"a": [1, 2, 3], "b": [4, 5, 6], "c": [7]}.items():
        engine.add(name, prompt, 8)
    assert engine.run()["c"] == checksum_output([7], 8)


def test_import_error(install):
    install("importless", "import a_package_that_is_not_there")
    assert_broken(discover(), "importless", "ModuleNotFoundError", "a_package_that_is_not_there")


def test_syntax_error(install):
    install("crooked", "def :")
    assert_broken(discover(), "crooked", "SyntaxError")


def test_a_package_for_newer_contracts_says_what_to_install(install):
    install("futuristic", GOOD.replace("KVENGINE_API = 1", "KVENGINE_API = 99"))
    said = ["states KVENGINE_API=99", "kvengine 0.1.0 has version 1", "install a kvengine that has it"]
    assert_broken(discover(), "futuristic", *said)


@pytest.mark.parametrize(
    ("name", "line", "says"),
    [
        ("dated", "KVENGINE_API = 0", "states KVENGINE_API=0,"),
        ("undated", "", "states no KVENGINE_API,"),
        ("misdated", "KVENGINE_API = '1'", "states KVENGINE_API='1',"),
    ],
)
def test_a_package_for_older_contracts_says_what_to_read_and_what_to_write_where(
    install, tmp_path, name, line, says
):
    install(name, GOOD.replace("KVENGINE_API = 1", line))
    file = tmp_path / f"{name}.py"
    said = ['docs/plugins.md, "API version"', f"then write KVENGINE_API = 1 in {file}"]
    assert_broken(discover(), name, says, *said)


def test_the_guide_says_what_every_version_of_the_contracts_holds():
    guide = (Path(__file__).parents[1] / "docs" / "plugins.md").read_text(encoding="utf-8")
    section = guide.partition("## API version")[2]
    assert all(f"\n| {version} | " in section for version in range(1, API_VERSION + 1))


def test_unknown_hook_name(install):
    install("misspelt", GOOD.replace("kvengine_register", "kvengine_regsiter"))
    assert_broken(discover(), "misspelt", "kvengine_regsiter")


def test_unknown_kind_names_the_nearest(install):
    install("kindless", GOOD.replace('"victim"', '"victims"'))
    assert_broken(discover(), "kindless", "unknown plug-in kind 'victims'", "did you mean 'victim'?")


def test_registration_that_fails_half_way_registers_nothing(install):
    install("halfway", GOOD + "        raise RuntimeError('second thoughts')\n")
    assert_broken(discover(), "halfway", "RuntimeError: second thoughts")


def test_name_of_a_built_in_is_refused_even_to_who_comes_first_by_name(install):
    taking = GOOD + '        registry.add("allocator", "paged", lambda config, build: None, summary="mine")\n'
    install("aaaa", taking)
    registry = discover()
    assert_broken(registry, "aaaa", "allocator 'paged'", "kvengine", "aaaa 2.5")


def test_name_that_a_package_takes_twice(install):
    again = '        registry.add("victim", "novel", lambda config, build: None, summary="again")\n'
    install("doubled", GOOD + again)
    assert_broken(discover(), "doubled", "victim 'novel'")


def test_of_two_packages_with_one_name_the_second_is_refused_whole(install):
    extra = '        registry.add("queue", "extra", lambda config, build: None, summary="")\n'
    install("pack-b", GOOD + extra)
    install("pack-a", GOOD)
    registry = discover()
    assert "registered by pack-a 2.5 and pack-b 2.5" in problem_of(registry, "pack-b")
    assert registry.get("victim", "novel").distribution == "pack-a 2.5"
    assert "extra" not in registry.names("queue")


def test_a_broken_package_does_not_take_a_good_one_with_it(install):
    install("aabroken", "1 / 0")
    install("goodone", GOOD)
    registry = discover()
    assert "ZeroDivisionError" in problem_of(registry, "aabroken")
    assert registry.get("victim", "novel").distribution == "goodone 2.5"
    assert_others_are_there(registry)


def test_two_packages_may_share_an_entry_point_name(install):
    install("one-pack", GOOD, entry_point="plugin")
    install("two-pack", GOOD.replace("novel", "newer"), entry_point="plugin")
    registry = discover()
    assert {"novel", "newer"} <= set(registry.names("victim"))


@pytest.mark.parametrize(
    ("kind", "given", "meant"),
    [("scheduler", "contineous", "continuous"), ("allocator", "page", "paged"), ("queue", "FCFS", "fcfs")],
)
def test_mistyped_name_is_answered_with_the_nearest(kind, given, meant):
    with pytest.raises(ConfigError) as error:
        discover().get(kind, given)
    assert (error.value.key, error.value.value) == (kind, given)
    assert f"did you mean '{meant}'?" in str(error.value)
    assert f"choices: {', '.join(discover().names(kind))}" in str(error.value)


def test_name_that_is_missing_mentions_the_packages_that_did_not_load(install):
    install("unlucky", "1 / 0")
    with pytest.raises(ConfigError, match="plug-in unlucky did not load: ZeroDivisionError"):
        discover().get("scheduler", "unlucky")
    with pytest.raises(ConfigError, match="1 plug-ins did not load, see python -m kvengine plugins"):
        discover().get("scheduler", "something_else")


def test_two_registries_share_nothing():
    first, second = discover(), discover()
    first.add("victim", "only_here", lambda config, build: None, summary="")
    assert "only_here" in first.names("victim")
    assert "only_here" not in second.names("victim")


def test_entries_come_in_the_order_of_kinds_then_names():
    entries = [(KINDS.index(entry.kind), entry.name) for entry in discover()]
    assert entries == sorted(entries)
