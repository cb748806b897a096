"""Runs and sweeps: Hydra composes, every variant is checked before the first starts, results are gathered."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from kvengine import seconds_since_start
from kvengine.analysis.table import print_sweep, stdout
from kvengine.assemble import blueprint
from kvengine.compose import (
    CONFIG_NAME,
    checkout,
    composer,
    conf_dir,
    plain,
    register_third_party_conf,
    variants,
)
from kvengine.core.errors import ConfigError, KvEngineError, ModelError
from kvengine.overrides import HYDRA_ERRORS, LIMITS, expand, explain, flatten, key_of
from kvengine.registry import discover
from kvengine.run import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, Run

FLAGS_WITHOUT_RUN = (
    "--help", "-h", "--hydra-help", "--cfg", "-c", "--info", "-i", "--shell-completion", "-sc",
)  # fmt: skip
MULTIRUN_FLAGS = ("-m", "--multirun")


def launch(argv: list[str]) -> int:
    """Run what `argv` (flags and overrides) describes; the exit code. Raises KvEngineError."""
    overrides = expand(word for word in argv if _is_override(word))
    flags = [word for word in argv if not _is_override(word)]
    argv = [*flags, *overrides]  # Hydra's parser wants all overrides in one place
    if any(word.split("=")[0] in FLAGS_WITHOUT_RUN for word in flags):
        _compose_and_call(argv, lambda config: None)
        return EXIT_OK
    sweeps = any(flag in flags for flag in MULTIRUN_FLAGS)
    _check(overrides, sweeps)
    return _sweep(argv, overrides) if sweeps else _single(argv, overrides)


def _is_override(word: str) -> bool:
    return ("=" in word and not word.startswith("-")) or word.startswith("~")


def _check(overrides: list[str], sweeps: bool) -> None:
    """ConfigError or ModelError over the first variant that cannot work, before anything is written."""
    registry = discover()
    own = [word for word in overrides if not key_of(word).startswith("hydra")]
    with composer() as compose:
        try:
            for variant in variants(own) if sweeps else [own]:
                blueprint(compose(variant), registry)
        except HYDRA_ERRORS as error:
            wrong = explain(error, overrides, [*flatten(compose([])), *LIMITS])
            raise ConfigError(wrong.key, wrong.value, wrong.problem + registry.broken_hint()) from error


def _single(argv: list[str], overrides: list[str]) -> int:
    path = _directory(overrides, "hydra.run.dir", "")
    codes: list[int] = []
    try:
        _compose_and_call(
            [*argv, f"hydra.run.dir={_quoted(path)}"],
            lambda config: codes.append(_run(config, overrides, path)),
        )
    finally:
        _remove_if_empty(path)
    return codes[0]


def _sweep(argv: list[str], overrides: list[str]) -> int:
    path = _directory(overrides, "hydra.sweep.dir", "sweep_")
    interrupted = False
    try:
        _compose_and_call(
            [*argv, f"hydra.sweep.dir={_quoted(path)}"], lambda config: _run_one_of_many(config, overrides)
        )
    except KeyboardInterrupt:
        interrupted = True
    runs = sorted((p for p in path.iterdir() if p.name.isdigit()), key=lambda p: int(p.name))
    results = [_result(run) for run in runs]
    print_sweep(stdout(), results)
    _remove_if_empty(path)
    if interrupted:
        return EXIT_INTERRUPTED
    return EXIT_OK if all(summary for _, summary in results) else EXIT_FAILED


def _run_one_of_many(config: DictConfig, overrides: list[str]) -> None:
    """One variant of a sweep: its failure is said at once and does not stop the others, an interrupt does."""
    began = seconds_since_start()
    settings = HydraConfig.get()
    path = Path(settings.runtime.output_dir)
    words = [word.replace("'", "") for word in settings.overrides.task]
    path.mkdir(parents=True, exist_ok=True)
    (path / "variant.json").write_text(json.dumps(words), encoding="utf-8")
    print(f"\n[{settings.job.num}] {' '.join(words)}", flush=True)
    try:
        code = _run(config, overrides, path, began)
    except KvEngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return
    if code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt


def _run(config: DictConfig, overrides: list[str], path: Path, began: float = 0.0) -> int:
    """One variant, begun `began` s after kvengine was; the exit code."""
    content = plain(config)
    asked = time.perf_counter()
    if content["executor"]["name"] != "null" and not any(
        key_of(w).split(".")[0] == "model" for w in overrides
    ):
        content = _with_model_at_hand(content)
    fetch_s = time.perf_counter() - asked
    return Run(content, discover(), path, began=began, fetch_s=fetch_s).execute()


def _with_model_at_hand(content: dict[str, Any]) -> dict[str, Any]:
    """The default model, or tiny, said in one line, when nobody asked for it by name and it cannot be had."""
    registry = discover()
    entry = registry.get("model", content["model"]["name"])
    try:
        entry.factory(entry.schema(), None).directory  # noqa: B018 - fetches it
    except ModelError as error:
        print(f"warning: the default model cannot be had, going on with model=tiny: {error}", file=sys.stderr)
        return content | {"model": {"name": "tiny"}}
    return content


def _compose_and_call(argv: list[str], task: Callable[[DictConfig], Any]) -> None:
    """Let Hydra parse `argv` and call `task` with what it composes; errors are raised, not printed."""
    failures: list[KvEngineError] = []

    def call(config: DictConfig) -> None:
        try:
            task(config)
        except KvEngineError as error:  # Hydra would print it, and all overrides, before passing it on
            failures.append(error)

    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    register_third_party_conf()
    before, sys.argv = sys.argv, ["kvengine", *argv]
    try:
        hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=CONFIG_NAME)(call)()
    except HYDRA_ERRORS as error:
        raise explain(error, argv, LIMITS) from error
    finally:
        sys.argv = before
    if failures:
        raise failures[0]


def _directory(overrides: list[str], key: str, prefix: str) -> Path:
    """The directory that the user named by `key`, or a new one of its own: traces/TIME."""
    named = [word.partition("=")[2].strip("'\"") for word in overrides if key_of(word) == key]
    if named:
        return Path(named[-1]).absolute()
    root = (checkout() or Path.cwd()) / "traces"
    stamp = prefix + datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    for suffix in count(1):
        path = root / (stamp if suffix == 1 else f"{stamp}-{suffix}")
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            continue
        except OSError as error:
            raise KvEngineError(f"no run directory can be made in {root}: {error.strerror}") from error
    raise AssertionError("count() ends")


def _quoted(path: Path) -> str:
    """`path` as a quoted string of Hydra's override grammar."""
    return "'" + str(path).replace("'", "\\'") + "'"


def _remove_if_empty(path: Path) -> None:
    with suppress(OSError):
        path.rmdir()


def _result(path: Path) -> tuple[list[str], dict[str, Any] | None]:
    """A swept run's overrides and summary; None when it was not completed."""
    try:
        words = json.loads((path / "variant.json").read_text(encoding="utf-8"))
        run = json.loads((path / "run.json").read_text(encoding="utf-8"))
    except OSError:
        return [path.name], None
    return words, run.get("summary") if run.get("status") == "complete" else None
