"""Blocks are conserved, shared only by prefix, and evicted least recently used first."""

import random
from collections import Counter
from collections.abc import Callable
from hashlib import sha256

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from outpace.cache.block_pool import BlockPool, block_hashes
from outpace.errors import ConfigError
from tests.untraced import untraced

SIZE = 4


def taken(pool: BlockPool, count: int) -> list[int]:
    blocks = pool.allocate(count)
    assert blocks is not None
    return blocks


def cached(pool: BlockPool, tokens: list[int]) -> list[int]:
    """Blocks of these tokens, computed and still held."""
    hashes = block_hashes(tokens, SIZE)
    blocks = taken(pool, len(hashes))
    for block, key in zip(blocks, hashes, strict=True):
        pool.register(block, key)
    return blocks


def test_hashes_are_of_full_blocks_only() -> None:
    assert [len(block_hashes(range(count), SIZE)) for count in (0, 3, 4, 7, 8, 9)] == [0, 0, 1, 1, 2, 2]
    assert all(len(key) == sha256().digest_size for key in block_hashes(range(9), SIZE))


def test_a_hash_depends_on_all_tokens_before_and_on_the_salt() -> None:
    base = block_hashes([1, 2, 3, 4, 5, 6, 7, 8], SIZE)
    assert block_hashes([1, 2, 3, 4, 5, 6, 7, 9], SIZE)[0] == base[0]
    assert block_hashes([1, 2, 3, 4, 5, 6, 7, 9], SIZE)[1] != base[1]
    assert not set(block_hashes([9, 2, 3, 4, 5, 6, 7, 8], SIZE)) & set(base)
    assert not set(block_hashes([1, 2, 3, 4, 5, 6, 7, 8], SIZE, "salt")) & set(base)
    assert block_hashes([1, 2, 3, 4] * 2, SIZE)[0] != block_hashes([1, 2, 3, 4] * 2, SIZE)[1]
    assert block_hashes([256], 1) != block_hashes([1], 1)


def test_hashes_grow_with_a_sequence() -> None:
    known: list[bytes] = []
    for count in range(40):
        assert block_hashes(range(count), SIZE, "s", known) is known
        assert known == block_hashes(range(count), SIZE, "s")


def test_any_text_can_be_a_salt() -> None:
    assert block_hashes(range(4), SIZE, "\ud800") != block_hashes(range(4), SIZE, "\ud801")


def test_allocation_is_whole_or_none() -> None:
    pool = BlockPool(4, SIZE)
    first = taken(pool, 3)
    assert pool.allocate(2) is None
    assert pool.num_free == 1
    assert sorted(first + taken(pool, 1)) == [0, 1, 2, 3]
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []
    pool.release(first)
    assert pool.num_free == 3
    pool.check()


def test_a_block_cannot_be_released_twice() -> None:
    pool = BlockPool(4, SIZE)
    blocks = taken(pool, 1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(blocks)


def test_a_block_without_reference_cannot_be_registered() -> None:
    with pytest.raises(AssertionError, match="no reference"):
        BlockPool(4, SIZE).register(0, b"key")


def test_a_shared_block_is_free_when_the_last_holder_lets_go() -> None:
    pool = BlockPool(4, SIZE)
    blocks = taken(pool, 2)
    pool.share(blocks)
    pool.share(blocks[:1])
    pool.check({blocks[0]: 3, blocks[1]: 2})
    pool.release(blocks)
    assert pool.num_free == 2
    pool.release(blocks)
    assert pool.num_free == 3
    pool.release(blocks[:1])
    assert pool.num_free == 4
    pool.check({})


def test_match_finds_the_longest_cached_prefix() -> None:
    pool = BlockPool(8, SIZE)
    blocks = cached(pool, list(range(12)))
    assert pool.match(block_hashes(range(12), SIZE)) == blocks
    assert pool.match(block_hashes(range(20), SIZE)) == blocks
    assert pool.match(block_hashes([*range(8), 99, 99, 99, 99], SIZE)) == blocks[:2]
    assert pool.match(block_hashes([99, *range(11)], SIZE)) == []
    assert pool.match(block_hashes(range(12), SIZE)[1:]) == blocks[1:]  # by hash, which names all that stands before
    assert pool.match([]) == []


def test_matching_takes_no_reference_and_a_cached_block_outlives_its_holder() -> None:
    pool = BlockPool(4, SIZE)
    blocks = cached(pool, list(range(8)))
    pool.release(blocks)
    assert pool.num_free == 4
    assert pool.match(block_hashes(range(8), SIZE)) == blocks
    pool.check({})
    pool.share(blocks)
    assert pool.num_free == 2
    pool.check(dict.fromkeys(blocks, 1))


def test_blocks_that_are_held_are_not_evicted() -> None:
    pool = BlockPool(4, SIZE)
    blocks = cached(pool, list(range(8)))
    assert not set(taken(pool, 2)) & set(blocks)
    assert pool.allocate(1) is None
    assert pool.match(block_hashes(range(8), SIZE)) == blocks


def test_empty_blocks_are_used_before_cached_ones() -> None:
    pool = BlockPool(4, SIZE)
    blocks = cached(pool, list(range(8)))
    pool.release(blocks)
    taken(pool, 2)
    assert pool.match(block_hashes(range(8), SIZE)) == blocks


def test_the_least_recently_used_goes_first_and_of_a_sequence_the_last_block() -> None:
    pool = BlockPool(6, SIZE)
    old, new = list(range(12)), list(range(50, 62))
    first, second = cached(pool, old), cached(pool, new)
    pool.release(first)
    pool.release(second)
    assert taken(pool, 1) == first[2:]
    assert pool.match(block_hashes(old, SIZE)) == first[:2]
    pool.share(first[:2])  # used again, so it is not the oldest any more
    pool.release(first[:2])
    assert taken(pool, 3) == second[::-1]
    assert pool.match(block_hashes(old, SIZE)) == first[:2]
    assert pool.match(block_hashes(new, SIZE)) == []
    pool.check()


def test_the_first_block_with_a_hash_keeps_it() -> None:
    pool = BlockPool(4, SIZE)
    (first,), (second,) = cached(pool, [1, 2, 3, 4]), cached(pool, [1, 2, 3, 4])
    assert pool.match(block_hashes([1, 2, 3, 4], SIZE)) == [first]
    pool.release([first, second])
    assert taken(pool, 3).count(first) == 0  # the twin was never findable, so it was simply empty
    pool.check()


def test_without_prefix_caching_nothing_is_found() -> None:
    pool = BlockPool(4, SIZE, enable_prefix_caching=False)
    blocks = cached(pool, list(range(8)))
    assert pool.match(block_hashes(range(8), SIZE)) == []
    pool.release(blocks)
    pool.check({})


def test_blocks_for_rounds_up() -> None:
    assert [BlockPool(1, SIZE).blocks_for(count) for count in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


@pytest.mark.parametrize(("num_blocks", "block_size"), [(-1, 4), (4, 0)])
def test_impossible_sizes_are_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ConfigError, match="num_blocks"):
        BlockPool(num_blocks, block_size)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda pool: pool._references.__setitem__(0, -1),
        lambda pool: pool._references.__setitem__(3, 1),
        lambda pool: pool._empty.append(3),
        lambda pool: pool._empty.pop(),
        lambda pool: pool._cached.clear(),
        lambda pool: pool._hashes.__setitem__(0, None),
        lambda pool: pool._cached.__setitem__(b"key", 3),
        lambda pool: pool._evictable.__setitem__(3, None),
    ],
)
def test_check_sees_what_is_wrong(spoil: Callable[[BlockPool], object]) -> None:
    pool = BlockPool(4, SIZE)
    pool.release(cached(pool, list(range(8)))[:1])
    pool.check()
    spoil(pool)
    with pytest.raises((AssertionError, KeyError)):
        pool.check()


class PoolModel:
    """A pool beside what it should be: who holds what, and what each block was said to hold."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, SIZE)
        self.holders: list[tuple[list[int], list[bytes]]] = []
        self.contents: dict[int, bytes] = {}

    def held(self) -> Counter[int]:
        return Counter(block for blocks, _ in self.holders for block in blocks)

    def open(self, tokens: list[int]) -> None:
        """What a scheduler does for a request: match, share, allocate the rest, compute, register."""
        hashes = block_hashes(tokens, SIZE)
        found = self.pool.match(hashes)
        assert [self.contents[block] for block in found] == hashes[: len(found)]
        self.pool.share(found)
        free = self.pool.num_free
        fresh = self.pool.allocate(len(hashes) - len(found))
        assert (fresh is None) == (len(hashes) - len(found) > free)
        if fresh is None:
            self.pool.release(found)
            return
        assert not self.held().keys() & set(fresh)
        for block, key in zip(fresh, hashes[len(found) :], strict=True):
            self.contents[block] = key
            self.pool.register(block, key)
        self.holders.append((found + fresh, hashes))

    def take(self, count: int) -> None:
        blocks = self.pool.allocate(count)
        if blocks is not None:
            assert len(blocks) == count
            assert not self.held().keys() & set(blocks)
            for block in blocks:
                self.contents.pop(block, None)
            self.holders.append((blocks, []))

    def fork(self, index: int) -> None:
        blocks, hashes = self.holders[index % len(self.holders)]
        self.pool.share(blocks)
        self.holders.append((list(blocks), hashes))

    def close(self, index: int) -> None:
        self.pool.release(self.holders.pop(index % len(self.holders))[0])

    def check(self) -> None:
        held = self.held()
        self.pool.check(held)
        assert self.pool.num_free == self.pool.num_blocks - len(held)


TOKENS = st.lists(st.integers(0, 1), max_size=24)


class PoolMachine(RuleBasedStateMachine):
    model: PoolModel

    @initialize(num_blocks=st.integers(0, 10))
    def start(self, num_blocks: int) -> None:
        self.model = PoolModel(num_blocks)

    @rule(tokens=TOKENS)
    def open(self, tokens: list[int]) -> None:
        self.model.open(tokens)

    @rule(count=st.integers(0, 6))
    def take(self, count: int) -> None:
        self.model.take(count)

    @precondition(lambda self: self.model.holders)
    @rule(index=st.integers(0, 20))
    def fork(self, index: int) -> None:
        self.model.fork(index)

    @precondition(lambda self: self.model.holders)
    @rule(index=st.integers(0, 20))
    def close(self, index: int) -> None:
        self.model.close(index)

    @invariant()
    def conserved(self) -> None:
        self.model.check()


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, database=None, derandomize=True
)


def test_a_long_random_life() -> None:
    rng, model = random.Random(7), PoolModel(24)
    with untraced():
        for _ in range(30_000):
            action = rng.random()
            if action < 0.4:
                model.open([rng.randrange(2) for _ in range(rng.randrange(30))])
            elif action < 0.5:
                model.take(rng.randrange(8))
            elif model.holders:
                (model.fork if action < 0.6 else model.close)(rng.randrange(100))
            model.check()
