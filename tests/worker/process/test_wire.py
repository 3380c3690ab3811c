from __future__ import annotations

from pathlib import Path

import pytest
import zmq

from pagoda_proto.keys import KeyFileError
from pagoda_proto.steps import (
    PROTOCOL_VERSION,
    Goodbye,
    Welcome,
)
from pagoda_worker.process.control import Membership
from pagoda_worker.process.loop import Identity
from pagoda_worker.process.wire import Wire, local_or_encrypted

WAIT_S = 120.0


# --- pieces -----------------------------------------------------------------------------------------------------------


def test_a_lease_that_ran_out_is_not_revived_by_what_is_heard_later() -> None:
    membership = Membership()
    standing = membership.admit(Welcome(epoch=3, engine_boot_id="b", lease_s=4.0), PROTOCOL_VERSION, now=100.0)
    assert membership.heard(standing, 103.9)
    assert membership.standing(107.8) == standing
    assert not membership.heard(standing, 108.0)
    assert membership.standing(103.0) is None
    assert "4.1 s" in membership.why_lost


def test_what_is_over_cannot_end_or_renew_what_came_after() -> None:
    membership = Membership()
    old = membership.admit(Welcome(epoch=3, engine_boot_id="b", lease_s=4.0), PROTOCOL_VERSION, now=0.0)
    new = membership.admit(Welcome(epoch=4, engine_boot_id="b", lease_s=4.0), PROTOCOL_VERSION, now=1.0)
    membership.lose(old, "late")
    assert not membership.heard(old, 2.0)
    assert membership.standing(3.0) == new


GOOD_ADDRESSES = [
    "ipc:///run/x/e.sock", "ipc:///run/x:0", "tcp://127.0.0.1:5000", "tcp://localhost:1", "tcp://[::1]:5000",
]  # fmt: skip
BAD_ADDRESSES = ["", "ipc://", "tcp://127.0.0.1", "tcp://127.0.0.1:x", "udp://127.0.0.1:1", "ipc:///" + "x" * 110]


@pytest.mark.parametrize("good", GOOD_ADDRESSES)
def test_local_addresses_are_accepted(good: str) -> None:
    assert local_or_encrypted(good, "w").keys is None


@pytest.mark.parametrize("bad", [*BAD_ADDRESSES, "tcp://10.0.0.1:5000", "tcp://0.0.0.0:1", "tcp://host:1"])
def test_other_addresses_are_refused(bad: str) -> None:
    with pytest.raises(ValueError, match="engine"):
        local_or_encrypted(bad, "w")


@pytest.fixture
def key_dir(tmp_path: Path) -> Path:
    """A worker's keys, next to the engine core's secret key."""
    (engine_public, engine_secret), (public, secret) = zmq.curve_keypair(), zmq.curve_keypair()
    keys = {"engine-core.public": engine_public, "curve.public": public, "curve.secret": secret}
    for name, key in {**keys, "engine-core.secret": engine_secret}.items():
        (tmp_path / name).write_bytes(key)
    return tmp_path


@pytest.mark.parametrize("bad", BAD_ADDRESSES)
def test_keys_do_not_make_up_for_an_address_that_is_none(bad: str, key_dir: Path) -> None:
    with pytest.raises(ValueError, match="engine:"):
        local_or_encrypted(bad, "w", str(key_dir))


def test_keys_allow_any_host_and_must_be_there(key_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    link = local_or_encrypted("tcp://engine-core:5000", "w", str(key_dir))
    assert link.keys is not None
    assert link.keys.secret == (key_dir / "curve.secret").read_bytes()
    with pytest.raises(KeyFileError):
        local_or_encrypted("tcp://engine-core:5000", "w", str(tmp_path_factory.mktemp("empty")))


def test_the_wire_is_encrypted_to_the_engine_core_s_key_alone(key_dir: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt(zmq.CURVE_SECRETKEY, (key_dir / "engine-core.secret").read_bytes())
        endpoint = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"
        link = local_or_encrypted(endpoint, "w", str(key_dir))
        assert link.keys is not None
        other_key, _ = zmq.curve_keypair()
        plain, wrong = link._replace(keys=None), link._replace(keys=link.keys._replace(peers=(other_key,)))
        wires = [Wire(context, one, name) for one, name in ((plain, "plain"), (wrong, "wrong"), (link, "right"))]
        assert wires[2].send(Goodbye(), timeout_s=WAIT_S)
        assert router.poll(WAIT_S * 1000)
        assert router.recv_multipart()[0] == b"right"
        assert not wires[0].send(Goodbye())
        assert not wires[1].send(Goodbye())
        for wire in wires:
            wire.close()


def test_identity() -> None:
    assert Identity.of_this_process("w").worker_id == "w"
    assert Identity.of_this_process().worker_id
    assert Identity.of_this_process("w").incarnation != Identity.of_this_process("w").incarnation
    with pytest.raises(ValueError, match="worker_id"):
        Identity.of_this_process("w" * 200)
