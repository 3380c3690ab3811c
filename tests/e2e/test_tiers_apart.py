"""Each tier started by itself, as in containers, with keys on every link, and with the health checks of the images."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from tests.e2e.tiers import STOP_S, Tiers, healthy, pagoda, tiers_apart

from pagoda.commands.ping import ping

pytestmark = pytest.mark.e2e


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[Tiers]:
    with tiers_apart(tmp_path) as started:
        yield started


def test_tiers_meet_over_encrypted_links_and_strangers_stay_out(tiers: Tiers, tmp_path: Path) -> None:
    pagoda("keygen", str(tmp_path / "keys"))

    def keys(role: str) -> list[str]:
        return ["--keys-dir", str(tmp_path / "keys" / role)]

    addresses = ["--listen", f"127.0.0.1:{tiers.grpc}", "--worker-endpoint", f"tcp://127.0.0.1:{tiers.zmq}"]
    engine = tiers.start("engine", "engine-core", *addresses, *keys("engine-core"))
    secured = {"keys_dir": str(tmp_path / "keys" / "engine-core")}
    tiers.wait_until(lambda: ping(f"grpcs://127.0.0.1:{tiers.grpc}", **secured) is None)
    assert healthy(f"grpcs://127.0.0.1:{tiers.grpc}", *keys("engine-core"))

    stranger_keys = tmp_path / "strange"
    pagoda("keygen", str(stranger_keys))
    # The stranger knows the engine core's public key, but its own key is not listed there.
    (stranger_keys / "worker" / "engine-core.public").write_bytes(
        (tmp_path / "keys" / "worker" / "engine-core.public").read_bytes()
    )
    link = ["--engine", f"tcp://127.0.0.1:{tiers.zmq}"]
    signs = {name: tmp_path / name for name in ("stranger-alive", "stranger-ready", "alive", "ready")}
    signs["stranger-ready"].touch()  # left by an earlier process

    def files(prefix: str = "") -> list[str]:
        return ["--alive-file", str(signs[f"{prefix}alive"]), "--ready-file", str(signs[f"{prefix}ready"])]

    tiers.start("stranger", "worker", *link, "--keys-dir", str(stranger_keys / "worker"), *files("stranger-"))
    tiers.start("worker", "worker", *link, *keys("worker"), *files())
    gateway = ["--engine", f"127.0.0.1:{tiers.grpc}", "--port", str(tiers.http), "--served-model-name", "demo"]
    tiers.start("gateway", "gateway", *gateway, *keys("gateway"))

    tiers.wait_until(lambda: ping(f"{tiers.url}/health/ready") is None)
    assert healthy(f"{tiers.url}/health/ready")
    assert healthy(f"file:{signs['alive']}")
    assert healthy(f"file:{signs['ready']}")
    with openai.OpenAI(base_url=f"{tiers.url}/v1", api_key="none") as client:
        answer = client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "What is 2 + 3?"}])
    assert "5" in (answer.choices[0].message.content or "")
    tiers.wait_until(lambda: ping(f"file:{signs['stranger-alive']}") is None)
    assert not signs["stranger-ready"].exists()
    listed = pagoda("workers", "list", "--engine", f"127.0.0.1:{tiers.grpc}", *keys("gateway"))
    assert [line.split()[1] for line in listed.stdout.splitlines()[1:]] == ["ready"], listed

    engine.terminate()
    assert engine.wait(STOP_S) == 0
    tiers.wait_until(lambda: ping(f"file:{signs['ready']}", max_age_s=2) is not None)
    assert not healthy(f"file:{signs['ready']}", "--max-age-s", "2")
    tiers.wait_until(lambda: ping(f"file:{signs['alive']}", max_age_s=2) is None)  # alive also without an engine core


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["engine-core", "--listen", "0.0.0.0:7700", "--worker-endpoint", "tcp://127.0.0.1:7701"], "keys_dir"),
        (["engine-core", "--listen", "127.0.0.1:0", "--worker-endpoint", "tcp://0.0.0.0:7701"], "keys_dir"),
        (["worker", "--engine", "tcp://10.0.0.1:7701"], "keys_dir"),
        (["gateway", "--engine", "engine-core:7700", "--port", "0"], "keys_dir"),
    ],
)
def test_sec_02_a_link_off_this_machine_without_keys_is_refused_at_start(arguments: list[str], message: str) -> None:
    done = pagoda(*arguments)
    assert done.returncode == 2, done
    assert message in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
