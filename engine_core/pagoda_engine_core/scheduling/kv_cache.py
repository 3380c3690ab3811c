"""A block table may share any block and may write only into blocks it has alone.

Everything here follows: a prefix hit shares full blocks, a fork shares a sibling's prompt blocks, beams share what the
one had that they come from, and whoever is about to write into a block with another user first gets a copy of it.
Blocks are offered to the prefix cache once a worker has confirmed that it computed them. Only what is confirmed is
swapped out, too: a choice that is preempted with a step in flight loses that step and no other, and should that step
fail, nothing of it is kept.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

from pagoda_engine_core.scheduling.blocks import BlockPool, HashChain
from pagoda_engine_core.scheduling.request import Choice, Request


class Prefix(NamedTuple):
    """What a row starts with: blocks to share, swap blocks whose content follows theirs, and how many of a choice's
    tokens they hold together."""

    block_ids: list[int]
    num_tokens: int
    swap_block_ids: Sequence[int] = ()


class Growth(NamedTuple):
    """How a block table changed: ids at its end; (index, new id) within it; (source, destination) to copy first."""

    appended: list[int]
    replaced: list[tuple[int, int]]
    copies: list[tuple[int, int]]


class BlockCounts(NamedTuple):
    """Of the moment."""

    blocks_total: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    swap_blocks_total: int = 0
    swap_blocks_used: int = 0


NOTHING_CACHED = Prefix([], 0)
NO_GROWTH = Growth([], [], [])


def fork_source(request: Request) -> Choice | None:
    """A choice whose prompt blocks its siblings may share.

    Earlier plans compute its whole prompt. One that starts in the plan being made is none yet: its last block may be
    the destination of a copy, and all copies of a step are done at once, before anything is computed.
    """
    if not request.num_rows:
        return None
    ready = (c for c in request.choices if c.launched and c.num_computed >= request.num_prompt_tokens)
    return next(ready, None)


def awaits_sibling(choice: Choice) -> bool:
    """Whether a sibling computes the prompt right now, which this choice would otherwise compute, too; or, in a search,
    what has to be known before this choice goes on."""
    if not choice.distance:
        return True
    return choice.request.num_rows > 0 and not choice.num_swapped and fork_source(choice.request) is None


class KvCache:
    """Block tables of choices on top of one worker's blocks, those of its KV cache and those of its swap space. Where a
    worker has no blocks, it keeps nothing and no row needs any."""

    def __init__(self, pool: BlockPool, num_swap_blocks: int = 0) -> None:
        self.pool = pool
        self.swap_pool = BlockPool(num_swap_blocks, pool.block_size, prefix_cache=False)
        self._block_size = pool.block_size
        self.keeps = pool.num_blocks > 0

    def emptied(self) -> KvCache:
        """One of the same sizes that holds nothing."""
        pool = BlockPool(self.pool.num_blocks, self.pool.block_size, self.pool.prefix_cache)
        return KvCache(pool, self.swap_pool.num_blocks)

    @property
    def counts(self) -> BlockCounts:
        pool, swapped = self.pool, self.swap_pool
        return BlockCounts(pool.num_blocks, pool.num_used, pool.num_cached, swapped.num_blocks, swapped.num_used)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self._block_size) if self.keeps else 0

    def lifetime_blocks(self, request: Request) -> int:
        """Blocks of a choice at its longest: the last token sampled needs none."""
        return self.blocks_for(request.num_prompt_tokens + request.max_output_tokens - 1)

    def shortage(self, choice: Choice) -> int:
        """Blocks that it lacks for all tokens known."""
        return max(0, self.blocks_for(choice.num_tokens) - len(choice.block_ids))

    def capacity(self, choice: Choice) -> int:
        """Tokens that the blocks of a choice hold."""
        return len(choice.block_ids) * self._block_size

    def next_full(self, choice: Choice) -> int:
        """Computed tokens with which `commit` has a block to register."""
        return (choice.num_registered + 1) * self._block_size if self.pool.prefix_cache else sys.maxsize

    def matched_tokens(self, choice: Choice) -> int:
        """How many leading tokens a prefix hit would save right now."""
        return self._cached_prefix(choice).num_tokens

    def lookup(self, choice: Choice) -> Prefix:
        """The longest prefix to start a row with: from the cache, from a sibling whose prompt is computed, or from
        swap blocks behind what one of them still has.

        At least one token is left to compute, for without computing there are no logits to sample from.
        """
        if choice.owes_prompt_logprobs:
            return NOTHING_CACHED
        cached, forked = self._cached_prefix(choice), self._forked_prefix(choice)
        found = forked if forked.num_tokens > cached.num_tokens else cached
        if found.num_tokens >= choice.num_swapped:
            return found
        num_full = found.num_tokens // self._block_size
        return Prefix(found.block_ids[:num_full], choice.num_swapped, choice.swap_block_ids[num_full:])

    def admission_cost(self, prefix: Prefix, num_tokens: int, lifetime_blocks: int) -> int:
        """`cost` of all tokens known, and one block to go on with, unless that is all there will ever be."""
        return self.cost(prefix, num_tokens) + (self.blocks_for(num_tokens) < lifetime_blocks)

    def cost(self, prefix: Prefix, num_tokens: int) -> int:
        """Blocks that leave the free list when a table starts from `prefix` and grows to hold `num_tokens`."""
        revived = sum(not self.pool.ref_counts[block] for block in prefix.block_ids)
        copied = prefix.num_tokens % self._block_size != 0 and not prefix.swap_block_ids
        return revived + copied + self.blocks_for(num_tokens) - len(prefix.block_ids)

    def attach(self, choice: Choice, prefix: Prefix) -> list[tuple[int, int]]:
        """Start the empty block table of `choice` with a prefix. What is to be swapped in for it, as in StepPlan;
        its swap blocks are free then, for a swap-out of the next plan at the earliest."""
        self.pool.share(prefix.block_ids)
        own = self.pool.allocate(len(prefix.swap_block_ids))
        choice.block_ids = prefix.block_ids + own
        choice.num_computed = prefix.num_tokens
        self.free_swapped(choice)
        return list(zip(prefix.swap_block_ids, own, strict=True))

    def swap_out(self, choice: Choice) -> list[tuple[int, int]]:
        """Keep the confirmed tokens of a choice that is to lose its blocks; `swap_pool` must have room. What is to be
        swapped out for it, as in StepPlan."""
        num_blocks = self.blocks_for(choice.num_confirmed)
        choice.swap_block_ids, choice.num_swapped = self.swap_pool.allocate(num_blocks), choice.num_confirmed
        return list(zip(choice.block_ids[:num_blocks], choice.swap_block_ids, strict=True))

    def missing(self, choice: Choice, num_tokens: int) -> int:
        """Free blocks that `grow` needs."""
        new = self.blocks_for(num_tokens) - len(choice.block_ids)
        return max(0, new) + len(self._shared_indices(choice, num_tokens))

    def grow(self, choice: Choice, num_tokens: int) -> Growth:
        """Make the table fit to write tokens [num_computed, num_tokens). `missing` blocks must be free."""
        new = self.blocks_for(num_tokens) - len(choice.block_ids)
        shared = self._shared_indices(choice, num_tokens)
        if new <= 0 and not shared:
            return NO_GROWTH
        growth = Growth(self.pool.allocate(max(0, new)), [], [])
        for index in shared:
            source, (copy,) = choice.block_ids[index], self.pool.allocate(1)
            growth.copies.append((source, copy))
            growth.replaced.append((index, copy))
            choice.block_ids[index] = copy
            self.pool.free([source])
        choice.block_ids.extend(growth.appended)
        return growth

    def commit(self, choice: Choice, num_computed: int) -> None:
        """A worker has computed this many leading tokens, all known by now: full blocks enter the prefix cache."""
        choice.num_confirmed = num_computed
        num_full = num_computed // self._block_size
        if num_full <= choice.num_registered or not self.pool.prefix_cache:
            return
        names = self._names(choice, num_full)
        for index in range(choice.num_registered, num_full):
            self.pool.register(choice.block_ids[index], names[index])
        choice.num_registered = num_full

    def free(self, choice: Choice) -> None:
        """Give up the whole table."""
        self.pool.free(choice.block_ids)
        choice.block_ids = []

    def free_swapped(self, choice: Choice) -> None:
        """Give up what was swapped out, if anything was."""
        self.swap_pool.free(choice.swap_block_ids)
        choice.swap_block_ids, choice.num_swapped = [], 0

    def num_shared(self, choice: Choice, num_blocks: int) -> int:
        """How many of the first `num_blocks` blocks have another user, and so will be there when this one is gone."""
        return sum(self.pool.ref_counts[block] > 1 for block in choice.block_ids[:num_blocks])

    def _shared_indices(self, choice: Choice, num_tokens: int) -> list[int]:
        """Table entries in the way of writing [num_computed, num_tokens): blocks with another user."""
        table, refs = choice.block_ids, self.pool.ref_counts
        first, last = choice.num_computed // self._block_size, (num_tokens - 1) // self._block_size
        if first >= len(table):
            return []
        return [index for index in range(first, min(last + 1, len(table))) if refs[table[index]] > 1]

    def _cached_prefix(self, choice: Choice) -> Prefix:
        if not self.pool.prefix_cache or choice.owes_prompt_logprobs:
            return NOTHING_CACHED
        num_blocks = (choice.num_tokens - 1) // self._block_size
        blocks = self.pool.match(self._names(choice, num_blocks)[:num_blocks])
        return Prefix(blocks, len(blocks) * self._block_size)

    def _forked_prefix(self, choice: Choice) -> Prefix:
        sibling = fork_source(choice.request)
        if sibling is None:
            return NOTHING_CACHED
        num_tokens = min(choice.request.num_prompt_tokens, choice.num_tokens - 1)
        return Prefix(sibling.block_ids[: self.blocks_for(num_tokens)], num_tokens)

    def _names(self, choice: Choice, num_blocks: int) -> list[bytes]:
        """Names of at least the first `num_blocks` blocks. Choices of one request hash their prompt once."""
        chain = choice.chains.get(self._block_size)
        if chain is None:
            chain = HashChain(choice.request.record.cache_salt, self._block_size, choice.request.adapter_digest)
            chain.hashes.extend(self._prompt_names(choice.request))
            choice.chains[self._block_size] = chain
        chain.extend(num_blocks, choice.tokens)
        return chain.hashes

    def _prompt_names(self, request: Request) -> list[bytes]:
        chains = (c.chains[self._block_size] for c in request.choices if self._block_size in c.chains)
        known = max((chain.hashes for chain in chains), key=len, default=[])
        return known[: request.num_prompt_tokens // self._block_size]
