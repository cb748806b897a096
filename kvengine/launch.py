"""Runs and sweeps: Hydra composes, every variant is checked before the first starts, results are gathered."""

from __future__ import annotations

import json
import os
import re
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
    sweep_axes,
    variants,
)
from kvengine.core.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    ConfigError,
    KvEngineError,
    ModelError,
    choices_hint,
)
from kvengine.overrides import HYDRA_ERRORS, LIMITS, expand, explain, flatten, key_of
from kvengine.registry import KINDS, discover
from kvengine.run import Run

FLAGS_WITHOUT_RUN = (
    "--help", "-h", "--hydra-help", "--cfg", "-c", "--info", "-i", "--shell-completion", "-sc",
)  # fmt: skip
PACKS = ("preset", "experiment")
"""Groups whose choices set others."""

CHOOSABLE = ("kv", "prefix_cache", "telemetry", *PACKS, *KINDS)
"""Groups of which one choice is taken by its name."""

MULTIRUN_FLAGS = ("-m", "--multirun")
OTHER_FLAGS = (
    "--resolve", "--package", "-p", "--run", "-r", "--config-path", "-cp", "--config-name", "-cn",
    "--config-dir", "-cd", "--experimental-rerun",
)  # fmt: skip


def launch(argv: list[str]) -> int:
    """Run what `argv` (flags and overrides) describes; the exit code. Raises KvEngineError."""
    overrides = expand(word for word in argv if _is_override(word))
    flags = [word for word in argv if not _is_override(word)]
    _check_flags(flags)
    argv = [*flags, *overrides]  # Hydra's parser wants all overrides in one place
    if any(word.split("=")[0] in FLAGS_WITHOUT_RUN for word in flags):
        _compose_and_call(argv, lambda config: None)
        return EXIT_OK
    sweeps = any(flag in flags for flag in MULTIRUN_FLAGS)
    # Other flags and other sweepers change what is composed; then each run is checked when Hydra has composed it.
    unlike = set(flags) - set(MULTIRUN_FLAGS) or any(key_of(word).startswith("hydra/") for word in overrides)
    checked, axes = ([], []) if unlike else _check(overrides, sweeps)
    argv, overrides = [*argv, *axes], [*overrides, *axes]
    return _sweep(argv, overrides, len(checked)) if sweeps else _single(argv, overrides, checked)


def _is_override(word: str) -> bool:
    return ("=" in word and not word.startswith("-")) or word.startswith("~")


def _check_flags(flags: list[str]) -> None:
    """ConfigError over a flag that does not exist."""
    known = (*FLAGS_WITHOUT_RUN, *MULTIRUN_FLAGS, *OTHER_FLAGS)
    for flag in flags:
        if flag.startswith("-") and flag.split("=")[0] not in known:
            raise ConfigError("flag", flag, f"no such flag; {choices_hint(flag, known)}")


def _check(overrides: list[str], sweeps: bool) -> tuple[list[bool], list[str]]:
    """Whether each variant records, and the overrides over which an experiment sweeps by itself; ConfigError or
    ModelError over the first variant that cannot work."""
    registry = discover()
    own = [word for word in overrides if not key_of(word).startswith("hydra")]
    checked, axes = [], []
    with composer() as compose:
        try:
            axes = sweep_axes(own)
            if axes and not sweeps:
                print(f"note: {' '.join(axes)} is not swept without -m", file=sys.stderr)
                axes = []
            own += axes
            for variant in variants(own) if sweeps else [own]:
                checked.append(blueprint(compose(variant), registry).telemetry.record)
        except ValueError as error:  # Hydra's for a group that is given a bool, a number or null
            raise _no_choice(own) or error from error
        except HYDRA_ERRORS as error:
            wrong = explain(error, overrides, [*flatten(compose(_choices(own, compose))), *LIMITS, *PACKS])
            raise ConfigError(
                wrong.key, wrong.value, wrong.problem + registry.broken_hint(wrong.value)
            ) from error
    return checked, axes


def _choices(own: list[str], compose: Callable[[list[str]], Any]) -> list[str]:
    """The words that choose a group, as far as they exist: what else may be set depends on them."""
    groups = [word for word in own if key_of(word) in CHOOSABLE and "," not in word]
    try:
        compose(groups)
    except (*HYDRA_ERRORS, ValueError):
        return []
    return groups


def _no_choice(own: list[str]) -> ConfigError | None:
    """The error over the first group that is given what can be no name of a choice."""
    for word in own:
        key, _, value = word.partition("=")
        if key in CHOOSABLE and re.fullmatch(r"(?i)true|false|null|[-+.\d_]+(e\d+)?", value.split(",")[0]):
            names = sorted(file.stem for file in (conf_dir() / key).glob("*.yaml"))
            return ConfigError(key, value, f"no such {key}; {choices_hint(value, names)}")
    return None


def _single(argv: list[str], overrides: list[str], checked: list[bool]) -> int:
    records = not checked or checked[0]
    made = None if _sets(overrides, "hydra.run.dir") or not records else _new_directory("")
    where = [f"hydra.run.dir={_quoted(made or Path())}"] if made or not records else []
    codes: list[int] = []
    try:
        _compose_and_call([*argv, *where], lambda config: codes.append(_run(config, overrides, records)))
    finally:
        _remove_if_empty(made)
    return codes[0]


def _sweep(argv: list[str], overrides: list[str], num_variants: int) -> int:
    if _sets(overrides, "hydra.sweep.subdir"):
        raise ConfigError("hydra.sweep.subdir", "", "cannot be set: each variant's directory is its number")
    made = None if _sets(overrides, "hydra.sweep.dir") else _new_directory("sweep_")
    where = [f"hydra.sweep.dir={_quoted(made)}"] if made else []
    directories: list[Path] = []
    interrupted = False
    try:
        _compose_and_call([*argv, *where], lambda config: _run_one_of_many(config, overrides, directories))
    except KeyboardInterrupt:
        interrupted = True
    finally:
        _remove_if_empty(made)
    # Another launcher runs variants in processes of its own: their directories are found, not told.
    found = made.glob("[0-9]*") if made and made.is_dir() else directories
    results = [_result(path) for path in sorted(found, key=lambda path: int(path.name))]
    print_sweep(stdout(), results)
    if len(results) < num_variants:
        print(f"{num_variants - len(results)} of {num_variants} variants were not started")
    if interrupted:
        return EXIT_INTERRUPTED
    return EXIT_OK if all(status == "complete" for _, _, status in results) else EXIT_FAILED


def _run_one_of_many(config: DictConfig, overrides: list[str], directories: list[Path]) -> None:
    """One variant of a sweep: its failure is said at once and does not stop the others, an interrupt does."""
    began = seconds_since_start()
    settings = HydraConfig.get()
    path = Path(settings.runtime.output_dir)
    words = [word.replace("'", "") for word in settings.overrides.task]
    print(f"\n[{settings.job.num}] {' '.join(words)}", flush=True)
    _refuse_used(path, "hydra.sweep.dir")
    directories.append(path)
    (path / "variant.json").write_text(json.dumps(words), encoding="utf-8")
    try:
        code = _run(config, overrides, True, began)
    except KvEngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return
    if code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt


def _run(config: DictConfig, overrides: list[str], records: bool, began: float = 0.0) -> int:
    """One variant, begun `began` s after kvengine was; the exit code."""
    path = Path(HydraConfig.get().runtime.output_dir)
    if records:
        _refuse_used(path, "hydra.run.dir")
    content = plain(config)
    asked = time.perf_counter()
    if content["executor"]["name"] != "null" and not _names_model(overrides):
        content = _with_model_at_hand(content)
    fetch_s = time.perf_counter() - asked
    return Run(content, discover(), path, began=began, fetch_s=fetch_s).execute()


def _refuse_used(path: Path, key: str) -> None:
    """ConfigError when `path` already holds something: two runs must not mix."""
    if any(entry.name != "variant.json" for entry in path.iterdir()):
        raise ConfigError(key, path, "is not empty; name a directory of its own for every run")


def _names_model(overrides: list[str]) -> bool:
    return any(_sets(overrides, key) for key in ("model", "model.name", "model.path"))


_unavailable: list[ModelError] = []
"""Why the default model cannot be had, once that is known: a sweep does not try again for every variant."""


def _with_model_at_hand(content: dict[str, Any]) -> dict[str, Any]:
    """The default model, or tiny, said in one line, when nobody asked for it by name and it cannot be had."""
    model = content["model"]
    entry = discover().get("model", model["name"])
    try:
        if not _unavailable:
            entry.factory(entry.schema(), None).directory  # noqa: B018 - fetches it
            return content
    except ModelError as error:
        _unavailable.append(error)
        print(f"warning: going on with model=tiny, the default model cannot be had: {error}", file=sys.stderr)
    dtype = {} if model.get("dtype", "auto") == "auto" else {"dtype": model["dtype"]}
    return content | {"model": {"name": "tiny", **dtype}}


def _compose_and_call(argv: list[str], task: Callable[[DictConfig], Any]) -> None:
    """Let Hydra parse `argv` and call `task` with what it composes; errors are raised, not printed."""
    failures: list[Exception] = []

    def call(config: DictConfig) -> None:
        try:
            task(config)
        except Exception as error:  # Hydra would print it, and all overrides, before passing it on
            failures.append(error)

    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    register_third_party_conf()
    before, sys.argv = sys.argv, ["kvengine", *argv]
    try:
        hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=CONFIG_NAME)(call)()
    except HYDRA_ERRORS as error:
        raise explain(error, argv, LIMITS) from error
    except ValueError as error:  # flags that exclude each other
        raise ConfigError("flags", None, str(error)) from error
    finally:
        sys.argv = before
    if failures:
        raise failures[0]


def _sets(overrides: list[str], key: str) -> bool:
    return any(key_of(word) == key for word in overrides)


def traces_folder() -> Path:
    """Where runs are recorded: traces/ in the checkout, else where we are."""
    return (checkout() or Path.cwd()) / "traces"


def _new_directory(prefix: str) -> Path:
    """A directory of its own for a run or a sweep, named by the time."""
    root = traces_folder()
    stamp = prefix + datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    for suffix in count(1):
        path = root / (stamp if suffix == 1 else f"{stamp}-{suffix}")
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            if not root.is_dir():
                raise KvEngineError(f"no run directory can be made in {root}: it is a file") from None
        except OSError as error:
            raise KvEngineError(f"no run directory can be made in {root}: {error.strerror}") from error
    raise AssertionError("count() ends")


def _quoted(path: Path) -> str:
    """`path` as a quoted string of Hydra's override grammar, with nothing in it to interpolate."""
    return "'" + str(path).replace("'", "\\'").replace("${", "\\${") + "'"


def _remove_if_empty(path: Path | None) -> None:
    with suppress(OSError):
        if path is not None:
            path.rmdir()


def _result(path: Path) -> tuple[list[str], dict[str, Any] | None, str]:
    """A swept run's overrides, its summary if it got that far, and how it ended."""
    words, run = [path.name], {}
    with suppress(OSError, ValueError):
        words = json.loads((path / "variant.json").read_text(encoding="utf-8"))
        run = json.loads((path / "run.json").read_text(encoding="utf-8"))
    return words, run.get("summary"), run.get("status", "failed")
