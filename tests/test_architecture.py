"""What the design forbids, read from the source: imports against the layers, torch where it has no business,
long functions and files, modules without a sentence; and engines that share state."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from kvengine.registry import discover
from kvengine.testing.engines import TestEngine

ROOT = Path(__file__).resolve().parents[1]
SOURCE_DIRS = (ROOT, ROOT / "kernels", ROOT / "plugins")
"""Where the top-level packages kvengine, kvengine_kernels and kvengine_plugins lie."""

LAYERS = (
    ("kvengine", "core"),
    ("policies", "registry", "hookspecs", "config"),
    ("kv",),
    ("engine",),
    ("executors", "telemetry", "workloads", "models", "analysis"),
    ("combinations",),
    ("assemble",),
)
"""From the bottom up; a module may import its own layer and those below. What is not named here (command
line, library class, test support) is a front door, above all of them."""

TORCH_FREE = ("core", "policies", "registry", "hookspecs", "config", "kv", "engine")
POLICY_FOLDERS = (
    "allocators",
    "schedulers",
    "queues",
    "admissions",
    "victims",
    "preemptions",
    "evictions",
    "predictors",
)
TORCH = {"torch", "triton", "transformers", "accelerate", "safetensors"}
MAX_FUNCTION_LINES = 45
MAX_FILE_LINES = 350


@dataclass(frozen=True)
class Module:
    """One source file of the product."""

    name: str
    path: Path
    tree: ast.Module

    @property
    def unit(self) -> str:
        """Its first part below kvengine: a folder or a single module; `kvengine` for the package itself."""
        parts = self.name.split(".")
        return parts[1] if len(parts) > 1 else parts[0]

    def imports(self) -> set[str]:
        """Full names of all it imports, anywhere in it: at the top, in functions, for type checking."""
        found = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.name} imports relatively"
                assert node.module
                found |= {_module_or_owner(node.module, alias.name) for alias in node.names}
        return found


def _module_or_owner(module: str, name: str) -> str:
    """`module.name` if that is a module of ours, else `module`, which then holds `name`."""
    inner = f"{module}.{name}"
    paths = [base / inner.replace(".", "/") for base in SOURCE_DIRS]
    is_module = any(path.is_dir() or path.with_suffix(".py").is_file() for path in paths)
    return inner if is_module else module


@cache
def modules() -> tuple[Module, ...]:
    found = []
    for base in SOURCE_DIRS:
        for path in sorted(base.glob("kvengine*/**/*.py")):
            parts = path.relative_to(base).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found.append(Module(name, path, ast.parse(path.read_text(encoding="utf-8"))))
    return tuple(found)


def modules_of(package: str) -> list[Module]:
    return [module for module in modules() if module.name.split(".")[0] == package]


def root_of(name: str) -> str:
    return name.split(".")[0]


def is_stdlib(name: str) -> bool:
    return root_of(name) in sys.stdlib_module_names


def below(name: str, allowed: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in allowed)


# ---- imports point one way


def test_the_parser_sees_every_kind_of_import():
    code = """
import a.b
from kvengine.core import plan
from kvengine.core.plan import StepPlan
if TYPE_CHECKING:
    from c import d
def f():
    import e
"""
    module = Module("x", Path("x"), ast.parse(code))
    assert module.imports() == {"a.b", "kvengine.core.plan", "c", "e"}
    names = {module.name for module in modules()}
    assert {"kvengine", "kvengine.engine.context", "kvengine_plugins", "kvengine_kernels.cache"} <= names


def layer_of(unit: str) -> int:
    return next((i for i, units in enumerate(LAYERS) if unit in units), len(LAYERS))


def test_imports_point_one_way():
    units = {module.name: module.unit for module in modules_of("kvengine")}
    wrong = [
        f"{module.name} imports {target}"
        for module in modules_of("kvengine")
        for target in module.imports()
        if target in units and layer_of(units[target]) > layer_of(module.unit)
    ]
    assert not wrong


def test_engine_and_front_doors_know_plug_ins_only_through_the_registry():
    wrong = [
        module.name
        for module in modules_of("kvengine")
        if any("kvengine_plugins" in i for i in module.imports())
    ]
    assert not wrong


def test_core_needs_nothing_but_the_standard_library():
    for module in modules_of("kvengine"):
        if module.unit == "core":
            foreign = {name for name in module.imports() if not is_stdlib(name)}
            assert all(below(name, ("kvengine.core",)) for name in foreign), f"{module.name}: {foreign}"


@pytest.mark.parametrize("unit", TORCH_FREE)
def test_no_torch_below_the_executors(unit):
    found = [module for module in modules_of("kvengine") if module.unit == unit]
    assert found
    for module in found:
        assert not TORCH & {root_of(name) for name in module.imports()}, module.name


def policy_modules() -> Iterator[Module]:
    for module in modules_of("kvengine_plugins"):
        if module.unit in POLICY_FOLDERS:
            yield module


def test_policy_plug_ins_import_only_core_policies_and_kv():
    assert {module.unit for module in policy_modules()} >= set(POLICY_FOLDERS)
    for module in policy_modules():
        own = f"kvengine_plugins.{module.unit}"
        allowed = ("kvengine.core", "kvengine.policies", "kvengine.kv", own)
        if module.path.name == "__init__.py":  # the folder's registration
            allowed += ("kvengine.registry",)
        foreign = {name for name in module.imports() if not is_stdlib(name) and not below(name, allowed)}
        assert not foreign, f"{module.name}: {foreign}"


def test_kernels_import_nobody():
    assert modules_of("kvengine_kernels")
    for module in modules_of("kvengine_kernels"):
        allowed = ("torch", "triton", "kvengine_kernels")
        foreign = {name for name in module.imports() if not is_stdlib(name) and not below(name, allowed)}
        assert not foreign, f"{module.name}: {foreign}"


ASSEMBLE_AND_RUN = """
from kvengine.assemble import blueprint
from kvengine.engine.driver import Driver
from kvengine.registry import discover

registry = discover()
assert not registry.broken, registry.broken
names = dict(
    allocator="paged", scheduler="static", queue="fcfs", admission="whole_prompt", victim="latest_arrival",
    preemption="recompute", eviction="lru", predictor="oracle",
    attention="torch", executor="null", workload="synthetic",
    model="checksum",
)
plan = blueprint({kind: {"name": name} for kind, name in names.items()}, registry)
report = Driver(plan.engine(), plan.workload).run()
assert report.num_sent and not report.rejected
"""


@pytest.mark.parametrize(
    "code",
    ["import kvengine", "import kvengine_plugins", "import kvengine.testing.engines", ASSEMBLE_AND_RUN],
)
def test_torch_is_not_loaded_until_it_is_needed(code):
    probe = f"{code}\nimport sys\nprint(sorted({TORCH!r} & sys.modules.keys()))"
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


# ---- house rules


def test_every_module_has_a_docstring_of_which_the_first_paragraph_is_one_sentence():
    for module in modules():
        docstring = ast.get_docstring(module.tree)
        assert docstring, f"{module.name} has no docstring"
        first = " ".join(docstring.split("\n\n")[0].split())
        assert first.endswith("."), f"{module.name}: {first}"
        assert not re.search(r"[a-z)`]\. [A-Z`]", first), (
            f"{module.name} says more than one sentence: {first}"
        )


def functions(module: Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_no_function_and_no_file_is_too_long():
    long_functions = [
        f"{module.name}.{function.name}: {length} lines"
        for module in modules()
        for function in functions(module)
        if (length := (function.end_lineno or 0) - function.lineno + 1) > MAX_FUNCTION_LINES
    ]
    assert not long_functions
    lengths = {module.name: len(module.path.read_text(encoding="utf-8").splitlines()) for module in modules()}
    assert not {name: length for name, length in lengths.items() if length > MAX_FILE_LINES}


def test_no_configuration_names_a_class_to_instantiate():
    files = [*(ROOT / "conf").rglob("*.yaml"), *(ROOT / "plugins").rglob("*.yaml")]
    assert files
    assert not [path for path in files if "_target_" in path.read_text(encoding="utf-8")]


# ---- no shared state

VARIANTS = [
    {"scheduler": "chunked"},
    {"scheduler": "chunked"},
    {"scheduler": "continuous"},
    {"scheduler": "static"},
    {"scheduler": "continuous", "allocator": "contiguous_max"},
]


def loaded_engine(registry, ordinal: int) -> TestEngine:
    """An engine with a load of its own under which it must preempt or queue; all use the same request ids."""
    engine = TestEngine(
        registry=registry,
        policies=VARIANTS[ordinal],
        block_size=4,
        num_blocks=8,
        max_model_len=30,
        max_num_seqs=3,
    )
    for i in range(4):
        engine.add(f"r{i}", range(20 * ordinal + i, 20 * ordinal + 3 * i + 5), 9 + ordinal, n=1 + i % 2)
    return engine


def test_engines_stepped_in_turns_do_what_each_does_alone():
    registry = discover()
    alone = [loaded_engine(registry, i) for i in range(len(VARIANTS))]
    for engine in alone:
        engine.run()
    together = [loaded_engine(registry, i) for i in range(len(VARIANTS))]
    while any(engine.engine.has_unfinished for engine in together):
        for engine in together:
            engine.step()
    assert len({str(engine.outputs) for engine in alone}) == len(alone)
    for one, other in zip(alone, together, strict=True):
        assert other.outputs == one.outputs
        assert other.log.steps == one.log.steps
