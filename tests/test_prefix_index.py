"""PrefixIndex and eviction policies: single cases, and random histories against a model too simple to be wrong."""

from __future__ import annotations

import heapq
import random
from collections.abc import Hashable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvengine.kv.prefix_index import Node, PrefixIndex, PrefixPath, root_of, sha256
from kvengine.policies import Build, CachedBlock, Eviction
from kvengine.registry import discover, own_distribution

BLOCK = 2


class HeadFirst:
    """Hostile: wants the heads of chains to die before their tails, and those that are used most."""

    def rank(self, block: CachedBlock) -> tuple[int, int]:
        return block.depth, -block.num_hits


class Confused:
    """Hostile: another answer whenever it is asked."""

    def __init__(self) -> None:
        self._random = random.Random(0)

    def rank(self, block: CachedBlock) -> float:
        return self._random.random()


def eviction_named(name: str) -> Eviction:
    if name == "head_first":
        return HeadFirst()
    if name == "confused":
        return Confused()
    return discover().get("eviction", name).factory(None, Build())


BUILT_IN = [
    entry.name
    for entry in discover()
    if entry.kind == "eviction" and entry.distribution == own_distribution()
]
ALL = [*BUILT_IN, "head_first", "confused"]


def index_with(eviction: str = "lru", hasher: Any = sha256) -> PrefixIndex:
    return PrefixIndex(BLOCK, eviction_named(eviction), hasher=hasher)


def publish(index: PrefixIndex, tokens: list[int], blocks: list[int], root: bytes = b"") -> PrefixPath:
    """A sequence computes `tokens` in these blocks; where a block of the same content is there it takes that."""
    path = PrefixPath(root)
    for block in blocks:
        node = index.publish(path, tokens, block)
        if node is None:
            break
        if node.block != block:
            index.use(node, hit=False)
    return path


def leave(index: PrefixIndex, path: PrefixPath) -> None:
    """Its sequence ends: last block first."""
    for node in reversed(path.nodes):
        index.leave(node)


def hit(index: PrefixIndex, tokens: list[int]) -> PrefixPath:
    """A sequence of `tokens` takes what is cached of them."""
    path = PrefixPath(b"")
    path.nodes = list(index.match(path, tokens, len(tokens) // BLOCK))
    for node in path.nodes:
        index.use(node)
    return path


def evict(index: PrefixIndex) -> int:
    node, block = index.pop_leaf()
    index.forget(node)
    return block


# ---- lookups


def test_the_longest_prefix_is_found_and_nothing_after_a_gap():
    index = index_with()
    leave(index, publish(index, [1, 2, 3, 4, 5, 6], [10, 11, 12]))
    assert [node.block for node in hit(index, [1, 2, 3, 4, 5, 6, 7, 8]).nodes] == [10, 11, 12]
    assert [node.block for node in index.match(PrefixPath(b""), [1, 2, 3, 4, 5, 6], 2)] == [10, 11]
    assert [node.block for node in index.match(PrefixPath(b""), [1, 2, 9, 4, 5, 6], 3)] == [10]
    assert index.match(PrefixPath(b""), [3, 4, 5, 6], 2) == [], "a block is found only after those before it"
    assert index.match(PrefixPath(b"other"), [1, 2, 3, 4], 2) == []


def test_equal_tokens_at_another_place_are_another_block():
    index = index_with()
    leave(index, publish(index, [1, 2, 1, 2, 1, 2], [10, 11, 12]))
    assert len(index) == 3
    assert [node.depth for node in hit(index, [1, 2, 1, 2]).nodes] == [0, 1]
    index.check_integrity()


def test_the_same_content_is_published_once():
    index = index_with()
    first = publish(index, [1, 2, 3, 4], [10, 11])
    second = publish(index, [1, 2, 3, 4, 5, 6], [20, 21, 22])
    assert second.nodes[:2] == first.nodes
    assert [node.block for node in second.nodes] == [10, 11, 22]
    assert [index.node_of(block) for block in (20, 21)] == [None, None]
    assert len(index) == 3
    index.check_integrity()


@pytest.mark.parametrize("hasher", [lambda data: 0, lambda data: len(data), lambda data: data[-8:]])
def test_a_collision_is_no_hit_and_ends_what_can_be_published(hasher):
    index = index_with(hasher=hasher)
    first = publish(index, [1, 2, 3, 4], [10, 11])
    assert len(first.nodes) >= 1
    second = publish(index, [7, 2, 3, 4], [20, 21])
    assert second.nodes == []
    assert second.unpublishable
    assert index.match(PrefixPath(b""), [7, 2, 3, 4], 2) == []
    found = index.match(PrefixPath(b""), [1, 2, 3, 4], 2)
    assert found == first.nodes
    index.check_integrity()


def test_a_collision_within_a_chain_cuts_it_there():
    """The third block has the key of the first, so that blocks from it on cannot be found."""
    index = index_with(hasher=lambda data: "abac"[data[-16] // 2])  # by the first token of the block
    path = publish(index, list(range(8)), [10, 11, 12, 13])
    assert [node.block for node in path.nodes] == [10, 11]
    assert path.unpublishable
    assert [node.block for node in index.match(PrefixPath(b""), list(range(8)), 4)] == [10, 11]
    index.check_integrity()


def test_a_key_that_comes_free_again_is_published_again():
    index = index_with(hasher=lambda data: 0)
    leave(index, publish(index, [1, 2], [10]))
    assert evict(index) == 10
    assert [node.block for node in publish(index, [7, 8], [11]).nodes] == [11]
    index.check_integrity()


def test_roots_tell_every_part_and_its_kind():
    parts: list[dict[str, str | None]] = [
        {}, {"tenant": "A"}, {"cache_salt": "A"}, {"tenant": ""}, {"tenant": "A", "cache_salt": "A"},
        {"tenant": "A', 'B"}, {"tenant": "A'), ('tenant', 'B"}, {"kv_dtype": "A"}, {"tenant": "None"},
    ]  # fmt: skip
    roots = [root_of(part) for part in parts]
    assert len(set(roots)) == len(roots)
    assert root_of({"tenant": None, "cache_salt": "s"}) == root_of({"cache_salt": "s"})
    assert root_of({"a": "1", "b": "2"}) == root_of({"b": "2", "a": "1"})


# ---- what a lookup remembers


def test_a_lookup_is_made_once_per_version():
    calls = []
    index = index_with()
    path = PrefixPath(b"")
    tokens = [1, 2, 3, 4]
    publish(index, tokens, [10])
    index._by_key = Counting(index._by_key, calls)
    first = index.match(path, tokens, 2)
    asked = len(calls)
    assert asked
    assert index.match(path, tokens, 2) is first
    assert len(calls) == asked, "nothing has changed: nothing is looked up"
    assert index.match(path, tokens, 1) == first
    assert len(calls) > asked, "another number of blocks is another question"


class Counting(dict):
    """Notes every lookup."""

    def __init__(self, content: dict, calls: list) -> None:
        super().__init__(content)
        self._calls = calls

    def get(self, key: Hashable, default: Any = None) -> Any:
        self._calls.append(key)
        return super().get(key, default)


def test_whatever_may_change_an_answer_changes_the_version():
    index, tokens = index_with(), [1, 2, 3, 4]
    waiting = PrefixPath(b"")

    def blocks() -> list[int | None]:
        return [node.block for node in index.match(waiting, tokens, 2)]

    assert blocks() == []
    path = publish(index, tokens, [10])
    assert blocks() == [10]
    index.publish(path, tokens, 11)
    assert blocks() == [10, 11]
    leave(index, path)
    node, block = index.pop_leaf()
    index.forget(node)
    assert block == 11
    assert blocks() == [10]
    node, _ = index.pop_leaf()
    node.host_block = 3
    assert blocks() == [None], "it is on the host"
    index.bring_back(node, 20)
    index.use(node)
    assert blocks() == [20]
    index.check_integrity()


# ---- who dies first


@pytest.mark.parametrize("eviction", ALL)
def test_a_chain_dies_from_its_tail(eviction):
    index = index_with(eviction)
    leave(index, publish(index, list(range(8)), [10, 11, 12, 13]))
    for length in (4, 3, 2, 1):
        assert index.num_idle == length
        assert evict(index) == 9 + length
        found = index.match(PrefixPath(b""), list(range(8)), 4)
        assert [node.block for node in found] == [10, 11, 12, 13][: length - 1]
        index.check_integrity()
    with pytest.raises(KeyError):
        index.pop_leaf()


@pytest.mark.parametrize("eviction", ALL)
def test_a_fork_in_the_tree_stays_until_all_its_branches_are_gone(eviction):
    index = index_with(eviction)
    for last, blocks in ((5, [10, 11]), (6, [20, 12]), (7, [20, 13])):
        leave_with_trunk = publish(index, [1, 2, last, last], blocks)
        leave(index, leave_with_trunk)
    evicted = [evict(index) for _ in range(4)]
    assert sorted(evicted[:3]) == [11, 12, 13]
    assert evicted[3] == 10


@pytest.mark.parametrize("eviction", ALL)
def test_what_somebody_holds_is_never_taken(eviction):
    index = index_with(eviction)
    held = publish(index, [1, 2, 3, 4], [10, 11])
    leave(index, publish(index, [1, 2, 3, 4, 5, 6, 7, 8], [20, 21, 12, 13]))
    for node in held.nodes:  # the second sequence left them, the first still holds them
        index.use(node, hit=False)
    assert [evict(index), evict(index)] == [13, 12]
    with pytest.raises(KeyError):
        index.pop_leaf()
    leave(index, held)
    assert [evict(index), evict(index)] == [11, 10]


def three_chains(eviction: str) -> PrefixIndex:
    """Blocks 10, 20 and 30, one each, published and left in this order."""
    index = index_with(eviction)
    for block in (10, 20, 30):
        leave(index, publish(index, [block, block], [block]))
    return index


def use(index: PrefixIndex, block: int) -> None:
    leave(index, hit(index, [block, block]))


@pytest.mark.parametrize(
    ("eviction", "uses", "order"),
    [
        ("lru", [], [10, 20, 30]),
        ("lru", [10], [20, 30, 10]),
        ("lru", [20, 10, 20], [30, 10, 20]),
        ("lfu", [], [10, 20, 30]),
        ("lfu", [10], [20, 30, 10]),
        ("lfu", [20, 20, 10, 30], [10, 30, 20]),  # 2 hits of 20; 10 and 30 have one, 10 longer ago
        ("fifo", [], [10, 20, 30]),
        ("fifo", [10, 10, 20], [10, 20, 30]),
    ],
)
def test_the_order_of_each_policy(eviction, uses, order):
    index = three_chains(eviction)
    for block in uses:
        use(index, block)
    assert [evict(index) for _ in range(3)] == order


@pytest.mark.parametrize(("eviction", "order"), [("lru", [20, 10]), ("fifo", [10, 20]), ("lfu", [20, 10])])
def test_who_leaves_last_was_used_last(eviction, order):
    """Published as 10, 20 and left as 20, 10."""
    index = index_with(eviction)
    first, second = publish(index, [1, 1], [10]), publish(index, [2, 2], [20])
    leave(index, second)
    leave(index, first)
    assert [evict(index), evict(index)] == order


def test_moments_are_unique_and_rise():
    index = three_chains("lru")
    use(index, 20)
    nodes = [index.node_of(block) for block in (10, 30, 20)]
    moments = [node.last_used for node in nodes if node]
    assert moments == sorted(set(moments))
    published = [node.published for node in nodes if node]
    assert len(set(published)) == 3


def test_the_replacement_of_an_equal_block_is_no_hit():
    index = index_with("lfu")
    leave(index, publish(index, [1, 2], [10]))
    leave(index, publish(index, [1, 2], [20]))
    node = index.node_of(10)
    assert node is not None
    assert node.num_hits == 0
    use_path = hit(index, [1, 2])
    assert node.num_hits == 1
    leave(index, use_path)
    assert index.num_idle == 1


# ---- the queue of leaves


def test_the_queue_of_leaves_stays_small_and_right():
    """Every hit leaves an entry behind that is not valid any more; they are swept out."""
    index = three_chains("lru")
    most = 0
    for i in range(5000):
        use(index, (10, 20, 30)[i % 3])
        most = max(most, len(index._leaves))
    assert most <= 2 * 3 + 1024 + 1
    index.check_integrity()
    assert [evict(index) for _ in range(3)] == [30, 10, 20]  # 5000 uses end with 20 (i = 4999)


def test_sweeping_keeps_the_order():
    """With a queue that is swept at every turn the evicted blocks are the same."""
    rng = random.Random(1)
    plain, swept = three_chains("lru"), three_chains("lru")
    for _ in range(500):
        block = rng.choice([10, 20, 30])
        use(plain, block)
        use(swept, block)
        swept._leaves = [entry for entry in swept._leaves if entry[2].ticket == entry[1]]
        heapq.heapify(swept._leaves)
        swept.check_integrity()
    assert [evict(plain) for _ in range(3)] == [evict(swept) for _ in range(3)]


# ---- random histories


class IndexAgainstDict(RuleBasedStateMachine):
    """The model: for every prefix that is cached, its device block or None (on the host), and who holds it."""

    @initialize(eviction=st.sampled_from(ALL), keys=st.sampled_from([0, 0, 3, 7]))
    def start(self, eviction: str, keys: int) -> None:
        self.index = index_with(eviction, hasher=(lambda data: sum(data) % keys) if keys else sha256)
        self.collides = keys > 0
        self.blocks: dict[tuple[int, ...], int | None] = {}
        self.holders: list[tuple[list[int], PrefixPath]] = []
        self.host: dict[tuple[int, ...], Node] = {}
        self.fresh = 0

    def prefix(self, tokens: list[int], place: int) -> tuple[int, ...]:
        return tuple(tokens[: BLOCK * (place + 1)])

    @rule(tokens=st.lists(st.integers(0, 2), min_size=2, max_size=8), first=st.integers(0, 1))
    def begin(self, tokens: list[int], first: int) -> None:
        """A sequence takes what is there of its tokens, back from the host too, and publishes the rest."""
        path = PrefixPath(b"")
        full = len(tokens) // BLOCK
        found = self.index.match(path, tokens, full)
        known = [place for place in range(full) if self.prefix(tokens, place) in self.blocks]
        assert [self.blocks[self.prefix(tokens, place)] for place in range(len(found))] == [
            node.block for node in found
        ]
        assert len(found) == next((i for i, place in enumerate([*known, None]) if place != i), 0)
        path.nodes = list(found)
        for place, node in enumerate(found):
            if node.block is None:
                self.fresh += 1
                self.index.bring_back(node, self.fresh)
                del self.host[self.prefix(tokens, place)]
                self.blocks[self.prefix(tokens, place)] = self.fresh
            self.index.use(node)
        for place in range(len(found), full):
            self.fresh += 1
            node = self.index.publish(path, tokens, self.fresh)
            if node is None:
                assert self.collides
                break
            assert node.block == self.fresh
            self.blocks[self.prefix(tokens, place)] = self.fresh
        self.holders.append((tokens, path))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        _, path = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        for node in reversed(path.nodes):
            if not any(node in other.nodes for _, other in self.holders):
                self.index.leave(node)

    @rule(keep=st.booleans())
    def evict(self, keep: bool) -> None:
        held = {node for _, path in self.holders for node in path.nodes}
        idle = {p: b for p, b in self.blocks.items() if b is not None and self.index.node_of(b) not in held}
        if not idle:
            with pytest.raises(KeyError):
                self.index.pop_leaf()
            return
        node, block = self.index.pop_leaf()
        [prefix] = [p for p, b in idle.items() if b == block]
        longer = [p for p, b in self.blocks.items() if b is not None and p[: len(prefix)] == prefix]
        assert longer == [prefix], "nothing on the device continues it"
        if keep:
            node.host_block = len(self.host)
            self.host[prefix], self.blocks[prefix] = node, None
            return
        below = sorted((p for p in self.host if p[: len(prefix)] == prefix), key=len, reverse=True)
        for other in below:
            self.index.forget(self.host.pop(other))
            del self.blocks[other]
        self.index.forget(node)
        del self.blocks[prefix]

    @invariant()
    def counts_agree(self) -> None:
        if not hasattr(self, "index"):
            return
        held = {node for _, path in self.holders for node in path.nodes}
        idle = self.index.check_integrity()
        on_device = [b for b in self.blocks.values() if b is not None]
        assert set(idle) == {b for b in on_device if self.index.node_of(b) not in held}
        assert self.index.num_idle == len(idle)
        assert len(self.index) == len(self.blocks)


TestIndexAgainstDict = IndexAgainstDict.TestCase
TestIndexAgainstDict.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True
)
