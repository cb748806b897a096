"""The directory that a run leaves behind, written so that a killed run keeps what it had."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from kvengine.core.errors import ConfigError, nearest
from kvengine.telemetry.tables import SCHEMAS, in_order

LATEST = "latest"


class RunDirectory:
    """`run.json`, one folder of Parquet parts per table, `outputs.jsonl`; spans.jsonl is added at the end.

    The first OSError (a full disk) stops all writing and is kept in `problem`: the run itself goes on.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problem: OSError | None = None
        self._num_parts = dict.fromkeys(SCHEMAS, 0)

    def write_run(self, content: dict[str, Any]) -> None:
        """Replace run.json as a whole; tried even after a problem, which it then names."""
        if self.problem is not None:
            content = {**content, "recording_problem": str(self.problem)}
        text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
        try:
            _replace(self.path / "run.json", text + "\n")
        except OSError as error:
            self.problem = self.problem or error

    def write_part(self, name: str, part: pa.Table) -> None:
        """Add a closed Parquet file to the table `name`."""
        target = self.path / name / f"{self._num_parts[name]:05d}.parquet"
        self._num_parts[name] += 1

        def write() -> None:
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = target.with_suffix(".partial")
            pq.write_table(part, partial, compression="zstd")
            os.replace(partial, target)

        self._attempt(write)

    def write_whole(self, name: str, table: pa.Table) -> None:
        """Put one file in the place of all parts of the table `name`: the run has ended."""
        folder, whole = self.path / name, self.path / f"{name}.whole"

        def write() -> None:
            whole.mkdir(parents=True, exist_ok=True)
            pq.write_table(table, whole / "00000.parquet", compression="zstd")
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(whole, folder)

        self._attempt(write)

    def write_output(self, content: dict[str, Any]) -> None:
        """Add one finished sequence to outputs.jsonl."""
        line = json.dumps(content, ensure_ascii=False) + "\n"

        def write() -> None:
            self.path.mkdir(parents=True, exist_ok=True)
            with open(self.path / "outputs.jsonl", "a", encoding="utf-8") as file:
                file.write(line)

        self._attempt(write)

    def _attempt(self, write: Any) -> None:
        if self.problem is not None:
            return
        try:
            write()
        except OSError as error:
            self.problem = error


def read_tables(path: Path) -> dict[str, pa.Table]:
    """The tables of a recorded run; a table without parts is empty."""
    found = {}
    for name, schema in SCHEMAS.items():
        parts = [pq.read_table(part, schema=schema) for part in sorted((path / name).glob("*.parquet"))]
        found[name] = pa.concat_tables([schema.empty_table(), *parts])
    return found | {"decisions": in_order(found["decisions"])}


def find_run(name: str, traces: Path) -> Path:
    """The directory of a recorded run: a path, a name under `traces`, or `latest`; ConfigError, with the nearest
    name, when there is none."""
    runs = [file.parent for pattern in ("*", "*/*") for file in traces.glob(f"{pattern}/run.json")]
    if name == LATEST and runs:
        return max(runs, key=lambda path: ((path / "run.json").stat().st_mtime_ns, str(path)))
    for path in (Path(name), traces / name):
        if name and (path / "run.json").is_file():
            return path
        if name and (path / "0" / "run.json").is_file():
            raise ConfigError("run", name, f"is a sweep; name one of its variants, as in {name}/0")
    known = sorted(str(path.relative_to(traces)) for path in runs)
    meant = nearest(name, known)
    said = f"did you mean '{meant}'?" if meant else f"{len(known)} are in {traces}"
    raise ConfigError("run", name, f"no recorded run; {said}")


def policies_of(path: Path) -> dict[str, str]:
    """The names of the policies of a recorded run, by kind; what run.json does not tell is left out."""
    try:
        config = json.loads((path / "run.json").read_text(encoding="utf-8"))["config"]
        return {
            kind: group["name"]
            for kind, group in config.items()
            if isinstance(group, dict) and "name" in group
        }
    except (OSError, ValueError, KeyError):
        return {}


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
