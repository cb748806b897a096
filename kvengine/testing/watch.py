"""Policies held against their contracts call by call: an allocator's account, a queue's order, what a step costs."""

from __future__ import annotations

import math
import sys
from types import FrameType
from typing import Any

from kvengine.core.reasons import Refusal
from kvengine.core.request import Request, SamplingParams
from kvengine.core.sequence import Sequence
from kvengine.policies import Predictor, Queue
from kvengine.testing.engines import TestEngine


class WatchedEngine(TestEngine):
    """Counts, beside the allocator, who holds what; AssertionError after the step in which the two differ."""

    __test__ = False

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._allocator: Any = self.engine.context.allocator
        self._faults: list[str] = []
        self._allocate = self._allocator.allocate
        self._allocator.allocate = self._watched_allocate

    def step(self) -> bool:
        worked = super().step()
        self._check_tables()
        self._ask_too_much()
        assert not self._faults, self._faults[0]
        return worked

    def _watched_allocate(self, seq: Sequence, num_tokens: int) -> Refusal | None:
        """`allocate`, held against what the allocator said before; faults wait for the end of the step, since
        an error in a plan is taken for one of whoever plans."""
        allocator, table = self._allocator, seq.block_table
        free, needed = allocator.num_free_blocks, allocator.blocks_needed(seq, num_tokens)
        before = list(table.blocks), table.num_slots
        refusal = self._allocate(seq, num_tokens)
        taken, after = free - allocator.num_free_blocks, (list(table.blocks), table.num_slots)
        if refusal is not None and (taken or before != after):
            self._faults.append(f"changes something though it refuses: {taken} blocks, {before} to {after}")
        if refusal is None and taken != needed:
            self._faults.append(f"counts wrong: blocks_needed said {needed}, allocate took {taken}")
        if refusal is None and not num_tokens <= table.num_slots <= len(table.blocks) * allocator.block_size:
            slots = f"{table.num_slots} slots in {len(table.blocks)} blocks of {allocator.block_size}"
            self._faults.append(f"gives {slots} for {num_tokens} tokens")
        return refusal

    def _ask_too_much(self) -> None:
        """Where no block is free for the longest prompt there can be, ask for it: that is refused."""
        longest = self.engine.context.limits.max_model_len - 1
        seq = sequence(10**6, longest, max_tokens=1)
        needed, free = self._allocator.blocks_needed(seq, longest), self._allocator.num_free_blocks
        if needed > free and self._watched_allocate(seq, longest) is None:
            self._faults.append(f"gives {needed} blocks where {free} are free")

    def _check_tables(self) -> None:
        allocator, context = self._allocator, self.engine.context
        tables = [seq.block_table for seq in (*context.seats.running, *context.held)]
        held = [block for table in tables for block in table.blocks[table.num_dropped :]]
        strange = [block for block in held if not 0 <= block < allocator.num_blocks]
        assert not strange, f"gives blocks {strange} of a pool of {allocator.num_blocks}"
        assert allocator.shares or len(held) == len(set(held)), "gives a block to two, and does not share"
        free, wanted = allocator.num_free_blocks, allocator.num_blocks - len(set(held))
        assert free == wanted, f"counts {free} free blocks, the tables leave {wanted}"
        if not allocator.shares:
            owned, wanted = allocator.num_owned_slots, sum(table.num_slots for table in tables)
            assert owned == wanted, f"counts {owned} owned slots, the tables have {wanted}"


def sequence(
    order: int, num_prompt_tokens: int = 3, num_output_tokens: int = 0, max_tokens: int = 50
) -> Sequence:
    """One as intake makes it, with some tokens generated."""
    request = Request(
        id=f"r{order}",
        prompt_token_ids=tuple((order + i) % 251 for i in range(num_prompt_tokens)),
        sampling=SamplingParams(max_tokens=max_tokens),
        known_output_tokens=max_tokens,
        priority=order % 3,
        tenant=("anna", "bert")[order % 2],
    )
    seq = Sequence(
        request,
        choice=0,
        order=order,
        max_tokens_total=num_prompt_tokens + max_tokens,
        stop_ids=frozenset(),
        seed=0,
    )
    seq.token_ids += [7] * num_output_tokens
    return seq


def check_queue(queue: Queue, moves: list[int]) -> None:
    """AssertionError unless an empty `queue` keeps its contract while sequences come, go and come back.

    A move pushes a newcomer (even) or takes out one of those that wait, the head as often as another, and pushes
    every other one again as if it had been preempted.
    """
    waiting: list[Sequence] = []
    for order, move in enumerate(moves):
        if move % 2 == 0 or not waiting:
            waiting.append(sequence(order, 1 + move % 5))
            queue.push(waiting[-1])
        else:
            seq = queue.peek() if move % 4 == 1 else waiting[move % len(waiting)]
            queue.remove(seq)
            waiting.remove(seq)
            _raises(ValueError, "remove of who is not there", queue.remove, seq)
            if move % 3 == 0:
                seq.num_preemptions += 1
                waiting.append(seq)
                queue.push(seq)
        order_now = list(queue)
        assert len(queue) == len(waiting), f"counts {len(queue)} where {len(waiting)} wait"
        assert set(order_now) == set(waiting), f"loses or invents somebody: {order_now}, and {waiting} wait"
        assert len(order_now) == len(waiting), f"gives somebody twice: {order_now}"
        if waiting:
            assert queue.peek() is queue.peek() is order_now[0], f"is not led by its head: {order_now}"
        else:
            _raises(IndexError, "peek of an empty queue", queue.peek)


def _raises(error: type[Exception], what: str, call: Any, *args: Any) -> None:
    try:
        call(*args)
    except error:
        return
    except Exception as other:
        raise AssertionError(f"gives {type(other).__name__} for {what}, not {error.__name__}") from other
    raise AssertionError(f"gives no {error.__name__} for {what}")


def check_predictions(predictor: Predictor) -> None:
    """AssertionError unless it predicts finite numbers of tokens, before and after it has seen outputs."""
    for order in range(60):
        asked = sequence(order, 1 + order % 40, order % 7)
        told = predictor.predict(asked)
        real = isinstance(told, int | float) and math.isfinite(told)
        assert real, f"predicts {told!r}, which is no finite number, for {asked}"
        assert told >= 0, f"predicts {told!r} tokens for {asked}"
        predictor.finished(sequence(order, 1 + order % 40, order % 50))


def lines_per_step(engine: TestEngine, num_waiting: int) -> int:
    """The most lines of Python that one of some steps runs, while that many wait for one of few seats."""
    for i in range(num_waiting):
        prompt = (i % 251, i // 251)
        engine.engine.add_request(Request(id=f"r{i}", prompt_token_ids=prompt, known_output_tokens=4))
    _count_iteration(engine)
    for _ in range(6):  # the first takes all from the inbox
        engine.engine.step()
    return max(_lines(engine.engine.step) for _ in range(12))


def _count_iteration(engine: TestEngine) -> None:
    """Make iterating over the queue run lines of Python, however it is written."""
    queue = engine.engine.context.waiting
    plain, num_seen = type(queue), [0]

    def iterate(self: Any) -> Any:
        for seq in plain.__iter__(self):
            num_seen[0] += 1  # a line for each, which `yield from` would not be
            yield seq

    queue.__class__ = type(plain.__name__, (plain,), {"__iter__": iterate})


def _lines(call: Any) -> int:
    """Lines of Python that `call()` runs."""
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count
