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
        for seq in view.running:
            if not seq.is_prefilling:
                view.schedule(seq, max_tokens=1)
        for seq in view.running:
            if seq.is_prefilling:
                view.schedule(seq, view.token_budget_left)
        while len(view.waiting) and view.token_budget_left:
            if not view.admit(view.waiting.peek(), view.token_budget_left):
                return
        view.stop(Reason.NO_TOKEN_BUDGET)
