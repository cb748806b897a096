"""Which prefixes of tokens the KV pool holds: a tree of full blocks, found by chained hashes.

Source: the automatic prefix caching of vLLM (a hash of each block and of all before it); the tree of
RadixAttention (Zheng et al., "SGLang", NeurIPS 2024), of which leaves are evicted first.
"""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections.abc import Callable, Collection, Hashable
from itertools import count
from typing import Any

from kvengine.core.errors import PolicyError
from kvengine.policies import Eviction

Hasher = Callable[[bytes], Hashable]


def sha256(data: bytes) -> bytes:
    """The digest by which blocks are found; its 32 bytes are part of the key of the block after."""
    return hashlib.sha256(data).digest()


class Node:
    """One cached block: its content, its place in the tree, and what eviction policies rank it by.

    It is on the device (`block`), on the host (`host_block`), or neither any more.
    """

    __slots__ = (
        "block", "content", "depth", "host_block", "idle", "key", "last_used", "num_children",
        "num_device_children", "num_hits", "parent", "published", "ticket",
    )  # fmt: skip

    def __init__(self, key: Hashable, content: bytes, parent: Node | None, block: int, now: int) -> None:
        self.key = key
        self.content = content
        self.parent = parent
        self.block: int | None = block
        self.host_block: int | None = None
        self.depth = parent.depth + 1 if parent else 0
        self.idle = False
        """Whether it is on the device and no table holds it."""
        self.num_children = 0
        self.num_device_children = 0
        self.num_hits = 0
        self.published = now
        self.last_used = now
        self.ticket = -1
        """Its entry in the queue of leaves, if that is still valid."""


class PrefixPath:
    """The place of one sequence in the tree: keys of its full blocks, and the nodes its table holds."""

    __slots__ = ("keys", "match", "match_of", "nodes", "root", "unpublishable")

    def __init__(self, root: bytes) -> None:
        self.root = root
        """What separates its prefixes from equal tokens of others."""
        self.keys: list[tuple[Hashable, bytes]] = []
        """(key, content) of its first full blocks, as far as they were asked for."""
        self.nodes: list[Node] = []
        """Those of its blocks that are in the index, from the first on."""
        self.match: list[Node] = []
        self.match_of: tuple[int, int] = (-1, -1)
        """The version of the index and the number of blocks for which `match` was found."""
        self.unpublishable = False
        """Whether another content has the key of its next block, so that nothing after it can be found."""

    def copy(self, num_blocks: int) -> PrefixPath:
        """The path of a branch that shares the first `num_blocks` blocks."""
        path = PrefixPath(self.root)
        path.keys, path.nodes = self.keys[:num_blocks], self.nodes[:num_blocks]
        path.unpublishable = self.unpublishable
        return path


def _as_bytes(key: Hashable) -> bytes:
    return key if isinstance(key, bytes) else repr(key).encode()


def root_of(parts: dict[str, str | None]) -> bytes:
    """What goes before the first block's tokens: every given part with its kind, so that kinds do not mix."""
    return repr([(kind, value) for kind, value in sorted(parts.items()) if value is not None]).encode()


class PrefixIndex:
    """All cached blocks. Whoever holds a block holds all blocks before it, so a node that nobody holds has no
    descendant that somebody holds, and every idle block can be evicted, its descendants first.

    `num_idle` counts nodes on the device that no table holds. Every call costs O(blocks it touches), and
    eviction O(log of the leaves) besides.
    """

    def __init__(self, block_size: int, eviction: Eviction, hasher: Hasher = sha256) -> None:
        self._block_size = block_size
        self._eviction = eviction
        self._hasher = hasher
        self._by_key: dict[Hashable, Node] = {}
        self._by_block: list[Node | None] = []
        self.num_idle = 0
        self._leaves: list[tuple[Any, int, Node]] = []
        """A heap; an entry is valid while its number is the ticket of its node."""
        self._first: tuple[Any, int, Node] | None = None
        """An entry that is below all of the heap: mostly the parent of the leaf that died last."""
        self._tickets = count()
        self._now = count()
        self.version = 0
        """Changes whenever a lookup may have another answer than before."""

    def __len__(self) -> int:
        return len(self._by_key)

    def node_of(self, block: int) -> Node | None:
        """The node whose content is in device block `block`."""
        return self._by_block[block] if block < len(self._by_block) else None

    def match(self, path: PrefixPath, token_ids: list[int], num_blocks: int) -> list[Node]:
        """The nodes of the longest cached prefix of `token_ids`, `num_blocks` at most. Compares the tokens."""
        if path.match_of == (self.version, num_blocks):
            return path.match
        found: list[Node] = []
        parent: Node | None = None
        for index in range(num_blocks):
            key, content = self._key(path, token_ids, index)
            node = self._by_key.get(key)
            if node is None or node.parent is not parent or node.content != content:
                break
            found.append(node)
            parent = node
        path.match, path.match_of = found, (self.version, num_blocks)
        return found

    def publish(self, path: PrefixPath, token_ids: list[int], block: int) -> Node | None:
        """Add the next block of `path`, whose KV is in `block`; the node for its content, new or there before.

        None when its key belongs to another content: then it cannot be found, nor can any block after it.
        """
        index = len(path.nodes)
        parent = path.nodes[-1] if path.nodes else None
        key, content = self._key(path, token_ids, index)
        node = self._by_key.get(key)
        if node is None:
            node = Node(key, content, parent, block, next(self._now))
            self._by_key[key] = node
            self._place(node, block)
            if parent:
                parent.num_children += 1
                parent.num_device_children += 1
            self.version += 1
        elif node.parent is not parent or node.content != content:
            path.unpublishable = True
            return None
        path.nodes.append(node)
        return node

    def bring_back(self, node: Node, block: int) -> None:
        """Device block `block` has, or will have before the next forward pass, the content of an offloaded node."""
        node.block, node.host_block = block, None
        self._place(node, block)
        if node.parent:
            node.parent.num_device_children += 1
        self.version += 1

    def use(self, node: Node, *, hit: bool = True) -> None:
        """A table holds `node` from now on: it was hit, or its block replaced an equal one."""
        node.num_hits += hit
        node.last_used = next(self._now)
        node.ticket = -1
        if node.idle:
            node.idle = False
            self.num_idle -= 1

    def leave(self, node: Node) -> None:
        """No table holds `node` any more."""
        node.last_used = next(self._now)
        node.idle = True
        self.num_idle += 1
        if not node.num_device_children:
            self._add_leaf(node)

    def pop_leaf(self, *, forget: bool = False) -> tuple[Node, int]:
        """Take the idle leaf of the lowest rank off the device, and its block; KeyError when nothing is idle.

        Unless it is forgotten at once the node stays in the index, without a block: the caller forgets it, or
        offloads it.
        """
        node = self._take_first()
        block = node.block
        assert block is not None
        self._by_block[block] = None
        node.ticket, node.block, node.idle = -1, None, False
        self.num_idle -= 1
        parent = node.parent
        if parent:
            parent.num_device_children -= 1
            if parent.idle and not parent.num_device_children:
                self._add_leaf(parent)
        if forget:
            self.forget(node)
        return node, block

    def forget(self, node: Node) -> None:
        """Remove a node that is not on the device and has no children."""
        assert not node.num_children
        del self._by_key[node.key]
        if node.parent:
            node.parent.num_children -= 1
        self.version += 1

    def check_integrity(self) -> Collection[int]:
        """Raise AssertionError where the tree contradicts itself; the blocks of the idle nodes."""
        children: dict[Node, list[Node]] = {}
        for node in self._by_key.values():
            if node.parent:
                assert self._by_key.get(node.parent.key) is node.parent, "a node outlives its parent"
                children.setdefault(node.parent, []).append(node)
        for node in self._by_key.values():
            below = children.get(node, [])
            on_device = [child for child in below if child.block is not None]
            assert node.num_children == len(below), (
                f"{node.num_children} children counted, {len(below)} there"
            )
            assert node.num_device_children == len(on_device), "children on the device are miscounted"
            assert (node.block is None) != (node.host_block is None), "a node is in two places, or in none"
            assert not node.idle or all(child.idle for child in on_device), (
                "a block that nobody holds has a child that somebody holds"
            )
        entries = [*self._leaves, *([self._first] if self._first else [])]
        valid = {node for _, ticket, node in entries if node.ticket == ticket}
        idle = [node for node in self._by_key.values() if node.idle]
        assert len(idle) == self.num_idle, f"{self.num_idle} idle nodes counted, {len(idle)} there"
        assert valid == {node for node in idle if not node.num_device_children}, "the leaves are wrong"
        placed = {block: node for block, node in enumerate(self._by_block) if node}
        there = {node.block: node for node in self._by_key.values() if node.block is not None}
        assert placed == there, "a block stands for a node that is elsewhere"
        return {node.block for node in idle if node.block is not None}

    def _key(self, path: PrefixPath, token_ids: list[int], index: int) -> tuple[Hashable, bytes]:
        """Key and content of full block `index`; the key depends on all blocks before."""
        keys, size = path.keys, self._block_size
        while len(keys) <= index:
            start = len(keys) * size
            tokens = array("q", token_ids[start : start + size]).tobytes()
            content = tokens if keys else path.root + tokens
            before = _as_bytes(keys[-1][0]) if keys else b""
            keys.append((self._hasher(before + content), content))
        return keys[index]

    def _place(self, node: Node, block: int) -> None:
        if block >= len(self._by_block):
            self._by_block += [None] * (block + 1)  # at least doubles, so that it is seldom
        self._by_block[block] = node

    def _add_leaf(self, node: Node) -> None:
        ticket = next(self._tickets)
        node.ticket = ticket
        entry = (self._eviction.rank(node), ticket, node)
        leaves, first = self._leaves, self._first
        try:
            if first is None:
                if leaves and not entry < leaves[0]:
                    heapq.heappush(leaves, entry)
                else:
                    self._first = entry
            elif entry < first:
                heapq.heappush(leaves, first)
                self._first = entry
            else:
                heapq.heappush(leaves, entry)
        except TypeError as error:
            name = type(self._eviction).__name__
            raise PolicyError(f"{name}: its ranks cannot be compared: {error}") from error
        if len(leaves) > 2 * self.num_idle + 1024:
            self._leaves = [entry for entry in leaves if entry[2].ticket == entry[1]]
            heapq.heapify(self._leaves)

    def _take_first(self) -> Node:
        """The leaf of the lowest rank, out of the queue; KeyError when there is none."""
        entry, self._first = self._first, None
        while entry is None or entry[2].ticket != entry[1]:
            if not self._leaves:
                raise KeyError("no cached block is idle")
            entry = heapq.heappop(self._leaves)
        return entry[2]
