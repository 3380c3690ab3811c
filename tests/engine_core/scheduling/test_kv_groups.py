"""KV groups with a sliding window: the blocks a row holds, prefix cache hits, and the numbers reported."""

from __future__ import annotations

import pytest
from tests.engine_core.harness import Harness
from tests.engine_core.scheduling.test_kv_cache import BLOCK_SIZE, compute, make_request
from tests.fakes import make_record

from pagoda_engine_core.scheduling.kv_cache import KvCache
from pagoda_engine_core.scheduling.request import Choice, ChoiceState
from pagoda_proto.errors import ErrorCode
from pagoda_proto.steps import NO_BLOCK, KVGroup

KEPT = 8  # two blocks


def make_kv(*kept: int, num_blocks: int = 32, prefix_cache: bool = True) -> KvCache:
    groups = [KVGroup(num_blocks, tokens, 16) for tokens in kept]
    return KvCache(groups, BLOCK_SIZE, prefix_cache, longest_chunk=8, max_tokens=1024)


def computed(kv: KvCache, num_tokens: int, *, chunk: int = 4, salt: str = "") -> Choice:
    """A choice whose prompt was computed chunk by chunk."""
    choice = make_request(num_tokens, salt=salt).choices[0]
    for end in range(chunk, num_tokens + 1, chunk):
        compute(kv, choice, end)
    return choice


def test_a_window_goes_along_with_the_row() -> None:
    kv = make_kv(0, KEPT)
    choice = computed(kv, 40)
    whole, window = choice.tables
    assert (whole.gone, whole.num_held) == (0, 10)
    assert (window.gone, window.num_held, window.ids[:8]) == (8, 2, [NO_BLOCK] * 8)
    assert [group.pool.num_used for group in kv.groups] == [10, 2]
    assert [group.pool.num_cached for group in kv.groups] == [0, 8], "what is let go is still known"
    kv.commit(choice, 43)
    assert window.gone == 8, "nothing goes before a block is full"
    assert all(32 <= block < 64 for block in window.held), "ids go through all groups"


def test_without_a_prefix_cache_it_is_forgotten() -> None:
    kv = make_kv(0, KEPT, prefix_cache=False)
    choice = computed(kv, 40)
    assert choice.tables[1].num_held == 2
    assert [group.pool.num_cached for group in kv.groups] == [0, 0]
    assert kv.next_full(choice) == 44, "a row that decodes is looked at when its block is full"


def test_the_next_turn_finds_the_last_window() -> None:
    """The conversation's older windows have been reallocated meanwhile."""
    kv = make_kv(0, KEPT)
    kv.free(computed(kv, 40))
    window = kv.groups[1].pool
    given = window.allocate(window.num_free - 2)  # all but the two freed last
    found = kv.lookup(make_request(48).choices[0])
    assert found.num_tokens == 40
    assert [(table.gone, table.num_held) for table in found.tables] == [(0, 10), (8, 2)]
    assert kv.matched_tokens(make_request(39).choices[0]) == 0, "the window before token 36 is gone"
    window.free(given)


def test_a_hit_ends_where_each_group_has_the_window_before_it() -> None:
    """One window group lost block 6, the other block 4. A hit of 6 blocks needs those from 4 on, a hit of 4 those from
    2 on."""
    kv = make_kv(0, KEPT, 5)
    kv.free(computed(kv, 40, chunk=4))
    for group, place in ((kv.groups[1], 6), (kv.groups[2], 4)):
        name = make_names(kv)[place]
        block = group.pool._block_of[name]
        group.pool._forget(block, name)
    found = kv.lookup(make_request(36).choices[0])
    assert found.num_tokens == 16
    assert [table.gone for table in found.tables] == [0, 2, 2]
    assert kv.matched_tokens(make_request(41).choices[0]) == 40, "behind it all windows are whole again"


def make_names(kv: KvCache) -> list[bytes]:
    return kv._names(make_request(41).choices[0], 10)


def test_a_model_of_windows_alone_has_hits_too() -> None:
    kv = make_kv(KEPT)
    kv.free(computed(kv, 40))
    assert kv.matched_tokens(make_request(60).choices[0]) == 40
    pool = kv.groups[0].pool
    pool.allocate(pool.num_free - 3)
    assert kv.matched_tokens(make_request(60).choices[0]) == 40
    pool.allocate(2)
    assert kv.matched_tokens(make_request(60).choices[0]) == 0


def test_only_the_window_is_swapped_out_and_in() -> None:
    kv = make_kv(0, KEPT)
    choice = make_request(44).choices[0]
    for end in range(2, 39, 2):
        compute(kv, choice, end)
    out = kv.swap_out(choice)
    assert len(out) == 10 + 3
    assert [(table.gone, table.num_held) for table in choice.swapped] == [(0, 10), (7, 3)]
    assert all(swap_block >= 16 for _, swap_block in out[10:]), "swap blocks go through all groups, too"
    kv.free(choice)
    choice.leave_worker(ChoiceState.PREEMPTED)
    kv.reset_cache()
    back = kv.attach(choice, kv.lookup(choice))
    assert [swap_block for swap_block, _ in back] == [swap_block for _, swap_block in out]
    assert [(table.gone, table.num_held) for table in choice.tables] == [(0, 10), (7, 3)]
    assert [group.swap_pool.num_used for group in kv.groups] == [0, 0]


def test_a_prompt_needs_no_more_of_a_window_than_it_holds_at_once() -> None:
    kv = make_kv(0, KEPT, num_blocks=64)
    choice = make_request(200).choices[0]
    assert kv.cost(kv.lookup(choice), 200) == [50, 2 + 8 // BLOCK_SIZE + 2]
    small = KvCache([KVGroup(64), KVGroup(7, KEPT)], BLOCK_SIZE, True, longest_chunk=512, depth=2, max_tokens=1024)
    assert small.longest_chunk == (7 - 2 - 2) * BLOCK_SIZE // 2
    assert (
        KvCache([KVGroup(64), KVGroup(64, KEPT)], BLOCK_SIZE, True, longest_chunk=512, max_tokens=256).longest_chunk
        == 512
    )


@pytest.mark.parametrize("groups", [(KVGroup(8), KVGroup(8, KEPT)), (KVGroup(32, KEPT), KVGroup(8, 4))])
def test_the_group_that_has_too_few_is_the_one_that_is_told(groups: tuple[KVGroup, ...]) -> None:
    """A group with a window does not limit the length of a request; a group that keeps all tokens does."""
    harness = Harness(kv_groups=groups, block_size=BLOCK_SIZE)
    harness.add(make_record([1] * 60, max_tokens=5))
    client = next(iter(harness.clients.values()))
    if groups[0].kept:
        harness.drain()
        harness.check_all()
    else:
        assert client.error_code == ErrorCode.CONTEXT_LENGTH_EXCEEDED
        assert "need 16 KV blocks; the worker has 8" in client.error_message


def test_the_fullest_group_says_how_full_a_worker_is() -> None:
    kv = make_kv(0, KEPT, num_blocks=20)
    choice = computed(kv, 40)
    assert kv.usage == 0.5
    kv.groups[1].pool.allocate(13)
    assert kv.usage == 0.75
    assert kv.counts[:3] == (40, 10 + 2 + 13, kv.groups[1].pool.num_cached)
    kv.free(choice)
