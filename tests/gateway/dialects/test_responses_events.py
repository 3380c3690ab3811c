"""A second telling gives the remaining events, wherever the first one stopped and however the text is split."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagoda_gateway.dialects.responses_events import AlreadyTold, Telling
from pagoda_gateway.generation.updates import Update
from pagoda_gateway.text.events import CallArguments, CallBegun, Event, Finish, Text
from pagoda_proto.errors import ErrorCode, PagodaError
from pagoda_proto.records import FinishReason, Usage

SAID = [("text", "hello there"), ("call", '{"a": 1}'), ("text", "🙂 done"), ("call", "{}")]
USAGE = Usage(prompt_tokens=3, output_tokens=9)


def updates(cuts: Sequence[int]) -> list[Update]:
    """The whole answer, in pieces of these sizes, with a log-probability for each character."""
    found: list[Update] = []
    calls = 0
    sizes = iter(cuts)
    for kind, text in SAID:
        if kind == "call":
            found.append(Update(0, [], None, [CallBegun(calls, "f")]))
            calls += 1
        while text:
            size = next(sizes, 1)
            piece, text = text[:size], text[size:]
            said: Event = Text(piece) if kind == "text" else CallArguments(calls - 1, piece)
            found.append(Update(0, [], None, [said]))
    found.append(Update(0, [], None, [Finish(FinishReason.STOP)]))
    return found


def tell(cuts: Sequence[int], known: AlreadyTold | None = None) -> list[dict[str, Any]]:
    telling = Telling({"id": "resp_1", "background": True}, "1", known)
    events = [_copied(one) for one in telling.begin()]
    for update in updates(cuts):
        text = "".join(one.text for one in update.events if isinstance(one, Text))
        events += [_copied(one) for one in telling.update(update, [{"token": char} for char in text])]
    return events + [_copied(one) for one in telling.finish(USAGE, 7)]


def _copied(event: dict[str, Any]) -> dict[str, Any]:
    """A snapshot of the event."""
    copied: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(event))
    return copied


def added_up(events: Sequence[dict[str, Any]]) -> list[Any]:
    """Merges consecutive deltas of one type."""
    found: list[Any] = []
    for event in events:
        one = {name: value for name, value in event.items() if name != "sequence_number"}
        if "delta" in one and found and found[-1]["type"] == one["type"]:
            found[-1]["delta"] += one["delta"]
            found[-1]["logprobs"] = found[-1].get("logprobs", []) + one.get("logprobs", [])
        else:
            found.append({"logprobs": [], **one} if "delta" in one else one)
    return found


CUTS = st.lists(st.integers(1, 6), max_size=12)


@given(first=CUTS, again=CUTS, told=st.integers(0, 60))
def test_a_telling_goes_on_where_another_one_stopped(first: list[int], again: list[int], told: int) -> None:
    before = tell(first)[:told]
    known = AlreadyTold()
    for event in before:
        known.add(event)
    events = before + tell(again, known)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert added_up(events) == added_up(tell([]))


def test_one_in_the_background_is_made_then_queued() -> None:
    begun = [(event["type"], event["response"]["status"]) for event in tell([])[:3]]
    assert begun == [
        ("response.created", "queued"), ("response.queued", "queued"), ("response.in_progress", "in_progress"),
    ]  # fmt: skip


def test_the_last_event_has_all_that_was_said() -> None:
    response = tell([4, 4, 4])[-1]["response"]
    texts = [item.get("arguments") or item["content"][0]["text"] for item in response["output"]]
    assert texts == [text for _, text in SAID]
    assert len({item["id"] for item in response["output"]}) == len(SAID)
    assert response["usage"]["total_tokens"] == 12
    assert response["completed_at"] == 7


@pytest.mark.parametrize("told", [0, 2, 7, 12])
def test_one_that_goes_wrong_again_early_is_ended_all_the_same(told: int) -> None:
    known = AlreadyTold()
    for event in tell([])[:told]:
        known.add(event)
    error = PagodaError(ErrorCode.INTERNAL, "x")
    for ending in (lambda telling: telling.fail(error, USAGE), lambda telling: telling.cancel(USAGE)):
        last = list(ending(Telling({"id": "resp_1"}, "1", copy.deepcopy(known))))
        assert [one["sequence_number"] for one in last] == [told]


def test_what_was_said_before_a_failure_stays() -> None:
    telling = Telling({"id": "resp_1"}, "1")
    list(telling.begin())
    deltas = [one["delta"] for one in telling.update(updates([4])[0], []) if "delta" in one]
    (last,) = telling.fail(PagodaError(ErrorCode.INTERNAL, "x"), USAGE)
    (item,) = last["response"]["output"]
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", "".join(deltas))
