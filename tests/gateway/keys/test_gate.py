"""Which key a request presents, with a store that fails and recovers, and a clock that the test sets."""

from __future__ import annotations

import ast
import asyncio
import inspect
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from tests.gateway.keys.flaky_store import FlakyStore

from pagoda_gateway.keys import answers, api_key, gate
from pagoda_gateway.keys.api_key import NewKey
from pagoda_gateway.keys.gate import NOBODY, Auth, Gate, Holder, OptionKeys
from pagoda_gateway.keys.grants import NO_LIMITS, Limits, Right, Role
from pagoda_gateway.keys.register import KEYS, KeyRegister
from pagoda_proto import times
from pagoda_proto.errors import ErrorCode, PagodaError

OPTION = "key-of-an-option"


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


class World:
    """Makes gates; the clock stands still unless the test moves it."""

    def __init__(self, store: FlakyStore) -> None:
        self.store = store
        self.clock = Clock()
        self.register = KeyRegister(store, self.clock)
        self.gates: list[Gate] = []

    def gate(self, auth: str = Auth.AUTO, defaults: Limits = NO_LIMITS, **options: str) -> Gate:
        made = Gate(
            self.register, OptionKeys(**options), auth=auth, defaults=defaults, clock=self.clock, now=self.clock
        )
        self.gates.append(made)
        return made


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World(FlakyStore())
    yield world
    for each in world.gates:
        await each.aclose()
    await world.store.aclose()


async def ask(one: Gate, *keys: str | bytes) -> Holder:
    shown = [key if isinstance(key, bytes) else key.encode() for key in keys]
    return await one.holder_of([(b"x-api-key", key) for key in shown])


async def refused(one: Gate, *keys: str | bytes) -> PagodaError:
    with pytest.raises(PagodaError) as caught:
        await ask(one, *keys)
    return caught.value


async def test_everybody_may_ask_until_there_is_a_key_and_then_never_again(world: World) -> None:
    one = world.gate()
    assert await ask(one) == await ask(one, "none") == NOBODY
    key, text = await world.register.create(NewKey(name="first"))
    world.clock.now += times.KEY_FRESH_S
    assert (await refused(one)).code is (await refused(one, "none")).code is ErrorCode.INVALID_API_KEY
    assert (await ask(one, text)).tenant == key.id
    await world.register.revoke(key.id)
    world.clock.now += times.KEY_FRESH_S
    assert "is revoked" in (await refused(one, text)).message
    assert (await refused(world.gate())).code is ErrorCode.INVALID_API_KEY


async def test_what_auth_says_of_a_server_without_keys(world: World) -> None:
    assert (await refused(world.gate(Auth.KEYS))).code is ErrorCode.INVALID_API_KEY
    await world.register.create(NewKey(name="n"))
    assert await ask(world.gate(Auth.NONE)) == NOBODY
    assert world.store.calls["get"] == world.store.calls["page"] == 0


async def test_where_nobody_knows_whether_there_are_keys_nobody_may_ask(world: World) -> None:
    one = world.gate()
    world.store.gone = True
    error = await refused(one)
    assert (error.code, error.retry_after_s) == (ErrorCode.UNAVAILABLE, 2.5)
    world.store.gone = False
    assert await ask(one) == NOBODY
    world.store.gone = True
    world.clock.now += 10 * times.KEY_STALE_S
    assert await ask(one) == NOBODY


async def test_that_a_key_was_looked_up_does_not_say_whether_there_are_any(world: World) -> None:
    """As when a request resumes under a key: whether keys exist is then still unknown, and must be looked up."""
    key, _ = await world.register.create(NewKey(name="n"))
    one = world.gate()
    await one.grant_of(key.id)
    assert not one.knows
    await one.learn()
    assert one.knows
    world.store.gone = True
    assert not await one.is_open()


async def test_keys_of_options_need_no_store(world: World) -> None:
    world.store.gone = True
    one = world.gate(client=f"{OPTION},another-of-them", admin="key-of-the-admin")
    rights = [(await ask(one, key)).grant.rights for key in (OPTION, "another-of-them", "key-of-the-admin")]
    assert rights == [frozenset({Right.USE}), frozenset({Right.USE}), frozenset(Right)]
    assert len({(await ask(one, key)).tenant for key in (OPTION, "another-of-them", "key-of-the-admin")}) == 3
    assert (await refused(one, OPTION[:-1])).code is ErrorCode.INVALID_API_KEY
    assert (await refused(one, "sk-pagoda-0123456789abcdef-" + "x" * 43)).code is ErrorCode.UNAVAILABLE


async def test_sec_23_the_tenant_does_not_tell_the_key(world: World) -> None:
    tenant = (await ask(world.gate(client=OPTION), OPTION)).tenant
    assert len(tenant) == 16
    assert "." not in tenant
    assert tenant not in OPTION


async def test_a_key_is_what_its_record_says(world: World) -> None:
    defaults = Limits(requests_per_minute=5, tokens_per_minute=0, concurrent_requests=0)
    limits = Limits(tokens_per_minute=7)
    asked = NewKey(name="n", role=Role.MONITOR, models=("a",), limits=limits, expires_at=2000)
    key, text = await world.register.create(asked)
    one = world.gate(defaults=defaults)
    holder = await ask(one, text)
    assert (holder.tenant, holder.grant.rights, holder.grant.models) == (key.id, frozenset({Right.WATCH}), ("a",))
    assert holder.grant.limits == Limits(requests_per_minute=5, tokens_per_minute=7, concurrent_requests=0)
    world.clock.now = 2000
    assert "is expired" in (await refused(one, text)).message


async def test_a_key_is_looked_up_now_and_then_and_revoked_within_that(world: World) -> None:
    key, text = await world.register.create(NewKey(name="n"))
    one = world.gate()
    await asyncio.gather(*(ask(one, text) for _ in range(20)))
    assert world.store.calls["get"] == 1
    await world.register.revoke(key.id)
    asked = world.store.calls["get"]
    world.clock.now += times.KEY_FRESH_S - 0.001
    await ask(one, text)
    assert world.store.calls["get"] == asked
    world.clock.now += 0.001
    assert "is revoked" in (await refused(one, text)).message


async def test_while_the_store_is_gone_keys_seen_lately_are_good_and_others_are_not_wrong(world: World) -> None:
    _, seen = await world.register.create(NewKey(name="seen"))
    _, unseen = await world.register.create(NewKey(name="unseen"))
    one = world.gate()
    await ask(one, seen)
    world.store.gone = True
    world.clock.now += times.KEY_STALE_S - 1
    assert (await ask(one, seen)).tenant
    assert (await refused(one, seen[:-1] + "!")).code is ErrorCode.INVALID_API_KEY  # malformed: the store is not asked
    wrong = seen[:-1] + ("A" if seen[-1] != "A" else "B")
    assert (await refused(one, wrong)).code is ErrorCode.INVALID_API_KEY
    assert (await refused(one, unseen)).code is ErrorCode.UNAVAILABLE
    world.clock.now += 1
    assert (await refused(one, seen)).code is ErrorCode.UNAVAILABLE
    world.store.gone = False
    assert (await ask(one, unseen)).tenant


async def test_a_silent_store_holds_up_nobody_whose_key_was_seen(world: World) -> None:
    _, text = await world.register.create(NewKey(name="n"))
    one = world.gate()
    await ask(one, text)
    world.store.answers.clear()
    world.clock.now += times.KEY_FRESH_S
    async with asyncio.timeout(60):
        for _ in range(100):  # one of them asks the store
            assert (await ask(one, text)).tenant


async def test_who_leaves_does_not_take_the_answer_from_others(world: World) -> None:
    _, text = await world.register.create(NewKey(name="n"))
    one = world.gate(Auth.KEYS)
    world.store.answers.clear()
    world.store.asked.clear()
    first, second = asyncio.create_task(ask(one, text)), asyncio.create_task(ask(one, text))
    await world.store.asked.wait()
    first.cancel()
    await asyncio.wait([first])
    world.store.answers.set()
    assert (await second).tenant
    assert world.store.calls["get"] == 1


async def test_that_a_key_is_unknown_is_remembered_shortly_and_of_few(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "MOST_ABSENT", 8)
    await world.register.create(NewKey(name="n"))
    one = world.gate()
    unknown = [f"sk-pagoda-{i:016x}-{'x' * 43}" for i in range(50)]
    for text in unknown:
        assert (await refused(one, text)).code is ErrorCode.INVALID_API_KEY
        assert (await refused(one, text)).code is ErrorCode.INVALID_API_KEY
    assert world.store.calls["get"] == len(unknown)
    assert len(one._keys._absent) == 8
    assert not one._keys._kept
    world.clock.now += times.KEY_FRESH_S
    world.store.gone = True
    assert (await refused(one, unknown[-1])).code is ErrorCode.UNAVAILABLE


async def test_only_so_many_keys_are_looked_up_at_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MOST_ASKING", 4)
    one = world.gate(Auth.KEYS)
    world.store.answers.clear()
    asking = [asyncio.create_task(refused(one, f"sk-pagoda-{i:016x}-{'x' * 43}")) for i in range(9)]
    done, _ = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
    assert {task.result().code for task in done} == {ErrorCode.OVERLOADED}
    world.store.answers.set()
    codes = [(await task).code for task in asking]
    assert (codes.count(ErrorCode.OVERLOADED), codes.count(ErrorCode.INVALID_API_KEY)) == (5, 4)


@pytest.mark.parametrize(
    "shown",
    [
        "' OR '1'='1",
        "key_'; DROP TABLE records; --",
        'sk-pagoda-" OR 1=1 --------',
        "%",
        "sk-pagoda-%%%%%%%%%%%%%%%%-" + "_" * 43,
        b"\xff\x00\r\n",
        "",
        "*",
        "key_*",
    ],
)
async def test_sec_23_what_means_something_to_a_database_is_no_key(world: World, shown: str | bytes) -> None:
    _, text = await world.register.create(NewKey(name="it's; --"))
    one = world.gate()
    assert (await refused(one, shown)).code is ErrorCode.INVALID_API_KEY
    assert (await ask(one, text)).tenant


async def test_what_goes_on_without_its_caller_has_the_grant_of_its_key_for_as_long_as_that_is_good(
    world: World,
) -> None:
    key, text = await world.register.create(NewKey(name="n", models=("a",)))
    one = world.gate(client=OPTION)
    for shown in (text, OPTION):
        holder = await ask(one, shown)
        assert await one.grant_of(holder.tenant) == holder.grant
    assert await one.grant_of("") == NOBODY.grant
    await world.register.revoke(key.id)
    world.clock.now += times.KEY_FRESH_S
    for tenant in (key.id, "key_0123456789abcdef", "0123456789abcdef", "x"):
        with pytest.raises(PagodaError) as caught:
            await one.grant_of(tenant)
        assert caught.value.code is ErrorCode.INVALID_API_KEY


async def test_a_record_that_cannot_be_read_opens_nothing(world: World) -> None:
    key, text = await world.register.create(NewKey(name="n"))
    await world.store.put(KEYS, key.id, b'{"id": "of another version"}')
    assert (await refused(world.gate(), text)).code is ErrorCode.UNAVAILABLE


def test_sec_23_digests_are_compared_in_constant_time_and_in_no_other_way() -> None:
    sources = [ast.parse(inspect.getsource(module)) for module in (gate, api_key)]
    nodes = [node for source in sources for node in ast.walk(source)]
    compared = [ast.unparse(node) for node in nodes if isinstance(node, ast.Compare)]
    assert not [text for text in compared if "digest" in text.lower()]
    calls = [ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)]
    assert calls.count("hmac.compare_digest") == 2
