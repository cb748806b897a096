"""The only hand that changes sequences while a step is planned: seats, budget, blocks, victims."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvengine.core.decision import Action, Decision
from kvengine.core.errors import PolicyError
from kvengine.core.limits import EngineLimits
from kvengine.core.plan import ScheduledRow, StepPlan
from kvengine.core.reasons import FinishReason, Reason, Refusal
from kvengine.core.sequence import Sequence, SequenceState
from kvengine.policies import Admission, Allocator, Preemption, Queue, Scheduler, Victim


class SchedulingContext:
    """Plans a step by asking the scheduler, and keeps what every policy must keep.

    Limits hold whatever a policy asks; a refused request changes nothing. Progress does not depend on the
    policies' goodwill: the oldest running sequence is never a victim, nobody is admitted in a step that
    preempted, and a request is accepted only if it fits an empty pool, so the oldest can always grow.
    """

    def __init__(
        self,
        *,
        limits: EngineLimits,
        allocator: Allocator,
        scheduler: Scheduler,
        queue: Queue,
        admission: Admission,
        victim: Victim,
        preemption: Preemption,
    ) -> None:
        self.limits = limits
        self.allocator = allocator
        self.scheduler = scheduler
        self.waiting = queue
        self.held: list[Sequence] = []
        self.now = 0
        self.token_budget_left = 0
        self.num_tokens_held = 0
        """Slots that hold the KV of a computed token, over all live sequences."""
        self._admission = admission
        self._victim = victim
        self._preemption = preemption
        self._running: dict[Sequence, None] = {}
        self._plan = StepPlan(step=0, now_ns=0)
        self._next_step = 0
        self._inbox: list[Callable[[], None]] = []
        self._aborted: list[Sequence] = []

    # ---- what the engine calls

    def enqueue(self, seq: Sequence) -> None:
        """Let `seq` wait from the next plan on."""
        self._inbox.append(lambda: self.waiting.push(seq))

    def abort(self, seq: Sequence) -> None:
        """End `seq` at the start of the next plan, wherever it is then."""
        self._inbox.append(lambda: self._abort(seq))

    def plan(self, now: int) -> StepPlan:
        """The next step; PolicyError, naming the policy, when one of them raises or breaks its contract."""
        self.now = now
        self.token_budget_left = self.limits.max_num_batched_tokens
        self._plan = plan = StepPlan(step=self._next_step, now_ns=now)
        inbox, self._inbox = self._inbox, []
        try:
            for message in inbox:
                message()
            self.scheduler.schedule(self)
        except PolicyError:
            raise
        except Exception as error:
            raise self._broken(self._raiser(error), f"raised {type(error).__name__}: {error}") from error
        if not plan.is_idle:
            self._next_step += 1
        return plan

    def take_aborted(self) -> list[Sequence]:
        """The sequences that were aborted since the last call."""
        aborted, self._aborted = self._aborted, []
        return aborted

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End a running sequence: free its blocks, or hold them if the scheduler keeps finished rows."""
        seq.finish_reason = reason
        seq.state = SequenceState.FINISHED
        del self._running[seq]
        if self.scheduler.holds_finished:
            self.held.append(seq)
        else:
            self._free(seq)

    def release_held(self) -> list[Sequence]:
        """Free all held rows: their batch has drained."""
        released, self.held = self.held, []
        for seq in released:
            self._free(seq)
        return released

    @property
    def has_work(self) -> bool:
        """Whether a message, a running sequence or a held row waits for the next plan."""
        return bool(self._inbox or self._running or self.held)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block is accounted for by the live sequences."""
        live = [*self._running, *self.held]
        self.allocator.check_integrity(live)
        held = sum(seq.num_computed_tokens for seq in live)
        assert held == self.num_tokens_held, f"{held} tokens are held, {self.num_tokens_held} counted"
        for seq in self.waiting:
            assert not seq.block_table.blocks, f"{seq} waits and owns blocks"

    # ---- what a policy sees (the contract is policies.SchedulingView)

    @property
    def running(self) -> Iterator[Sequence]:
        return (seq for seq in list(self._running) if seq.state is SequenceState.RUNNING)

    @property
    def num_free_blocks(self) -> int:
        return self.allocator.num_free_blocks

    @property
    def num_promised_blocks(self) -> int:
        needed = self.allocator.blocks_needed
        return sum(needed(seq, seq.num_tokens) for seq in self._running if seq.is_prefilling)

    def uncomputed(self, seq: Sequence) -> int:
        return len(seq.token_ids) - seq.num_computed_tokens - seq.num_scheduled_tokens

    def blocks_needed(self, seq: Sequence, num_tokens: int) -> int:
        return self.allocator.blocks_needed(seq, num_tokens)

    def schedule(self, seq: Sequence, max_tokens: int) -> int:
        if seq.state is not SequenceState.RUNNING:
            raise self._broken(self.scheduler, f"scheduled {seq}, which does not run")
        count = min(max_tokens, self.uncomputed(seq), self.token_budget_left)
        if not self.scheduler.chunks and count < self.uncomputed(seq):
            count = 0
        if count <= 0:
            return 0
        end = seq.num_computed_tokens + seq.num_scheduled_tokens + count
        if end > seq.block_table.num_slots and not self._grow(seq, end):
            return 0
        self._add_row(seq, count)
        return count

    def admit(self, seq: Sequence, max_tokens: int | None = None) -> int:
        if seq.state not in (SequenceState.WAITING, SequenceState.PREEMPTED):
            raise self._broken(self.scheduler, f"admitted {seq}, which does not wait")
        uncomputed = self.uncomputed(seq)
        count = min(uncomputed, self.token_budget_left, uncomputed if max_tokens is None else max_tokens)
        refusal = self._refuses(seq, count, uncomputed)
        if refusal is None:
            free = self.num_free_blocks
            refusal = self.allocator.allocate(seq, count)
        if refusal is not None:
            self._record(Decision(Action.REFUSE, seq, refusal.reason, refusal.detail))
            return 0
        action = Action.RESUME if seq.state is SequenceState.PREEMPTED else Action.ADMIT
        self.waiting.remove(seq)
        seq.state = SequenceState.RUNNING
        self._running[seq] = None
        if seq.times.admitted_ns is None:
            seq.times.admitted_ns = self.now
        self._add_row(seq, count)
        taken = free - self.num_free_blocks
        self._record(Decision(action, seq, num_blocks=taken, num_tokens=count, num_free_before=free))
        return count

    def idle_row(self, seq: Sequence) -> bool:
        if seq not in self.held:
            raise self._broken(self.scheduler, f"asked for an idle row of {seq}, which is not held")
        if self.token_budget_left < 1:
            return False
        self.token_budget_left -= 1
        self._plan.idle_rows.append(seq)
        return True

    def pad(self, num_tokens: int) -> None:
        padding = min(max(num_tokens, 0), self.token_budget_left)
        self.token_budget_left -= padding
        self._plan.padding_tokens += padding

    def stop(self, reason: Reason) -> None:
        if len(self.waiting):
            self._record(Decision(Action.STOP, None, reason, num_tokens=len(self.waiting)))

    def wake_at(self, moment_ns: int) -> None:
        if moment_ns <= self.now:
            return  # no moment to wait for: an engine that slept for it would spin
        if self._plan.wake_at is None or moment_ns < self._plan.wake_at:
            self._plan.wake_at = moment_ns

    # ---- inside

    def _refuses(self, seq: Sequence, count: int, uncomputed: int) -> Refusal | None:
        """Why `seq` may not enter with `count` tokens, blocks apart."""
        if self._plan.preempted:
            return Refusal(Reason.AFTER_PREEMPTION)
        if len(self._running) + len(self.held) >= self.limits.max_num_seqs:
            return Refusal(Reason.MAX_NUM_SEQS)
        if count < (1 if self.scheduler.chunks else uncomputed):
            return Refusal(Reason.NO_TOKEN_BUDGET, f"{uncomputed} needed, {count} allowed")
        return self._admission.refuses(seq, self)

    def _add_row(self, seq: Sequence, count: int) -> None:
        """Schedule `count` more tokens of `seq`, in the row it has in this plan if it has one."""
        start = seq.num_computed_tokens + seq.num_scheduled_tokens
        samples = start + count == len(seq.token_ids)
        if seq.num_scheduled_tokens:
            row = next(row for row in self._plan.rows if row.seq is seq)
            row.num_tokens += count
            row.samples = samples
        else:
            self._plan.rows.append(ScheduledRow(seq, start, count, samples))
        seq.num_scheduled_tokens += count
        self.token_budget_left -= count

    def _grow(self, seq: Sequence, end: int) -> bool:
        """Get slots for `seq` up to token `end`, preempting as needed; False when `seq` itself gave way."""
        while True:
            refusal = self.allocator.allocate(seq, end)
            if refusal is None:
                return True
            victim = self._choose_victim(seq)
            if victim is None:
                if not self.held:
                    raise PolicyError(
                        f"step {self._plan.step}: {seq} runs alone and its allocator refuses "
                        f"{end} slots: {refusal.reason} {refusal.detail}"
                    )
                self._free_one_held()
                continue
            self._preempt(victim, seq)
            if victim is seq:
                return False

    def _choose_victim(self, needy: Sequence) -> Sequence | None:
        """The victim policy's choice among all running but the oldest, None when there is nobody else."""
        protected = min(self._running, key=lambda seq: seq.order)
        candidates = [seq for seq in self._running if seq is not protected]
        if not candidates:
            return None
        victim = self._victim.choose(candidates, needy)
        if victim not in candidates:
            raise self._broken(self._victim, f"chose {victim}, which is not a candidate")
        return victim

    def _preempt(self, victim: Sequence, needy: Sequence) -> None:
        """Take `victim` out of the batch and of this plan, and let it wait again."""
        plan, free = self._plan, self.num_free_blocks
        lost = victim.num_computed_tokens
        self._preemption.mechanism(victim)  # recompute is the only one so far
        if victim.num_scheduled_tokens:
            plan.rows = [row for row in plan.rows if row.seq is not victim]
            self.token_budget_left += victim.num_scheduled_tokens
            victim.num_scheduled_tokens = 0
        freed = self._free(victim)
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        victim.state = SequenceState.PREEMPTED
        del self._running[victim]
        self.waiting.push(victim)
        plan.preempted.append(victim)
        self._record(Decision(Action.PREEMPT, victim, Reason.PREEMPTED_FOR, needy.id, freed, lost, free))

    def _free_one_held(self) -> None:
        """A finished row of a static batch gives its blocks to the last one running; its seat stays taken."""
        richest = max(self.held, key=lambda seq: len(seq.block_table.blocks))
        if not richest.block_table.blocks:
            raise PolicyError(f"step {self._plan.step}: held rows have no blocks left to give")
        self._free(richest)
        richest.num_computed_tokens = 0

    def _free(self, seq: Sequence) -> int:
        self.num_tokens_held -= seq.num_computed_tokens
        return self.allocator.free(seq)

    def _abort(self, seq: Sequence) -> None:
        if seq in self.held:  # it keeps its row until the batch drains, but nobody gets its answer
            seq.finish_reason = FinishReason.ABORT
            self._aborted.append(seq)
        if seq.state is SequenceState.FINISHED:
            return
        free = self.num_free_blocks
        freed = 0
        if seq.state is SequenceState.RUNNING:
            del self._running[seq]
            freed = self._free(seq)
        else:
            self.waiting.remove(seq)
        seq.state = SequenceState.FINISHED
        seq.finish_reason = FinishReason.ABORT
        self._aborted.append(seq)
        self._record(Decision(Action.ABORT, seq, num_blocks=freed, num_free_before=free))

    def _raiser(self, error: Exception) -> object:
        """The policy in whose code `error` was raised: the innermost of ours on its traceback."""
        policies = (
            self.scheduler, self.waiting, self._admission, self._victim, self._preemption, self.allocator
        )  # fmt: skip
        found: object = self.scheduler
        trace = error.__traceback__
        while trace is not None:
            inside = trace.tb_frame.f_locals.get("self")
            if any(inside is policy for policy in policies):
                found = inside
            trace = trace.tb_next
        return found

    def _record(self, decision: Decision) -> None:
        self._plan.decisions.append(decision)

    def _broken(self, policy: object, what: str) -> PolicyError:
        return PolicyError(f"{type(policy).__name__}, step {self._plan.step}: {what}")
