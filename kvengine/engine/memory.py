"""The blocks of live sequences: what the scheduling context asks of the allocator and of the host pool."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvengine.core.plan import MemoryOperations, StepPlan
from kvengine.core.reasons import Reason, Refusal
from kvengine.core.sequence import Sequence, SequenceState
from kvengine.kv.host_pool import SwapPool
from kvengine.policies import Allocator


class _Resumed(NamedTuple):
    """What a sequence had on the host, and how many tokens of it were found cached on the device."""

    host_blocks: list[int]
    num_computed: int
    num_cached: int


class Memory:
    """Gives sequences their blocks and takes them back, and counts what is held.

    Copies are only planned here: `finish_plan` puts them into the plan, in whose step they run, and `executed`
    gives free what had to stay as it was until then.
    """

    def __init__(self, allocator: Allocator, host_pool: SwapPool) -> None:
        self.allocator = allocator
        self.host_pool = host_pool
        self.num_tokens = 0
        """Computed tokens of live sequences on the device, those that share a slot each counted."""
        self._plan = StepPlan(step=0, now_ns=0)
        self._swap_outs: list[tuple[int, int]] = []
        self._resumed: dict[Sequence, _Resumed] = {}
        """Who comes back from the host in this plan."""
        self._only_cached: set[Sequence] = set()
        """Who entered in this plan with what it found cached. Swap-ins may have yet to fill its blocks, and they
        come after all swap-outs: what is swapped out here is what the blocks hold now."""
        self._operations = MemoryOperations()

    @property
    def num_slots_held(self) -> int:
        """Slots of the pool that hold the KV of a computed token of a live sequence."""
        return self.num_tokens - self.allocator.num_saved_slots

    def begin_plan(self, plan: StepPlan) -> None:
        self._plan = plan
        self._only_cached.clear()

    def finish_plan(self) -> None:
        """Put all copies that were asked for into the plan."""
        plan, operations = self._plan, self.allocator.take_operations()
        plan.swap_outs = [*self._swap_outs, *operations.swap_outs]
        plan.swap_ins = [*self._swap_in_pairs(), *operations.swap_ins]
        plan.copies = list(operations.copies)
        self._swap_outs = []
        self._operations = operations

    def executed(self) -> None:
        """The step of the plan is over, or had nothing to do."""
        if self._resumed:
            for resumed in self._resumed.values():
                self.host_pool.give_back(resumed.host_blocks)
            self._resumed = {}
        if any(self._operations):
            self.allocator.operations_done(self._operations)
            self._operations = MemoryOperations()

    def num_computed(self, seq: Sequence) -> int:
        """Tokens of `seq` that need not be computed (any more) when it runs."""
        if seq.block_table.blocks:
            return seq.num_computed_tokens
        return max(seq.num_computed_tokens, self.allocator.cached_tokens(seq))

    def enter(self, seq: Sequence, num_tokens: int) -> Refusal | None:
        """Give a waiting sequence `num_tokens` slots, its computed tokens in the first ones; or nothing."""
        start = self.num_computed(seq)
        cached = self.allocator.cached_tokens(seq)
        refusal = self.allocator.allocate(seq, num_tokens)
        if refusal is not None:
            return refusal
        table = seq.block_table
        if seq.state is SequenceState.WAITING:
            seq.num_cached_tokens = cached
        if table.host_blocks:
            self._resumed[seq] = _Resumed(table.host_blocks, seq.num_computed_tokens, cached)
            table.host_blocks = []
        elif start:
            self._only_cached.add(seq)
        seq.num_computed_tokens = start
        self.num_tokens += start
        table.since = self._plan.step
        return None

    def grow(self, seq: Sequence, num_tokens: int) -> Refusal | None:
        """Give a running sequence `num_tokens` writable slots; None on success."""
        table = seq.block_table
        before, num_blocks, tail = table.num_slots, len(table.blocks), table.blocks[-1:]
        refusal = self.allocator.allocate(seq, num_tokens)
        if refusal is None and (len(table.blocks) > num_blocks or table.blocks[-1:] != tail):
            if before > seq.num_computed_tokens:
                table.earlier.append((table.since, before))
            table.since = self._plan.step
        return refusal

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child` start from the computed tokens of `parent`, in the same blocks.

        Not while anything is planned for `parent`: what has yet to be copied, moved or written is not shared.
        """
        assert not parent.num_scheduled_tokens, f"{parent} is forked after it was scheduled"
        self.allocator.fork(parent, child)
        child.num_computed_tokens = child.num_cached_tokens = parent.num_computed_tokens
        child.num_computed_peak = parent.num_computed_tokens
        child.block_table.since = parent.block_table.since  # of the tail, which the last of them answers for
        self.num_tokens += child.num_computed_tokens

    def computed(self, seq: Sequence, num_tokens: int) -> None:
        """`num_tokens` more tokens of `seq` have their KV in the pool."""
        seq.num_computed_tokens += num_tokens
        self.num_tokens += num_tokens
        self.allocator.publish(seq)

    def give_way(self, seq: Sequence, *, swap: bool) -> tuple[bool, Refusal | None]:
        """Take the device blocks of `seq`: whether its KV is on the host now, and why not where that was wanted.

        What a sequence only found cached in this plan is not moved: it stays cached, and nothing is lost.
        """
        refusal = None
        if swap and seq.num_computed_tokens and seq not in self._only_cached:
            refusal = self.swap_out(seq)
            if refusal is None:
                return True, None
        self.free(seq)
        seq.num_computed_tokens = 0
        return False, refusal

    def swap_out(self, seq: Sequence) -> Refusal | None:
        """Move the KV of `seq` to the host and free its device blocks; where it does not fit, do nothing.

        Not for what only found its KV cached in this plan: `give_way` frees it instead.
        """
        assert seq not in self._only_cached, f"{seq} would be swapped out before its KV has arrived"
        table = seq.block_table
        self.allocator.cancel_operations(seq)
        if seq in self._resumed:  # its KV is still on the host
            resumed = self._resumed.pop(seq)
            self.free(seq)
            table.host_blocks, seq.num_computed_tokens = resumed.host_blocks, resumed.num_computed
            return None
        end = -(-seq.num_computed_tokens // self.allocator.block_size)
        blocks = table.blocks[table.num_dropped : end]
        host_blocks = self.host_pool.take(len(blocks))
        if host_blocks is None:
            room = f"{len(blocks)} needed, {self.host_pool.num_free} of {self.host_pool.num_blocks} free"
            return Refusal(Reason.NO_SWAP_SPACE, room)
        self._swap_outs += zip(blocks, host_blocks, strict=True)
        self.free(seq)
        table.host_blocks = host_blocks
        return None

    def free(self, seq: Sequence) -> int:
        """Give back all device blocks of `seq`, noting the slots it had and never wrote; the blocks freed."""
        table, free = seq.block_table, self.allocator.num_free_blocks
        self.allocator.cancel_operations(seq)
        if seq in self._resumed:
            self._give_back_host(self._resumed.pop(seq).host_blocks)
        if table.blocks:
            for since, slots in (*table.earlier, (table.since, self.allocator.num_own_slots(seq))):
                if slots > seq.num_computed_tokens and since < self._plan.step:
                    self._plan.unwritten.append((seq, since, slots - seq.num_computed_tokens))
            table.earlier = []
            self.num_tokens -= seq.num_computed_tokens
        self.allocator.free(seq)
        return self.allocator.num_free_blocks - free

    def drop_host(self, seq: Sequence) -> None:
        """Give back the host blocks of a sequence that will not come back."""
        blocks, seq.block_table.host_blocks = seq.block_table.host_blocks, []
        self._give_back_host(blocks)

    def check_integrity(
        self, live: list[Sequence], waiting: Iterable[Sequence], *, thorough: bool = True
    ) -> None:
        """Raise AssertionError unless every block, and every token, is accounted for."""
        self.allocator.check_integrity(live, thorough=thorough)
        held = sum(seq.num_computed_tokens for seq in live)
        assert held == self.num_tokens, f"{held} tokens are held, {self.num_tokens} counted"
        assert 0 <= self.num_slots_held <= self.allocator.num_owned_slots, "more slots are held than owned"
        swapped = []
        for seq in waiting:
            assert not seq.block_table.blocks, f"{seq} waits and owns blocks"
            assert not seq.block_table.host_blocks or seq.state is SequenceState.SWAPPED, (
                f"{seq} has host blocks"
            )
            swapped.append(seq.block_table.host_blocks)
        swapped += [resumed.host_blocks for resumed in self._resumed.values()]
        self.host_pool.check_integrity([*swapped, self.allocator.host_blocks], thorough=thorough)

    def _give_back_host(self, blocks: list[int]) -> None:
        """Nobody wants what is in these host blocks, nor what this plan would have put there."""
        if self._swap_outs:
            unwanted = set(blocks)
            self._swap_outs = [pair for pair in self._swap_outs if pair[1] not in unwanted]
        self.host_pool.give_back(blocks)

    def _swap_in_pairs(self) -> list[tuple[int, int]]:
        """Host to device, for what did not turn out to be cached on the device meanwhile."""
        pairs = []
        size = self.allocator.block_size
        for seq, (host_blocks, num_computed, num_cached) in self._resumed.items():
            end = -(-num_computed // size)
            first = end - len(host_blocks)
            places = range(max(first, num_cached // size, seq.block_table.num_dropped), end)
            pairs += [(host_blocks[place - first], seq.block_table.blocks[place]) for place in places]
        return pairs
