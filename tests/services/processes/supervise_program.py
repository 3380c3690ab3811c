"""A process that runs a supervisor over children of `child_program`; prints each event as a JSON line.

supervise_program.py HOW '{"name": ["ready", "linger"], ...}'      children stop in the order given

HOW: `forked` from templates, or each life started `afresh`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from typing import Any

from pagoda.processes.restarts import Pauses
from pagoda.processes.supervisor import ChildSpec, Supervisor
from pagoda.settings.resolving import child_environment

CHILD = "tests.services.processes.child_program"


class Printer:
    def on_event(self, child: str, event: dict[str, Any]) -> None:
        print(json.dumps({"child": child, **event}), flush=True)

    def on_line(self, child: str, line: str) -> None:
        print(json.dumps({"child": child, "event": "line", "line": line}), flush=True)


def spec(name: str, words: list[str], order: int, how: str) -> ChildSpec:
    return ChildSpec(
        name=name,
        command=lambda: [sys.executable, "-m", CHILD, *words * (100_000 if name == "long" else 1)],
        environment=child_environment(TOLD="by its spec"),
        prepares=how == "forked",
        stop_order=order,
        stop_timeout_s=0.5 if "quick" in name else 30.0,
        silence_timeout_s={"mute": 0.5, "beating": 2.5, "wordless": 0.5}.get(name.partition("-")[0], 0.0),
        first_word_s=0.6 if name == "wordless" else 60.0,
    )


async def run() -> int:
    logging.basicConfig(level=logging.INFO)
    _, how, programs = sys.argv
    children = [spec(name, words, order, how) for order, (name, words) in enumerate(json.loads(programs).items())]
    return await Supervisor(children, Printer(), Pauses(first_s=0.01, most_s=0.2, never_up_first_s=0.01)).run()


if __name__ == "__main__":
    sys.exit(asyncio.run(run()))
