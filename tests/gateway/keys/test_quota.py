"""What is left of a key's limits, with a clock that the test sets."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import pytest

from pagoda_gateway.keys.grants import NO_LIMITS, Limits
from pagoda_gateway.keys.quota import CONCURRENT_RETRY_S, SWEPT_ABOVE, Quota, Quotas
from pagoda_proto.errors import ErrorCode, PagodaError


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def quota(clock: Clock, **limits: int) -> Quota:
    return Quota(Limits(**limits).or_else(NO_LIMITS), clock)


def refused(ask: Callable[[], object]) -> PagodaError:
    with pytest.raises(PagodaError) as caught:
        ask()
    return caught.value


def visit(one: Quota) -> None:
    with one.request():
        pass


def remaining(one: Quota) -> dict[str, int]:
    return {left.name: left.remaining for left in one.left()}


def test_requests_a_minute() -> None:
    clock = Clock()
    one = quota(clock, requests_per_minute=3)
    for _ in range(3):
        visit(one)
    error = refused(lambda: visit(one))
    assert (error.code, error.retry_after_s, error.status.http) == (ErrorCode.RATE_LIMITED, 20.0, 429)
    clock.now += 19.9
    assert refused(lambda: visit(one)).retry_after_s == pytest.approx(0.1)
    clock.now += 0.1
    visit(one)
    assert remaining(one) == {"requests": 0}
    clock.now += 60
    assert remaining(one) == {"requests": 3}


def test_requests_at_once_are_counted_until_they_end_however_they_end() -> None:
    one = quota(Clock(), concurrent_requests=2)
    with ExitStack() as both:
        both.enter_context(one.request())
        both.enter_context(one.request())
        error = refused(lambda: visit(one))
        assert (error.code, error.retry_after_s) == (ErrorCode.RATE_LIMITED, CONCURRENT_RETRY_S)
    with pytest.raises(RuntimeError), one.request():
        raise RuntimeError
    visit(one)
    assert one.left() == []


def test_output_is_taken_as_it_grows_and_once() -> None:
    clock, grown = Clock(), [0]
    one = quota(clock, tokens_per_minute=100)
    one.begin("run", 30, lambda: grown[0])
    assert remaining(one) == {"tokens": 70}
    grown[0] = 50
    assert remaining(one) == remaining(one) == {"tokens": 20}
    assert refused(lambda: one.check_prompt(21)).retry_after_s == pytest.approx(60 / 100)
    grown[0] = 140
    assert refused(lambda: visit(one)).retry_after_s == pytest.approx((70 + 1) * 60 / 100)
    grown[0] = 150
    one.end("run")
    one.end("run")
    grown[0] = 500
    assert refused(lambda: visit(one)).retry_after_s == pytest.approx((80 + 1) * 60 / 100)
    clock.now += 90 * 60 / 100
    visit(one)
    assert remaining(one) == {"tokens": 10}


def test_a_refused_request_costs_nothing_and_one_nobody_took_is_given_back() -> None:
    one = quota(Clock(), tokens_per_minute=100, requests_per_minute=5)
    one.check_prompt(60)
    one.begin("a", 60, lambda: 0)
    for _ in range(3):
        assert refused(lambda: one.check_prompt(50)).code is ErrorCode.RATE_LIMITED
    assert remaining(one) == {"requests": 5, "tokens": 40}
    one.end("b", give_back=50)
    assert remaining(one)["tokens"] == 40
    one.end("a", give_back=60)
    assert remaining(one)["tokens"] == 100


def test_a_prompt_that_will_never_fit_is_not_worth_a_retry() -> None:
    error = refused(lambda: quota(Clock(), tokens_per_minute=100).check_prompt(101))
    assert (error.code, error.status.retryable) == (ErrorCode.REQUEST_TOO_LARGE, False)


def test_a_key_without_limits_has_none() -> None:
    one = quota(Clock())
    for i in range(1000):
        visit(one)
        one.check_prompt(10**9)
        one.begin(i, 10**9, lambda: 10**9)
    assert one.left() == []


def test_a_keys_own_limits_are_before_the_defaults() -> None:
    defaults = Limits(requests_per_minute=5, tokens_per_minute=6, concurrent_requests=0)
    found = Limits(requests_per_minute=0, concurrent_requests=2).or_else(defaults)
    assert found == Limits(requests_per_minute=0, tokens_per_minute=6, concurrent_requests=2)


def test_only_what_has_something_to_remember_is_kept() -> None:
    clock = Clock()
    quotas, limits = Quotas(clock), Limits(requests_per_minute=60).or_else(NO_LIMITS)
    used = quotas.of("used", limits)
    for _ in range(50):
        visit(used)
    with quotas.of("busy", limits).request():
        clock.now += 10
        for i in range(SWEPT_ABOVE):
            quotas.of(f"key {i}", limits)
        assert quotas.of("used", limits) is used
        assert len(quotas._by_tenant) < 10
        assert quotas.of("busy", limits)._open == 1
    assert quotas.known("used") is used
    assert quotas.known("never seen").left() == []
    assert quotas.of("free", NO_LIMITS) is quotas.known("never seen") is quotas.none
    assert "free" not in quotas._by_tenant
