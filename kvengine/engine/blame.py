"""Which policy an exception came from, so that a broken plug-in is named and not the engine."""

from __future__ import annotations

from collections.abc import Sequence

from kvengine.core.errors import PolicyError


def blamed(
    error: Exception, policies: Sequence[object], step: int, default: object | None = None
) -> PolicyError | None:
    """`error` as one of the policy in whose code it was raised: the innermost of `policies` on its traceback.

    Where it was raised in none it is one of `default`; None when there is no default.
    """
    found = default
    trace = error.__traceback__
    while trace is not None:
        inside = trace.tb_frame.f_locals.get("self")
        if inside is not None and any(inside is policy for policy in policies):
            found = inside
        trace = trace.tb_next
    if found is None:
        return None
    return PolicyError(f"{type(found).__name__}, step {step}: raised {type(error).__name__}: {error}")
