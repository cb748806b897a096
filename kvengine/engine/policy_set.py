"""The policies of one engine by name, so that a broken plug-in is named and not the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvengine.core.errors import PolicyError
from kvengine.core.sequence import Sequence
from kvengine.policies import Admission, Allocator, Eviction, Predictor, Preemption, Queue, Scheduler, Victim


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySet:
    """What decides in one engine; `names` by kind, as on the command line."""

    scheduler: Scheduler
    queue: Queue
    admission: Admission
    victim: Victim
    preemption: Preemption
    allocator: Allocator
    eviction: Eviction
    predictor: Predictor
    names: Mapping[str, str] = field(default_factory=dict)

    def name(self, kind: str) -> str:
        """The name of the policy of `kind`; that of its class where none was given."""
        return self.names.get(kind) or type(getattr(self, kind)).__name__

    def broken(self, kind: str, step: int, what: str, seq: Sequence | None = None) -> PolicyError:
        """The error that ends a run in which the policy of `kind` broke its contract, over `seq` if any."""
        over = f", {seq}" if seq is not None else ""
        of_class = type(getattr(self, kind)).__name__
        return PolicyError(f"{kind}={self.name(kind)} ({of_class}), step {step}{over}: {what}")

    def blamed(
        self, error: Exception, step: int, seq: Sequence | None = None, default: str | None = None
    ) -> PolicyError | None:
        """`error` as one of the policy in whose code it was raised: the innermost on its traceback.

        Where it was raised in none it is one of the kind `default`; None when there is no default.
        """
        found = default
        trace = error.__traceback__
        while trace is not None:
            inside = trace.tb_frame.f_locals.get("self")
            if inside is not None:
                found = next((kind for kind in KINDS if getattr(self, kind) is inside), found)
            trace = trace.tb_next
        if found is None:
            return None
        return self.broken(found, step, f"raised {type(error).__name__}: {error}", seq)


KINDS = ("scheduler", "queue", "admission", "victim", "preemption", "allocator", "eviction", "predictor")
