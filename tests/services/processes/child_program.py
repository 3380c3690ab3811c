"""A tiny child for the supervisor; it speaks the status protocol and follows its words.

Words: `ready`, `garbage` (a status line that is no event), `exit=CODE`, `why=TEXT` (reports that it failed), `deaf`
(ignores SIGTERM), `say=COUNT` (that many letters on one line), `crash-once=FILE`, `grandchild=FILE`, `linger` (waits
for signals), `wait=SECONDS`, `beat` (sends heartbeats and prints their monotonic time, until a signal),
`import=MODULE`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pagoda.processes.process import die_with_parent


def read(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs="*")
    parser.add_argument("--status-fd", type=int)
    parser.add_argument("--parent-pid", type=int)
    return parser.parse_args(words)


def prepare(words: Sequence[str]) -> int:
    """Follows words like `prepare:exit=CODE`, which the lives ignore. With `prepare` it also reports that it runs."""
    arguments = read(words)
    if "prepare" in arguments.words:
        print("prepares", flush=True)
        os.write(arguments.status_fd, json.dumps({"event": "prepares", "pid": os.getpid()}).encode() + b"\n")
    asked = [word.removeprefix("prepare:") for word in arguments.words if word.startswith("prepare:")]
    return main([*asked, f"--status-fd={arguments.status_fd}", f"--parent-pid={arguments.parent_pid}"])


def main(words: Sequence[str]) -> int:
    arguments = read(words)
    die_with_parent(arguments.parent_pid)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))

    def report(**event: object) -> None:
        os.write(arguments.status_fd, json.dumps(event).encode() + b"\n")

    for word in arguments.words:
        name, _, value = word.partition("=")
        if name == "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        elif name == "say":
            print("é" * int(value), flush=True)
        elif name == "crash-once" and not Path(value).exists():
            Path(value).touch()
            os._exit(1)
        elif name == "grandchild":
            grandchild = subprocess.Popen(["sleep", "600"])
            Path(value).write_text(str(grandchild.pid))
        elif name == "ready":
            files = len(os.listdir("/proc/self/fd"))
            report(event="ready", pid=os.getpid(), parent=os.getppid(), files=files, told=os.environ.get("TOLD"))
        elif name == "why":
            report(event="failed", why=value)
        elif name == "garbage":
            os.write(arguments.status_fd, b"this is no event\n")
        elif name == "exit":
            return int(value)
        elif name == "import":
            importlib.import_module(value)
        elif name == "wait":
            time.sleep(float(value))
        elif name == "linger":
            while True:
                time.sleep(0.1)  # a signal just before is handled after it, but never after a `pause`
        elif name == "beat":
            while True:
                report(event="beat")
                print(time.monotonic(), flush=True)
                time.sleep(0.2)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
