"""Chunked prefill: decodes first, then prefills in chunks within the token budget, so no decode stalls.

Source: Sarathi-Serve (Agrawal et al., OSDI 2024, algorithm 3).
"""

from __future__ import annotations

from kvengine.core.reasons import Reason
from kvengine.policies import Scheduler, SchedulingView


class ChunkedScheduler(Scheduler):
    """Every running decode gets its token; what is left of the budget goes to prefills, oldest first."""

    chunks = True

    def schedule(self, view: SchedulingView) -> None:
        view.schedule_decodes()
        for seq in view.prefilling:
            view.schedule(seq, view.token_budget_left)
        for seq in view.heads:
            if not view.token_budget_left:
                return view.stop(Reason.NO_TOKEN_BUDGET)
            view.admit(seq, view.token_budget_left)
        return None
