"""A position survives writing and reading, and an invalid one is refused before it is used."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagoda_gateway.generation.positions import MAX_POSITION_CHARS, Marks, Place, Position
from pagoda_gateway.generation.tape import Tape
from pagoda_gateway.generation.updates import Update
from pagoda_gateway.text.events import CallBegun, Finish, Text
from pagoda_proto.records import FinishReason

NUMBER = st.integers(0, 10**9 - 1)
PLACES = st.lists(st.builds(Place, NUMBER, NUMBER), min_size=1, max_size=8).map(tuple)


@given(besides=NUMBER, places=PLACES)
def test_it_is_read_as_it_was_written(besides: int, places: tuple[Place, ...]) -> None:
    position = Position("stream_1f", "0123abcd", besides, places)
    assert Position.read(str(position)) == position


@pytest.mark.parametrize(
    "text",
    ["", "7", "stream_1", "s:0123abcd:0:", "s:0123abcd:0:1", "s:0123abcd:0:1.2,", "s:0123ABCD:0:1.2",
     "s:0123abcd:-1:1.2",
     "s:0123abcd:0:1.2\n", "é:0123abcd:0:1.2", "s:0123abcd:0:" + "1.2," * (MAX_POSITION_CHARS // 4) + "1.2",
     "s:0123abcd:0:12345678901.2", "s:0123abcd:0:١.2"],
)  # fmt: skip
def test_what_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Position.read(text)


def test_one_of_another_stream_is_refused() -> None:
    for known in (Position("other", "0123abcd", 0, (Place(),)), Position("mine", "0123abcd", 0, (Place(), Place()))):
        with pytest.raises(ValueError, match="another stream"):
            Marks("mine", Tape("j"), 1, known)


@given(tokens=st.integers(0, 6), units=st.integers(0, 12))
def test_an_update_is_cut_where_its_reader_is(tokens: int, units: int) -> None:
    events = [Text("ab🙂d"), CallBegun(0, "f"), Text("gh"), Finish(FinishReason.STOP)]
    tape = Tape("j")
    marks = Marks("s", tape, 1, Position("s", tape.tag(), 0, (Place(tokens, units),)))
    had, left = marks.cut(Update(0, [1, 2, 3], None, [*events]))
    assert had.token_ids + left.token_ids == [1, 2, 3]
    assert had.text + left.text == "ab🙂dgh"
    assert [len(had.token_ids), len(had.text)] == [min(tokens, 3), [0, 1, 2, 3, 4, 4, 5, 6, 6, 6, 6, 6, 6][units]]
    assert (left.finish is None) == (units >= 8)
    assert marks.line() == f"id: s:{tape.tag()}:0:{min(tokens, 3)}.{min(units, 8)}\n".encode()
