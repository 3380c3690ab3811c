"""A block is free when its reference count is 0; a free block may keep its content until it is allocated again.

So "cached" is not a third state: cached blocks without users are in the free list like all others, only later in it,
and a prefix hit takes them out again.

    ref count 0        in the free list: blocks without content worth keeping first, then cached ones, least recently
                       used first
    ref count >= 1     held by that many rows; never allocated

The free list is a doubly linked list in two int arrays (a deque cannot remove from the middle in O(1)). Only BlockPool
touches the links. A block here is an int; the tensor behind it belongs to the worker.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from pagoda_proto.steps import NO_BLOCK, KVGroup

DIGEST_BYTES = 32


class BrokenInvariant(AssertionError):
    """The books do not balance: a bug in this code, never caused by input."""


def require(condition: bool, what: str) -> None:
    """Raises BrokenInvariant if a condition that this code guarantees does not hold."""
    if not condition:
        raise BrokenInvariant(what)


class HashChain:
    """Names of the leading full blocks of a growing list of tokens.

    A name covers the block's tokens, all tokens before it (through the parent's name), and the cache salt and adapter
    digest (at the root), so equal names mean equal KV within one salt. Each block is hashed once, when it becomes full.
    """

    __slots__ = ("_adapter", "_salt", "block_size", "hashes")

    def __init__(self, salt: str, block_size: int, adapter: str = "") -> None:
        self._salt = salt
        self._adapter = adapter
        self.block_size = block_size
        self.hashes: list[bytes] = []

    def copy(self) -> HashChain:
        """A chain for another list that begins with the same tokens."""
        chain = HashChain(self._salt, self.block_size, self._adapter)
        chain.hashes = list(self.hashes)
        return chain

    def extend(self, num_blocks: int, tokens: Callable[[int, int], Sequence[int]]) -> None:
        """Hash up to `num_blocks` blocks; `tokens(start, end)` returns that range of the token list."""
        for index in range(len(self.hashes), num_blocks):
            parent = self.hashes[-1] if index else self._root()
            own = array("Q", tokens(index * self.block_size, (index + 1) * self.block_size)).tobytes()
            self.hashes.append(blake2b(parent + own, digest_size=DIGEST_BYTES).digest())

    def _root(self) -> bytes:
        return blake2b(self._salt.encode(), digest_size=DIGEST_BYTES, key=bytes.fromhex(self._adapter)).digest()


@dataclass(slots=True)
class Table:
    """A row's blocks of one group, by place. The first `gone` places hold NO_BLOCK: their blocks have been freed."""

    ids: list[int] = field(default_factory=list)
    gone: int = 0

    @classmethod
    def behind(cls, gone: int, ids: Sequence[int]) -> Table:
        """A table with these blocks after `gone` places without a block."""
        return cls([NO_BLOCK] * gone + [*ids], gone)

    @property
    def held(self) -> list[int]:
        return self.ids[self.gone :]

    @property
    def num_held(self) -> int:
        return len(self.ids) - self.gone

    def copy(self) -> Table:
        return Table(list(self.ids), self.gone)

    def let_go(self, gone: int) -> list[int]:
        """Drop the blocks before place `gone`, and return them."""
        left = self.ids[self.gone : gone]
        self.ids[self.gone : gone] = [NO_BLOCK] * len(left)
        self.gone = gone
        return left


class BlockPool:
    """KV blocks of one worker. Ids are `first` .. `first` + num_blocks - 1; lists indexed by id still start at 0."""

    def __init__(self, num_blocks: int, block_size: int, prefix_cache: bool, first: int = 0) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.first, self.end = first, first + num_blocks
        # Others read these; only this class writes them.
        self.ref_counts = [0] * self.end
        self.num_free = num_blocks  # allocatable, including cached blocks without users
        self.num_cached = 0  # free, with content kept for prefix hits
        self._hash_of: list[bytes | None] = [None] * self.end
        self._block_of: dict[bytes, int] = {}
        # Index `end` is the list's head and tail; initially the free list is in order of ids.
        self._next: list[int] = [*range(1, self.end + 1), first]
        self._previous: list[int] = [*range(-1, self.end)]
        if num_blocks:
            self._previous[first] = self.end
        else:
            self._previous[self.end] = self.end

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, forgetting their content. Callers check `num_free` first (BrokenInvariant)."""
        require(count <= self.num_free, f"{count} blocks asked for, {self.num_free} free")
        return [self._take_first() for _ in range(count)]

    def share(self, block_ids: Sequence[int]) -> None:
        """Add a user to each of these blocks, used or cached."""
        for block in block_ids:
            if not self.ref_counts[block]:
                require(self._hash_of[block] is not None, f"block {block} is free and holds nothing")
                self._unlink(block)
                self.num_cached -= 1
            self.ref_counts[block] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """Remove a user from each. Of blocks freed together, the last is evicted first, so prefixes live longest."""
        for block in reversed(block_ids):
            require(self.ref_counts[block] > 0, f"block {block} freed without a user")
            self.ref_counts[block] -= 1
            if self.ref_counts[block]:
                continue
            if self._hash_of[block] is None:
                self._link_after(self.end, block)
            else:
                self._link_after(self._previous[self.end], block)
                self.num_cached += 1

    def register(self, block: int, name: bytes) -> None:
        """Make a used block, now full and computed, findable by `name`. The first block with a name keeps it."""
        require(self.ref_counts[block] > 0, f"block {block} registered without a user")
        if self.prefix_cache and self._hash_of[block] is None and name not in self._block_of:
            self._hash_of[block] = name
            self._block_of[name] = block

    def knows(self, name: bytes) -> bool:
        """Whether a block has this name."""
        return name in self._block_of

    def match(self, names: Sequence[bytes]) -> list[int]:
        """Blocks of the longest cached prefix of `names`. Changes nothing; `share` the blocks to keep them."""
        blocks = []
        for name in names:
            block = self._block_of.get(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def reset_cache(self) -> int:
        """Forget the content of cached blocks without users; return their number. Blocks in use keep their names."""
        cached = [(block, name) for block in self._walk() if (name := self._hash_of[block]) is not None]
        for block, name in cached:
            self._forget(block, name)
        return len(cached)

    def check_invariants(self) -> None:
        """Raises BrokenInvariant unless the free list is exactly the blocks without users and names map both ways."""
        free = list(self._walk())
        require(len(free) == self.num_free, "free list and free count differ")
        require(
            set(free) == {b for b in range(self.first, self.end) if not self.ref_counts[b]},
            "free list != blocks without user",
        )
        require(all(count >= 0 for count in self.ref_counts), "negative ref count")
        named = {name: block for block, name in enumerate(self._hash_of) if name is not None}
        require(named == self._block_of, "names and blocks differ")
        require(sum(self._hash_of[block] is not None for block in free) == self.num_cached, "cached count is wrong")

    def _walk(self) -> list[int]:
        blocks: list[int] = []
        block = self._next[self.end]
        while block != self.end and len(blocks) <= self.num_blocks:
            require(self._previous[self._next[block]] == block, f"links around block {block} are broken")
            blocks.append(block)
            block = self._next[block]
        return blocks

    def _take_first(self) -> int:
        block = self._next[self.end]
        self._unlink(block)
        name = self._hash_of[block]
        if name is not None:
            self._forget(block, name)
        self.ref_counts[block] = 1
        return block

    def _forget(self, block: int, name: bytes) -> None:
        del self._block_of[name]
        self._hash_of[block] = None
        self.num_cached -= 1

    def _unlink(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before] = after
        self._previous[after] = before
        self.num_free -= 1

    def _link_after(self, before: int, block: int) -> None:
        after = self._next[before]
        self._next[before] = self._previous[after] = block
        self._previous[block], self._next[block] = before, after
        self.num_free += 1


class Group:
    """One group's blocks in the KV cache and in the swap space.

    in_flight_tokens: Most tokens of one row that are planned but not confirmed.
    """

    def __init__(self, offer: KVGroup, pools: tuple[BlockPool, BlockPool], in_flight_tokens: int) -> None:
        self.pool, self.swap_pool = pools
        self.swap_block_s = offer.swap_block_s
        self._block_size = self.pool.block_size
        self._kept = -(-offer.kept // self._block_size) if offer.kept else sys.maxsize  # full blocks before the next
        self.kept, self.keeps_all = offer.kept, not offer.kept  # tokens
        most = self._kept + in_flight_tokens // self._block_size + 2
        self._most = sys.maxsize if self.keeps_all else min(most, offer.num_blocks)

    def first_kept(self, num_tokens: int) -> int:
        """The first place that a row reads when it continues after `num_tokens` tokens."""
        return max(0, num_tokens // self._block_size - self._kept)

    def most(self, num_blocks: int) -> int:
        """Most blocks that a row holds at once while growing to `num_blocks` places."""
        return min(num_blocks, self._most)

    def reach(self, names: Sequence[bytes], num_blocks: int) -> int:
        """An upper bound, for this group, on the length of a prefix hit among the first `num_blocks` blocks."""
        if self.keeps_all:
            return len(self.pool.match(names[:num_blocks]))
        first = self.first_kept(num_blocks * self._block_size)
        places = range(num_blocks - 1, first - 1, -1)
        return next((place for place in places if not self.pool.knows(names[place])), num_blocks)

    def hit(self, names: Sequence[bytes], num_blocks: int) -> Table:
        """The table of a hit of `num_blocks` blocks."""
        first = self.first_kept(num_blocks * self._block_size)
        return Table.behind(first, self.pool.match(names[first:num_blocks]))


def pools_of(offers: Sequence[KVGroup], block_size: int, prefix_cache: bool) -> list[tuple[BlockPool, BlockPool]]:
    """The KV block pool and the swap block pool of each group; see `group` in `steps`."""
    found: list[tuple[BlockPool, BlockPool]] = []
    first = first_swap = 0
    for offer in offers:
        pool = BlockPool(offer.num_blocks, block_size, prefix_cache, first)
        found.append((pool, BlockPool(offer.num_swap_blocks, block_size, False, first_swap)))
        first, first_swap = pool.end, found[-1][1].end
    return found
