"""Every error a user or a plug-in author can meet, as one tree.

KvEngineError
├── ConfigError            a setting is wrong; the command line exits with 2
├── RequestError           one request is refused; the others go on
├── ModelError             a model cannot be had or cannot be served; exits with 2
├── PolicyError            a plug-in broke its contract; ends the run with the policy's name
└── EngineStalledError     work waits, and nothing can ever change that
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130
"""Exit codes of the command line."""


def nearest(name: object, choices: Iterable[str]) -> str | None:
    """The choice that a mistyped `name` most likely meant, or None when none is close."""
    found = difflib.get_close_matches(str(name).lower(), list(choices), n=1, cutoff=0.5)
    return found[0] if found else None


def choices_hint(name: object, choices: Iterable[str]) -> str:
    """The sentence that follows a wrong name: what it most likely meant, and all that is possible."""
    listed = sorted(choices)
    if not listed:
        return "there is nothing to choose from"
    meant = nearest(name, listed)
    said = f"did you mean '{meant}'? " if meant else ""
    return f"{said}choices: {', '.join(listed)}"


class KvEngineError(Exception):
    """Base of all errors of kvengine; `str()` is always one line fit for a terminal."""


class ConfigError(KvEngineError):
    """A setting that cannot work: `key`, the `value` given (None: there is none to show), and `problem` with
    the nearest valid choice."""

    def __init__(self, key: str, value: object, problem: str) -> None:
        self.key, self.value, self.problem = key, value, problem
        super().__init__(f"{key}: {problem}" if value is None else f"{key}={value}: {problem}")


class RequestError(KvEngineError):
    """A request that can never be served, refused by name when it is added."""

    def __init__(self, request_id: str, problem: str) -> None:
        self.request_id, self.problem = request_id, problem
        super().__init__(f"request '{request_id}': {problem}")


class ModelError(KvEngineError):
    """A model that cannot be found, loaded or served; the text names the model and what to do."""


class PolicyError(KvEngineError):
    """A plug-in that raised or broke its contract; the text names it, the step and the sequence."""


class EngineStalledError(KvEngineError):
    """Sequences wait, none runs, and no future event is due: the text says who and why."""
