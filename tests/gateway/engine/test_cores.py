"""Routing: the least busy engine core, the same one for prompts with a common prefix, recently failed ones last."""

from __future__ import annotations

from collections import Counter

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from tests.gateway.streams import record

from pagoda_gateway.engine.cores import AVOID_MOST_S, PREFIX_TOKENS, SLACK, Core, choose, merged
from pagoda_proto.records import Load, RequestRecord


def core(name: str, num_open: int = 0, num_workers: int = 1, *, usable: bool = True) -> Core:
    load = Load(engine_id=name, num_workers=num_workers, num_running=num_open)
    return Core(name=name, usable=usable, load=load)


def asking(*tokens: int, salt: str = "") -> RequestRecord:
    return msgspec.structs.replace(record(), prompt_token_ids=tokens, cache_salt=salt)


def test_of_none_none_is_chosen_and_of_one_that_one() -> None:
    alone = core("a", num_workers=0)
    assert choose([], asking(1), 0.0) is None
    assert choose([alone], asking(1), 0.0) is alone


def test_the_much_less_busy_is_chosen_counted_by_worker() -> None:
    many, few = core("many", num_open=12, num_workers=4), core("few", num_open=8, num_workers=1)
    assert {choose([many, few], asking(i), 0.0) for i in range(20)} == {many}


def test_what_was_sent_since_it_last_told_counts() -> None:
    cores = [core("a"), core("b")]
    for _ in range(100):
        chosen = choose(cores, asking(7), 0.0)
        assert chosen is not None
        chosen.sent += 1
    assert abs(cores[0].sent - cores[1].sent) <= SLACK + 1


def test_prompts_that_begin_alike_go_to_the_same_one_and_others_are_spread() -> None:
    cores = [core(name) for name in "abcd"]
    beginning = range(PREFIX_TOKENS)
    assert len({choose(cores, asking(*beginning, i), 0.0) for i in range(50)}) == 1
    spread = Counter(choose(cores, asking(i), 0.0) for i in range(400))
    assert min(spread[each] for each in cores) > 60
    assert len({choose(cores, asking(1, salt=str(i)), 0.0) for i in range(50)}) > 1


def test_one_that_goes_moves_nothing_but_its_own_share() -> None:
    cores = [core(name) for name in "abcd"]
    before = {i: choose(cores, asking(i), 0.0) for i in range(200)}
    after = {i: choose(cores[1:], asking(i), 0.0) for i in range(200)}
    assert all(after[i] is before[i] for i in range(200) if before[i] is not cores[0])


def test_who_failed_is_avoided_longer_every_time_and_taken_where_no_other_works() -> None:
    failed, other = core("a"), core("b")
    waits = []
    for _ in range(12):
        failed.failed(100.0)
        waits.append(failed.avoided_until - 100.0)
    assert waits == sorted(waits)
    assert (waits[0], waits[-1]) == (0.5, AVOID_MOST_S)
    assert {choose([failed, other], asking(i), 101.0) for i in range(20)} == {other}
    assert choose([failed, core("c", num_workers=0)], asking(1), 101.0) is failed
    failed.got_on()
    assert {choose([failed, other], asking(i), 101.0) for i in range(20)} == {failed, other}


def test_together_they_say_what_one_says_and_what_several_add_up_to() -> None:
    one = Load(
        engine_id="a", num_workers=1, num_running=3, num_waiting=1, kv_usage=0.2, max_model_len=512, vocab_size=10
    )
    two = msgspec.structs.replace(one, engine_id="b", num_workers=3, kv_usage=0.6, max_model_len=256, draining=True)
    assert merged([one]) == one
    both = merged([one, two])
    assert (both.num_workers, both.num_running, both.num_waiting, both.max_model_len) == (4, 6, 2, 256)
    assert abs(both.kv_usage - 0.5) < 1e-9
    assert not both.draining
    assert both.vocab_size == 10
    gone = Load(engine_id="c", max_model_len=64)
    assert merged([one, gone]).max_model_len == 512, "who has no worker limits nobody"
    assert merged([one, msgspec.structs.replace(one, num_workers=0)]) == merged([one, one]) == one
    assert merged([]).engine_id == ""


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.booleans()), min_size=1, max_size=5))
def test_one_with_workers_is_chosen_wherever_there_is_one(found: list[tuple[int, int, bool]]) -> None:
    cores = [core(str(i), num_open, num_workers) for i, (num_open, num_workers, _) in enumerate(found)]
    for each, (_, _, failed) in zip(cores, found, strict=True):
        if failed:
            each.failed(0.0)
    chosen = choose(cores, asking(1), 0.0)
    assert chosen is not None
    assert chosen.works or not any(each.works for each in cores)
