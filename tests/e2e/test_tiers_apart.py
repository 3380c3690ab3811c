"""Each tier started by itself, as in containers, with keys on every link; health checks as the images use them."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest
from tests.e2e.stack import free_port

pytestmark = pytest.mark.e2e


class Tiers:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._started: list[subprocess.Popen[bytes]] = []
        self.pagoda("keygen", str(directory / "keys"))
        self.grpc, self.zmq, self.http = (free_port() for _ in range(3))

    def keys(self, role: str) -> list[str]:
        return ["--keys-dir", str(self._directory / "keys" / role)]

    def pagoda(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pagoda.cli", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

    def start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "pagoda.cli", *arguments]
        with (self._directory / f"{name}.log").open("wb") as log:
            self._started.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))
        return self._started[-1]

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            logs = {path.name: path.read_text()[-1500:] for path in self._directory.glob("*.log")}
            assert time.monotonic() < deadline, logs
            time.sleep(0.1)

    def healthy(self, *target: str) -> bool:
        return self.pagoda("ping", *target).returncode == 0

    def stop(self) -> None:
        for process in reversed(self._started):
            process.terminate()
        for process in self._started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[Tiers]:
    tiers = Tiers(tmp_path)
    yield tiers
    tiers.stop()


def test_tiers_meet_over_encrypted_links_and_strangers_stay_out(tiers: Tiers, tmp_path: Path) -> None:
    addresses = ["--listen", f"127.0.0.1:{tiers.grpc}", "--worker-endpoint", f"tcp://127.0.0.1:{tiers.zmq}"]
    engine = tiers.start("engine", "engine-core", *addresses, *tiers.keys("engine-core"))
    tiers.wait_until(lambda: tiers.healthy(f"grpcs://127.0.0.1:{tiers.grpc}", *tiers.keys("engine-core")))

    stranger_keys = tmp_path / "strange"
    tiers.pagoda("keygen", str(stranger_keys))
    # It knows whom to talk to, but is not on the list of those who may.
    (stranger_keys / "worker" / "engine-core.public").write_bytes(
        (tmp_path / "keys" / "worker" / "engine-core.public").read_bytes()
    )
    link = ["--engine", f"tcp://127.0.0.1:{tiers.zmq}"]
    stranger_alive, alive = tmp_path / "stranger-alive", tmp_path / "alive"
    tiers.start(
        "stranger", "worker", *link, "--keys-dir", str(stranger_keys / "worker"), "--alive-file", str(stranger_alive)
    )
    tiers.start("worker", "worker", *link, *tiers.keys("worker"), "--alive-file", str(alive))
    gateway = ["--engine", f"127.0.0.1:{tiers.grpc}", "--port", str(tiers.http), "--served-model-name", "demo"]
    tiers.start("gateway", "gateway", *gateway, *tiers.keys("gateway"))

    tiers.wait_until(lambda: tiers.healthy(f"http://127.0.0.1:{tiers.http}/health/ready"))
    assert tiers.healthy(f"file:{alive}")
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{tiers.http}/v1", api_key="none")
    answer = client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "What is 2 + 3?"}])
    assert "5" in (answer.choices[0].message.content or "")
    assert not stranger_alive.exists()

    engine.terminate()
    assert engine.wait(20) == 0
    tiers.wait_until(lambda: not tiers.healthy(f"file:{alive}", "--max-age-s", "2"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["engine-core", "--listen", "0.0.0.0:7700", "--worker-endpoint", "tcp://127.0.0.1:7701"], "keys_dir"),
        (["engine-core", "--listen", "127.0.0.1:0", "--worker-endpoint", "tcp://0.0.0.0:7701"], "keys_dir"),
        (["worker", "--engine", "tcp://10.0.0.1:7701"], "keys_dir"),
        (["gateway", "--engine", "engine-core:7700"], "keys_dir"),
    ],
)
def test_a_link_off_this_machine_without_keys_is_refused_at_start(
    tiers: Tiers, arguments: list[str], message: str
) -> None:
    done = tiers.pagoda(*arguments)
    assert done.returncode == 2, done
    assert message in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
