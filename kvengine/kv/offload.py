"""Cached blocks that were evicted from the device and wait on the host for the next hit."""

from __future__ import annotations

from kvengine.core.plan import MemoryOperations
from kvengine.kv.prefix_index import Node, PrefixIndex
from kvengine.policies import HostPool


class Offload:
    """Keeps evicted nodes in host blocks, as long as nobody needs those more: swapped sequences come first.

    The oldest leaf gives way first. Host blocks that the plan being made reads or writes are busy until
    `done`, and are neither reused nor reclaimed.
    """

    def __init__(self, index: PrefixIndex, host_pool: HostPool) -> None:
        self._index = index
        self._host_pool = host_pool
        self._nodes: dict[Node, None] = {}
        self._busy: set[int] = set()
        self._leaving: list[int] = []
        self.swap_outs: list[tuple[int, int]] = []
        self.swap_ins: list[tuple[int, int]] = []
        host_pool.reclaim = self.reclaim

    @property
    def host_blocks(self) -> list[int]:
        """All host blocks that are taken here."""
        return [node.host_block for node in self._nodes if node.host_block is not None] + self._leaving

    def keep(self, node: Node, block: int) -> bool:
        """Move an evicted node from device block `block` to the host; False when there is no room."""
        taken = self._host_pool.take(1)
        if taken is None:
            return False
        node.host_block = taken[0]
        self._nodes[node] = None
        self._busy.add(taken[0])
        self.swap_outs.append((block, taken[0]))
        return True

    def protect(self, nodes: list[Node]) -> None:
        """These are about to be brought back: no eviction on the way may take them."""
        self._busy.update(node.host_block for node in nodes if node.host_block is not None)

    def bring_back(self, node: Node, block: int) -> None:
        """Move a node to device block `block`."""
        assert node.host_block is not None
        self.swap_ins.append((node.host_block, block))
        self._let_go(node)
        self._index.bring_back(node, block)

    def replace(self, node: Node, block: int) -> None:
        """Device block `block` has the content of `node` anyway; its host block is not needed any more."""
        self._let_go(node)
        self._index.bring_back(node, block)

    def forget_below(self, node: Node) -> None:
        """Forget all descendants of a node that has left the device: they are here, deeper ones first."""
        for other in [other for other in self._nodes if _is_below(other, node)]:
            self._forget(other)

    def reclaim(self, count: int) -> None:
        """Give up to `count` host blocks back, oldest leaves first."""
        for _ in range(count):
            ready = (n for n in self._nodes if n.host_block not in self._busy and not n.num_children)
            node = next(ready, None)
            if node is None:
                return
            self._forget(node)

    def done(self) -> None:
        """The plan with the operations asked for so far was executed."""
        self._busy.clear()
        if self._leaving:
            self._host_pool.give_back(self._leaving)
            self._leaving = []

    def take_operations(self) -> MemoryOperations:
        """The swap-outs and swap-ins asked for since the last call."""
        taken = MemoryOperations(tuple(self.swap_outs), tuple(self.swap_ins))
        self.swap_outs, self.swap_ins = [], []
        return taken

    def _forget(self, node: Node) -> None:
        self._index.forget(node)
        self._let_go(node)

    def _let_go(self, node: Node) -> None:
        assert node.host_block is not None
        del self._nodes[node]
        if node.host_block in self._busy:
            self._leaving.append(node.host_block)
        else:
            self._host_pool.give_back([node.host_block])
        node.host_block = None


def _is_below(node: Node, ancestor: Node) -> bool:
    above = node.parent
    while above is not None and above is not ancestor:
        above = above.parent
    return above is ancestor
