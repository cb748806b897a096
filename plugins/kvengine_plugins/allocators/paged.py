"""Paged allocation: blocks from anywhere in the pool, one at a time as a sequence grows, shared where contents
are equal.

Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention",
SOSP 2023, sections 4.3 and 4.4 (reference counts, copy-on-write); automatic prefix caching as vLLM has it.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvengine.core.plan import MemoryOperations
from kvengine.core.reasons import Reason, Refusal
from kvengine.core.sequence import BlockTable, Sequence
from kvengine.core.shapes import KvShape
from kvengine.kv.block_pool import BlockPool
from kvengine.kv.offload import Offload
from kvengine.kv.prefix_cache import PrefixCache
from kvengine.kv.prefix_index import Node, PrefixIndex
from kvengine.policies import Allocator


class PagedAllocator(Allocator):
    """Wastes less than one block per sequence, and knows no external fragmentation.

    With an `index`, full blocks whose KV is written are found again by equal prefixes, in whole blocks and never
    for the last token of a sequence. With an `offload` besides, evicted blocks go to the host first. A sliding
    window of the pool's shape frees what no query can see any more; it excludes an index, since a cached prefix
    needs the blocks that a window has given up.
    """

    shares = True
    grows = True

    def __init__(
        self,
        kv: KvShape,
        index: PrefixIndex | None = None,
        offload: Offload | None = None,
        *,
        isolate_tenants: bool = False,
    ) -> None:
        assert index is None or kv.sliding_window is None
        self.num_blocks = kv.num_blocks
        self.block_size = kv.block_size
        self._window = kv.sliding_window
        self._pool = BlockPool(kv.num_blocks)
        self._cache: PrefixCache | None = None
        if index is not None:
            self._cache = PrefixCache(
                self._pool,
                index,
                offload,
                block_size=kv.block_size,
                kv_dtype=kv.dtype,
                isolate_tenants=isolate_tenants,
            )
        self.caches = index is not None
        self._copies: dict[int, int] = {}
        """Source of each block that the plan being made copies into."""
        self._num_saved_slots = 0

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free + (self._cache.index.num_idle if self._cache else 0)

    @property
    def num_cached_blocks(self) -> int:
        return self._cache.index.num_idle if self._cache else 0

    @property
    def num_owned_slots(self) -> int:
        return (self.num_blocks - self.num_free_blocks) * self.block_size

    @property
    def num_saved_blocks(self) -> int:
        return self._pool.num_saved

    @property
    def num_saved_slots(self) -> int:
        return self._num_saved_slots

    @property
    def host_blocks(self) -> list[int]:
        offload = self._cache.offload if self._cache else None
        return offload.host_blocks if offload else []

    @property
    def capacity(self) -> int:
        return self.num_blocks * self.block_size

    def blocks_needed(self, seq: Sequence, num_tokens: int) -> int:
        table = seq.block_table
        total = -(-num_tokens // self.block_size)
        if table.blocks:
            return max(0, total - len(table.blocks)) + self._copies_tail(table)
        held = sum(
            node.block is not None and self._pool.ref_count(node.block) > 0 for node in self._match(seq)
        )
        return total - held - self._num_out_of_window(seq)

    def cached_tokens(self, seq: Sequence) -> int:
        return len(self._match(seq)) * self.block_size

    def allocate(self, seq: Sequence, num_tokens: int) -> Refusal | None:
        table = seq.block_table
        blocks = table.blocks
        if not blocks and (self._cache is not None or self._window is not None):
            return self._begin(seq, num_tokens)
        size = self.block_size
        missing = -(-num_tokens // size) - len(blocks)
        if table.num_slots < len(blocks) * size:
            return self._grow(seq, max(missing, 0))
        pool = self._pool
        if missing > pool.num_free:
            if missing > self.num_free_blocks:
                return self._no_blocks(missing)
            assert self._cache is not None
            self._cache.evict(missing - pool.num_free)
        if missing > 0:
            blocks += pool.take(missing)
            table.num_slots = len(blocks) * size
        return None

    def fork(self, parent: Sequence, child: Sequence) -> None:
        computed, size = parent.num_computed_tokens, self.block_size
        ours, theirs = parent.block_table, child.block_table
        theirs.blocks = ours.blocks[: -(-computed // size)]
        theirs.num_dropped = ours.num_dropped
        theirs.num_slots = computed // size * size
        if computed % size:
            ours.num_slots = theirs.num_slots  # whoever writes next copies the tail
        if ours.prefix is not None:
            theirs.prefix = ours.prefix.copy(computed // size)
        live = theirs.blocks[theirs.num_dropped :]
        self._pool.hold(live)
        self._num_saved_slots += computed

    def num_own_slots(self, seq: Sequence) -> int:
        table = seq.block_table
        return table.num_slots if self._copies_tail(table) else len(table.blocks) * self.block_size

    def publish(self, seq: Sequence) -> None:
        cache, path, table = self._cache, seq.block_table.prefix, seq.block_table
        if self._window is not None:
            self._drop_front(table, table.blocks[table.num_dropped : self._num_out_of_window(seq)])
        if cache is None or path is None:
            return
        num_full = seq.num_computed_tokens // self.block_size
        while len(path.nodes) < num_full and not path.unpublishable:
            place = len(path.nodes)
            block = table.blocks[place]
            node = cache.index.publish(path, seq.token_ids, block)
            if node is None:
                return
            if node.block is None:
                assert cache.offload is not None
                cache.offload.replace(node, block)
            elif node.block != block:
                self._replace(table, place, node)

    def cancel_operations(self, seq: Sequence) -> None:
        table = seq.block_table
        for place, block in enumerate(table.blocks if self._copies else ()):
            if block in self._copies:
                source = self._copies.pop(block)
                self._pool.hold([source])
                self._pool.unpin(source)
                table.blocks[place] = source
                table.num_slots = place * self.block_size
                self._pool.put_back(self._pool.drop([block]))
                self._count_shared(source, seq.num_computed_tokens - place * self.block_size, 1)

    def take_operations(self) -> MemoryOperations:
        copies = tuple((source, block) for block, source in self._copies.items())
        self._copies = {}
        cached = self._cache.take_operations() if self._cache else MemoryOperations()
        return cached._replace(copies=copies)

    def operations_done(self, operations: MemoryOperations) -> None:
        self._let_go([source for source, _ in operations.copies if self._pool.unpin(source)])
        if self._cache:
            self._cache.operations_done()

    def free(self, seq: Sequence) -> None:
        table = seq.block_table
        live = table.blocks[table.num_dropped :] if table.num_dropped else table.blocks
        left = self._pool.drop(live)
        if len(left) < len(live):
            self._uncount_shared(seq, live)
        self._num_saved_slots -= table.num_dropped * self.block_size
        self._let_go(left)
        table.blocks, table.num_slots, table.num_dropped = [], 0, 0
        if table.prefix is not None:
            table.prefix.nodes, table.prefix.unpublishable = [], False

    def check_integrity(self, sequences: Iterable[Sequence], *, thorough: bool = True) -> None:
        if not thorough:
            tables = [seq.block_table.blocks[seq.block_table.num_dropped :] for seq in sequences]
            self._pool.check_counts(tables, self.num_cached_blocks)
            return
        cached = self._cache.index.check_integrity() if self._cache else ()
        tables = [(seq, seq.block_table) for seq in sequences]
        live = [table.blocks[table.num_dropped :] for _, table in tables]
        self._pool.check_integrity(live, cached)
        filled: dict[int, int] = {}
        for seq, table in tables:
            for place in range(table.num_dropped, len(table.blocks)):
                written = min(max(seq.num_computed_tokens - place * self.block_size, 0), self.block_size)
                block = table.blocks[place]
                filled[block] = max(filled.get(block, 0), written)
        saved = sum(seq.num_computed_tokens for seq, _ in tables) - sum(filled.values())
        assert self._num_saved_slots == saved, f"{self._num_saved_slots} slots saved by sharing, not {saved}"

    # ---- inside

    def _begin(self, seq: Sequence, num_tokens: int) -> Refusal | None:
        """The first blocks of a sequence: those the index has, and fresh ones after them."""
        size, pool = self.block_size, self._pool
        found = self._match(seq)
        dropped = self._num_out_of_window(seq)
        hits = [node for node in found if node.block is not None]
        idle = sum(pool.ref_count(node.block) == 0 for node in hits if node.block is not None)
        fresh = -(-num_tokens // size) - len(hits) - dropped
        if fresh + idle > self.num_free_blocks:
            return self._no_blocks(fresh + idle)
        table = seq.block_table
        table.blocks = [self.num_blocks] * dropped
        for node in hits:
            self._hit(node, table)
        from_host = found[len(hits) :]
        if self._cache:
            self._cache.protect(from_host)
        table.blocks += self._take(fresh)
        if self._cache and from_host:
            self._cache.bring_back(from_host, table.blocks[: len(found)], len(hits))
        table.num_slots = len(table.blocks) * size
        table.num_dropped = dropped
        self._num_saved_slots += dropped * size
        if table.prefix is not None:
            table.prefix.nodes = list(found)
        return None

    def _hit(self, node: Node, table: BlockTable) -> None:
        assert node.block is not None
        assert self._cache is not None
        if self._pool.num_tables(node.block):
            self._num_saved_slots += self.block_size
        self._pool.hold([node.block])
        self._cache.index.use(node)
        table.blocks.append(node.block)

    def _grow(self, seq: Sequence, missing: int) -> Refusal | None:
        """`missing` more blocks, and a copy of the tail if it is shared."""
        table, size = seq.block_table, self.block_size
        copies = self._copies_tail(table)
        if missing + copies > self.num_free_blocks:
            return self._no_blocks(missing + copies)
        new = self._take(missing + copies)
        if copies:
            self._copy_tail(seq, new.pop())
        table.blocks += new
        table.num_slots = len(table.blocks) * size
        return None

    def _copies_tail(self, table: BlockTable) -> bool:
        """Whether the next write of this table goes to a block that another table holds too."""
        place = table.num_slots // self.block_size
        return place < len(table.blocks) and self._pool.num_tables(table.blocks[place]) > 1

    def _copy_tail(self, seq: Sequence, block: int) -> None:
        """Put `block` in place of the shared tail, whose content is copied into it before the next write."""
        table = seq.block_table
        place = table.num_slots // self.block_size
        source = table.blocks[place]
        self._count_shared(source, seq.num_computed_tokens - place * self.block_size, -1)
        self._pool.pin(source)
        self._pool.drop([source])
        table.blocks[place] = block
        self._copies[block] = source

    def _count_shared(self, block: int, filled: int, sign: int) -> None:
        """One table more (or less) shares `block`, which holds `filled` computed tokens, with others."""
        if self._pool.num_tables(block) > 1:
            self._num_saved_slots += sign * filled

    def _uncount_shared(self, seq: Sequence, dropped: list[int]) -> None:
        """`seq` has left the blocks `dropped`; others still hold some of them."""
        first = seq.block_table.num_dropped
        for place, block in enumerate(dropped, first):
            if self._pool.num_tables(block):
                filled = seq.num_computed_tokens - place * self.block_size
                self._num_saved_slots -= min(max(filled, 0), self.block_size)

    def _drop_front(self, table: BlockTable, out: list[int]) -> None:
        """Give `out`, the first blocks the table still has, up: no query will see them."""
        left = self._pool.drop(out)
        self._num_saved_slots += len(left) * self.block_size
        self._let_go(left)
        first = table.num_dropped
        table.num_dropped = first + len(out)
        table.blocks[first : table.num_dropped] = [self.num_blocks] * len(out)

    def _num_out_of_window(self, seq: Sequence) -> int:
        """Blocks at the front that neither the next token nor any later one attends to."""
        if self._window is None:
            return 0
        return max(0, seq.num_computed_tokens + 1 - self._window) // self.block_size

    def _replace(self, table: BlockTable, place: int, node: Node) -> None:
        """Hold the block of `node` instead of our own of the same content."""
        assert node.block is not None
        assert self._cache is not None
        ours, theirs = table.blocks[place], node.block
        self._pool.hold([theirs])
        self._count_shared(theirs, self.block_size, 1)
        self._cache.index.use(node, hit=False)
        self._count_shared(ours, self.block_size, -1)
        table.blocks[place] = theirs
        self._let_go(self._pool.drop([ours]))

    def _match(self, seq: Sequence) -> list[Node]:
        return self._cache.match(seq) if self._cache else []

    def _take(self, count: int) -> list[int]:
        """`count` blocks, of which there are enough free or cached."""
        if self._cache and count > self._pool.num_free:
            self._cache.evict(count - self._pool.num_free)
        return self._pool.take(count)

    def _let_go(self, blocks: list[int]) -> None:
        """Nobody holds `blocks` any more."""
        if self._cache:
            self._cache.let_go(blocks)
        else:
            self._pool.put_back(blocks)

    def _no_blocks(self, needed: int) -> Refusal:
        return Refusal(Reason.NO_BLOCKS, f"{needed} needed, {self.num_free_blocks} free")
