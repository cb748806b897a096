"""The prefix cache of a block pool: lookups, eviction, and the way of evicted blocks to the host and back."""

from __future__ import annotations

from kvengine.core.plan import MemoryOperations
from kvengine.core.sequence import Sequence
from kvengine.kv.block_pool import BlockPool
from kvengine.kv.offload import Offload
from kvengine.kv.prefix_index import Node, PrefixIndex, PrefixPath, root_of


class PrefixCache:
    """Blocks that nobody holds any more but that are in `index` stay where they are until they are evicted."""

    def __init__(
        self,
        pool: BlockPool,
        index: PrefixIndex,
        offload: Offload | None,
        *,
        block_size: int,
        kv_dtype: str,
        isolate_tenants: bool,
    ) -> None:
        self.index = index
        self.offload = offload
        self._pool = pool
        self._block_size = block_size
        self._kv_dtype = kv_dtype
        self._isolate_tenants = isolate_tenants
        self._pinned: list[int] = []
        """Blocks of prefixes that come back from the host with this plan, pinned until it was executed."""

    def match(self, seq: Sequence) -> list[Node]:
        """Nodes of the longest cached prefix of `seq`, in whole blocks; at least one token is left to compute.

        Those on the device come first, those on the host after them.
        """
        table, request = seq.block_table, seq.request
        if table.prefix is None:
            tenant = request.tenant if self._isolate_tenants else None
            parts = {"cache_salt": request.cache_salt, "tenant": tenant, "kv_dtype": self._kv_dtype}
            table.prefix = PrefixPath(root_of(parts))
        num_full = (len(seq.token_ids) - 1) // self._block_size
        return self.index.match(table.prefix, seq.token_ids, num_full)

    def protect(self, nodes: list[Node]) -> None:
        """These are on the host and will be brought back: no eviction before that may forget them."""
        if self.offload:
            self.offload.protect(nodes)

    def bring_back(self, nodes: list[Node], blocks: list[int], first: int) -> None:
        """Fill `blocks[first:]` with the content of `nodes` by the plan's swap-ins.

        Until that has happened neither these blocks nor `blocks[:first]`, which come before them in the tree, can
        be evicted.
        """
        assert self.offload is not None
        for node, block in zip(nodes, blocks[first:], strict=True):
            self.offload.bring_back(node, block)
            self.index.use(node)
        self._pinned += reversed(blocks)
        for block in blocks:
            self._pool.pin(block)

    def evict(self, count: int) -> None:
        """Put `count` idle blocks on the free list; there are that many."""
        index, offload = self.index, self.offload
        if offload is None:
            self._pool.put_back([index.pop_leaf(forget=True)[1] for _ in range(count)])
            return
        freed = []
        for _ in range(count):
            node, block = index.pop_leaf()
            if not offload.keep(node, block):
                offload.forget_below(node)
                index.forget(node)
            freed.append(block)
        self._pool.put_back(freed)

    def let_go(self, blocks: list[int]) -> None:
        """Nobody holds `blocks` any more: cached ones stay, the others are free."""
        for block in blocks:
            node = self.index.node_of(block)
            if node is None:
                self._pool.put_back((block,))
            else:
                self.index.leave(node)

    def take_operations(self) -> MemoryOperations:
        """What evictions and hits of the plan being made copy between device and host."""
        return self.offload.take_operations() if self.offload else MemoryOperations()

    def operations_done(self) -> None:
        """The plan that carried them was executed."""
        pinned, self._pinned = self._pinned, []
        self.let_go([block for block in pinned if self._pool.unpin(block)])
        if self.offload:
            self.offload.done()
