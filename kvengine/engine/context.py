"""The only hand that changes sequences while a step is planned: seats, budget, blocks, victims."""

from __future__ import annotations

from collections.abc import Callable

from kvengine.core.decision import Action, Decision
from kvengine.core.errors import PolicyError
from kvengine.core.limits import EngineLimits
from kvengine.core.plan import ScheduledRow, StepPlan
from kvengine.core.reasons import FinishReason, Reason, Refusal
from kvengine.core.sequence import Sequence, SequenceState
from kvengine.engine.forks import Forks
from kvengine.engine.memory import Memory
from kvengine.engine.policy_set import PolicySet
from kvengine.engine.preemptor import Preemptor
from kvengine.engine.refusals import Refusals
from kvengine.engine.seats import Seats
from kvengine.engine.view import EngineView
from kvengine.engine.waiting import WaitingLine
from kvengine.kv.host_pool import SwapPool


class SchedulingContext(EngineView):
    """Plans a step by asking the scheduler, and keeps what every policy must keep.

    Limits hold whatever a policy asks, a refused request changes nothing, and work ends (docs/scheduling.md: why).
    """

    def __init__(
        self, *, limits: EngineLimits, policies: PolicySet, host_pool: SwapPool | None = None
    ) -> None:
        super().__init__(
            limits=limits,
            allocator=policies.allocator,
            seats=Seats(limits.max_num_seqs),
            memory=Memory(policies.allocator, host_pool or SwapPool(0)),
            line=WaitingLine(policies),
        )
        self.policies = policies
        self.scheduler = policies.scheduler
        self.num_advances = 0
        """How often a sequence got further than it ever was, or ended."""
        self.refusals = Refusals(self.line, policies)
        self._forks = Forks(self.seats, self.memory, self.line)
        self._preemptor = Preemptor(seats=self.seats, memory=self.memory, line=self.line, policies=policies)
        self._plan = StepPlan(step=0, now_ns=0)
        self._next_step = 0
        self._inbox: list[Callable[[], None]] = []
        self.aborted: list[Sequence] = []
        """Aborted, and not yet taken note of."""
        self._looked_at: Sequence | None = None
        self._closed = False
        """Whether somebody was preempted in this plan so that nobody may enter in it ..."""
        self._beneficiary: Sequence | None = None
        """... but who a scheduler preempted for."""

    # ---- what the engine calls

    def enqueue(self, seq: Sequence) -> None:
        """Let `seq` wait from the next plan on."""
        self._inbox.append(lambda: self.line.push(seq))

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child` go on from the computed tokens of `parent`, or wait if that does not run or seats are short."""
        self._inbox.append(lambda: self._forks.branch(parent, child))

    def abort(self, seq: Sequence) -> None:
        """End `seq` at the start of the next plan, wherever it is then."""
        self._inbox.append(lambda: self._abort(seq))

    def plan(self, now: int) -> StepPlan:
        """The next step; PolicyError, naming the policy, when one of them raises or breaks its contract."""
        self.now = now
        self.token_budget_left = self.limits.max_num_batched_tokens
        self._plan = plan = StepPlan(step=self._next_step, now_ns=now)
        self._looked_at, self._closed, self._beneficiary = None, False, None
        for part in (self.memory, self.line, self._preemptor, self.refusals, self._forks):
            part.begin_plan(plan)
        inbox, self._inbox = self._inbox, []
        try:
            for message in inbox:
                message()
            self.line.check()
            self.line.refill()
            self.scheduler.schedule(self)
            self._looked_at = None
            self.line.check()
            self.refusals.explain_the_rest(self.token_budget_left, self.num_free_seats)
            self.memory.finish_plan()
        except PolicyError:
            raise
        except Exception as error:
            raise self.blame(error, "scheduler") or error from error
        if not plan.is_idle:
            self._next_step += 1
        return plan

    def blame(self, error: Exception, default: str | None = None) -> PolicyError | None:
        """`error` as one of the policy in whose code it was raised, or else of the kind `default`, if any."""
        return self.policies.blamed(error, self._plan.step, self._looked_at, default)

    def advanced(self, seq: Sequence, num_tokens: int) -> None:
        """`num_tokens` more tokens of `seq`, which runs, have their KV in the pool."""
        self.memory.computed(seq, num_tokens)
        if seq in self.seats.prefilling and not seq.is_prefilling:
            del self.seats.prefilling[seq]
        if seq.num_computed_tokens > seq.num_computed_peak:
            self.num_advances += 1

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End a running sequence: free its blocks, or hold them if the scheduler keeps finished rows."""
        seq.finish_reason = reason
        seq.state = SequenceState.FINISHED
        self.num_advances += 1
        self.seats.leave(seq)
        self.policies.predictor.finished(seq)
        if self.scheduler.holds_finished:
            self.seats.held.append(seq)
        else:
            self.memory.free(seq)

    def fork_choices(self, leader: Sequence, forks: tuple[Sequence, ...]) -> None:
        """The prompt of `leader` is computed: `forks` take the seats kept for them, its other siblings wait."""
        for child in self._forks.choices(leader, forks):
            self.enqueue(child)

    def release_held(self) -> list[Sequence]:
        """Free all held rows: their batch has drained."""
        released, self.seats.held = self.seats.held, []
        for seq in released:
            self.memory.free(seq)
        return released

    def committed(self, plan: StepPlan) -> None:
        """The results of `plan` are taken: let those policies know that count tokens."""
        self.waiting.committed(plan)
        self.policies.admission.committed(plan)

    @property
    def has_work(self) -> bool:
        """Whether a message, a running sequence or a held row waits for the next plan."""
        return bool(self._inbox or self.seats.running or self.held)

    @property
    def num_running(self) -> int:
        return len(self.seats.running)

    def check_integrity(self, *, thorough: bool = True) -> None:
        """Raise AssertionError unless every block is accounted for by the live sequences."""
        self.memory.check_integrity([*self.seats.running, *self.held], self.line, thorough=thorough)

    # ---- what a policy sees (the contract is policies.SchedulingView)

    def schedule(self, seq: Sequence, max_tokens: int) -> int:
        if seq.state is not SequenceState.RUNNING:
            raise self._broken(f"scheduled {seq}, which does not run")
        uncomputed = len(seq.token_ids) - seq.num_computed_tokens - seq.num_scheduled_tokens
        count = min(max_tokens, uncomputed, self.token_budget_left)
        if not self.scheduler.chunks:  # all or nothing, however little was asked for
            count = uncomputed if max_tokens > 0 and uncomputed <= self.token_budget_left else 0
        if count <= 0:
            return 0
        end = seq.num_computed_tokens + seq.num_scheduled_tokens + count
        if end > seq.block_table.num_slots and not self._grow(seq, end):
            return 0
        self._add_row(seq, count)
        return count

    def schedule_decodes(self) -> None:
        rows, left, running = self._plan.rows, self.token_budget_left, SequenceState.RUNNING
        for seq in list(self.seats.running):
            start = seq.num_computed_tokens
            if len(seq.token_ids) - start != 1 or seq.num_scheduled_tokens or seq.state is not running:
                continue
            if left < 1:
                break
            if start >= seq.block_table.num_slots:
                self.token_budget_left = left
                grown = self._grow(seq, start + 1)
                left = self.token_budget_left
                if not grown:
                    continue
            forks = self.seats.kept_for(seq) if seq.siblings else ()
            rows.append(ScheduledRow(seq, start, 1, True, forks))
            seq.num_scheduled_tokens = 1
            left -= 1
        self.token_budget_left = left

    def schedule_running(self) -> None:
        self.schedule_decodes()
        for seq in self.prefilling:
            self.schedule(seq, self.token_budget_left)

    def admit(self, seq: Sequence, max_tokens: int | None = None) -> int:
        if seq not in self.line:
            self.line.check_named(seq)
            raise self._broken(f"admitted {seq}, which does not wait")
        self._looked_at = seq
        start = self.memory.num_computed(seq)
        uncomputed = len(seq.token_ids) - start
        count = min(uncomputed, self.token_budget_left, uncomputed if max_tokens is None else max_tokens)
        refusal = self._refuses(seq, count, uncomputed)
        free = self.allocator.num_free_blocks
        if refusal is None:
            refusal = self.memory.enter(seq, start + count)
        if refusal is not None:
            if self.refusals.add(seq, refusal):
                self._end_waiting(seq, FinishReason.REFUSED)
                self._plan.refused.append(seq)
            return 0
        after = self.allocator.num_free_blocks
        first = seq.state is SequenceState.WAITING
        self.line.remove(seq)
        self.refusals.entered(seq)
        self.token_budget_left += self._preemptor.make_seats(seq)
        self.seats.take(seq, self.now)
        if count < uncomputed:
            self.seats.prefilling[seq] = None
        self._add_row(seq, count)
        if first:
            self.waiting.admitted(seq, uncomputed)
        action = Action.ADMIT if first else Action.RESUME
        self._record(Decision(action, seq, "", "", free - after, count, free, start, after))
        return count

    def refuse(self, seq: Sequence, reason: Reason, detail: str = "") -> None:
        if not self.line.queued(seq):
            self.line.check_named(seq)
            raise self._broken(f"refused {seq}, which does not wait")
        self.refusals.add(seq, Refusal(reason, detail))

    def preempt(self, seq: Sequence, reason: Reason, beneficiary: Sequence) -> bool:
        if seq.state is not SequenceState.RUNNING:
            raise self._broken(f"preempted {seq}, which does not run")
        if not self._preemptor.preempts or len(seq.token_ids) <= seq.num_tokens_at_entry:
            return False
        self.token_budget_left += self._preemptor.preempt(seq, beneficiary, reason, "scheduler")
        allowed = not self._closed or beneficiary is self._beneficiary
        self._closed, self._beneficiary = True, beneficiary if allowed else None
        return True

    def idle_row(self, seq: Sequence) -> bool:
        if seq not in self.held:
            raise self._broken(f"asked for an idle row of {seq}, which is not held")
        if self.token_budget_left < 1:
            return False
        self.token_budget_left -= 1
        self._plan.idle_rows.append(seq)
        return True

    def pad(self, num_tokens: int) -> None:
        padding = min(max(num_tokens, 0), self.token_budget_left)
        self.token_budget_left -= padding
        self._plan.padding_tokens += padding

    def stop(self, reason: Reason, detail: str = "") -> None:
        self.refusals.stop(reason, detail)

    def wake_at(self, moment_ns: int) -> None:
        if moment_ns > self.now:  # else it is no moment to wait for: an engine that slept for it would spin
            self._plan.wake_at = min(moment_ns, self._plan.wake_at or moment_ns)

    # ---- inside

    def _refuses(self, seq: Sequence, count: int, uncomputed: int) -> Refusal | None:
        """Why `seq` may not enter with `count` tokens, blocks apart."""
        if (self._closed and seq is not self._beneficiary) or seq in self._plan.preempted:
            return Refusal(Reason.AFTER_PREEMPTION)
        seats = self.seats
        if seats.wanted(seq) > seats.num_free and not (self._preemptor.preempts and seats.could_seat(seq)):
            return Refusal(Reason.MAX_NUM_SEQS)
        if count < (1 if self.scheduler.chunks else uncomputed):
            return Refusal(Reason.NO_TOKEN_BUDGET, f"{uncomputed} needed, {count} allowed")
        return self.refusals.of_admission(seq, self)

    def _add_row(self, seq: Sequence, count: int) -> None:
        """Schedule `count` more tokens of `seq`, in the row it has in this plan if it has one."""
        start = seq.num_computed_tokens + seq.num_scheduled_tokens
        samples = start + count == len(seq.token_ids)
        forks = self.seats.kept_for(seq) if samples else ()
        if seq.num_scheduled_tokens:
            row = next(row for row in self._plan.rows if row.seq is seq)
            row.num_tokens += count
            row.samples, row.forks = samples, forks
        else:
            self._plan.rows.append(ScheduledRow(seq, start, count, samples, forks))
        seq.num_scheduled_tokens += count
        self.token_budget_left -= count

    def _grow(self, seq: Sequence, end: int) -> bool:
        """Get slots for `seq` up to token `end`, preempting as needed; False when that is not to be now."""
        self._looked_at = seq
        while (refusal := self.memory.grow(seq, end)) is not None:
            if not self._preemptor.preempts:
                self.refusals.add_growth(seq, refusal)
                return False
            victim = self._preemptor.victim_for(seq)
            if victim is not None:
                self.token_budget_left += self._preemptor.preempt(victim, seq, Reason.PREEMPTED_FOR, "victim")
                self.policies.admission.preempted()
                self._closed, self._beneficiary = True, None
                if victim is seq:
                    return False
            elif self._plan.preempted:
                return False  # what this plan still has to copy may keep blocks until its step is over
            elif any(held.block_table.blocks for held in self.held):
                self._free_one_held()
            else:
                problem = f"refuses {end} slots to who runs alone: {refusal.reason} {refusal.detail}"
                raise self.policies.broken("allocator", self._plan.step, problem, seq)
        return True

    def _free_one_held(self) -> None:
        """A finished row of a static batch gives its blocks to the last one running; its seat stays taken."""
        richest = max(self.held, key=lambda seq: len(seq.block_table.blocks))
        self.memory.free(richest)
        richest.num_computed_tokens = 0

    def _abort(self, seq: Sequence) -> None:
        if seq in self.held:  # it keeps its row until the batch drains, but nobody gets its answer
            seq.finish_reason = FinishReason.ABORT
            self.aborted.append(seq)
        if seq.state is SequenceState.FINISHED:
            return
        free, freed = self.num_free_blocks, 0
        if seq.state is SequenceState.RUNNING:
            self.seats.leave(seq)
            freed = self.memory.free(seq)
        self._end_waiting(seq, FinishReason.ABORT)
        self.aborted.append(seq)
        after = self.num_free_blocks
        self._record(
            Decision(Action.ABORT, seq, num_blocks=freed, num_free_before=free, num_free_after=after)
        )

    def _end_waiting(self, seq: Sequence, reason: FinishReason) -> None:
        """`seq`, which does not run, ends."""
        if seq in self.line:
            self.line.remove(seq)
            self.memory.drop_host(seq)
        seq.state = SequenceState.FINISHED
        seq.finish_reason = reason
        self.num_advances += 1

    def _record(self, decision: Decision) -> None:
        self._plan.decisions.append(decision)

    def _broken(self, what: str) -> PolicyError:
        return self.policies.broken("scheduler", self._plan.step, what)
