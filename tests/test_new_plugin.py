"""Packages that `new-plugin` writes: clean, found, run, conforming; and what it refuses to write."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from kvengine import launch, new_plugin
from kvengine.cli import main
from kvengine.config import from_mapping
from kvengine.core.errors import EXIT_USAGE
from kvengine.policies import Build
from kvengine.registry import discover
from kvengine.testing.attention_cases import check_backend

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = {"lifo": "queue", "most_blocks": "victim", "deepest": "eviction"}
LONGEST = "a" * new_plugin.MAX_NAME_LENGTH
QUICK = [
    "model=checksum",
    "executor=null",
    "workload=synthetic",
    "workload.num_requests=4",
    "workload.output_len.mean=4",
]


def python(*words: str, cwd: Path, site: Path | None = None) -> str:
    """What a child says that has `site` on its path; it must succeed."""
    path = os.pathsep.join([*([str(site)] if site else []), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def install(package: Path, site: Path) -> None:
    """As `pip install --target` would leave it: the module, and metadata with the entry points."""
    project = tomllib.loads((package / "pyproject.toml").read_text(encoding="utf-8"))
    (module,) = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    about = project["project"]
    shutil.copytree(package / module, site / module)
    info = site / f"{about['name'].replace('-', '_')}-{about['version']}.dist-info"
    info.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {about['name']}\nVersion: {about['version']}\n"
    (info / "METADATA").write_text(metadata)
    points = "".join(
        f"[{group}]\n" + "".join(f"{name} = {where}\n" for name, where in named.items())
        for group, named in about["entry-points"].items()
    )
    (info / "entry_points.txt").write_text(points)


def name_of(kind: str) -> str:
    return f"try_{kind}"


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A package of each kind, and a folder with all of them installed."""
    packages, site = tmp_path_factory.mktemp("packages"), tmp_path_factory.mktemp("site")
    for kind in new_plugin.KINDS:
        assert new_plugin.new_plugin([kind, name_of(kind), str(packages)]) == 0
        install(packages / new_plugin.distribution(name_of(kind)), site)
    return packages, site


@pytest.fixture
def installed(everything: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The packages, visible in this process."""
    monkeypatch.syspath_prepend(str(everything[1]))
    return everything[0]


# ---- what is written


@pytest.mark.parametrize("name", ["x", "most_of_all", LONGEST])
def test_it_is_clean_whatever_the_name(name: str, tmp_path: Path) -> None:
    for kind in new_plugin.KINDS:
        assert new_plugin.new_plugin([kind, name, str(tmp_path / kind)]) == 0
    python("-m", "ruff", "check", "-q", "--no-cache", ".", cwd=tmp_path)
    python("-m", "ruff", "format", "-q", "--check", "--no-cache", ".", cwd=tmp_path)


@pytest.mark.parametrize("kind", new_plugin.KINDS)
def test_the_registry_finds_it_with_its_settings(kind: str, installed: Path) -> None:
    registry, name = discover(), name_of(kind)
    assert not [broken for broken in registry.broken if broken.name == name]
    entry = registry.get(kind, name)
    assert entry.distribution == f"{new_plugin.distribution(name)} 0.1.0"
    assert entry.summary == new_plugin.KINDS[kind].summary
    package = installed / new_plugin.distribution(name)
    file = package / f"kvengine_{name}" / "conf" / kind / f"{name}.yaml"
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert content.pop("name") == name
    assert set(content) == {field.name for field in fields(entry.schema)}
    assert len(content) == 1
    assert from_mapping(entry.schema, content, kind) == entry.schema()


@pytest.mark.parametrize("kind", [kind for kind in new_plugin.KINDS if kind != "attention"])
def test_a_run_with_it_works(kind: str, installed: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "checkout", lambda: None)
    needs = {"predictor": ["queue=shortest_job"], "preemption": ["num_host_blocks=200"]}
    assert main([f"{kind}={name_of(kind)}", *QUICK, *needs.get(kind, [])]) == 0
    assert "4 finished" in capsys.readouterr().out


@pytest.mark.parametrize("seed", range(3))
def test_the_attention_backend_computes_attention(seed: int, installed: Path) -> None:
    entry = discover().get("attention", name_of("attention"))
    check_backend(entry.factory(entry.schema(tile=5), Build()).backend(), seed)


@pytest.mark.slow
def test_a_run_with_the_attention_backend_works(installed: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "checkout", lambda: None)
    assert main([f"attention={name_of('attention')}", "model=tiny", *QUICK[2:]]) == 0
    assert "4 finished" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["queue"])
def test_its_own_tests_and_the_conformance_suite_pass(kind: str, everything: tuple[Path, Path]) -> None:
    check_tests(kind, everything, "--kvengine-examples", "15")


@pytest.mark.slow
@pytest.mark.parametrize("kind", new_plugin.KINDS)
def test_the_tests_and_the_conformance_suite_pass_for_every_kind(
    kind: str, everything: tuple[Path, Path]
) -> None:
    check_tests(kind, everything)


def check_tests(kind: str, everything: tuple[Path, Path], *options: str) -> None:
    """One pytest for both: paths that are named are collected beside the suite."""
    packages, site = everything
    package = packages / new_plugin.distribution(name_of(kind))
    words = ["tests", "--kvengine-conformance", f"{kind}={name_of(kind)}", "-p", "no:cacheprovider"]
    said = python("-m", "pytest", *words, *options, cwd=package, site=site)
    assert f"tests/test_{name_of(kind)}.py ." in said
    assert "passed" in said
    assert "failed" not in said
    assert "skipped" not in said


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_are_what_is_written(name: str) -> None:
    """So that there is one text of each; whoever changes a template writes the example anew."""
    folder = ROOT / "plugins" / "examples" / name
    found = {
        str(path.relative_to(folder)): path.read_text(encoding="utf-8")
        for path in folder.rglob("*")
        if path.is_file() and not {"__pycache__", ".pytest_cache", ".ruff_cache"} & {*path.parts}
    }
    assert found == new_plugin.package(EXAMPLES[name], name)


def test_what_is_printed_are_the_files_and_commands_that_work(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new-plugin", "scheduler", "my_own", "."]) == 0
    said = capsys.readouterr().out.splitlines()
    written = [str(path.relative_to("kvengine-my-own")) for path in Path("kvengine-my-own").rglob("*")]
    files = [path for path in written if Path("kvengine-my-own", path).is_file()]
    assert sorted(line.strip() for line in said[2 : 2 + len(files)]) == sorted(files)
    assert said[-4:] == [
        "    pip install -e './kvengine-my-own[test]'",
        "    python -m kvengine scheduler=my_own executor=null workload=synthetic",
        "    pytest ./kvengine-my-own",
        "    pytest --kvengine-conformance scheduler=my_own",
    ]


# ---- what is refused


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "new-plugin=: takes KIND, NAME and DIR"),
        ("scheduler mine", "new-plugin=scheduler mine: takes KIND, NAME and DIR"),
        ("scheduler mine . more", "takes KIND, NAME and DIR"),
        (
            "shceduler mine .",
            "new-plugin=shceduler: there is no template of that kind; did you mean 'scheduler'?",
        ),
        ("executor mine .", "new-plugin=executor: there is no template of that kind"),
        ("scheduler Mine .", "new-plugin=Mine: must be lower-case"),
        ("scheduler 2nd .", "new-plugin=2nd: must be"),
        ("scheduler mine-own .", "new-plugin=mine-own: must be"),
        ("scheduler __x .", "new-plugin=__x: must be"),
        ("scheduler on .", "new-plugin=on: must be"),
        ("scheduler null .", "new-plugin=null: must be"),
        (f"scheduler {LONGEST}a .", f"at most {len(LONGEST)} characters"),
        ("scheduler continuous .", "scheduler=continuous is registered by kvengine 0.1.0 already"),
        ("queue plugins .", "its package kvengine_plugins is installed already"),
        ("scheduler mine full", "new-plugin=full/kvengine-mine: is there already and not empty"),
        ("scheduler mine full/kvengine-mine/file", "new-plugin=full/kvengine-mine/file: is a file"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(
    words: str, said: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    (tmp_path / "full" / "kvengine-mine").mkdir(parents=True)
    (tmp_path / "full" / "kvengine-mine" / "file").write_text("dear")
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert main(["new-plugin", *words.split()]) == EXIT_USAGE
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("error: ")
    assert output.err.count("\n") == 1
    assert said in output.err
    assert sorted(tmp_path.rglob("*")) == before


def test_an_empty_folder_and_one_that_is_not_there_will_do(tmp_path: Path) -> None:
    (tmp_path / "kvengine-mine").mkdir()
    assert main(["new-plugin", "queue", "mine", str(tmp_path)]) == 0
    assert main(["new-plugin", "queue", "other", str(tmp_path / "not" / "there")]) == 0
    assert (tmp_path / "not" / "there" / "kvengine-other" / "pyproject.toml").is_file()


# ---- from nothing, as an author does it


@pytest.mark.slow
def test_from_a_fresh_environment_to_a_conforming_scheduler(tmp_path: Path) -> None:
    """Nothing of this process's environment: a virtual one, a real pip, the commands that docs/plugins.md names."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    environment["PATH"] = f"{tmp_path / 'venv' / 'bin'}{os.pathsep}{environment['PATH']}"

    def do(*words: str) -> str:
        done = subprocess.run(
            words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    subprocess.run([sys.executable, "-m", "venv", "venv"], cwd=tmp_path, check=True)
    do("pip", "install", "-q", str(ROOT))
    do("python", "-m", "kvengine", "new-plugin", "scheduler", "mine", ".")
    do("pip", "install", "-q", "./kvengine-mine[test]")
    run = do("python", "-m", "kvengine", "scheduler=mine", "executor=null", "workload=synthetic")
    assert "scheduler=mine" in run
    assert "64 finished" in run
    assert "3 passed" in do("pytest", "./kvengine-mine")
    assert "5 passed" in do("pytest", "--kvengine-conformance", "scheduler=mine")
