"""What is wrong with a policy, for whoever wrote it: one line, where it was raised, and a script that shows it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from traceback import extract_tb

from kvengine.core.errors import EngineStalledError, KvEngineError
from kvengine.registry import Entry
from kvengine.testing.cases import Case

WORDS = (
    "starves", "leaks", "exceeds", "corrupts", "schedules", "is not", "computes", "loses", "counts", "gives",
    "predicts", "visits", "changes", "cannot",
)  # fmt: skip
"""How the checks of this package begin to say what is wrong."""
HERE = Path(__file__).parents[1]


class Fault(AssertionError):
    """A plug-in that does what its contract forbids; the text says which, and what."""


@contextmanager
def faults_named(plugin: Entry) -> Iterator[None]:
    """What goes wrong inside is a Fault of `plugin`, said in one line."""
    name = f"{plugin.kind}={plugin.name}"
    try:
        yield
    except Fault:
        raise
    except AssertionError as error:
        said = str(error).splitlines()[0] if str(error) else "of the engine"
        said = said if said.startswith(WORDS) else f"breaks an invariant: {said}"
        raise Fault(f"{name} {said}") from error
    except EngineStalledError as error:
        raise Fault(f"{name} starves: {error}") from error
    except KvEngineError as error:
        raise Fault(f"{name} breaks its contract: {error}{_raised_at(error)}") from error


def _raised_at(error: BaseException) -> str:
    """The line outside kvengine where the cause of `error` was raised, if it was one."""
    cause = error.__cause__
    frames = extract_tb(cause.__traceback__) if cause else []
    ours = [frame for frame in frames if not Path(frame.filename).is_relative_to(HERE)]
    if not ours:
        return ""
    return f"\n    {ours[-1].filename}:{ours[-1].lineno}: {ours[-1].line}"


def script(policies: Mapping[str, str], case: Case, max_steps: int) -> str:
    """A program that runs `case` under `policies` and prints what was decided until it fails."""
    module, engine = ("watch", "WatchedEngine") if "allocator" in policies else ("engines", "TestEngine")
    asks = "\n".join(f"        {ask!r}," for ask in case.asks)
    return f"""\
from kvengine.testing.cases import Ask, Case, check_nothing_is_left, check_outputs, drive
from kvengine.testing.{module} import {engine}

case = Case(
    (
{asks}
    ),
    {case.limits},
)
engine = {engine}(policies={dict(policies)}, **case.limits)
try:
    check_outputs(engine, case, drive(engine, case, max_steps={max_steps}))
    check_nothing_is_left(engine)
finally:
    for step in engine.log.steps:
        print(step.step, step.scheduled, "preempted:", step.preempted)"""
