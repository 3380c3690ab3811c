from __future__ import annotations

import itertools
import math

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes import make_delta
from tests.session_frames import FrameReader

from pagoda_engine_core.dispatch.answers import Full
from pagoda_engine_core.sessions import outbox as outbox_module
from pagoda_engine_core.sessions.outbox import FRAME_NUMBERS, Outbox
from pagoda_engine_core.sessions.session import Mailbox
from pagoda_proto.errors import ErrorCode, PagodaError
from pagoda_proto.records import Delta, FinishReason, LedgerEntry, Load, NextTokens, Stream, Usage
from pagoda_proto.steps import TopLogprobs


def delta(request_id: str, first_index: int, tokens: list[int], choice: int = 0, **fields: object) -> Delta:
    return make_delta(first_index, tokens, request_id=request_id, choice=choice, **fields)


def logprob(token: int) -> TopLogprobs:
    return TopLogprobs(-0.5, 1, [token], [-0.5])


def test_neighbours_merge_and_the_ending_stays_last() -> None:
    outbox = Outbox()
    outbox.deltas([delta("a", 0, [1], logprobs=[logprob(1)], prompt_logprobs=[logprob(9)])])
    outbox.deltas([delta("a", 1, [2], logprobs=[logprob(2)])])
    usage, ledger = Usage(prompt_tokens=1, output_tokens=2), [LedgerEntry("decode", 1.0)]
    outbox.deltas([delta("a", 2, [], finish_reason=FinishReason.LENGTH, usage=usage, ledger=ledger)])
    (merged,) = outbox.take_deltas()
    assert merged.result.token_ids == [1, 2]
    assert merged.result.logprobs == [logprob(1), logprob(2)]
    assert merged.result.prompt_logprobs == [logprob(9)]
    assert (merged.finish_reason, merged.usage, merged.ledger) == (FinishReason.LENGTH, usage, ledger)


def test_a_refusal_says_whether_it_is_of_all() -> None:
    outbox = Outbox()
    outbox.rejected("a", 0, PagodaError(ErrorCode.OVERLOADED, "too much"), 1.0)
    outbox.rejected("b", 0, Full("too many"), 2.0)
    told = [(frame.rejected.code, frame.rejected.of_all) for frame in outbox.take()]
    assert told == [("overloaded", False), ("overloaded", True)]


def test_other_choices_and_requests_do_not_merge_and_a_later_attempt_replaces_an_earlier_one() -> None:
    outbox = Outbox()
    outbox.deltas([delta("a", 0, [1]), delta("a", 0, [2], choice=1), delta("b", 0, [3])])
    outbox.deltas([delta("a", 1, [4], attempt=1)])
    outbox.deltas([delta("c", 3, [5, 6]), delta("c", 2, [7], attempt=1)])
    taken = [(d.request_id, d.attempt, d.result.token_ids) for d in outbox.take_deltas()]
    assert taken == [("a", 0, [2]), ("b", 0, [3]), ("a", 1, [1, 4]), ("c", 1, [7])]


def test_frames_come_in_an_order_that_makes_sense() -> None:
    outbox = Outbox()
    outbox.load(Load(engine_id="old"))
    outbox.migrate("a", 0)
    outbox.deltas([delta("a", 0, [1])])
    outbox.accepted("a", 0, 7)
    outbox.rejected("b", 2, PagodaError(ErrorCode.OVERLOADED, "full", "x"), 3.5)
    outbox.load(Load(engine_id="new"))
    frames = outbox.take()
    assert [frame.WhichOneof("frame") for frame in frames] == ["accepted", "rejected", "outputs", "migrate", "load"]
    rejected = frames[1].rejected
    assert (rejected.code, rejected.param, rejected.attempt, rejected.retry_after_s) == ("overloaded", "x", 2, 3.5)
    assert frames[-1].load.engine_id == "new"
    assert outbox.take() == []


def test_frames_are_bounded_and_so_is_what_waits() -> None:
    outbox = Outbox()
    outbox.deltas([delta(str(i), 0, [7] * (FRAME_NUMBERS // 2)) for i in range(3)])
    assert [len(outbox.take()) for _ in range(4)] == [1, 1, 1, 0]
    assert not outbox.overfull
    outbox.deltas([delta("a", 0, [7] * (outbox_module.MAX_WAITING_NUMBERS + 1))])
    assert outbox.overfull
    outbox.take_deltas()
    assert not outbox.overfull


def test_tokens_do_not_wait_for_all_that_is_much() -> None:
    outbox, reader = Outbox(), FrameReader()
    for number, name in enumerate("abc"):
        outbox.accepted(name, 0, 2 * number)
    outbox.load(Load(engine_id="e"))
    outbox.migrate("c", 0)
    long = [logprob(9)] * FRAME_NUMBERS
    outbox.deltas([delta("b", 0, [1], prompt_logprobs=long), delta("c", 0, [1], prompt_logprobs=long)])
    told, kinds = list[list[str]](), list[list[str | None]]()
    for first_index in range(3):
        token = Stream(number=0, request_id="a", attempt=0, choice=0)
        outbox.next_tokens(NextTokens(streams=[token], first_indexes=[first_index], token_ids=[5]))
        frames = outbox.take()
        told.append([got.request_id for frame in frames for got in reader.deltas(frame)])
        kinds.append([frame.WhichOneof("frame") for frame in frames])
    assert told == [["a", "b"], ["a", "c"], ["a"]]
    assert kinds == [["accepted"] * 3 + ["outputs"], ["outputs", "migrate", "load"], ["outputs"]]


def test_whoever_has_news_all_the_time_holds_up_nobody() -> None:
    """Another step arrives between any two frames."""
    outbox, reader = Outbox(frame_numbers=4), FrameReader()
    outbox.migrate("b", 0)
    outbox.load(Load(engine_id="e"))
    told: list[str] = []
    for step in range(8):
        outbox.deltas([delta(name, step, [7], logprobs=[logprob(7)]) for name in "ab"])
        outbox.deltas([delta("long", step, [7] * (1 if step else 9)), delta("c", step, [7])][: 1 + (step == 0)])
        for frame in outbox.take():
            told += [got.request_id for got in reader.deltas(frame)]
            told += [kind for kind in ("migrate", "load") if frame.HasField(kind)]
    assert {"long", "c", "migrate", "load"} <= set(told)
    assert told.index("c") < told.index("migrate") < told.index("load")


@settings(max_examples=50)
@given(
    steps=st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 1), st.integers(0, 3), st.booleans()), max_size=40),
    column=st.sampled_from([1, 3, 1000]),
    room=st.sampled_from([1, 4, FRAME_NUMBERS]),
)
def test_however_it_is_read_the_tokens_are_the_same(
    steps: list[tuple[str, int, int, bool]], column: int, room: int
) -> None:
    """Single tokens are sent as columns, others as deltas, and the two may alternate in any order."""
    outbox = Outbox(column, room)
    reader = FrameReader()
    for number, name in enumerate("ab"):
        outbox.accepted(name, 0, 2 * number)
    sent: dict[tuple[str, int], list[int]] = {}
    received: dict[tuple[str, int], list[int]] = {}

    def read(rounds: float = math.inf) -> None:
        while rounds > 0 and (frames := outbox.take()):
            rounds -= 1
            for got in itertools.chain.from_iterable(map(reader.deltas, frames)):
                tokens = received.setdefault((got.request_id, got.choice), [])
                assert got.result.first_index == len(tokens)
                tokens += got.result.token_ids

    for request_id, choice, count, then_read in steps:
        tokens = sent.setdefault((request_id, choice), [])
        if count == 1:
            number = 2 * "ab".index(request_id) + choice
            stream = Stream(number=number, request_id=request_id, attempt=0, choice=choice)
            outbox.next_tokens(NextTokens(streams=[stream], first_indexes=[len(tokens)], token_ids=[0]))
        else:
            outbox.deltas([delta(request_id, len(tokens), list(range(count)), choice)])
        tokens += range(count)
        if then_read:
            read(rounds=1)
    read()
    assert received == sent


async def test_a_refusal_says_when_to_come_again_and_the_one_that_was_kept_does_not() -> None:
    mailbox, kept = Mailbox(), PagodaError(ErrorCode.OVERLOADED, "full")
    mailbox.reject("r", 0, kept, 7.0)
    assert mailbox.refusal is not None
    assert (mailbox.refusal.retry_after_s, kept.retry_after_s) == (7.0, 0.0)
