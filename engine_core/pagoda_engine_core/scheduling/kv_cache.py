"""A block table may share any block, but is written only in blocks that it does not share.

The rest follows: a prefix hit shares full blocks, a fork shares a sibling's prompt blocks, beams share the blocks of
their source, and a writer to a block with another user first gets a copy of it. Blocks enter the prefix cache once a
worker has confirmed that it computed them. Likewise, only confirmed tokens are swapped out: a choice that is preempted
with a step in flight loses only that step, and if that step fails, nothing of it is kept.

A row has a table for each group of layers. A group with a sliding window frees a row's blocks once no step in flight or
to come can read them. This is decided by whole blocks of confirmed tokens, so it changes only when a block fills up,
and a prefix hit may end wherever the window before its end is cached.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

from pagoda_engine_core.config import EngineConfig
from pagoda_engine_core.scheduling.blocks import Group, HashChain, Table, pools_of
from pagoda_engine_core.scheduling.request import Choice, Request
from pagoda_proto.steps import Hello, KVGroup

Counts = Sequence[int]
"""Numbers of blocks, by group."""


class Prefix(NamedTuple):
    """What a row starts from. By group: tables of blocks to share, and the swap blocks whose content follows them;
    together they hold `num_tokens` tokens of the choice."""

    tables: Sequence[Table]
    num_tokens: int
    swapped: Sequence[Sequence[int]]


class Growth(NamedTuple):
    """How block tables changed: ids appended, group by group; (index, new id) replaced; (source, destination) to copy
    first."""

    appended: list[int]
    replaced: list[tuple[int, int]]
    copies: list[tuple[int, int]]


class BlockCounts(NamedTuple):
    """Current numbers of blocks, summed over all groups."""

    blocks_total: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    swap_blocks_total: int = 0
    swap_blocks_used: int = 0


NO_GROWTH = Growth([], [], [])


def exceeds(wanted: Counts, there: Counts) -> bool:
    """Whether any group has fewer blocks than wanted."""
    return any(map(int.__gt__, wanted, there))


def less(there: Counts, taken: Counts) -> list[int]:
    return [one - other for one, other in zip(there, taken, strict=True)]


def fork_source(request: Request) -> Choice | None:
    """A choice whose prompt blocks its siblings may share.

    Earlier plans must compute its whole prompt. A choice that starts in the plan being made does not qualify: its last
    block may be the destination of a copy, and a step does all its copies at once, before computing anything.
    """
    if not request.num_rows:
        return None
    ready = (c for c in request.choices if c.launched and c.num_computed >= request.num_prompt_tokens)
    return next(ready, None)


def awaits_sibling(choice: Choice) -> bool:
    """Whether a sibling is now computing the prompt, which this choice would otherwise compute again, or, in a beam
    search, what this choice needs before it can continue."""
    if not choice.distance:
        return True
    return choice.request.num_rows > 0 and not choice.num_swapped and fork_source(choice.request) is None


class KvCache:
    """Block tables of choices, over one worker's KV and swap blocks. A worker without groups keeps no KV, and its rows
    need no blocks.

    longest_chunk: Most tokens of a row that one step may compute: as configured, or as a window's blocks have room for.
    """

    def __init__(
        self,
        offers: Sequence[KVGroup],
        block_size: int,
        prefix_cache: bool,
        *,
        longest_chunk: int = sys.maxsize // 2**16,
        depth: int = 1,
        max_tokens: int = sys.maxsize,
    ) -> None:
        self._offers, self.block_size, self._prefix_cache = offers, block_size, prefix_cache
        self._depth, self._max_tokens = depth, max_tokens
        rooms = [offer.room_in_flight(block_size, max_tokens) // depth for offer in offers]
        self.longest_chunk = min([longest_chunk, *rooms])
        self.groups = [
            Group(offer, pools, depth * self.longest_chunk)
            for offer, pools in zip(offers, pools_of(offers, block_size, prefix_cache), strict=True)
        ]
        self._nothing = Prefix([Table() for _ in offers], 0, [()] * len(offers))
        self._heeds_full = prefix_cache or not all(group.keeps_all for group in self.groups)
        self.keeps = bool(self.groups)

    @classmethod
    def of(cls, hello: Hello, config: EngineConfig) -> KvCache:
        return cls(
            hello.kv_groups, hello.block_size, config.prefix_cache and bool(hello.kv_groups),
            longest_chunk=min(config.chunk_size, hello.max_tokens_per_step),
            depth=config.max_steps_in_flight, max_tokens=hello.max_model_len,
        )  # fmt: skip

    def emptied(self) -> KvCache:
        """An empty cache of the same sizes."""
        sizes = self._offers, self.block_size, self._prefix_cache
        return KvCache(*sizes, longest_chunk=self.longest_chunk, depth=self._depth, max_tokens=self._max_tokens)

    @property
    def counts(self) -> BlockCounts:
        counts = (
            (one.num_blocks, one.num_used, one.num_cached, other.num_blocks, other.num_used)
            for one, other in ((group.pool, group.swap_pool) for group in self.groups)
        )
        return BlockCounts(*map(sum, zip(*counts, strict=True)))

    @property
    def usage(self) -> float:
        """Fraction of blocks in use, in the fullest group."""
        return max((group.pool.num_used / group.pool.num_blocks for group in self.groups), default=0.0)

    @property
    def free_blocks(self) -> Counts:
        return [group.pool.num_free for group in self.groups]

    def lacks(self, wanted: Counts, reserved: Counts | None = None) -> bool:
        """Whether any group has fewer free blocks than wanted, apart from reserved ones."""
        if reserved is not None:
            return exceeds(wanted, less(self.free_blocks, reserved))
        return any(count > group.pool.num_free for count, group in zip(wanted, self.groups, strict=True))

    @property
    def free_swap_blocks(self) -> Counts:
        return [group.swap_pool.num_free for group in self.groups]

    def reset_cache(self) -> int:
        """Forget cached blocks that no row uses, and return their number."""
        return sum(group.pool.reset_cache() for group in self.groups)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks needed to hold this many tokens, in each group that keeps them."""
        return -(-num_tokens // self.block_size) if self.keeps else 0

    def lifetime_blocks(self, request: Request) -> int:
        """The greatest length of a choice's tables; the last token sampled needs no block."""
        return self.blocks_for(request.num_prompt_tokens + request.max_output_tokens - 1)

    def unfit(self, request: Request) -> str:
        """Why all blocks together cannot hold one choice at its longest; empty if they can."""
        wanted = self.lifetime_blocks(request)
        lacking = (group for group in self.groups if group.most(wanted) > group.pool.num_blocks)
        group = next(lacking, None)
        return f"need {wanted} KV blocks; the worker has {group.pool.num_blocks}" if group else ""

    def shortage(self, choice: Choice, num_tokens: int) -> Counts:
        """Blocks that a choice lacks to grow to this many tokens."""
        wanted = self.blocks_for(num_tokens)
        pairs = zip(self.groups, self._tables(choice), strict=True)
        return [max(0, group.most(wanted - table.gone) - table.num_held) for group, table in pairs]

    def capacity(self, choice: Choice) -> int:
        """Tokens that a choice's blocks have room for."""
        return len(choice.tables[0].ids) * self.block_size if choice.tables else 0

    def next_full(self, choice: Choice) -> int:
        """The number of computed tokens at which `commit` next has a block to register or free."""
        return (choice.num_registered + 1) * self.block_size if self._heeds_full else sys.maxsize

    def matched_tokens(self, choice: Choice) -> int:
        """How many leading tokens a prefix hit would save now."""
        return self.cached_prefix(choice).num_tokens

    def lookup(self, choice: Choice) -> Prefix:
        """The longest prefix to start a row from: the cache, a sibling whose prompt is computed, or swap blocks that
        continue one of those.

        At least one token is left to compute, to have logits to sample from.
        """
        if choice.owes_prompt_logprobs:
            return self._nothing
        cached, forked = self.cached_prefix(choice), self._forked_prefix(choice)
        found = forked if forked.num_tokens > cached.num_tokens else cached
        if found.num_tokens >= choice.num_swapped:
            return found
        num_full = found.num_tokens // self.block_size
        pairs = list(zip(found.tables, choice.swapped, strict=True))
        shared = [Table.behind(kept.gone, table.ids[kept.gone : num_full]) for table, kept in pairs]
        behind = [kept.ids[max(kept.gone, num_full) :] for _, kept in pairs]
        return Prefix(shared, choice.num_swapped, behind)

    def admission_cost(self, prefix: Prefix, num_tokens: int, lifetime_blocks: int) -> Counts:
        """`cost` of all known tokens and one more block, unless the choice will never need it."""
        return self.cost(prefix, num_tokens, spare=int(self.blocks_for(num_tokens) < lifetime_blocks))

    def cost(self, prefix: Prefix, num_tokens: int, spare: int = 0) -> Counts:
        """Blocks that leave the free lists when tables start from `prefix` and grow to hold `num_tokens`, plus `spare`
        blocks."""
        copied = any(prefix.num_tokens % self.block_size and not ids for ids in prefix.swapped)
        wanted = self.blocks_for(num_tokens) + spare
        found = []
        for group, table in zip(self.groups, prefix.tables, strict=True):
            revived = sum(not group.pool.ref_counts[block] for block in table.held)
            found.append(revived + copied + group.most(wanted - table.gone) - table.num_held)
        return found

    def attach(self, choice: Choice, prefix: Prefix) -> list[tuple[int, int]]:
        """Start the empty block tables of `choice` from a prefix, and return its swap-ins, as in StepPlan. This frees
        its swap blocks, for a swap-out of the next plan at the earliest."""
        swap_ins: list[tuple[int, int]] = []
        choice.tables = []
        for group, table, swapped in zip(self.groups, prefix.tables, prefix.swapped, strict=True):
            group.pool.share(table.held)
            own = group.pool.allocate(len(swapped))
            choice.tables.append(Table(table.ids + own, table.gone))
            swap_ins += zip(swapped, own, strict=True)
        choice.num_computed = prefix.num_tokens
        self.free_swapped(choice)
        return swap_ins

    def to_swap(self, choice: Choice) -> list[list[int]]:
        """The blocks of confirmed tokens that a row reads when it continues from them, by group."""
        end, num_tokens = self.blocks_for(choice.num_confirmed), choice.num_confirmed
        pairs = zip(self.groups, choice.tables, strict=True)
        return [table.ids[group.first_kept(num_tokens) : end] for group, table in pairs]

    def swap_out(self, choice: Choice) -> list[tuple[int, int]]:
        """Save the confirmed tokens of a choice that is about to lose its blocks, and return the swap-outs, as in
        StepPlan. There must be enough free swap blocks."""
        swap_outs: list[tuple[int, int]] = []
        choice.num_swapped = choice.num_confirmed
        for group, block_ids in zip(self.groups, self.to_swap(choice), strict=True):
            taken = group.swap_pool.allocate(len(block_ids))
            choice.swapped.append(Table.behind(group.first_kept(choice.num_swapped), taken))
            swap_outs += zip(block_ids, taken, strict=True)
        return swap_outs

    def missing(self, choice: Choice, num_tokens: int) -> Counts:
        """Free blocks that `grow` needs."""
        wanted, tables, found = self.blocks_for(num_tokens), self._tables(choice), []
        for place, group in enumerate(self.groups):
            ids = tables[place].ids
            found.append(max(0, wanted - len(ids)) + len(self._shared_indices(choice, group, ids, wanted)))
        return found

    def grow(self, choice: Choice, num_tokens: int) -> Growth:
        """Prepare the tables for writing tokens [num_computed, num_tokens). `missing` blocks must be free."""
        wanted, growth = self.blocks_for(num_tokens), NO_GROWTH
        choice.tables = self._tables(choice)
        for place, group in enumerate(self.groups):
            ids = choice.tables[place].ids
            shared = self._shared_indices(choice, group, ids, wanted)
            if wanted <= len(ids) and not shared:
                continue
            if growth is NO_GROWTH:
                growth = Growth([], [], [])
            appended = group.pool.allocate(max(0, wanted - len(ids)))
            for index in shared:
                source, (copy,) = ids[index], group.pool.allocate(1)
                growth.copies.append((source, copy))
                growth.replaced.append((index, copy))
                ids[index] = copy
                group.pool.free([source])
            ids.extend(appended)
            growth.appended.extend(appended)
        return growth

    def commit(self, choice: Choice, num_computed: int) -> None:
        """A worker has computed this many leading tokens, all known by now: register full blocks in the prefix cache
        and free those that have left a window."""
        choice.num_confirmed = num_computed
        num_full = num_computed // self.block_size
        if num_full <= choice.num_registered or not self._heeds_full:
            return
        names = self._names(choice, num_full) if self._prefix_cache else ()
        for place, group in enumerate(self.groups):
            table = choice.tables[place]
            for index in range(max(choice.num_registered, table.gone), num_full if names else 0):
                group.pool.register(table.ids[index], names[index])
            if not group.keeps_all and (gone := group.first_kept(num_computed)) > table.gone:
                group.pool.free(table.let_go(gone))
        choice.num_registered = num_full

    def free(self, choice: Choice) -> None:
        """Give up all tables."""
        for group, table in zip(self.groups, choice.tables, strict=False):
            group.pool.free(table.held)
        choice.tables = []

    def free_swapped(self, choice: Choice) -> None:
        """Free the swap blocks, if any."""
        for group, kept in zip(self.groups, choice.swapped, strict=False):
            group.swap_pool.free(kept.held)
        choice.swapped, choice.num_swapped = [], 0

    def num_shared(self, block_ids: Sequence[Sequence[int]]) -> Counts:
        """How many of these blocks have another user, and so survive this one."""
        pairs = zip(self.groups, block_ids, strict=True)
        return [sum(group.pool.ref_counts[block] > 1 for block in ids) for group, ids in pairs]

    def _tables(self, choice: Choice) -> list[Table]:
        return choice.tables or [Table() for _ in self.groups]

    def _shared_indices(self, choice: Choice, group: Group, ids: Sequence[int], end: int) -> Sequence[int]:
        """Indices of table entries, from the first token not computed up to place `end`, whose blocks have another user
        and so must not be written."""
        first, refs = choice.num_computed // self.block_size, group.pool.ref_counts
        if first >= len(ids):
            return ()
        return [index for index in range(first, min(end, len(ids))) if refs[ids[index]] > 1]

    def cached_prefix(self, choice: Choice) -> Prefix:
        """The longest cached prefix that all groups have: a block missing in one group ends it for all. For a request
        not yet here this is the only prefix: any rows that it has are on another worker."""
        if not self._prefix_cache or choice.owes_prompt_logprobs:
            return self._nothing
        num_blocks = (choice.num_tokens - 1) // self.block_size
        names = self._names(choice, num_blocks)
        reached = num_blocks + 1
        while num_blocks < reached:
            reached = num_blocks
            for group in self.groups:
                num_blocks = group.reach(names, num_blocks)
        tables = [group.hit(names, num_blocks) for group in self.groups]
        return Prefix(tables, num_blocks * self.block_size, self._nothing.swapped)

    def _forked_prefix(self, choice: Choice) -> Prefix:
        """A sibling's prompt; nothing if the sibling has freed blocks that would be read next."""
        sibling = fork_source(choice.request)
        if sibling is None:
            return self._nothing
        num_tokens = min(choice.request.num_prompt_tokens, choice.num_tokens - 1)
        end, pairs = self.blocks_for(num_tokens), list(zip(self.groups, sibling.tables, strict=True))
        if any(table.gone > group.first_kept(num_tokens) for group, table in pairs):
            return self._nothing
        firsts = [group.first_kept(num_tokens) for group in self.groups]
        tables = [Table.behind(first, table.ids[first:end]) for first, (_, table) in zip(firsts, pairs, strict=True)]
        return Prefix(tables, num_tokens, self._nothing.swapped)

    def _names(self, choice: Choice, num_blocks: int) -> list[bytes]:
        """Names of at least the first `num_blocks` blocks. The choices of a request hash their prompt only once."""
        chain = choice.chains.get(self.block_size)
        if chain is None:
            chain = HashChain(choice.request.record.cache_salt, self.block_size, choice.request.adapter_digest)
            chain.hashes.extend(self._prompt_names(choice.request))
            choice.chains[self.block_size] = chain
        chain.extend(num_blocks, choice.tokens)
        return chain.hashes

    def _prompt_names(self, request: Request) -> list[bytes]:
        chains = (c.chains[self.block_size] for c in request.choices if self.block_size in c.chains)
        known = max((chain.hashes for chain in chains), key=len, default=[])
        return known[: request.num_prompt_tokens // self.block_size]
