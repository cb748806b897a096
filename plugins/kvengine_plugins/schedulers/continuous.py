"""Continuous batching, prefill first: whoever fits enters at once, and decodes wait for prefills.

Source: iteration-level scheduling of Orca (Yu et al., OSDI 2022, section 4.1), with whole prompts in steps of
their own as vLLM's first scheduler had it.
"""

from __future__ import annotations

from kvengine.policies import Scheduler, SchedulingView


class ContinuousScheduler(Scheduler):
    """A step is either the prefill of all that may enter, or one token for everybody who runs."""

    def schedule(self, view: SchedulingView) -> None:
        if not sum(view.admit(seq) for seq in view.heads):
            view.schedule_decodes()
            for seq in view.prefilling:  # a branch of a live request begins with tokens of its own
                view.schedule(seq, view.token_budget_left)
