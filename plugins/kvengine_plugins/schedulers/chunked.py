"""Chunked prefill: steps mix decodes with prefills, which are cut to the token budget, so that no decode stalls.

Sources: Sarathi-Serve (Agrawal et al., OSDI 2024, algorithm 3) for decodes first; the loop of vLLM V1's scheduler
for order of admission.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvengine.core.reasons import Reason
from kvengine.policies import Scheduler, SchedulingView


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedConfig:
    """`order` of those that run: `decodes_first`, or as they were admitted (`admission`), whatever they compute."""

    order: Literal["decodes_first", "admission"] = "decodes_first"

    def scheduler(self) -> ChunkedScheduler:
        """The scheduler that serves in this order."""
        return ChunkedScheduler() if self.order == "decodes_first" else AdmissionOrderScheduler()


class ChunkedScheduler(Scheduler):
    """Every running decode gets its token; what is left of the budget goes to prefills, oldest first."""

    chunks = True

    def schedule(self, view: SchedulingView) -> None:
        self._serve_running(view)
        for seq in view.heads:
            if not view.token_budget_left:
                return view.stop(Reason.NO_TOKEN_BUDGET)
            view.admit(seq, view.token_budget_left)
        return None

    def _serve_running(self, view: SchedulingView) -> None:
        view.schedule_running()


class AdmissionOrderScheduler(ChunkedScheduler):
    """Each that runs takes all that it has yet to compute, in order of admission, so that a prefill may leave
    nothing to decodes that were admitted after it."""

    def _serve_running(self, view: SchedulingView) -> None:
        for seq in view.running:
            view.schedule(seq, view.token_budget_left)
