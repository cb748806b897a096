"""kvengine.engine.memory by itself: what it notes when sequences leave in the plan in which they came or grew."""

from __future__ import annotations

from memory_support import paged, sequence

from kvengine.core.plan import StepPlan
from kvengine.core.reasons import Reason, Refusal
from kvengine.core.sequence import Sequence, SequenceState
from kvengine.engine.memory import Memory
from kvengine.kv.host_pool import SwapPool


def memory_with(num_blocks: int = 8, num_host_blocks: int = 8, cache: bool = False) -> Memory:
    return Memory(paged(num_blocks, cache=cache), SwapPool(num_host_blocks))


def begin(memory: Memory, step: int) -> StepPlan:
    plan = StepPlan(step=step, now_ns=0)
    memory.begin_plan(plan)
    return plan


def end(memory: Memory) -> None:
    memory.finish_plan()
    memory.executed()


def compute_first(memory: Memory, seq: Sequence, num_tokens: int) -> None:
    """Step 0: `seq` enters, and its first tokens are computed."""
    begin(memory, 0)
    assert memory.enter(seq, num_tokens) is None
    end(memory)
    memory.computed(seq, num_tokens)


def test_slots_that_were_not_full_when_a_sequence_got_more_count_as_unwritten() -> None:
    """Blocks of 4: 2 tokens in step 0, a second block in step 1, and preempted in that same plan."""
    memory, seq = memory_with(), sequence(range(10))
    compute_first(memory, seq, 2)
    plan = begin(memory, 1)
    assert memory.grow(seq, 6) is None
    assert memory.give_way(seq, swap=False) == (False, None)
    assert plan.unwritten == [(seq, 0, 2)]


def test_what_a_fork_loses_before_its_first_row_is_computed_again() -> None:
    memory, parent, child = memory_with(), sequence(range(6)), sequence(range(6))
    compute_first(memory, parent, 6)
    memory.fork(parent, child)
    assert child.num_computed_tokens == child.num_computed_peak == child.num_cached_tokens == 6
    begin(memory, 1)
    memory.give_way(child, swap=False)
    assert (child.num_computed_tokens, child.num_computed_peak) == (0, 6)


def test_a_swap_out_that_nobody_wants_any_more_is_not_in_the_plan() -> None:
    memory, seq = memory_with(), sequence(range(6))
    compute_first(memory, seq, 6)
    plan = begin(memory, 1)
    assert memory.give_way(seq, swap=True) == (True, None)
    memory.drop_host(seq)
    end(memory)
    assert plan.swap_outs == []
    assert memory.host_pool.num_free == 8


def test_a_swap_that_does_not_fit_says_what_is_missing_and_drops_the_kv() -> None:
    memory, seq = memory_with(num_host_blocks=1), sequence(range(6))
    compute_first(memory, seq, 6)
    begin(memory, 1)
    swapped, refusal = memory.give_way(seq, swap=True)
    assert not swapped
    assert refusal == Refusal(Reason.NO_SWAP_SPACE, "2 needed, 1 of 1 free")
    assert (seq.num_computed_tokens, memory.num_tokens) == (0, 0)


def test_what_was_only_found_cached_in_this_plan_stays_cached_and_is_not_swapped() -> None:
    memory = memory_with(cache=True)
    first, again = sequence(range(9)), sequence(range(9))
    compute_first(memory, first, 9)
    memory.free(first)
    plan = begin(memory, 1)
    assert memory.enter(again, 9) is None
    again.state = SequenceState.RUNNING
    assert again.num_computed_tokens == 8
    assert memory.give_way(again, swap=True) == (False, None)
    end(memory)
    assert plan.swap_outs == []
    assert memory.allocator.num_cached_blocks == 2
