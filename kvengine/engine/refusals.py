"""Why those wait that wait: every plan leaves a reason for each of them."""

from __future__ import annotations

from kvengine.core.decision import Action, Decision
from kvengine.core.plan import StepPlan
from kvengine.core.reasons import Reason, Refusal, Verdict
from kvengine.core.sequence import Sequence, SequenceState
from kvengine.engine.policy_set import PolicySet
from kvengine.engine.waiting import WaitingLine
from kvengine.policies import SchedulingView

MAX_REFUSALS_OF_ONE = 1000
"""So many refusals of one sequence in one plan are taken for a scheduler going round in circles."""


class Refusals:
    """The refusals of the plan being made, and one reason for all whom the scheduler did not look at."""

    def __init__(self, line: WaitingLine, policies: PolicySet) -> None:
        self._line = line
        self._policies = policies
        self._plan = StepPlan(step=0, now_ns=0)
        self._counts: dict[Sequence, int] = {}
        self._last: Sequence | None = None
        self._stopped = False
        self._answer: Refusal | None = None
        """The last that the admission policy gave."""
        self._last_words = ""
        """Who was refused last in the last plan that refused anybody, and why, for errors."""
        self._not_admitted = self._not_grown = ""
        """The same, of this plan, where the admission policy refused, and where a running one got no block."""

    def begin_plan(self, plan: StepPlan) -> None:
        self._plan = plan
        self._counts.clear()
        self._last = None
        self._stopped = False
        self._not_admitted = self._not_grown = ""

    def of_admission(self, seq: Sequence, view: SchedulingView) -> Refusal | None:
        """What the admission policy answers over `seq`; PolicyError where that is no answer."""
        self._answer = answer = self._policies.admission.refuses(seq, view)
        if answer is None:
            return None
        if not (
            isinstance(answer, Refusal)
            and isinstance(answer.reason, Reason)
            and isinstance(answer.verdict, Verdict)
        ):
            problem = f"answered {answer!r}, which is neither None nor a Refusal with a Reason and a Verdict"
            raise self._policies.broken("admission", self._plan.step, problem, seq)
        return answer

    def add_growth(self, seq: Sequence, refusal: Refusal) -> None:
        """`seq`, which runs, gets no blocks in this plan, and nobody may be preempted for it."""
        self._not_grown = f"{seq} {refusal.reason} {refusal.detail}".rstrip()
        self._plan.decisions.append(Decision(Action.REFUSE, seq, refusal.reason, refusal.detail))

    def add(self, seq: Sequence, refusal: Refusal) -> bool:
        """`seq` does not enter in this plan; whether it will never."""
        plan = self._plan
        count = self._counts[seq] = self._counts.get(seq, 0) + 1
        if count > MAX_REFUSALS_OF_ONE:
            problem = (
                f"asked for it {count} times in one plan, refused with {refusal.reason} {refusal.detail}"
            )
            raise self._policies.broken("scheduler", plan.step, problem, seq)
        reason, detail, verdict = refusal
        if verdict is not Verdict.WAIT and (seq.deferred or seq.state is not SequenceState.WAITING):
            problem = "may not defer or refuse for good who ran already, or was deferred before"
            raise self._policies.broken("admission", plan.step, problem, seq)
        self._last_words = f"{seq} {reason} {detail}".rstrip()
        action, policy = Action.REFUSE, ""
        if verdict is not Verdict.WAIT:
            action = Action.DEFER if verdict is Verdict.DEFER else Action.REJECT
            policy = self._policies.name("admission")
            del self._counts[seq]
        else:
            self._last = seq
            self._not_admitted = self._last_words if refusal is self._answer else ""
        plan.decisions.append(Decision(action, seq, reason, detail, policy=policy))
        if verdict is Verdict.DEFER:
            self._line.defer(seq)
            plan.deferred.append(seq)
        return verdict is Verdict.REFUSE

    def entered(self, seq: Sequence) -> None:
        """`seq` runs after all."""
        self._counts.pop(seq, None)
        if self._last is seq:
            self._last = None

    def stop(self, reason: Reason, detail: str = "") -> None:
        """The reason of all that were not refused one by one; the first that is stated counts."""
        rest = self._line.num_queued - len(self._counts)
        if rest > 0 and not self._stopped:
            self._stopped = True
            self._plan.decisions.append(Decision(Action.STOP, None, reason, detail, num_tokens=rest))

    def stall(self, *, anybody_runs: bool) -> str:
        """The step of this plan, which policy keeps it from doing anything, and how."""
        name, waits = self._policies.name, self._plan.wake_at is not None
        kind = "admission"
        if self._not_grown:
            what = f"let in who cannot grow under preemption={name('preemption')}: {self._not_grown}"
        elif self._not_admitted and not (anybody_runs or waits):
            what = f"lets nobody in although nobody runs: {self._not_admitted}"
        else:
            kind = "scheduler"
            what = (
                "asks to wait for ever" if waits else "schedules nothing and names no time to be asked again"
            )
            what += f"; refused last: {self._last_words}" if self._last_words else ""
        return f"step {self._plan.step}: {kind}={name(kind)} {what}"

    def explain_the_rest(self, token_budget_left: int, num_free_seats: int) -> None:
        """State the reason of those whom the scheduler passed over without a word."""
        if self._stopped or self._line.num_queued <= len(self._counts):
            return
        if self._last is not None:
            self.stop(Reason.HEAD_OF_LINE, self._last.id)
        elif self._plan.preempted:
            self.stop(Reason.AFTER_PREEMPTION)
        elif token_budget_left < 1:
            self.stop(Reason.NO_TOKEN_BUDGET)
        elif num_free_seats < 1:
            self.stop(Reason.MAX_NUM_SEQS)
        else:
            self.stop(Reason.POLICY, f"scheduler={self._policies.name('scheduler')} passed it over")
