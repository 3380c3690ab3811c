"""A request with a grammar is admitted once the grammar is found harmless, and ends exactly once whatever happens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.engine_core.bench import Bench
from tests.engine_core.fake_worker import make_hello
from tests.fakes import make_record, reference_tokens

from pagoda_engine_core.grammars import verdicts
from pagoda_engine_core.grammars.verdicts import Verdict
from pagoda_proto.errors import ErrorCode, PagodaError
from pagoda_proto.records import FinishReason, PriorOutput, RequestRecord
from pagoda_proto.times import GRAMMAR_REFUSED_S

GOOD = Verdict(None, final=True)
BAD = Verdict(PagodaError(ErrorCode.INVALID_ARGUMENT, "no good", "grammar"), final=True)
SLOW = Verdict(PagodaError(ErrorCode.INVALID_ARGUMENT, "too slow", "grammar"), final=False, dear=True)
UNREAD = Verdict(PagodaError(ErrorCode.OVERLOADED, "too many", "grammar"), final=False)


class ScriptedChecker:
    """The test decides what it finds and when; while `full`, it refuses to check."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.tenants: list[str] = []
        self.full = self.closed = False
        self._told: dict[str, Callable[[str, Verdict], object]] = {}

    def check(self, grammar: str, tenant: str, told: Callable[[str, Verdict], object]) -> None:
        if self.full:
            raise PagodaError(ErrorCode.OVERLOADED, "too many", "grammar")
        self.asked.append(grammar)
        self.tenants.append(tenant)
        self._told[grammar] = told

    def find(self, grammar: str, verdict: Verdict) -> None:
        self._told.pop(grammar)(grammar, verdict)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def checker() -> ScriptedChecker:
    return ScriptedChecker()


@pytest.fixture
def bench(checker: ScriptedChecker) -> Bench:
    bench = Bench(checker)
    bench.executor.join(1, make_hello())
    bench.settle()
    return bench


def formed(grammar: str = "g", **changes: object) -> RequestRecord:
    return make_record(grammar=grammar, **({"eos_token_ids": (255,)} | changes))  # type: ignore[arg-type]


def test_it_waits_for_the_verdict_and_runs(bench: Bench, checker: ScriptedChecker) -> None:
    record = formed(n=2)
    bench.submit(record)
    bench.settle()
    assert bench.sink.accepted_ids == []
    assert not bench.engine.idle
    checker.find("g", GOOD)
    bench.settle()
    assert bench.deltas(record.request_id) == reference_tokens(record)
    assert bench.engine.idle


def test_a_kept_refusal_keeps_nothing_of_those_it_refused(bench: Bench, checker: ScriptedChecker) -> None:
    together = [bench.submit(formed()) for _ in range(2)]
    bench.settle()
    checker.find("g", BAD)
    bench.settle()
    assert len({id(bench.sink.rejections.pop(name)) for name in together} | {id(BAD.error)}) == 3
    refused = [formed() for _ in range(3)]
    for record in refused:
        bench.submit(record)
    bench.settle()
    errors = [bench.sink.rejections.pop(record.request_id) for record in refused]
    assert len(set(map(id, errors))) == 3
    assert BAD.error is not None
    assert BAD.error.__traceback__ is None


def test_a_refused_one_ends_with_the_reason_and_the_field(bench: Bench, checker: ScriptedChecker) -> None:
    record = formed()
    bench.submit(record)
    bench.settle()
    checker.find("g", BAD)
    bench.settle()
    error = bench.sink.rejections[record.request_id]
    assert (error.code, error.message, error.param) == (ErrorCode.INVALID_ARGUMENT, "no good", "grammar")
    assert bench.sink.accepted_ids == []
    assert bench.engine.idle


def test_one_check_is_for_all_who_wait_and_a_final_verdict_for_all_who_come(
    bench: Bench, checker: ScriptedChecker
) -> None:
    early = [formed(), formed(), formed("other")]
    for record in early:
        bench.submit(record)
    bench.settle()
    checker.find("g", GOOD)
    checker.find("other", BAD)
    late = [formed(), formed("other")]
    for record in late:
        bench.submit(record)
    bench.settle()
    assert checker.asked == ["g", "other"]
    assert set(bench.sink.endings) == {early[0].request_id, early[1].request_id, late[0].request_id}
    assert set(bench.sink.rejections) == {early[2].request_id, late[1].request_id}


def test_what_a_busy_machine_may_be_to_blame_for_is_asked_again(bench: Bench, checker: ScriptedChecker) -> None:
    first, second = formed(), formed()
    bench.submit(first)
    bench.settle()
    checker.find("g", SLOW)
    bench.settle()
    early = bench.submit(formed())
    bench.settle()
    assert checker.asked == ["g"], "not at once"
    bench.pass_time(GRAMMAR_REFUSED_S + 1)
    bench.submit(second)
    bench.settle()
    assert checker.asked == ["g", "g"]
    checker.find("g", GOOD)
    bench.settle()
    assert set(bench.sink.rejections) == {first.request_id, early}
    assert bench.sink.rejections[early].message == "too slow"
    assert set(bench.sink.endings) == {second.request_id}


def test_each_tenant_that_asks_has_a_turn_and_who_made_room_for_others_is_overloaded(
    bench: Bench, checker: ScriptedChecker
) -> None:
    records = [formed(tenant=tenant) for tenant in ("a", "a", "b")]
    for record in records:
        bench.submit(record)
    bench.settle()
    assert (checker.asked, checker.tenants) == (["g", "g"], ["a", "b"])
    checker.find("g", UNREAD)
    bench.settle()
    assert {error.code for error in bench.sink.rejections.values()} == {ErrorCode.OVERLOADED}
    assert len(bench.sink.rejections) == 3
    bench.submit(formed())
    bench.settle()
    assert len(checker.asked) == 3


def test_one_that_made_room_is_refused_to_its_tenant_and_still_asked_for_by_others(
    bench: Bench, checker: ScriptedChecker
) -> None:
    records = [formed(tenant=tenant) for tenant in ("a", "b")]
    for record in records:
        bench.submit(record)
    bench.settle()
    checker.find("g", UNREAD._replace(tenant="a"))
    bench.settle()
    assert set(bench.sink.rejections) == {records[0].request_id}
    assert checker.tenants == ["a", "b", "b"]
    checker.find("g", GOOD)
    bench.settle()
    assert set(bench.sink.rejections) == {records[0].request_id}


def test_sec_17_verdicts_are_kept_for_so_many(
    bench: Bench, checker: ScriptedChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdicts, "MAX_FINAL", 3)
    for grammar in ("a", "b", "a", "c", "d", "a", "b"):  # b is evicted first, since a was used again
        known = set(checker.asked)
        bench.submit(formed(grammar))
        bench.settle()
        if grammar not in known or grammar == "b":
            checker.find(grammar, GOOD)
            bench.settle()
    assert checker.asked == ["a", "b", "c", "d", "b"]


def test_an_overloaded_checker_overloads_the_request(bench: Bench, checker: ScriptedChecker) -> None:
    checker.full = True
    record = formed()
    bench.submit(record)
    bench.settle()
    assert bench.sink.rejections[record.request_id].code is ErrorCode.OVERLOADED
    checker.full = False
    bench.submit(formed())
    bench.settle()
    assert checker.asked == ["g"]


def test_while_it_waits_it_can_be_aborted_and_given_up(bench: Bench, checker: ScriptedChecker) -> None:
    aborted, partly, abandoned = formed(), formed(n=2, max_tokens=3), formed()
    for record in (aborted, partly, abandoned):
        bench.submit(record)
    bench.settle()
    bench.engine.abort(aborted.request_id)
    bench.engine.abort(partly.request_id, (1,))
    bench.settle()
    assert bench.sink.rejections[aborted.request_id].code is ErrorCode.CANCELLED
    checker.find("g", GOOD)
    bench.settle()
    assert bench.sink.reasons[partly.request_id, 1] is FinishReason.ABORT
    assert bench.sink.reasons[partly.request_id, 0] is FinishReason.LENGTH
    bench.submit(formed("other"))
    bench.settle()
    bench.engine.abandon(bench.sink)
    bench.settle()
    assert bench.engine.idle
    checker.find("other", GOOD)  # nobody waits for it any more
    bench.settle()
    assert bench.engine.idle


def test_without_a_verdict_it_gives_up_in_time(bench: Bench) -> None:
    record = formed(queue_timeout_s=5.0)
    bench.submit(record)
    bench.pass_time(6.0)
    error = bench.sink.rejections[record.request_id]
    assert (error.code, error.message) == (ErrorCode.UNAVAILABLE, "the grammar was not checked within 5 s")


def test_a_later_attempt_takes_the_place_of_one_that_waits(bench: Bench, checker: ScriptedChecker) -> None:
    record = formed()
    bench.submit(record)
    bench.submit(record, 1)
    bench.settle()
    checker.find("g", GOOD)
    bench.settle()
    assert checker.asked == ["g"]
    assert bench.sink.accepted_ids == [(record.request_id, 1)]
    assert bench.deltas(record.request_id) == reference_tokens(record)


def test_what_has_begun_is_not_judged_again(bench: Bench, checker: ScriptedChecker) -> None:
    record = formed()
    told = reference_tokens(record)[0]
    begun = PriorOutput(choice=0, token_ids=told[:3])
    bench.sink.prime(record.request_id, 0, told[:3])
    bench.submit(record, 1, [begun])
    bench.settle()
    assert checker.asked == []
    assert bench.deltas(record.request_id) == [told]


def test_before_the_model_is_known_nothing_is_checked(checker: ScriptedChecker) -> None:
    bench = Bench(checker)
    record = formed()
    bench.submit(record)
    bench.settle()
    assert checker.asked == []
    bench.executor.join(1, make_hello())
    bench.settle()
    checker.find("g", GOOD)
    bench.settle()
    assert set(bench.sink.endings) == {record.request_id}


def test_a_grammar_without_an_end_of_sequence_is_refused(bench: Bench, checker: ScriptedChecker) -> None:
    record = formed(eos_token_ids=())
    bench.submit(record)
    bench.settle()
    assert bench.sink.rejections[record.request_id].param == "eos_token_ids"
    assert checker.asked == []


def test_who_waits_for_a_verdict_at_the_end_is_handed_back(bench: Bench, checker: ScriptedChecker) -> None:
    record = formed()
    bench.submit(record)
    bench.settle()
    bench.engine.close()
    assert bench.sink.migrated == [(record.request_id, 0)]
    assert checker.closed
    checker.find("g", GOOD)  # too late, and harmless
