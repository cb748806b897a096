"""The contracts of KV memory: which slots a sequence owns, and which cached block dies first."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from kvengine.core.plan import MemoryOperations
from kvengine.core.reasons import Refusal
from kvengine.core.sequence import Sequence


class Allocator(Protocol):
    """Which slots a sequence owns.

    Invariants: all-or-nothing (a refusal changes nothing); a block belongs to one table unless `shares`;
    free + cached + in use = num_blocks; what a call costs grows with the blocks it touches, not with the pool.
    Subclass this Protocol to have the defaults, which are those of an allocator that does not share.
    """

    num_blocks: int
    block_size: int
    shares: bool = False
    """Whether a sequence can be forked and blocks be cached."""
    caches: bool = False
    """Whether blocks that nobody holds are kept for equal prefixes."""
    grows: bool = False
    """Whether a running sequence asks for more as it gets longer (so that preemption can happen)."""
    needs_lengths: bool = False
    """Whether it reserves by the true output length, which the workload must know then."""

    @property
    def num_free_blocks(self) -> int:
        """Blocks held by no sequence: free ones, and cached ones that can be evicted."""
        ...

    @property
    def num_cached_blocks(self) -> int:
        """Those of `num_free_blocks` that keep a prefix for reuse."""
        return 0

    @property
    def num_owned_slots(self) -> int:
        """Slots that live sequences hold or may still write, each counted once.

        The rest of the pool is external: free, or lost to the rounding of regions.
        """
        ...

    @property
    def num_saved_blocks(self) -> int:
        """Blocks that sharing saves: the sum over all blocks of the tables that hold one, less one."""
        return 0

    @property
    def num_saved_slots(self) -> int:
        """Computed tokens that sharing saves: those of all sequences, less the slots that hold them."""
        return 0

    @property
    def capacity(self) -> int:
        """The most slots one sequence can own in an empty pool."""
        ...

    @property
    def host_blocks(self) -> list[int]:
        """Blocks of the host pool in which it keeps what it evicted."""
        return []

    def refuses_for_good(self, seq: Sequence) -> str | None:
        """Why `seq` could not be served even by an empty pool; None if it could."""
        return None

    def blocks_needed(self, seq: Sequence, num_tokens: int) -> int:
        """By how many blocks `allocate(seq, num_tokens)` would lower `num_free_blocks`."""
        ...

    def cached_tokens(self, seq: Sequence) -> int:
        """Leading tokens of a sequence without blocks whose KV the pool holds, never all of them.

        The next `allocate` begins with exactly these, if nothing happens in between.
        """
        return 0

    def allocate(self, seq: Sequence, num_tokens: int) -> Refusal | None:
        """Make `seq.block_table` hold writable slots up to its first `num_tokens` tokens; None on success.

        Sets `block_table.num_slots`. A shared block in which the next token would be written is copied: the pair
        is among the operations of the plan.
        """
        ...

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child`, which has no blocks, share those with the computed tokens of `parent`. Never fails."""
        raise AssertionError(f"{type(self).__name__} does not share")

    def num_own_slots(self, seq: Sequence) -> int:
        """Slots of `seq`, computed or not, up to the first that another sequence holds too and nobody wrote."""
        return seq.block_table.num_slots

    def publish(self, seq: Sequence) -> None:
        """The KV of the computed tokens of `seq` is written: others may hit its full blocks from now on, and
        what no token to come attends to may be given up."""

    def cancel_operations(self, seq: Sequence) -> None:
        """`seq` leaves the plan being made: drop the copies into its blocks as if they were never asked for."""

    def take_operations(self) -> MemoryOperations:
        """What the plan being made must copy before its forward pass; their sources stay as they are until
        `operations_done`."""
        return MemoryOperations()

    def operations_done(self, operations: MemoryOperations) -> None:
        """The step that carried `operations` was executed."""

    def free(self, seq: Sequence) -> None:
        """Give back all blocks of `seq`, emptying its table."""
        ...

    def check_integrity(self, sequences: Iterable[Sequence], *, thorough: bool = True) -> None:
        """Raise AssertionError unless the tables of `sequences` (all live ones) account for the pool.

        Called after every step under debug.integrity, and, not `thorough`, whenever the engine is idle: then only
        what costs as much as the blocks in use must be checked.
        """
        ...


class HostPool(Protocol):
    """Blocks of host memory to swap to (kvengine.kv.host_pool)."""

    num_blocks: int
    reclaim: Callable[[int], object]
    """Called with a number of blocks when so many are wanted and are not free: whoever only caches gives way."""

    @property
    def num_free(self) -> int: ...

    def take(self, count: int) -> list[int] | None:
        """So many blocks, or None (and no change) where even reclaiming does not free them."""
        ...

    def give_back(self, blocks: list[int]) -> None: ...


class CachedBlock(Protocol):
    """What an eviction policy knows of a cached block. Moments are counts of pool events, unique and rising."""

    last_used: int
    """When it was last published, hit or left by a sequence that held it."""
    num_hits: int
    published: int
    depth: int
    """How many blocks of its prefix come before it."""


class Eviction(Protocol):
    """Which cached block dies first, among leaves: blocks held by nobody, without a cached child.

    A chain of blocks thus dies from its tail, whatever the policy says.
    """

    def rank(self, block: CachedBlock) -> Any:
        """Something comparable; the lowest dies first. Asked when `block` becomes a leaf, and not again."""
        ...
