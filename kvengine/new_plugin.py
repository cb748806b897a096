"""`python -m kvengine new-plugin`: a complete third-party package from the templates that ship with kvengine."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from string import Template

from kvengine.core.errors import ConfigError, choices_hint
from kvengine.hookspecs import API_VERSION
from kvengine.registry import discover

TEMPLATES = Path(__file__).with_name("templates")
USAGE = "takes KIND, NAME and DIR, as in: python -m kvengine new-plugin scheduler mine ."
MAX_NAME_LENGTH = 20
"""So that the lines of the templates stay within theirs."""
NO_WORDS = frozenset({"null", "true", "false", "yes", "no", "on", "off", "nan", "inf"})
"""What YAML or Hydra take for something else than a word."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What the template of a kind is about; `words` are what to add to a run in which it matters."""

    noun: str
    summary: str
    words: str


KINDS = {
    "allocator": Kind(
        "allocator",
        "equal partitions of the pool, one for each who runs",
        "executor=null workload=synthetic",
    ),
    "eviction": Kind(
        "eviction policy",
        "evict the deepest cached block first",
        "executor=null workload=chat workload.turns.mean=1 workload.num_sessions=64 workload.system_prompt_len=200 "
        "workload.num_system_prompts=8 num_blocks=160 max_num_seqs=8",
    ),
    "scheduler": Kind(
        "scheduler",
        "a token for everybody who runs, a few whole prompts beside that",
        "executor=null workload=synthetic",
    ),
    "queue": Kind(
        "queue",
        "last come, first served while many wait",
        "executor=null workload=synthetic workload.num_requests=200 workload.arrival.process=poisson "
        "workload.arrival.rate=12 max_num_seqs=8",
    ),
    "admission": Kind(
        "admission policy",
        "fewer may run after a preemption, one more when it is calm",
        "executor=null workload=synthetic num_blocks=160",
    ),
    "victim": Kind(
        "victim policy",
        "preempt whoever holds most blocks",
        "executor=null workload=synthetic num_blocks=160",
    ),
    "preemption": Kind(
        "preemption policy",
        "compute short victims again, swap long ones",
        "executor=null workload=synthetic num_blocks=160 num_host_blocks=160",
    ),
    "predictor": Kind(
        "predictor",
        "the mean output of prompts of like length",
        "executor=null workload=synthetic queue=shortest_job max_num_seqs=8",
    ),
    "attention": Kind(
        "attention backend",
        "plain torch, a tile of keys at a time",
        "model=tiny workload=synthetic",
    ),
}


def new_plugin(words: list[str]) -> int:
    """Write the package for KIND, NAME, DIR and say what to do with it; ConfigError, and nothing written, over
    what cannot be."""
    if len(words) != 3:
        raise ConfigError("new-plugin", " ".join(words), USAGE)
    kind, name, where = words
    if kind not in KINDS:
        raise ConfigError(
            "new-plugin", kind, f"there is no template of that kind; {choices_hint(kind, KINDS)}"
        )
    _check_name(kind, name)
    root = Path(where) / distribution(name)
    _check_free(root)
    files = package(kind, name)
    for path, text in files.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    print(_what_next(kind, name, root, files))
    return 0


def package(kind: str, name: str) -> dict[str, str]:
    """The files of the package, by their path in it."""
    about, module = KINDS[kind], f"kvengine_{name}"
    values = {
        "api": str(API_VERSION),
        "article": "An" if about.noun[0] in "aeiou" else "A",
        "contract": kind.capitalize(),
        "distribution": distribution(name),
        "kind": kind,
        "module": module,
        "Name": "".join(part.capitalize() for part in name.split("_")),
        "name": name,
        "noun": about.noun,
        "summary": about.summary,
        "words": about.words,
    }
    values["kernel_row"] = f"| the kernel | `{module}/kernel.py` |\n" if kind == "attention" else ""
    values["idea"] = _filled(f"{kind}/idea.md", values).rstrip()
    files = {
        "pyproject.toml": _filled("pyproject.toml", values),
        "README.md": _filled("README.md", values),
        ".gitignore": _filled("gitignore", values),
        f"{module}/__init__.py": _filled(f"{kind}/policy.py", values),
        f"{module}/conf/{kind}/{name}.yaml": _filled(f"{kind}/conf.yaml", values),
        f"tests/test_{name}.py": _filled(f"{kind}/test.py", values),
    }
    if kind == "attention":
        files[f"{module}/kernel.py"] = _filled("attention/kernel.py", values)
    return files


def distribution(name: str) -> str:
    """What pip calls the package."""
    return f"kvengine-{name.replace('_', '-')}"


def _filled(template: str, values: dict[str, str]) -> str:
    text = (TEMPLATES / f"{template}.tmpl").read_text(encoding="utf-8")
    return Template(text).substitute(values)


def _check_name(kind: str, name: str) -> None:
    """ConfigError for a name that Python, YAML or Hydra would not take for one, or that is taken."""
    if (
        not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name)
        or len(name) > MAX_NAME_LENGTH
        or name in NO_WORDS
    ):
        problem = (
            f"must be lower-case letters, digits and single underscores, begin with a letter, have at most "
            f"{MAX_NAME_LENGTH} characters and be no word of YAML ({', '.join(sorted(NO_WORDS))})"
        )
        raise ConfigError("new-plugin", name, problem)
    taken = [entry for entry in discover() if (entry.kind, entry.name) == (kind, name)]
    if taken:
        raise ConfigError(
            "new-plugin", name, f"{kind}={name} is registered by {taken[0].distribution} already"
        )
    if importlib.util.find_spec(f"kvengine_{name}") is not None:
        raise ConfigError(
            "new-plugin", name, f"its package kvengine_{name} is installed already; choose another"
        )


def _check_free(root: Path) -> None:
    """ConfigError where the package cannot be put without touching what is there."""
    blocked = next((path for path in (root, *root.parents) if path.exists() and not path.is_dir()), None)
    if blocked is not None:
        raise ConfigError("new-plugin", str(blocked), "is a file")
    if root.is_dir() and any(root.iterdir()):
        raise ConfigError(
            "new-plugin", str(root), "is there already and not empty; choose another NAME or DIR"
        )


def _what_next(kind: str, name: str, root: Path, files: dict[str, str]) -> str:
    """What was written, and the commands to run now."""
    where = str(root) if root.is_absolute() else f"./{root}"
    about = KINDS[kind]
    lines = [f"{root}: the {about.noun} '{name}' ({about.summary}), to be made into yours", ""]
    lines += [f"    {path}" for path in files]
    lines += [
        "",
        "Next:",
        f"    pip install -e '{where}[test]'",
        f"    python -m kvengine {kind}={name} {about.words}",
        f"    pytest {where}",
        f"    pytest --kvengine-conformance {kind}={name}",
    ]
    return "\n".join(lines)
