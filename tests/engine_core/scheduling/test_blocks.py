from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagoda_engine_core.scheduling.blocks import BlockPool, BrokenInvariant, HashChain


def names(*numbers: int) -> list[bytes]:
    return [bytes([number]) for number in numbers]


def cached(pool: BlockPool, *numbers: int) -> list[int]:
    """Cached blocks named `numbers`, with a ref count of 0."""
    blocks = pool.allocate(len(numbers))
    for block, name in zip(blocks, names(*numbers), strict=True):
        pool.register(block, name)
    pool.free(blocks)
    return blocks


def test_allocate_and_free() -> None:
    pool = BlockPool(4, 16, True)
    blocks = pool.allocate(3)
    assert len(set(blocks)) == 3
    assert (pool.num_free, pool.num_used) == (1, 3)
    pool.free(blocks)
    assert (pool.num_free, pool.num_used) == (4, 0)


def test_asking_for_more_than_is_free_changes_nothing() -> None:
    pool = BlockPool(2, 16, True)
    pool.allocate(1)
    with pytest.raises(BrokenInvariant, match="2 blocks asked for, 1 free"):
        pool.allocate(2)
    assert pool.num_free == 1
    pool.check_invariants()


def test_a_shared_block_is_free_after_its_last_user() -> None:
    pool = BlockPool(2, 16, True)
    blocks = pool.allocate(1)
    pool.share(blocks)
    pool.free(blocks)
    assert pool.num_used == 1
    pool.free(blocks)
    assert pool.num_used == 0
    with pytest.raises(BrokenInvariant, match="without a user"):
        pool.free(blocks)


def test_a_free_block_without_content_cannot_be_shared() -> None:
    with pytest.raises(BrokenInvariant, match="holds nothing"):
        BlockPool(2, 16, True).share([0])


def test_match_finds_the_longest_known_prefix_and_share_revives_it() -> None:
    pool = BlockPool(8, 16, True)
    blocks = cached(pool, 1, 2, 3)
    assert pool.match(names(1, 2, 9, 3)) == blocks[:2]
    assert pool.match(names(9)) == []
    assert (pool.num_free, pool.num_cached) == (8, 3)
    pool.share(blocks[:2])
    assert (pool.num_free, pool.num_cached) == (6, 1)
    assert set(pool.allocate(6)).isdisjoint(blocks[:2])
    assert pool.match(names(1, 2, 3)) == blocks[:2], "used blocks are found too, evicted ones are not"


def test_uncached_blocks_go_first_then_the_least_recently_used_and_tails_before_heads() -> None:
    pool = BlockPool(6, 16, True)
    first = cached(pool, 1, 2)
    second = cached(pool, 3, 4)
    plain = [block for block in range(6) if block not in first + second]
    pool.share(first)  # used again: now younger than `second`
    pool.free(first)
    order = [pool.allocate(1)[0] for _ in range(6)]
    assert sorted(order[:2]) == plain
    assert order[2:] == [second[1], second[0], first[1], first[0]]


def test_the_first_block_of_a_name_keeps_it() -> None:
    pool = BlockPool(4, 16, True)
    one, two = pool.allocate(2)
    pool.register(one, b"x")
    pool.register(two, b"x")
    pool.register(one, b"y")
    assert pool.match([b"x"]) == [one]
    assert pool.match([b"y"]) == []
    with pytest.raises(BrokenInvariant, match="without a user"):
        pool.register(3, b"z")


def test_without_prefix_cache_nothing_is_remembered() -> None:
    pool = BlockPool(2, 16, False)
    cached(pool, 1)
    assert pool.match(names(1)) == []
    assert pool.num_cached == 0


def test_reset_forgets_unused_blocks_only() -> None:
    pool = BlockPool(8, 16, True)
    cached(pool, 1, 2)
    (held,) = pool.allocate(1)
    pool.register(held, b"h")
    assert pool.reset_cache() == 2
    assert pool.match(names(1)) == []
    assert pool.match([b"h"]) == [held]
    assert pool.reset_cache() == 0
    pool.check_invariants()


@pytest.mark.parametrize("attribute", ["num_free", "num_cached"])
def test_check_invariants_sees_a_wrong_count(attribute: str) -> None:
    pool = BlockPool(4, 16, True)
    cached(pool, 1)
    setattr(pool, attribute, getattr(pool, attribute) + 1)
    with pytest.raises(BrokenInvariant):
        pool.check_invariants()


def test_check_invariants_sees_a_lost_reference_and_a_broken_link() -> None:
    pool = BlockPool(4, 16, True)
    pool.ref_counts[2] = 1
    with pytest.raises(BrokenInvariant, match="without user"):
        pool.check_invariants()
    pool = BlockPool(4, 16, True)
    pool._previous[2] = 0
    with pytest.raises(BrokenInvariant, match="links"):
        pool.check_invariants()


def chain(tokens: list[int], salt: str = "", block_size: int = 4, adapter: str = "") -> list[bytes]:
    result = HashChain(salt, block_size, adapter)
    result.extend(len(tokens) // block_size, lambda start, end: tokens[start:end])
    return result.hashes


def test_a_name_covers_everything_before_the_block_and_the_salt() -> None:
    tokens = list(range(12))
    base = chain(tokens)
    assert len(set(base)) == 3
    assert chain(tokens[:9]) == base[:2]
    assert chain([99, *tokens[1:]])[1] != base[1]
    assert chain(tokens, salt="tenant")[0] != base[0]
    assert chain([5] * 8)[0] != chain([5] * 8)[1]
    assert chain(tokens, block_size=6)[0] != base[0]


def test_a_name_covers_the_adapter_and_without_one_is_what_it_always_was() -> None:
    tokens, digests = list(range(8)), ["1" * 64, "2" * 64]
    names = [chain(tokens), *(chain(tokens, adapter=digest) for digest in digests), chain(tokens, salt=digests[0])]
    assert len({name for several in names for name in several}) == 8
    assert names[0][0].hex() == "1fe49eb63c7e7b4b76888b95a913ec7d0846a78660de8305ed9258fc17db57a6"


def test_each_block_is_hashed_once() -> None:
    asked: list[tuple[int, int]] = []
    result = HashChain("", 4)

    def tokens(start: int, end: int) -> list[int]:
        asked.append((start, end))
        return [7] * (end - start)

    result.extend(1, tokens)
    result.extend(3, tokens)
    result.extend(2, tokens)
    assert asked == [(0, 4), (4, 8), (8, 12)]


class BlockPoolMachine(RuleBasedStateMachine):
    """Allocates, shares and frees block tables, and compares the pool with a model of ref counts and names."""

    @initialize(num_blocks=st.integers(1, 12), prefix_cache=st.booleans())
    def start(self, num_blocks: int, prefix_cache: bool) -> None:
        self.pool = BlockPool(num_blocks, 16, prefix_cache)
        self.tables: list[list[int]] = []
        self.named: dict[int, bytes] = {}

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        blocks = self.pool.allocate(data.draw(st.integers(0, self.pool.num_free)))
        held = {block for table in self.tables for block in table}
        assert held.isdisjoint(blocks), "a block in use was handed out"
        assert len(set(blocks)) == len(blocks)
        for block in blocks:
            self.named.pop(block, None)
        self.tables.append(blocks)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.pool.free(self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1))))

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), name=st.binary(min_size=1, max_size=1))
    def register(self, data: st.DataObject, name: bytes) -> None:
        table = data.draw(st.sampled_from(self.tables))
        if not table:
            return
        block = data.draw(st.sampled_from(table))
        self.pool.register(block, name)
        if self.pool.prefix_cache and block not in self.named and name not in self.named.values():
            self.named[block] = name

    @rule(data=st.data())
    def match_and_share(self, data: st.DataObject) -> None:
        wanted = data.draw(st.lists(st.sampled_from(sorted(self.named.values()) or [b"none"]), max_size=4, unique=True))
        blocks = self.pool.match(wanted)
        assert [self.named[block] for block in blocks] == wanted[: len(blocks)]
        assert len(blocks) == len(wanted) or not self.named
        self.pool.share(blocks)
        self.tables.append(blocks)

    @rule()
    def reset(self) -> None:
        held = {block for table in self.tables for block in table}
        kept = {block: name for block, name in self.named.items() if block in held}
        assert self.pool.reset_cache() == len(self.named) - len(kept)
        self.named = kept

    @invariant()
    def agrees_with_the_model(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check_invariants()
        users = Counter(block for table in self.tables for block in table)
        assert self.pool.ref_counts == [users[block] for block in range(self.pool.num_blocks)]
        assert self.pool.num_used == len(users)
        assert self.pool.num_cached == sum(block not in users for block in self.named)

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for table in self.tables:
                self.pool.free(table)
            assert self.pool.num_free == self.pool.num_blocks


BlockPoolMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestBlockPool = BlockPoolMachine.TestCase
