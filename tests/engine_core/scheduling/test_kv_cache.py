from __future__ import annotations

from typing import Any

import pytest
from tests.fakes import make_record

from pagoda_engine_core.scheduling.blocks import Table
from pagoda_engine_core.scheduling.kv_cache import NO_GROWTH, Growth, KvCache, Prefix, fork_source
from pagoda_engine_core.scheduling.request import Choice, ChoiceState, Request
from pagoda_proto.records import PriorOutput, Resume
from pagoda_proto.steps import KVGroup

BLOCK_SIZE = 4


def make_kv(num_blocks: int = 16, prefix_cache: bool = True) -> KvCache:
    return KvCache((KVGroup(num_blocks),), BLOCK_SIZE, prefix_cache)


def make_request(num_prompt: int, num_output: int = 0, *, salt: str = "", **params: Any) -> Request:
    record = make_record(list(range(num_prompt)), cache_salt=salt, **{"max_tokens": 100} | params)
    prior = PriorOutput(choice=0, token_ids=list(range(100, 100 + num_output)))
    return Request(record, max_output_tokens=100, now=0.0, resume=Resume(prior_outputs=(prior,)))


def compute(kv: KvCache, choice: Choice, num_tokens: int) -> Growth:
    """Act as if a step had computed up to `num_tokens` and its result had arrived."""
    growth = kv.grow(choice, num_tokens)
    choice.num_computed = num_tokens
    choice.launched = True
    choice.state = ChoiceState.RUNNING
    choice.request.num_rows = 1
    kv.commit(choice, num_tokens)
    return growth


def cache_prompt(kv: KvCache, num_prompt: int, *, salt: str = "") -> list[int]:
    """Blocks that hold a prompt of this length, computed by a request that has ended."""
    choice = make_request(num_prompt, salt=salt).choices[0]
    compute(kv, choice, num_prompt)
    blocks = list(choice.tables[0].ids)
    kv.free(choice)
    return blocks


@pytest.mark.parametrize(("num_tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_for(num_tokens: int, blocks: int) -> None:
    assert make_kv().blocks_for(num_tokens) == blocks


def test_a_table_grows_only_when_a_block_is_full() -> None:
    kv, choice = make_kv(), make_request(6).choices[0]
    growth = compute(kv, choice, 6)
    assert (len(growth.appended), growth.replaced, growth.copies) == (2, [], [])
    for num_tokens in (7, 8):
        assert kv.missing(choice, num_tokens) == [0]
        assert kv.grow(choice, num_tokens) is NO_GROWTH
        choice.num_computed = num_tokens
    assert kv.missing(choice, 9) == [1]
    assert len(kv.grow(choice, 9).appended) == 1
    assert len(choice.tables[0].ids) == 3


@pytest.mark.parametrize(("num_prompt", "hit"), [(4, 0), (5, 4), (8, 4), (9, 8), (12, 8)])
def test_a_hit_takes_full_blocks_and_leaves_a_token_to_compute(num_prompt: int, hit: int) -> None:
    kv = make_kv()
    blocks = cache_prompt(kv, num_prompt)
    choice = make_request(num_prompt).choices[0]
    assert kv.lookup(choice) == Prefix([Table(blocks[: hit // 4])], hit, [()])
    assert kv.matched_tokens(choice) == hit


def test_looking_up_changes_nothing() -> None:
    kv = make_kv()
    cache_prompt(kv, 12)
    kv.lookup(make_request(12).choices[0])
    assert (kv.groups[0].pool.num_free, kv.groups[0].pool.num_cached) == (16, 3)


def test_salts_do_not_share() -> None:
    kv = make_kv()
    cache_prompt(kv, 12, salt="a")
    assert kv.matched_tokens(make_request(12, salt="b").choices[0]) == 0
    assert kv.matched_tokens(make_request(12, salt="a").choices[0]) == 8


def test_output_tokens_are_found_again_after_preemption() -> None:
    kv, choice = make_kv(), make_request(6, 5).choices[0]
    compute(kv, choice, 10)
    kv.free(choice)
    choice.leave_worker(ChoiceState.PREEMPTED)
    assert kv.lookup(choice).num_tokens == 8


def test_without_prefix_cache_nothing_is_found() -> None:
    kv = make_kv(prefix_cache=False)
    cache_prompt(kv, 12)
    assert kv.lookup(make_request(12).choices[0]) == Prefix([Table()], 0, [()])
    assert kv.matched_tokens(make_request(12).choices[0]) == 0


def test_who_owes_prompt_logprobs_computes_everything() -> None:
    kv = make_kv()
    cache_prompt(kv, 12)
    request = make_request(12, n=2, prompt_logprobs=1)
    assert kv.lookup(request.choices[0]) == Prefix([Table()], 0, [()])
    assert kv.matched_tokens(request.choices[0]) == 0
    assert kv.lookup(request.choices[1]).num_tokens == 8


def test_blocks_are_offered_once_full_and_confirmed() -> None:
    kv, choice = make_kv(), make_request(8).choices[0]
    kv.grow(choice, 8)
    other = make_request(12).choices[0]
    assert kv.matched_tokens(other) == 0, "planned is not computed"
    kv.commit(choice, 7)
    assert kv.matched_tokens(other) == 4
    kv.commit(choice, 8)
    assert kv.matched_tokens(other) == 8
    assert choice.num_registered == 2, "no block is offered again"


def test_cost_is_what_leaves_the_free_list() -> None:
    kv = make_kv()
    cache_prompt(kv, 12)
    choice = make_request(13).choices[0]
    prefix = kv.lookup(choice)
    before = kv.groups[0].pool.num_free
    cost = kv.cost(prefix, 13)
    kv.attach(choice, prefix)
    kv.grow(choice, 13)
    assert before - kv.groups[0].pool.num_free == cost[0] == 4
    twin = make_request(13).choices[0]
    assert kv.cost(kv.lookup(twin), 13) == [1], "blocks in use cost nothing"


@pytest.mark.parametrize(
    ("num_prompt", "num_output", "num_shared", "copies"),
    [
        (6, 0, 1, 1),  # the last prompt token is recomputed, in a block that the sibling still writes
        (8, 0, 1, 1),  # that token is the last of a full block
        (8, 3, 2, 0),  # with output tokens, the last prompt token is not recomputed
        (6, 3, 1, 1),
    ],
)
def test_a_fork_shares_the_prompt_and_copies_what_it_writes(
    num_prompt: int, num_output: int, num_shared: int, copies: int
) -> None:
    kv = make_kv(prefix_cache=False)
    request = make_request(num_prompt, num_output, n=2)
    resumed, leader = request.choices
    compute(kv, leader, num_prompt)
    prefix = kv.lookup(resumed)
    assert prefix.num_tokens == (num_prompt if num_output else num_prompt - 1)
    free_before = kv.groups[0].pool.num_free
    cost = kv.cost(prefix, resumed.num_tokens)
    kv.attach(resumed, prefix)
    growth = kv.grow(resumed, resumed.num_tokens)
    assert len(growth.copies) == copies
    assert [source for source, _ in growth.copies] == leader.tables[0].ids[num_shared : num_shared + copies]
    assert resumed.tables[0].ids[:num_shared] == leader.tables[0].ids[:num_shared]
    assert set(resumed.tables[0].ids[num_shared:]).isdisjoint(leader.tables[0].ids)
    assert free_before - kv.groups[0].pool.num_free == cost[0]


def test_no_fork_from_a_choice_that_has_not_computed_the_prompt_or_starts_only_now() -> None:
    kv = make_kv()
    request = make_request(8, n=2)
    leader = request.choices[0]
    assert fork_source(request) is None
    compute(kv, leader, 7)
    assert fork_source(request) is None
    compute(kv, leader, 8)
    assert fork_source(request) is leader
    leader.launched = False
    assert fork_source(request) is None


def test_whoever_writes_into_a_shared_block_gets_a_copy() -> None:
    kv, choice = make_kv(), make_request(6).choices[0]
    compute(kv, choice, 6)
    first, second = choice.tables[0].ids
    kv.groups[0].pool.share([first, second])
    assert kv.missing(choice, 9) == [2]
    growth = kv.grow(choice, 9)
    assert growth.copies == [(second, choice.tables[0].ids[1])]
    assert growth.replaced == [(1, choice.tables[0].ids[1])]
    assert choice.tables[0].ids == [first, growth.replaced[0][1], *growth.appended]
    assert [kv.groups[0].pool.ref_counts[block] for block in (first, second)] == [2, 1]


def test_choices_of_one_request_hash_their_prompt_once() -> None:
    kv = make_kv()
    request = make_request(9, n=2)
    kv.matched_tokens(request.choices[1])
    kv.matched_tokens(request.choices[0])
    first, second = (choice.chains[4] for choice in request.choices)
    assert first is not None
    assert second is not None
    assert len(first.hashes) == 2
    assert all(one is two for one, two in zip(first.hashes, second.hashes, strict=True))


def test_another_block_size_means_other_names() -> None:
    request = make_request(33)
    for block_size, expected in ((4, 8), (16, 2)):
        kv = KvCache((KVGroup(16),), block_size, True)
        kv.matched_tokens(request.choices[0])
        chain = request.choices[0].chains[block_size]
        assert (chain.block_size, len(chain.hashes)) == (block_size, expected)
