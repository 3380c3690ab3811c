"""A block is free when nobody refers to it; a free block may still remember what it holds until it is given away.

So "cached" is no third state: cached blocks without a user sit in the free list like all others, only later in it, and
a prefix hit takes them out again.

    ref count 0        in the free list; blocks without content worth keeping first, then cached ones, least recently
                       used first
    ref count >= 1     held by that many rows; never handed out

The free list is a doubly linked list through two int arrays (a deque could not remove from the middle in O(1)). Only
BlockPool touches the links. A block here is an int; the tensor behind it belongs to the worker.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from hashlib import blake2b

DIGEST_BYTES = 32


class BrokenInvariant(AssertionError):
    """Our books do not add up: a bug here, never somebody's input."""


def require(condition: bool, what: str) -> None:
    """Raises BrokenInvariant when a condition that our own code guarantees does not hold."""
    if not condition:
        raise BrokenInvariant(what)


class HashChain:
    """Names of the leading full blocks of one growing list of tokens.

    A name covers the block's own tokens, everything before it (through the parent's name), the cache salt and the
    digest of the adapter (at the root), so equal names mean equal KV within one salt. Each block is hashed once, when
    it becomes full.
    """

    __slots__ = ("_adapter", "_salt", "block_size", "hashes")

    def __init__(self, salt: str, block_size: int, adapter: str = "") -> None:
        self._salt = salt
        self._adapter = adapter
        self.block_size = block_size
        self.hashes: list[bytes] = []

    def copy(self) -> HashChain:
        """Of a list that begins the same."""
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


class BlockPool:
    """All KV blocks of one worker. Ids are 0 .. num_blocks - 1."""

    def __init__(self, num_blocks: int, block_size: int, prefix_cache: bool) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        # Read by others, written here only.
        self.ref_counts = [0] * num_blocks
        self.num_free = num_blocks  # that can be allocated, those cached without a user included
        self.num_cached = 0  # free, with content that is kept for prefix hits
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        # Index num_blocks is the list's head and tail; the free list starts out in order of ids.
        self._next: list[int] = [*range(1, num_blocks + 1), 0]
        self._previous: list[int] = [num_blocks, *range(num_blocks)]

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, forgetting what they held. Callers ask `num_free` first (BrokenInvariant)."""
        require(count <= self.num_free, f"{count} blocks asked for, {self.num_free} free")
        return [self._take_first() for _ in range(count)]

    def share(self, block_ids: Sequence[int]) -> None:
        """One more user for each of these blocks, whether used or cached."""
        for block in block_ids:
            if not self.ref_counts[block]:
                require(self._hash_of[block] is not None, f"block {block} is free and holds nothing")
                self._unlink(block)
                self.num_cached -= 1
            self.ref_counts[block] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """One user less for each. Of blocks freed together the last is forgotten first: prefixes outlive endings."""
        for block in reversed(block_ids):
            require(self.ref_counts[block] > 0, f"block {block} freed without a user")
            self.ref_counts[block] -= 1
            if self.ref_counts[block]:
                continue
            if self._hash_of[block] is None:
                self._link_after(self.num_blocks, block)
            else:
                self._link_after(self._previous[self.num_blocks], block)
                self.num_cached += 1

    def register(self, block: int, name: bytes) -> None:
        """A used block is full and computed: it can be found by `name`. The first block of a name keeps it."""
        require(self.ref_counts[block] > 0, f"block {block} registered without a user")
        if self.prefix_cache and self._hash_of[block] is None and name not in self._block_of:
            self._hash_of[block] = name
            self._block_of[name] = block

    def match(self, names: Sequence[bytes]) -> list[int]:
        """Blocks of the longest known prefix of `names`. Changes nothing; `share` them to keep them."""
        blocks = []
        for name in names:
            block = self._block_of.get(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def reset_cache(self) -> int:
        """Forget what blocks without a user hold, and return how many those were. Blocks in use keep their names."""
        cached = [(block, name) for block in self._walk() if (name := self._hash_of[block]) is not None]
        for block, name in cached:
            self._forget(block, name)
        return len(cached)

    def check_invariants(self) -> None:
        """Raises BrokenInvariant: the free list holds exactly the blocks without a user, names point both ways."""
        free = list(self._walk())
        require(len(free) == self.num_free, "free list and free count differ")
        require(
            set(free) == {b for b in range(self.num_blocks) if not self.ref_counts[b]},
            "free list != blocks without user",
        )
        require(all(count >= 0 for count in self.ref_counts), "negative ref count")
        named = {name: block for block, name in enumerate(self._hash_of) if name is not None}
        require(named == self._block_of, "names and blocks differ")
        require(sum(self._hash_of[block] is not None for block in free) == self.num_cached, "cached count is wrong")

    def _walk(self) -> list[int]:
        blocks: list[int] = []
        block = self._next[self.num_blocks]
        while block != self.num_blocks and len(blocks) <= self.num_blocks:
            require(self._previous[self._next[block]] == block, f"links around block {block} are broken")
            blocks.append(block)
            block = self._next[block]
        return blocks

    def _take_first(self) -> int:
        block = self._next[self.num_blocks]
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
