"""docs/structure.md from the modules' docstrings: `python tests/structure.py` writes it."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("kvengine", "kernels/kvengine_kernels", "plugins/kvengine_plugins")
PAGE = ROOT / "docs" / "structure.md"


def modules() -> list[Path]:
    """Every module of the product, in reading order."""
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def sentence(path: Path) -> str:
    """The first paragraph of a module's docstring as one line."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(docstring.split("\n\n")[0].split())


def page() -> str:
    """The whole page."""
    lines = [
        "# Structure",
        "",
        "One sentence per module, gathered from the docstrings by `python tests/structure.py`.",
        "",
    ]
    folder = None
    for path in modules():
        if path.parent != folder:
            folder = path.parent
            lines += (
                ["", f"## {folder.relative_to(ROOT)}", ""]
                if lines[-1]
                else [f"## {folder.relative_to(ROOT)}", ""]
            )
        lines.append(f"- `{path.name}`: {sentence(path)}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
