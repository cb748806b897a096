"""What the documents say is so: the structure page, the hook, the kinds, the options, the commands."""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvengine import hookspecs, policies
from kvengine.analysis.bound import ADVICE
from kvengine.assemble import blueprint
from kvengine.cli import COMMANDS
from kvengine.combinations import RULES, WORKLOAD_RULES
from kvengine.compose import composer, conf_dir
from kvengine.config import from_mapping
from kvengine.core.errors import ConfigError
from kvengine.core.reasons import Reason
from kvengine.engine.policy_set import KINDS as POLICY_KINDS
from kvengine.kv.sizing import KvConfig
from kvengine.registry import KINDS, discover
from kvengine.telemetry.config import TelemetryConfig

sys.path.insert(0, str(Path(__file__).parent))
import structure

ROOT = structure.ROOT
README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDE = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
SCHEDULING = (ROOT / "docs" / "scheduling.md").read_text(encoding="utf-8")
GROUPS = ["kv", "telemetry", *KINDS]


def choices(group: str) -> list[str]:
    return sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))


def test_the_structure_page_is_what_the_modules_say() -> None:
    assert structure.PAGE.read_text(encoding="utf-8") == structure.page(), "run python tests/structure.py"


def test_the_hook_is_documented_with_its_signature() -> None:
    parameters = ", ".join(inspect.signature(hookspecs.kvengine_register).parameters)
    assert f"def kvengine_register({parameters}):" in GUIDE


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_contract_a_conf_group_and_a_place_in_the_guide(kind: str) -> None:
    assert hasattr(policies, kind.capitalize())
    assert f"| {kind} |" in GUIDE
    ours = {
        entry.name
        for entry in discover()
        if entry.kind == kind and entry.distribution.startswith("kvengine ")
    }
    assert set(choices(kind)) == ours


def test_the_readme_names_every_policy() -> None:
    for entry in discover():
        if entry.distribution.startswith("kvengine "):
            assert f"`{entry.name}`" in README, f"{entry.kind} {entry.name}"


def test_the_readme_names_every_command_and_limit() -> None:
    for command in COMMANDS:
        assert f"python -m kvengine {command}" in README


@pytest.mark.parametrize("group", GROUPS)
def test_every_yaml_holds_exactly_the_settings_of_its_schema_with_their_defaults(group: str) -> None:
    registry = discover()
    for choice in choices(group):
        content = yaml.safe_load((conf_dir() / group / f"{choice}.yaml").read_text(encoding="utf-8"))
        if group in KINDS:
            assert content.pop("name") == choice
            schema: type = registry.get(group, choice).schema
        else:
            schema = {"kv": KvConfig, "telemetry": TelemetryConfig}[group]
        assert set(content) == {field.name for field in fields(schema)}, f"{group}/{choice}"
        if group in KINDS:
            assert from_mapping(schema, content, group) == schema(), f"{group}/{choice}"


@pytest.mark.parametrize("group", GROUPS)
def test_every_yaml_composes_and_assembles(group: str) -> None:
    registry = discover()
    needs: dict[tuple[str, str], list[str]] = {
        ("workload", "jsonl"): [f"workload.path={ROOT / 'kvengine/workloads/demo_prompts.jsonl'}"],
        ("workload", "azure"): [f"workload.path={ROOT / 'tests/azure_tiny.csv'}"],
        ("workload", "mooncake"): [f"workload.path={ROOT / 'tests/mooncake_tiny.jsonl'}"],
        ("model", "hf"): ["model.path=nowhere/at-all"],
        ("executor", "null"): [],
        ("preemption", "swap"): ["engine.num_host_blocks=4"],
        ("preemption", "auto"): ["engine.num_host_blocks=4"],
        ("preemption", "never"): ["allocator=contiguous_max"],
    }
    with composer() as compose:
        for choice in choices(group):
            config: dict[str, Any] = compose(
                ["workload=synthetic", f"{group}='{choice}'", *needs.get((group, choice), [])]
            )
            if (group, choice) == ("model", "hf"):
                assert config["model"]["path"] == "nowhere/at-all"
                continue
            assert blueprint(config, registry).kv.num_blocks > 0


def test_the_page_on_scheduling_has_every_rule_as_it_is_said() -> None:
    names = dict.fromkeys((*POLICY_KINDS, "workload"), "NAME")
    for rule in (*RULES, *WORKLOAD_RULES):
        assert f"| `{rule.kind}=NAME` | {rule.problem.format(**names)} |" in SCHEDULING
    assert SCHEDULING.count("=NAME` |") == len(RULES) + len(WORKLOAD_RULES)


@pytest.mark.parametrize("reason", list(Reason))
def test_the_page_on_scheduling_has_every_reason_and_what_to_try(reason: Reason) -> None:
    (row,) = re.findall(rf"^\| `{reason}` \| (.+) \| (.+) \|$", SCHEDULING, re.MULTILINE)
    when, what_to_try = row
    assert when
    if reason in ADVICE:
        assert ADVICE[reason].endswith(f"; {what_to_try}") or ADVICE[reason].endswith(f"; try {what_to_try}")


def test_the_page_on_scheduling_has_every_victim_and_every_way_to_leave() -> None:
    for kind in ("victim", "preemption"):
        for name in choices(kind):
            assert f"| `{name}` |" in SCHEDULING


def test_every_reason_is_used() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in structure.modules())
    for reason in Reason:
        assert len(re.findall(rf"\b{reason.name}\b", sources)) > 2, f"{reason} is declared and never given"


def test_a_wrong_default_group_is_a_config_error() -> None:
    with composer() as compose:
        config = compose([])
    config["nonsense"] = {}
    with pytest.raises(ConfigError, match="no such group"):
        blueprint(config, discover())
