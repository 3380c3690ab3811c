#!/usr/bin/env python3
"""Two of everything, sixteen chats, and a process killed every two seconds: counts what happens to the chats.

    python bench/chaos.py [--seconds 60] [--gap 2] [--chats 16] [--seed 0]

Two gateways share a store, and two engine cores, each with one worker; all serve the demo model. Every few seconds one
of the six, chosen at random, is killed (SIGKILL), and its supervisor restarts it. Each chat is repeated over a
transport that resumes streams, and every answer is compared with the undisturbed stack's, token by token and with
log-probabilities. The last line is the result; the exit status is 1 if a stream broke, or a token was lost or differs.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import sys
import tempfile
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.sides import free_port
from tests.faults.variants import Answer, Client, answer, misses

from pagoda.processes.process import UP_EVENTS
from pagoda.processes.supervisor import Child, ChildSpec, Supervisor, python_command
from pagoda.settings.resolving import child_environment

FIRST_START_S = 120.0
STOP_S = 30.0
FRAME_S = 0.2
BAR = 40
MAX_TOKENS = 300
QUESTIONS = ("Count from 1 to 60.", "What is 17 + 25?", "Reverse the word tower.", "Say something.")
HOME, WIPE, HIDE, SHOW = "\x1b[H", "\x1b[J", "\x1b[?25l", "\x1b[?25h"
RED, GREEN, DIM, PLAIN = "\x1b[31m", "\x1b[32m", "\x1b[2m", "\x1b[0m"


def chat(number: int) -> dict[str, Any]:
    """Greedy for even numbers, sampled for odd ones."""
    question = f"{QUESTIONS[number % len(QUESTIONS)]} ({number})"
    return {
        "model": "demo", "messages": [{"role": "user", "content": question}], "stream": True, "seed": number,
        "max_tokens": MAX_TOKENS, "temperature": 0.9 * (number % 2), "logprobs": True, "top_logprobs": 0,
        "extra_body": {"ignore_eos": True},
    }  # fmt: skip


@dataclass
class Tally:
    """The outcomes of the streams, and what happened meanwhile."""

    streams: int = 0
    broken: int = 0
    lost: int = 0
    different: int = 0
    kills: int = 0
    resumed: int = 0
    tokens: dict[int, int] = field(default_factory=dict)  # events of the current stream, by chat
    answers: Counter[int] = field(default_factory=Counter)  # by chat
    events: deque[str] = field(default_factory=lambda: deque(maxlen=8))
    breaks: list[str] = field(default_factory=list)

    def judge(self, got: Answer, expected: Answer) -> None:
        self.streams += 1
        missed = misses(got, expected)
        self.lost += missed["lost"]
        self.different += missed["different"] + missed["duplicated"]

    @property
    def sound(self) -> bool:
        return not (self.broken or self.lost or self.different)

    def line(self) -> str:
        bad = f"streams broken {self.broken}, tokens lost {self.lost}, tokens different {self.different}"
        return f"{bad}, kills {self.kills}"


class Tower:
    """The six processes under one supervisor. Implements its `Observer`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._log = (directory / "processes.log").open("w", encoding="utf-8")
        logging.basicConfig(stream=self._log)  # the supervisor's log
        self._ports = [free_port(), free_port()]
        self.up: set[str] = set()
        specs = [*(self._gateway(i) for i in (0, 1)), *(self._core(i) for i in (0, 1)), *map(self._worker, (0, 1))]
        self.supervisor = Supervisor(specs, self)

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self._ports]

    @property
    def children(self) -> list[Child]:
        return self.supervisor.children

    def on_line(self, child: str, line: str) -> None:
        print(f"[{child}] {line}", file=self._log, flush=True)

    def on_event(self, child: str, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind in ("died", "unready"):
            self.up.discard(child)
        elif kind in UP_EVENTS - {"loaded"} and not (child.startswith("gateway") and kind == "listening"):
            self.up.add(child)

    def close(self) -> None:
        self._log.close()

    def _spec(self, name: str, order: int, *arguments: str) -> ChildSpec:
        command = python_command(*arguments)
        environment = child_environment(PYTHONUNBUFFERED="1", OMP_NUM_THREADS="1")
        return ChildSpec(
            name=name, command=lambda: command, environment=environment, stop_order=order, stop_timeout_s=STOP_S
        )

    def _gateway(self, number: int) -> ChildSpec:
        engines = ",".join(f"unix:{self._directory}/core-{i}.sock" for i in (0, 1))
        options = (f"--store=sqlite://{self._directory}/store.db", "--served-model-name=demo", "--no-log-requests")
        name = f"gateway-{number}"
        return self._spec(name, 0, "gateway", f"--engine={engines}", f"--port={self._ports[number]}", *options)

    def _core(self, number: int) -> ChildSpec:
        listen, workers = (f"{self._directory}/{stem}-{number}.sock" for stem in ("core", "workers"))
        name = f"engine-core-{number}"
        return self._spec(name, 1, "engine-core", f"--listen=unix:{listen}", f"--worker-endpoint=ipc://{workers}")

    def _worker(self, number: int) -> ChildSpec:
        engine, name = f"--engine=ipc://{self._directory}/workers-{number}.sock", f"worker-{number}"
        return self._spec(name, 2, "worker", engine, f"--worker-id={name}", "--threads=1")


class Screen:
    """Shows progress: redrawn on a terminal, elsewhere one line per event."""

    def __init__(self, tower: Tower, tally: Tally, until: float) -> None:
        self._tower = tower
        self._tally = tally
        self._until = until
        self.live = sys.stdout.isatty()

    def tell(self, what: str) -> None:
        self._tally.events.append(what)
        if not self.live:
            print(what, flush=True)

    async def run(self) -> None:
        if not self.live:
            return
        print(HIDE + HOME + WIPE, end="")
        try:
            while True:
                print(HOME + "\n".join(f"{line}\x1b[K" for line in self._lines()) + WIPE, end="", flush=True)
                await asyncio.sleep(FRAME_S)
        finally:
            print(SHOW + HOME + WIPE, end="", flush=True)

    def _lines(self) -> list[str]:
        tally, left_s = self._tally, max(0.0, self._until - time.monotonic())
        head = f"two of everything, a kill -9 every little while; {left_s:.0f} s left"
        counts = f"{tally.streams} answers, {tally.resumed} resumed at a gateway; {tally.line()}"
        return [
            head,
            counts,
            "",
            *map(self._process, self._tower.children),
            "",
            *self._streams(),
            "",
            *tally.events,
            *tally.breaks,
        ]

    def _process(self, child: Child) -> str:
        is_up = child.spec.name in self._tower.up
        state = f"{GREEN}up  " if is_up else f"{RED}down"
        pid = child.process.pid if child.process is not None and is_up else ""
        return f"{child.spec.name:14} {state}{PLAIN} {pid:>7}  died {child.lives.deaths_in_a_row} times in a row"

    def _streams(self) -> list[str]:
        tally = self._tally
        bars = {number: "#" * (BAR * count // MAX_TOKENS) for number, count in sorted(tally.tokens.items())}
        return [f"chat {n:2} {bar:{BAR}} {DIM}{tally.answers[n]} told{PLAIN}" for n, bar in bars.items()]


async def one_chat(number: int, http: Client, url: str, expected: Answer, tally: Tally, until: float) -> None:
    """Repeat the same question until time is up, and finish the last answer."""
    client = http.openai(url, max_retries=20)  # while a stack is not ready, it tells every client to retry

    def flowing() -> None:
        tally.tokens[number] += 1

    while time.monotonic() < until:
        tally.tokens[number] = 0
        try:
            got = await answer(client, chat(number), flowing)
        except Exception as error:  # noqa: BLE001 - whatever a client is told, its stream broke
            tally.streams, tally.broken = tally.streams + 1, tally.broken + 1
            tally.breaks.append(f"chat {number} broke: {type(error).__name__}: {error}"[:200])
        else:
            tally.judge(got, expected)
            tally.answers[number] += 1
        tally.resumed = http.counted.num_resumed


async def kill_now_and_then(tower: Tower, screen: Screen, tally: Tally, rng: random.Random, gap_s: float) -> None:
    began = time.monotonic()
    while True:
        await asyncio.sleep(gap_s)
        alive = [child for child in tower.children if child.spec.name in tower.up]
        if not alive:
            continue
        victim = rng.choice(alive)
        tower.up.discard(victim.spec.name)
        victim.kill_group()
        tally.kills += 1
        at_s = time.monotonic() - began
        screen.tell(f"{at_s:5.1f} s  kill -9 {victim.spec.name}; {tally.streams} answers so far, {tally.line()}")


async def until_all_are_up(tower: Tower) -> None:
    async with asyncio.timeout(FIRST_START_S):
        while len(tower.up) < len(tower.children):  # noqa: ASYNC110 - told by another task
            await asyncio.sleep(0.05)


async def oracle_of(urls: list[str], chats: int) -> list[Answer]:
    async with Client(urls) as http:
        client = http.openai(urls[0])
        return list(await asyncio.gather(*(answer(client, chat(number)) for number in range(chats))))


async def disturb(tower: Tower, arguments: argparse.Namespace) -> Tally:
    tally = Tally()
    await until_all_are_up(tower)
    print(f"six processes are up; {arguments.chats} chats are answered undisturbed first", flush=True)
    oracle = await oracle_of(tower.urls, arguments.chats)
    until = time.monotonic() + arguments.seconds
    screen = Screen(tower, tally, until)
    drawing = asyncio.create_task(screen.run())
    killing = asyncio.create_task(kill_now_and_then(tower, screen, tally, random.Random(arguments.seed), arguments.gap))
    async with Client(tower.urls, timeout_s=30.0) as http:
        chats = [
            asyncio.create_task(one_chat(number, http, tower.urls[number % 2], expected, tally, until))
            for number, expected in enumerate(oracle)
        ]
        await asyncio.sleep(arguments.seconds)
        killing.cancel()
        await asyncio.gather(*chats)
    drawing.cancel()
    await asyncio.gather(drawing, killing, return_exceptions=True)
    return tally


async def run(arguments: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="pagoda-chaos-") as directory:
        tower = Tower(Path(directory))
        supervising = asyncio.create_task(tower.supervisor.run())
        try:
            disturbing = asyncio.create_task(disturb(tower, arguments))
            await asyncio.wait({supervising, disturbing}, return_when=asyncio.FIRST_COMPLETED)
            if not disturbing.done():
                disturbing.cancel()
                await asyncio.gather(disturbing, return_exceptions=True)
                print("the stack was stopped, or gave up", flush=True)
                return 1
            tally = disturbing.result()
        finally:
            if not supervising.done():
                tower.supervisor.stop()
                await supervising
            tower.close()
    print(f"{tally.streams} answers of {arguments.chats} chats, {tally.resumed} times gone on with at a gateway")
    print(*tally.breaks, tally.line(), sep="\n")
    return 0 if tally.sound and tally.streams else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long things are killed")
    parser.add_argument("--gap", type=float, default=2.0, help="seconds between two kills")
    parser.add_argument("--chats", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    return asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
