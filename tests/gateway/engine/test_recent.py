"""The last requests of each tenant are kept, and shown to no other tenant."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from tests.gateway.fake_engine_core import FakeEngineCore, until
from tests.gateway.streams import collect, record, sample

from pagoda_gateway.clients import Caller, origin_of
from pagoda_gateway.engine.client import SessionClient
from pagoda_gateway.engine.recent import MOST_PER_TENANT, MOST_TENANTS, EndedRequest, RecentRequests
from pagoda_proto.engine.v1 import engine_pb2 as pb
from pagoda_proto.errors import PagodaError
from pagoda_proto.records import LedgerEntry, RequestRecord


def ended(name: str) -> EndedRequest:
    return EndedRequest(
        id=name, model="m", ended_at=0.0, end="stop", prompt_tokens=1, cached_prompt_tokens=0, output_tokens=1,
        ttft_s=0.1, tpot_s=None, total_s=0.2, attempts=1,
    )  # fmt: skip


def test_the_last_ones_are_kept_newest_first() -> None:
    recent = RecentRequests()
    for i in range(MOST_PER_TENANT + 5):
        recent.add("a", ended(str(i)))
    recent.add("b", ended("other"))
    assert [request.id for request in recent.of("a")] == [str(i) for i in range(MOST_PER_TENANT + 4, 4, -1)]
    assert [request.id for request in recent.of("b")] == ["other"]
    assert recent.of("c") == []


def test_of_many_tenants_those_who_asked_last_are_kept() -> None:
    recent = RecentRequests()
    recent.add("quiet", ended("1"))
    recent.add("busy", ended("2"))
    for i in range(MOST_TENANTS - 1):
        recent.add("busy", ended("3"))
        recent.add(f"tenant {i}", ended("4"))
    assert recent.of("quiet") == []
    assert len(recent.of("busy")) == MOST_PER_TENANT
    assert len(recent.of("tenant 0")) == 1


@pytest.mark.parametrize("name", ["ab12", "chatcmpl-ab12", "resp_ab12"])
def test_the_newest_is_found_by_its_id_or_its_answers(name: str) -> None:
    recent = RecentRequests()
    for request in (ended("ab12"), msgspec.structs.replace(ended("ab12"), attempts=2), ended("12")):
        recent.add("a", request)
    assert recent.find("a", name) == msgspec.structs.replace(ended("ab12"), attempts=2)
    assert recent.find("b", name) is None


def test_a_clients_own_name_finds_a_request_too() -> None:
    recent = RecentRequests()
    recent.add("a", ended("ab12.mine"))
    assert all(recent.find("a", name) for name in ("mine", "chatcmpl-mine", "ab12.mine"))
    assert not any(recent.find("a", name) for name in ("ab12", "ine", "chatcmpl-ine", "not mine", ""))


def test_time_by_cause_sums_to_all_of_it() -> None:
    request = msgspec.structs.replace(ended("1"), total_s=2.0, waits_s={"queued_behind": 0.25, "decode": 1.5})
    assert request.spent_s() == {"queued_behind": 0.25, "decode": 1.5, "outside_engine_core": 0.25}
    assert msgspec.structs.replace(request, waits_s={}).spent_s() == {"outside_engine_core": 2.0}


def owned(tenant: str, asked: str | None = None) -> RequestRecord:
    return msgspec.structs.replace(record(), cache_salt=origin_of(Caller("", tenant), asked).cache_salt)


async def test_a_request_is_kept_for_its_own_tenant(engine: FakeEngineCore, client: SessionClient) -> None:
    engine.cached_prompt_tokens = 2
    ledger = [LedgerEntry("queued_behind", 0.25), LedgerEntry("decode", 1.5)]

    def telling(run: object, delta: object) -> list[object]:
        delta.ledger = ledger if delta.usage is not None else None  # type: ignore[attr-defined]
        return [delta]

    engine.script = telling
    requests = [owned("tenant-a"), owned("tenant-a", "salt"), owned("tenant-b"), record()]
    for request in requests:
        await collect(await client.submit(request))
    await collect(await client.submit(record(), counted=False))
    a1, a2, b, nobody = [request.request_id for request in requests]
    assert [each.id for each in client.recent.of("tenant-a")] == [a2, a1]
    assert [each.id for each in client.recent.of("tenant-b")] == [b]
    (kept,) = client.recent.of("")
    assert (kept.id, kept.end, kept.attempts) == (nobody, "length", 1)
    assert (kept.prompt_tokens, kept.cached_prompt_tokens, kept.output_tokens) == (3, 2, 12)
    assert kept.waits_s == {"queued_behind": 0.25, "decode": 1.5}
    assert kept.ttft_s is not None
    assert kept.tpot_s is not None
    assert kept.ttft_s <= kept.total_s


async def test_what_ended_early_is_kept_with_what_is_known(engine: FakeEngineCore, client: SessionClient) -> None:
    engine.steps = asyncio.Semaphore(2)
    left = await client.submit(record())
    await until(lambda: sample(client, "generation_tokens_total") == 2)
    await left.aclose()
    engine.on_submit = lambda submit: pb.ServerFrame(
        rejected=pb.Rejected(request_id=submit.record.request_id, code="overloaded")
    )
    with pytest.raises(PagodaError):
        await client.submit(record())
    refused, aborted = client.recent.of("")
    assert (refused.end, refused.ttft_s, refused.output_tokens) == ("error:overloaded", None, 0)
    assert (aborted.end, aborted.output_tokens, aborted.waits_s) == ("abort", 2, {})


def test_no_word_can_be_kept() -> None:
    texts = {"id", "model", "end"}
    for field in msgspec.structs.fields(EndedRequest):
        assert (field.type is str) == (field.name in texts), field.name
