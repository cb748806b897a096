"""The only hand that changes sequences while a step is planned: seats, budget, blocks, victims."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvengine.core.decision import Action, Decision
from kvengine.core.errors import PolicyError
from kvengine.core.limits import EngineLimits
from kvengine.core.plan import ScheduledRow, StepPlan
from kvengine.core.reasons import FinishReason, Reason, Refusal
from kvengine.core.sequence import Sequence, SequenceState
from kvengine.engine.blame import blamed
from kvengine.engine.memory import Memory
from kvengine.engine.seats import Seats
from kvengine.kv.host_pool import SwapPool
from kvengine.policies import Admission, Allocator, Eviction, Mechanism, Preemption, Queue, Scheduler, Victim

WAITING_STATES = (SequenceState.WAITING, SequenceState.PREEMPTED, SequenceState.SWAPPED)


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
        eviction: Eviction | None = None,
        host_pool: SwapPool | None = None,
    ) -> None:
        self.limits = limits
        self.allocator = allocator
        self.seats = Seats(limits.max_num_seqs)
        self.memory = Memory(allocator, host_pool or SwapPool(0))
        self.scheduler = scheduler
        self.waiting = queue
        self.now = 0
        self.token_budget_left = 0
        self._admission = admission
        self._victim = victim
        self._preemption = preemption
        self._policies = (scheduler, queue, admission, victim, preemption, allocator, eviction)
        self._plan = StepPlan(step=0, now_ns=0)
        self._next_step = 0
        self._inbox: list[Callable[[], None]] = []
        self._aborted: list[Sequence] = []

    # ---- what the engine calls

    def enqueue(self, seq: Sequence) -> None:
        """Let `seq` wait from the next plan on."""
        self._inbox.append(lambda: self.waiting.push(seq))

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child` go on from the computed tokens of `parent`, or wait if that does not run or seats are short."""
        self._inbox.append(lambda: self._fork_or_wait(parent, child))

    def abort(self, seq: Sequence) -> None:
        """End `seq` at the start of the next plan, wherever it is then."""
        self._inbox.append(lambda: self._abort(seq))

    def plan(self, now: int) -> StepPlan:
        """The next step; PolicyError, naming the policy, when one of them raises or breaks its contract."""
        self.now = now
        self.token_budget_left = self.limits.max_num_batched_tokens
        self._plan = plan = StepPlan(step=self._next_step, now_ns=now)
        self.memory.begin_plan(plan)
        inbox, self._inbox = self._inbox, []
        try:
            for message in inbox:
                message()
            self.scheduler.schedule(self)
        except PolicyError:
            raise
        except Exception as error:
            raise self.blame(error, self.scheduler) or error from error
        self.memory.finish_plan()
        if not plan.is_idle:
            self._next_step += 1
        return plan

    def blame(self, error: Exception, default: object | None = None) -> PolicyError | None:
        """`error` as one of the policy in whose code it was raised, or else of `default`, if there is one."""
        return blamed(error, self._policies, self._plan.step, default)

    def take_aborted(self) -> list[Sequence]:
        """The sequences that were aborted since the last call."""
        aborted, self._aborted = self._aborted, []
        return aborted

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End a running sequence: free its blocks, or hold them if the scheduler keeps finished rows."""
        seq.finish_reason = reason
        seq.state = SequenceState.FINISHED
        self.seats.leave(seq)
        if self.scheduler.holds_finished:
            self.seats.held.append(seq)
        else:
            self.memory.free(seq)

    def fork_choices(self, leader: Sequence, forks: tuple[Sequence, ...]) -> None:
        """The prompt of `leader` is computed: `forks` take the seats kept for them, its other siblings wait."""
        siblings = self.seats.give_to_siblings(leader)
        for child in forks:
            child.times.admitted_ns = leader.times.admitted_ns
            self._start_fork(leader, child)
        for child in siblings[len(forks) :]:
            self.enqueue(child)

    def release_held(self) -> list[Sequence]:
        """Free all held rows: their batch has drained."""
        released, self.seats.held = self.seats.held, []
        for seq in released:
            self.memory.free(seq)
        return released

    @property
    def has_work(self) -> bool:
        """Whether a message, a running sequence or a held row waits for the next plan."""
        return bool(self._inbox or self.seats.running or self.held)

    @property
    def num_running(self) -> int:
        return len(self.seats.running)

    def check_integrity(self, *, thorough: bool = True) -> None:
        """Raise AssertionError unless every block is accounted for by the live sequences."""
        self.memory.check_integrity([*self.seats.running, *self.held], self.waiting, thorough=thorough)

    # ---- what a policy sees (the contract is policies.SchedulingView)

    @property
    def running(self) -> Iterator[Sequence]:
        return iter(self.seats)

    @property
    def held(self) -> list[Sequence]:
        return self.seats.held

    @property
    def num_free_blocks(self) -> int:
        return self.allocator.num_free_blocks

    @property
    def num_promised_blocks(self) -> int:
        needed = self.allocator.blocks_needed
        return sum(needed(seq, seq.num_tokens) for seq in self.seats.running if seq.is_prefilling)

    def uncomputed(self, seq: Sequence) -> int:
        return len(seq.token_ids) - self.memory.num_computed(seq) - seq.num_scheduled_tokens

    def blocks_needed(self, seq: Sequence, num_tokens: int) -> int:
        return self.allocator.blocks_needed(seq, num_tokens)

    def schedule(self, seq: Sequence, max_tokens: int) -> int:
        if seq.state is not SequenceState.RUNNING:
            raise self._broken(self.scheduler, f"scheduled {seq}, which does not run")
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

    def admit(self, seq: Sequence, max_tokens: int | None = None) -> int:
        if seq.state not in WAITING_STATES:
            raise self._broken(self.scheduler, f"admitted {seq}, which does not wait")
        start = self.memory.num_computed(seq)
        uncomputed = len(seq.token_ids) - start
        count = min(uncomputed, self.token_budget_left, uncomputed if max_tokens is None else max_tokens)
        refusal = self._refuses(seq, count, uncomputed)
        if refusal is None:
            free = self.num_free_blocks
            refusal = self.memory.enter(seq, start + count)
        if refusal is not None:
            self._record(Decision(Action.REFUSE, seq, refusal.reason, refusal.detail))
            return 0
        action = Action.ADMIT if seq.state is SequenceState.WAITING else Action.RESUME
        self.waiting.remove(seq)
        self.seats.take(seq, self.now)
        self._add_row(seq, count)
        taken = free - self.num_free_blocks
        self._record(Decision(action, seq, "", "", taken, count, free, start))
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
        if moment_ns > self.now:  # else it is no moment to wait for: an engine that slept for it would spin
            self._plan.wake_at = min(moment_ns, self._plan.wake_at or moment_ns)

    # ---- inside

    def _refuses(self, seq: Sequence, count: int, uncomputed: int) -> Refusal | None:
        """Why `seq` may not enter with `count` tokens, blocks apart."""
        if self._plan.preempted:
            return Refusal(Reason.AFTER_PREEMPTION)
        if self.seats.wanted(seq) > self.seats.num_free:
            return Refusal(Reason.MAX_NUM_SEQS)
        if count < (1 if self.scheduler.chunks else uncomputed):
            return Refusal(Reason.NO_TOKEN_BUDGET, f"{uncomputed} needed, {count} allowed")
        return self._admission.refuses(seq, self)

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
        """Get slots for `seq` up to token `end`, preempting as needed; False when `seq` itself gave way."""
        while True:
            refusal = self.memory.grow(seq, end)
            if refusal is None:
                return True
            victim = self._choose_victim(seq)
            if victim is None:
                if self._plan.preempted:
                    return False  # what this plan still has to copy may keep blocks until its step is over
                if not any(seq.block_table.blocks for seq in self.held):
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
        candidates = self.seats.all_but_the_oldest()
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
        if victim.num_scheduled_tokens:
            plan.rows = [row for row in plan.rows if row.seq is not victim]
            self.token_budget_left += victim.num_scheduled_tokens
            victim.num_scheduled_tokens = 0
        mechanism = self._preemption.mechanism(victim)
        if mechanism not in tuple(Mechanism):
            raise self._broken(self._preemption, f"answered {mechanism!r}, which is no Mechanism")
        swapped, refusal = self.memory.give_way(victim, swap=mechanism == Mechanism.SWAP)
        if refusal is not None:
            self._record(Decision(Action.REFUSE, victim, refusal.reason, refusal.detail))
        victim.num_preemptions += 1
        victim.state = SequenceState.SWAPPED if swapped else SequenceState.PREEMPTED
        self.seats.leave(victim)
        self.waiting.push(victim)
        plan.preempted.append(victim)
        freed = self.num_free_blocks - free
        action = Action.SWAP_OUT if swapped else Action.PREEMPT
        self._record(Decision(action, victim, Reason.PREEMPTED_FOR, needy.id, freed, lost, free))

    def _free_one_held(self) -> None:
        """A finished row of a static batch gives its blocks to the last one running; its seat stays taken."""
        richest = max(self.held, key=lambda seq: len(seq.block_table.blocks))
        self.memory.free(richest)
        richest.num_computed_tokens = 0

    def _fork_or_wait(self, parent: Sequence, child: Sequence) -> None:
        if child.state is SequenceState.FINISHED:
            return  # aborted before it began
        if parent.state is SequenceState.RUNNING and self.seats.wanted(child) <= self.seats.num_free:
            self._start_fork(parent, child)
        else:
            self.waiting.push(child)

    def _start_fork(self, parent: Sequence, child: Sequence) -> None:
        self.memory.fork(parent, child)
        self.seats.take(child, self.now)
        num_blocks, computed = len(child.block_table.blocks), child.num_computed_tokens
        free = self.num_free_blocks
        self._record(Decision(Action.FORK, child, "", parent.id, num_blocks, computed, free, computed))

    def _abort(self, seq: Sequence) -> None:
        if seq in self.held:  # it keeps its row until the batch drains, but nobody gets its answer
            seq.finish_reason = FinishReason.ABORT
            self._aborted.append(seq)
        if seq.state is SequenceState.FINISHED:
            return
        free = self.num_free_blocks
        freed = 0
        if seq.state is SequenceState.RUNNING:
            self.seats.leave(seq)
            freed = self.memory.free(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)
            self.memory.drop_host(seq)
        seq.state = SequenceState.FINISHED
        seq.finish_reason = FinishReason.ABORT
        self._aborted.append(seq)
        self._record(Decision(Action.ABORT, seq, num_blocks=freed, num_free_before=free))

    def _record(self, decision: Decision) -> None:
        self._plan.decisions.append(decision)

    def _broken(self, policy: object, what: str) -> PolicyError:
        return PolicyError(f"{type(policy).__name__}, step {self._plan.step}: {what}")
