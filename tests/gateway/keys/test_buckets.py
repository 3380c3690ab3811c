"""In any interval a bucket gives no more than its capacity plus the inflow, and tells correctly how long to wait."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pagoda_gateway.keys.buckets import MINUTE_S, Bucket

gaps = st.floats(0, 200, allow_nan=False)
limits = st.integers(1, 10**6)


@given(limit=limits, asked=st.lists(st.tuples(gaps, st.integers(1, 1000)), max_size=30))
def test_who_waits_as_long_as_told_is_served_and_who_comes_sooner_is_not(
    limit: int, asked: list[tuple[float, int]]
) -> None:
    now = 1000.0
    bucket = Bucket(limit, now)
    for gap_s, amount in asked:
        amount = min(amount, limit)
        now += gap_s
        wait_s = bucket.wait_s(amount, now)
        if wait_s > 0.01:
            assert bucket.wait_s(amount, now + wait_s * 0.9) > 0
        now += wait_s
        assert bucket.wait_s(amount, now) == 0
        bucket.take(amount, now)


@given(limit=limits, asked=st.lists(st.tuples(gaps, st.integers(1, 1000)), max_size=30))
def test_what_is_served_in_all_is_the_limit_and_what_flowed_in(limit: int, asked: list[tuple[float, int]]) -> None:
    begun = now = 1000.0
    bucket, served = Bucket(limit, now), 0
    for gap_s, amount in asked:
        now += gap_s
        if amount <= limit and not bucket.wait_s(amount, now):
            bucket.take(amount, now)
            served += amount
    assert served <= limit + (now - begun) * limit / MINUTE_S + 0.01


def test_a_bucket_may_be_owed_and_then_fills_up_to_its_limit_only() -> None:
    bucket = Bucket(60, 0.0)
    bucket.take(150, 0.0)
    assert (bucket.remaining(0.0), bucket.wait_s(1, 0.0), bucket.reset_s(0.0)) == (0, 91.0, 150.0)
    assert bucket.remaining(100.0) == 10
    assert (bucket.remaining(10_000.0), bucket.reset_s(10_000.0)) == (60, 0.0)
    bucket.take(-5, 10_000.0)
    assert bucket.remaining(10_000.0) == 60


def test_a_clock_that_stands_or_goes_back_gives_nothing() -> None:
    bucket = Bucket(60, 100.0)
    bucket.take(60, 100.0)
    assert bucket.level(50.0) == bucket.level(100.0) == 0
    assert bucket.level(101.0) == 1
