"""The wheel: it holds all that a run needs and nothing else, and works outside the checkout."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", str(target), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (built,) = target.glob("*.whl")
    return built


def test_it_holds_every_module_yaml_and_data_file(wheel: Path) -> None:
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    wanted = set()
    for folder, prefix in (
        ("kvengine", ""),
        ("kernels/kvengine_kernels", "kernels/"),
        ("plugins/kvengine_plugins", "plugins/"),
    ):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                wanted.add(str(path.relative_to(ROOT)).removeprefix(prefix))
    wanted |= {f"kvengine/{path.relative_to(ROOT)}" for path in (ROOT / "conf").rglob("*.yaml")}
    assert held == wanted
    assert "kvengine/conf/config.yaml" in held


def test_it_runs_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    """The files of the wheel come first on the path, its entry points from its own metadata."""
    unpacked = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(unpacked)
    code = (
        "import sys; sys.path.insert(0, sys.argv.pop(1))\n"
        "import kvengine; print(kvengine.__file__)\n"
        "from kvengine.cli import main; sys.exit(main())"
    )
    words = ["executor=null", "model=checksum", "workload=synthetic", "workload.num_requests=2"]
    command = [sys.executable, "-c", code, str(unpacked), *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert str(unpacked) in done.stdout.splitlines()[0]
    assert "2 finished" in done.stdout
    assert (tmp_path / "traces").is_dir()
