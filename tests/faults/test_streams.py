"""The comparison of streams detects every failure it should."""

from __future__ import annotations

from typing import Any

import pytest
from tests.faults.streams import NO_ENDING, Outcome, Report, make_requests


def chunk(index: int, text: str, ids: list[int], finish_reason: str | None = None, **more: Any) -> dict[str, Any]:
    choice = {"index": index, "text": text, "token_ids": ids, "logprobs": None, "finish_reason": finish_reason}
    return {"choices": [choice], "usage": None, **more}


USAGE = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 3}}
ERROR = {"error": {"code": "stream_interrupted", "message": ""}}
WHOLE = [chunk(0, "ab", [1, 2]), chunk(0, "c", [3], "length"), USAGE]


def outcome_of(events: list[dict[str, Any]], *, done: bool = True, choices: int = 1) -> Outcome:
    outcome = Outcome(status=200)
    for event in events:
        outcome.add(event)
    outcome.close(done, choices)
    return outcome


UNDISTURBED = outcome_of(WHOLE)


@pytest.mark.parametrize(
    ("outcome", "kind"),
    [
        (outcome_of([chunk(0, "a", [1]), chunk(0, "bc", [2, 3], "length"), USAGE]), "identical"),
        (outcome_of([chunk(0, "ab", [1, 2]), chunk(0, "d", [4], "length"), USAGE]), "different"),
        (outcome_of([chunk(0, "ab", [1, 2]), chunk(0, "c", [3], "stop"), USAGE]), "different"),
        (outcome_of([*WHOLE[:2], chunk(0, "", [], "length"), USAGE]), "wrong"),
        (outcome_of([*WHOLE, USAGE]), "wrong"),
        (outcome_of(WHOLE[:2]), "wrong"),
        (outcome_of(WHOLE, choices=2), "wrong"),
        (outcome_of([chunk(0, "ab", [1, 2], "length"), USAGE]), "wrong"),
        (outcome_of([WHOLE[0], ERROR]), "wrong"),
        (outcome_of([WHOLE[0], ERROR], done=False), "broken"),
        (outcome_of(WHOLE[:1], done=False), "broken"),
        (Outcome(status=503, error="unavailable", retry_after="1"), "refused"),
        (Outcome(status=503, error="unavailable"), "broken"),
    ],
)
def test_every_kind_of_stream(outcome: Outcome, kind: str) -> None:
    assert outcome.kind(UNDISTURBED) == kind
    report = Report("")
    report.judge([(0, outcome)], [UNDISTURBED])
    assert bool(report.problems) == (kind not in ("identical", "refused"))


def test_a_stream_that_may_fail_must_say_that_it_did() -> None:
    report = Report("")
    report.judge([(0, outcome_of([WHOLE[0], ERROR], done=False))], [UNDISTURBED], may_fail=True)
    assert not report.problems
    silent = outcome_of(WHOLE[:1], done=False)
    assert silent.error == NO_ENDING
    report.judge([(0, silent)], [UNDISTURBED], may_fail=True)
    assert report.problems


def test_one_seed_makes_one_list_of_requests() -> None:
    assert make_requests(3, 20) == make_requests(3, 20)
    assert make_requests(3, 20) != make_requests(4, 20)
