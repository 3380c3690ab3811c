from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from pagoda_proto.engine.frames import MOST_BYTES, MOST_TOGETHER, TOGETHER_SINCE, joined, parted
from pagoda_proto.engine.v1 import engine_pb2 as pb


def abort(size: int) -> pb.ClientFrame:
    return pb.ClientFrame(abort=pb.Abort(request_id="x" * size))


SIZES = st.lists(st.sampled_from([0, 1, MOST_BYTES // 3, MOST_BYTES // 2, MOST_BYTES + 1]), max_size=12)


@given(SIZES, st.integers(0, 2 * MOST_TOGETHER))
def test_what_is_joined_is_parted_in_the_same_order(sizes: list[int], small: int) -> None:
    frames = [abort(size) for size in (*sizes, *[2] * small)]
    expected = [frame.SerializeToString() for frame in frames]
    messages = list(joined(frames, TOGETHER_SINCE))
    assert all(len(message.more) < MOST_TOGETHER for message in messages)
    assert all(not message.more or message.ByteSize() < MOST_BYTES + 16 * MOST_TOGETHER for message in messages)
    for one, then in itertools.pairwise(messages):  # as few messages as possible
        together = one.ByteSize() + then.abort.ByteSize()
        assert len(one.more) + 1 == MOST_TOGETHER or together > MOST_BYTES
    alone = [pb.ClientFrame(abort=frame.abort) for message in messages for frame in parted(message)]
    assert [frame.SerializeToString() for frame in alone] == expected


def test_who_does_not_know_of_it_gets_one_at_a_time() -> None:
    assert [len(message.more) for message in joined([abort(1), abort(2)], TOGETHER_SINCE - 1)] == [0, 0]
    assert list(joined(list[pb.ClientFrame](), TOGETHER_SINCE)) == []


def test_frames_within_frames_that_came_with_others_are_not_looked_at() -> None:
    deep = pb.ClientFrame(more=[pb.ClientFrame(more=[abort(1)])])
    assert len(list(parted(deep))) == 2
