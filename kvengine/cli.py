"""The command line: our own subcommands, and everything else as a run or a sweep."""

from __future__ import annotations

import json
import os
import sys

import kvengine
from kvengine.core.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    ConfigError,
    KvEngineError,
    ModelError,
    choices_hint,
)
from kvengine.registry import KINDS, Registry, discover


def main(argv: list[str] | None = None) -> int:
    """Run the command `argv` (default: the process's); the exit code. Never raises for a user's mistake."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        if argv == ["--version"]:
            print(f"kvengine {kvengine.__version__}")
            return 0
        if argv and argv[0] in COMMANDS:
            return COMMANDS[argv[0]](argv[1:])
        _refuse_stray(argv)
        from kvengine.launch import launch

        return launch(argv)
    except (ConfigError, ModelError) as error:
        return _say(error, EXIT_USAGE)
    except KvEngineError as error:
        return _say(error, EXIT_FAILED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing more can be said to it
        return EXIT_FAILED
    except OSError as error:
        return _say(error, EXIT_FAILED)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _refuse_stray(argv: list[str]) -> None:
    """ConfigError over words that are neither a command nor a flag (or its argument) nor KEY=VALUE."""
    for i, word in enumerate(argv):
        after_flag = i > 0 and argv[i - 1].startswith("-")
        if word and (word[0] in "-~" or ("=" in word and word[0] != "=") or after_flag):
            continue
        problem = f"no command and no setting (KEY=VALUE); {choices_hint(word, COMMANDS)}"
        raise ConfigError("command", word, problem)


def _say(error: Exception, code: int) -> int:
    print(f"error: {error}", file=sys.stderr)
    return code


def _plugins(words: list[str]) -> int:
    """List every plug-in, or with KIND NAME show one: what it is, and its settings as its YAML explains them."""
    from kvengine.compose import settings_file

    registry = discover()
    if not words:
        return _list_plugins(registry)
    if len(words) != 2:
        raise ConfigError("plugins", " ".join(words), "takes nothing, or KIND and NAME")
    kind, name = words
    if kind not in KINDS:
        raise ConfigError("plugins", kind, f"no such kind; {choices_hint(kind, KINDS)}")
    entry = registry.get(kind, name)
    print(f"{kind} {name} ({entry.distribution}): {entry.summary}\n")
    print(settings_file(kind, name))
    return 0


def _list_plugins(registry: Registry) -> int:
    """Kind, name, summary and providing distribution of each; then the broken packages."""
    from rich.table import Table

    from kvengine.analysis.table import stdout

    table = Table("kind", "name", "summary", "from", box=None, pad_edge=False, header_style="bold")
    for entry in registry:
        table.add_row(entry.kind, entry.name, entry.summary, entry.distribution)
    console = stdout()
    console.print(table)
    for broken in registry.broken:
        line = f"broken: {broken.name} ({broken.distribution}): {broken.problem}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0


def _pull(words: list[str]) -> int:
    """Fetch a model ahead of time."""
    if len(words) != 1:
        raise ConfigError(
            "pull", " ".join(words), "name one model, as in: python -m kvengine pull smollm2-135m"
        )
    name = words[0]
    registry = discover()
    entry = registry.get("model", name)
    model = entry.factory(entry.schema(), None)
    directory = getattr(model, "directory", None)
    print(f"{name} needs no files" if directory is None else f"{name} is in {directory}")
    return 0


def _new_plugin(words: list[str]) -> int:
    """Write a package of one policy, to be made into one's own."""
    from kvengine.new_plugin import new_plugin

    return new_plugin(words)


def _why(words: list[str]) -> int:
    """Print what the time of one request of a recorded run went to."""
    from kvengine.analysis.why import explain, lines_of
    from kvengine.launch import traces_folder
    from kvengine.telemetry.run_directory import find_run, policies_of, read_tables

    named = [word for word in words if word != "--json"]
    if len(named) != 2:
        problem = "takes RUN and REQUEST, as in: python -m kvengine why latest r3 (and --json)"
        raise ConfigError("why", " ".join(words), problem)
    run, request = named
    path = find_run(run, traces_folder())
    try:
        tables = read_tables(path)
    except (OSError, ValueError) as error:
        raise ConfigError("run", run, f"cannot be read: {str(error).splitlines()[0]}") from error
    choices = explain(tables, request)
    if "--json" in words:
        print(json.dumps({"run": str(path), "choices": choices}, indent=2))
        return 0
    for choice in choices:
        print("\n".join(lines_of(choice, policies_of(path))))
    return 0


COMMANDS = {"plugins": _plugins, "pull": _pull, "why": _why, "new-plugin": _new_plugin}
