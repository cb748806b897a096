"""The engine: add requests, step, get outputs."""

from __future__ import annotations

from dataclasses import replace

from kvengine.core.errors import EngineStalledError, PolicyError, RequestError
from kvengine.core.plan import Idle, RequestOutput, StepPlan, StepResult
from kvengine.core.reasons import FinishReason
from kvengine.core.request import Request
from kvengine.core.sequence import Sequence
from kvengine.engine.clock import Clock
from kvengine.engine.commit import commit
from kvengine.engine.context import SchedulingContext
from kvengine.engine.intake import Intake
from kvengine.engine.recording import NullRecorder, PoolState, Recorder
from kvengine.policies import Executor

MAX_EMPTY_STEPS = 1000
"""So many steps in a row that decide but compute nothing are taken for a policy going round in circles."""

MAX_IDLE_PLANS = 10_000
"""So are so many plans in a row that schedule nothing and ask to wait, while nothing arrives."""


class Engine:
    """One engine: a context, an executor and a clock. Two of them in a process share nothing."""

    def __init__(
        self,
        *,
        context: SchedulingContext,
        executor: Executor,
        intake: Intake,
        clock: Clock,
        recorder: Recorder | None = None,
        check_every_step: bool = False,
    ) -> None:
        self.context = context
        self.executor = executor
        self.clock = clock
        self.recorder: Recorder = recorder or NullRecorder()
        self._intake = intake
        self._live: dict[str, set[Sequence]] = {}
        self._num_empty_steps = self._num_idle_plans = 0
        self._aborted_in_step = False
        self._num_advances = self._num_steps_without_advance = 0
        self._check_every_step = check_every_step

    def add_request(self, request: Request) -> None:
        """Let `request` wait; RequestError if its id is in use or it can never be served."""
        self._num_idle_plans = 0
        for seq in self._accept(request):
            self.context.enqueue(seq)

    def fork(self, request: Request) -> None:
        """Branch a live request: let `request` go on from all that its `fork_of` has so far.

        The prompt of the branch is the tokens of that request's first choice and then its own
        `prompt_token_ids` (none is allowed: then only the draws differ); salt and tenant are those of `fork_of`.
        KV that is computed is shared, not computed again. RequestError when nothing of that id is live, when
        the allocator does not share blocks, and for whatever `add_request` refuses.
        """
        try:
            parent = self._parent_of(request)
        except RequestError as error:
            self.recorder.rejected(request, error, self.clock.now())
            raise
        source = parent.request
        tokens = (*parent.token_ids, *request.prompt_token_ids)
        branch = replace(request, prompt_token_ids=tokens, cache_salt=source.cache_salt, tenant=source.tenant)
        for child in self._accept(branch):
            self.context.fork(parent, child)

    def abort(self, request_id: str) -> None:
        """End all sequences of a request before the next step; nothing if it is not live. The id is free.

        Called while a step is executed, what that step gives the request is dropped.
        """
        self._aborted_in_step = True
        for seq in sorted(self._live.pop(request_id, ()), key=lambda seq: seq.order):
            self.context.abort(seq)

    @property
    def has_unfinished(self) -> bool:
        """Whether any accepted request is unfinished, or an abort has yet to take effect."""
        return bool(self._live) or self.context.has_work

    @property
    def num_unfinished(self) -> int:
        """Accepted requests that are unfinished."""
        return len(self._live)

    def live_sequences(self) -> list[Sequence]:
        """All sequences that are not delivered yet, in order of arrival."""
        return sorted((seq for group in self._live.values() for seq in group), key=lambda seq: seq.order)

    def step(self) -> list[RequestOutput] | Idle:
        """Advance every scheduled sequence by one forward pass."""
        self._aborted_in_step = False
        plan = self.context.plan(self.clock.now())
        self._note_aborted()
        if plan.is_idle:
            self.context.check_integrity(thorough=self._check_every_step)
            self.recorder.idle(plan)
            self._count_idle_plan()
            return Idle(plan.wake_at)
        self._num_idle_plans = 0
        result = self._execute(plan)
        self.clock.advance(result.duration_ns)
        end = self.clock.now()
        outputs = self._commit(plan, result, end)
        if self._aborted_in_step:
            outputs = self._without_late(outputs, end)
        self.recorder.step(plan, result, self._pool_state(), end)
        self._forget_finished(outputs, end)
        self._watch_progress(plan)
        if self._check_every_step:
            self.context.check_integrity()
        return outputs

    def stalled(self) -> EngineStalledError:
        """The error that ends a run in which nothing can happen any more, saying who waits."""
        context = self.context
        running = ", ".join(map(repr, list(context.running)[:3])) or "nobody"
        waiting = next(iter(context.line), None)
        head = f", first {waiting}" if waiting is not None else ""
        why = context.refusals.stall(anybody_runs=context.num_running > 0)
        return EngineStalledError(
            f"no progress, {why}; {len(context.line)} wait{head}, running: {running}, "
            f"{context.num_free_blocks} of {context.allocator.num_blocks} blocks free"
        )

    def close(self) -> None:
        """Free what the executor holds (model, caches)."""
        self.executor.close()

    def _count_idle_plan(self) -> None:
        """EngineStalledError when a policy keeps asking to wait and nothing comes of it."""
        self._num_idle_plans += 1
        if self._num_idle_plans > MAX_IDLE_PLANS and self._live:
            raise self.stalled()

    def _watch_progress(self, plan: StepPlan) -> None:
        """PolicyError when step after step computes only what was computed before.

        The longest that a sound scheduler can need is to compute one sequence again, a token a step.
        """
        advances = self.context.num_advances
        self._num_steps_without_advance += 1
        if advances != self._num_advances:
            self._num_advances, self._num_steps_without_advance = advances, 0
        elif self._num_steps_without_advance > MAX_EMPTY_STEPS + self.context.limits.max_model_len:
            what = f"nobody got further in {self._num_steps_without_advance} steps"
            oldest = next(self.context.running, None)
            raise self.context.policies.broken("scheduler", plan.step, what, oldest)

    def _execute(self, plan: StepPlan) -> StepResult:
        """The executor's result, checked: one list per row, an id for each sequence of a row that samples."""
        if not (plan.num_tokens or plan.swap_outs or plan.swap_ins or plan.copies):
            self._num_empty_steps += not (plan.refused or plan.deferred)  # which happens to each but once
            if self._num_empty_steps > MAX_EMPTY_STEPS:
                raise self.stalled()
            return StepResult([], 0)
        self._num_empty_steps = 0
        result = self.executor.execute(plan)
        wrong = [
            row.seq.id
            for row, ids in zip(plan.rows, result.token_ids, strict=True)
            if len(ids) != (1 + len(row.forks) if row.samples else 0)
        ]
        if wrong:
            raise PolicyError(
                f"{type(self.executor).__name__}, step {plan.step}: ids missing or surplus for {wrong}"
            )
        return result

    def _commit(self, plan: StepPlan, result: StepResult, end: int) -> list[RequestOutput]:
        """What `commit` delivers; PolicyError, naming it, when an allocator or an eviction policy raises in it."""
        try:
            return commit(self.context, plan, result, end)
        except PolicyError:
            raise
        except Exception as error:
            blamed = self.context.blame(error)
            if blamed is None:
                raise
            raise blamed from error

    def _pool_state(self) -> PoolState:
        context = self.context
        memory, allocator = context.memory, context.allocator
        return PoolState(
            context.num_running,
            len(context.held),
            len(context.line),
            allocator.num_free_blocks,
            allocator.num_cached_blocks,
            allocator.num_saved_blocks,
            memory.num_slots_held,
            allocator.num_owned_slots,
            memory.host_pool.num_blocks - memory.host_pool.num_free,
        )

    def _accept(self, request: Request) -> list[Sequence]:
        """The sequences that are to be scheduled: all of a request, or, where blocks can be shared, the first
        choice, of which the others are forked when the prompt is computed. RequestError."""
        try:
            sequences = self._intake.sequences(request)
            if request.id in self._live:
                raise RequestError(request.id, "this id is in use by an unfinished request")
        except RequestError as error:
            self.recorder.rejected(request, error, self.clock.now())
            raise
        self._live[request.id] = set(sequences)
        if self.context.allocator.shares:
            sequences[0].siblings = sequences[1:]
            return sequences[:1]
        return sequences

    def _parent_of(self, request: Request) -> Sequence:
        """The first choice of the request that `request` branches off; RequestError."""
        if not self.context.allocator.shares:
            name = type(self.context.allocator).__name__
            problem = f"{name} does not share blocks, so nothing can be forked; take allocator=paged"
            raise RequestError(request.id, problem)
        if not self.context.policies.preemption.preempts:
            problem = "under preemption=never nobody reserved room for a branch; take preemption=recompute"
            raise RequestError(request.id, problem)
        live = self._live.get(request.fork_of or "", ())
        parent = next((seq for seq in live if seq.choice == 0 and seq.finish_reason is None), None)
        if parent is None:
            raise RequestError(request.id, f"fork_of={request.fork_of}: no live request has this id")
        return parent

    def _without_late(self, outputs: list[RequestOutput], now: int) -> list[RequestOutput]:
        """`outputs` less those of requests that were aborted while their step was executed."""
        wanted = []
        for output in outputs:
            seq = output.sequence
            if seq in self._live.get(output.request_id, ()):
                wanted.append(output)
            elif seq.finish_reason is not None:  # it ended in this very step, so no plan will end it
                seq.finish_reason = FinishReason.ABORT
                self.recorder.finished(seq, now)
        return wanted

    def _note_aborted(self) -> None:
        aborted, self.context.aborted = self.context.aborted, []
        for seq in aborted:
            seq.times.finished_ns = self.clock.now()
            self.recorder.finished(seq, self.clock.now())

    def _forget_finished(self, outputs: list[RequestOutput], now: int) -> None:
        for output in outputs:
            if output.finish_reason is None:
                continue
            self.recorder.finished(output.sequence, now)
            siblings = self._live.get(output.request_id)
            if siblings is not None:
                siblings.discard(output.sequence)
                if not siblings:
                    del self._live[output.request_id]
