"""The images and the compose file on a real daemon, disturbed the way hosts disturb them: `make test-containers`.

Wanted: `docker` with a daemon on this machine (DOCKER_HOST is honoured), `docker compose` or `docker-compose`, and the
right to kill the processes of containers from the host. Not part of the test suite, which needs no daemon.

    BASE_IMAGE            the Python image to build on
    TORCH_INDEX           where torch comes from
    DOCKER_BUILD_OPTIONS  further words for `docker build`, for instance --network=host
    ARGS="--no-build"     take the images that are there

Every step says what it saw; the exit status is 1 when one of them failed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
from bench.sides import free_port
from tests.faults.streams import (
    Disturbance,
    Flow,
    Outcome,
    Report,
    Request,
    make_requests,
    run_streams,
    undisturbed,
)

ROOT = Path(__file__).parents[2]
PROJECT = "pagoda-check"
IMAGES = {"gateway": "gateway", "engine-core": "engine_core", "worker": "worker"}  # service -> directory
BASE_IMAGE = os.environ.get("BASE_IMAGE", "python:3.12-slim-bookworm")
# Lists what only building needs and final images must not have: compilers, installers, caches, tests of packages.
LEFTOVERS = """
for tool in gcc g++ cc c++ clang ld make pip; do PATH=/opt/pagoda/bin:$PATH command -v $tool; done
find / -xdev -type f 2>/dev/null | grep -E '/(pip|hatchling)/__init__[.]py$|[.](deb|whl)$|_Packages$|/tests/|/[.]cache/'
exit 0
"""
TIMEOUT_S = 300.0
GATEWAY_MB = 150  # more than its base image
MESSAGE_CHARS = 1000
NUM_STREAMS, MAX_TOKENS = 6, 1500


def run(*command: str, **options: Any) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, **options)
    if done.returncode != 0:
        output = done.stdout[-2000:] + done.stderr[-2000:]
        raise RuntimeError(f"{shlex.join(command)} ended with {done.returncode}:\n{output}")
    return done.stdout


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {TIMEOUT_S:.0f} s")
        time.sleep(0.2)


class Compose:
    """The shipped compose file, run as a separate project on a free port."""

    def __init__(self, scratch: Path) -> None:
        self.port = free_port()
        self.environment = os.environ | {"PORT": str(self.port), "BASE_IMAGE": BASE_IMAGE, "MODELS_DIR": str(scratch)}
        scratch.chmod(0o755)
        file = ROOT / "docker-compose.yml"
        self._command = ["docker", "compose"]
        if subprocess.run([*self._command, "version"], capture_output=True, check=False).returncode != 0:
            # docker-compose v1 supports neither a top-level name nor an optional env file.
            self._command = ["docker-compose"]
            shipped = file.read_text()
            options, file = scratch / "pagoda.env", scratch / "docker-compose.yml"
            options.write_text("PAGODA_WORKERS_HERE=3\n")
            optional = "[{path: pagoda.env, required: false}]"
            file.write_text(shipped.replace("\nname: pagoda\n", "\n").replace(optional, f"[{options}]"))
        self._command += ["-p", PROJECT, "-f", str(file), "--project-directory", str(ROOT)]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __call__(self, *arguments: str) -> str:
        return run(*self._command, *arguments, env=self.environment)

    def containers(self, service: str = "") -> list[dict[str, Any]]:
        """The daemon's description of a service's containers, or of all containers."""
        ids = self("ps", "-q", *([service] if service else [])).split()
        found: list[dict[str, Any]] = json.loads(run("docker", "inspect", *ids)) if ids else []
        return found

    def healthy(self) -> bool:
        states = [(c["State"]["Running"], c["State"].get("Health", {}).get("Status")) for c in self.containers()]
        return bool(states) and all(state == (True, "healthy") for state in states)

    def ready(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/health/ready", timeout=10).status_code == 200
        return False


def leftovers(image: str) -> set[str]:
    command = ("docker", "run", "--rm", "--user", "0", "--network=none", "--entrypoint", "sh", image, "-c", LEFTOVERS)
    return set(run(*command).splitlines())


def kill_from_host(container: dict[str, Any]) -> None:
    """SIGKILL Pagoda's own process. A kill through the daemon would count as intended and cause no restart."""
    lines = run("docker", "top", container["Id"], "-eo", "pid,args").splitlines()[1:]
    pids = [int(line.split()[0]) for line in lines if "pagoda" in line and "docker-init" not in line]
    if not pids:
        raise RuntimeError(f"no process of Pagoda's in {container['Name']}: {lines}")
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


class Check:
    """Runs the steps in order and keeps what each of them saw."""

    def __init__(self, compose: Compose) -> None:
        self.compose = compose
        self.rows: list[tuple[str, str, str]] = []
        self.requests: list[Request] = make_requests(7, NUM_STREAMS, max_tokens=MAX_TOKENS)
        self.undisturbed: list[Outcome] = []

    def step(self, name: str, work: Callable[[], str]) -> bool:
        began = time.monotonic()
        try:
            verdict, saw = "ok", work()
        except Exception as error:  # noqa: BLE001 - one failed step is a line of the table, not the end of it
            verdict, saw = "FAILED", f"{type(error).__name__}: {error}"[:MESSAGE_CHARS]
        self.rows.append((name, verdict, saw))
        print(f"{verdict:7} {name:48} {time.monotonic() - began:6.1f} s  {saw}", flush=True)
        return verdict == "ok"

    # Images

    def build(self, service: str) -> str:
        options = shlex.split(os.environ.get("DOCKER_BUILD_OPTIONS", ""))
        arguments = ["--build-arg", f"BASE_IMAGE={BASE_IMAGE}"]
        if service == "worker":
            arguments += ["--build-arg", f"TORCH_INDEX={os.environ.get('TORCH_INDEX', '')}"]
        dockerfile = f"{IMAGES[service]}/Dockerfile"
        run("docker", "build", *options, *arguments, "-f", dockerfile, "-t", f"pagoda-{service}:0.1.0", ".")
        return "built"

    def contents(self, service: str) -> str:
        image = f"pagoda-{service}:0.1.0"
        left_over = leftovers(image) - leftovers(BASE_IMAGE)
        assert not left_over, f"{len(left_over)} files are left over from building, such as {sorted(left_over)[:5]}"
        size, base = (int(run("docker", "image", "inspect", "-f", "{{.Size}}", name)) for name in (image, BASE_IMAGE))
        over_mb = (size - base) / 1e6
        assert service != "gateway" or over_mb <= GATEWAY_MB, f"{over_mb:.0f} MB over its base"
        return f"{size / 1e6:.0f} MB, {over_mb:.0f} MB over its base"

    # The stack at rest

    def start(self) -> str:
        self.compose("up", "-d", "--no-build")
        wait_until(lambda: self.compose.healthy() and self.compose.ready(), "all containers healthy")
        return f"{len(self.compose.containers())} containers healthy by their own `pagoda ping`"

    def confinement(self) -> str:
        for container in self.compose.containers():
            host, name = container["HostConfig"], container["Name"]
            assert host["ReadonlyRootfs"], name
            assert host["CapDrop"] == ["ALL"], name
            assert "no-new-privileges:true" in host["SecurityOpt"], name
            assert container["Config"]["User"] == "10001", name
            published = [entry for entries in (host["PortBindings"] or {}).values() for entry in entries]
            assert all(entry["HostIp"] == "127.0.0.1" for entry in published), name
            assert bool(published) == ("gateway" in name), name
        return "read-only roots, no capabilities, uid 10001, one port on loopback"

    def endpoints(self) -> str:
        paths = ("/health", "/health/live", "/health/ready", "/health/startup", "/metrics", "/v1/models")
        statuses = {path: httpx.get(self.compose.url + path, timeout=30).status_code for path in paths}
        assert set(statuses.values()) == {200}, statuses
        return ", ".join(paths)

    def chat(self) -> str:
        client = openai.OpenAI(base_url=f"{self.compose.url}/v1", api_key="none", max_retries=0)
        messages: list[Any] = [{"role": "user", "content": "What is 2 + 3?"}]
        answer = client.chat.completions.create(model=self.model(), messages=messages, temperature=0)
        text = answer.choices[0].message.content or ""
        assert "5" in text, text
        return text

    def model(self) -> str:
        return str(httpx.get(f"{self.compose.url}/v1/models", timeout=30).json()["data"][0]["id"])

    def undisturbed_run(self) -> str:
        for request in self.requests:
            request["model"] = self.model()
        self.undisturbed = undisturbed(self.compose.url, self.requests)
        return f"{sum(outcome.usage[1] for outcome in self.undisturbed if outcome.usage)} tokens"

    # The stack disturbed

    def run(self, disturb: Disturbance, again: bool = False) -> Report:
        """Run the streams: each must equal the undisturbed one, and none may be refused."""
        report, url = Report(""), self.compose.url
        report.judge(
            asyncio.run(run_streams(url, self.requests, clients=NUM_STREAMS, disturb=disturb, again=again)),
            self.undisturbed,
        )
        assert not report.problems, report.problems[:3]
        assert not report.kinds["refused"], report.line()
        return report

    def disturbed(self, action: Callable[[], object]) -> str:
        """Run `action` in mid-stream."""
        acted = False

        async def disturb(flow: Flow) -> None:
            nonlocal acted
            flowing = await flow.more(5 * NUM_STREAMS)
            await asyncio.to_thread(action)
            acted = flowing and not flow.ended

        report = self.run(disturb)
        assert acted, "the streams had ended before anything happened"
        wait_until(lambda: self.compose.healthy() and self.compose.ready(), "all containers healthy again")
        return f"{report.kinds['identical']} of {NUM_STREAMS} streams identical"

    def killed(self, service: str) -> str:
        [before] = self.compose.containers(service)
        saw = self.disturbed(lambda: kill_from_host(before))
        [after] = self.compose.containers(service)
        assert after["RestartCount"] > before["RestartCount"], "the daemon did not restart it"
        return f"{saw}; restarted by the daemon"

    def paused(self, services: list[str], seconds: float) -> str:
        ids = [container["Id"] for service in services for container in self.compose.containers(service)]

        def pause() -> None:
            run("docker", "pause", *ids)
            try:
                time.sleep(seconds)
            finally:
                run("docker", "unpause", *ids)

        return self.disturbed(pause)

    def scaled(self) -> str:
        """Run requests without a pause while workers are added and removed."""

        async def scale(flow: Flow) -> None:
            up = ("up", "-d", "--no-build", "--no-recreate", "--scale")
            for number in (3, 1):
                await asyncio.to_thread(self.compose, *up, f"worker={number}")
                await asyncio.to_thread(wait_until, self.compose.healthy, "all containers healthy")

        report = self.run(scale, again=True)
        assert len(self.compose.containers("worker")) == 1
        return f"1 -> 3 -> 1: {report.kinds['identical']} streams identical, none refused or broken"

    def stop(self) -> str:
        ids = [container["Id"] for container in self.compose.containers()]
        self.compose("stop")
        codes = {entry["Name"]: entry["State"]["ExitCode"] for entry in json.loads(run("docker", "inspect", *ids))}
        assert set(codes.values()) == {0}, codes
        return "SIGTERM: every container ended with 0"


def check(compose: Compose, build: bool) -> bool:
    steps = Check(compose)
    for service in IMAGES:
        if build:
            steps.step(f"build {service}", lambda service=service: steps.build(service))
        steps.step(f"contents of {service}", lambda service=service: steps.contents(service))
    try:
        if steps.step("compose up", steps.start):
            steps.step("confinement", steps.confinement)
            steps.step("health endpoints", steps.endpoints)
            steps.step("chat by the official client", steps.chat)
            if steps.step("streams undisturbed", steps.undisturbed_run):
                steps.step("SIGKILL of the worker in mid-stream", lambda: steps.killed("worker"))
                steps.step("SIGKILL of the engine core in mid-stream", lambda: steps.killed("engine-core"))
                steps.step("workers 1 -> 3 -> 1 under load", steps.scaled)
                steps.step("engine core paused for 8 s", lambda: steps.paused(["engine-core"], 8))
                everything = ["gateway", "engine-core", "worker"]
                steps.step("everything paused for 30 s", lambda: steps.paused(everything, 30))
            steps.step("compose stop", steps.stop)
        else:
            print(compose("logs", "--no-color", "--tail=40"))
    finally:
        compose("down", "--volumes", "--timeout", "10")
    return all(verdict == "ok" for _, verdict, _ in steps.rows)


def missing() -> str:
    """What this machine lacks, as a message; empty if it has everything."""
    if shutil.which("docker") is None:
        return "docker is not on PATH"
    daemon = subprocess.run(["docker", "version"], capture_output=True, text=True, check=False)
    if daemon.returncode != 0:
        return f"no Docker daemon answers (DOCKER_HOST={os.environ.get('DOCKER_HOST', '')}): {daemon.stderr.strip()}"
    v2 = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode == 0
    return "" if v2 or shutil.which("docker-compose") else "neither `docker compose` nor docker-compose is there"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-build", action="store_true", help="take the images that are there")
    arguments = parser.parse_args()
    if problem := missing():
        print(f"test-containers: {problem}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as scratch:
        return 0 if check(Compose(Path(scratch)), not arguments.no_build) else 1


if __name__ == "__main__":
    sys.exit(main())
