"""Which policy an exception came from, so that a broken plug-in is named and not the engine."""

from __future__ import annotations

from collections.abc import Sequence


def raiser(error: Exception, policies: Sequence[object]) -> object | None:
    """The one of `policies` in whose code `error` was raised: the innermost on its traceback; None if in none."""
    found = None
    trace = error.__traceback__
    while trace is not None:
        inside = trace.tb_frame.f_locals.get("self")
        if any(inside is policy for policy in policies):
            found = inside
        trace = trace.tb_next
    return found
