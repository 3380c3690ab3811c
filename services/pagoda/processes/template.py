"""A process that has made ready what a child needs and does nothing else: a child's next life is a fork of it.

Nearly all of a start is the same in every life: imports, two seconds of a worker's, and its model, which may take
minutes. It is done once, by the template, before the first life; each life after it begins within milliseconds.

Who ends whom: a template has one child at a time and dies with its supervisor, the child with its template. So when a
template is killed its child goes, too, and the supervisor starts both anew.

Over one socket of whole messages: the supervisor sends the words of a command with the two ends that its life writes
to. The life answers with its pid before it does anything else, and the template with its exit code when it is over. A
template that can bear no life answers with an exit code alone, and is then replaced.

The module of a command has two functions that take the words after its name and return an exit code: `prepare`, which
the template calls with those of the first life, and `main`, which each life does.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import importlib
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from setproctitle import setproctitle, setthreadtitle

from pagoda.processes.exit_codes import EXIT_CRASH, EXIT_OK, describe_exit
from pagoda.processes.garbage import put_off_collections
from pagoda.processes.process import STOP_SIGNALS, die_with_parent
from pagoda_proto import times

NONE = -1  # in place of a pid
FORK_PAUSES_S = (0.1, 0.4, 1.0, 2.5)  # after each attempt
OOM_SCORE = Path("/proc/self/oom_score_adj")  # in thousandths of memory, see proc(5)
OOM_MARGIN, MOST_OOM_SCORE = 20, 1000
LARGEST_MESSAGE = 256 * 1024  # bytes, which is more than a socket takes at once

log = logging.getLogger(__name__)


@functools.cache
def supported() -> bool:
    """By Linux from 5.3 on; elsewhere nothing takes a child along with its template, or nothing tells of its end."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


async def execute(
    command: Sequence[str], environment: Mapping[str, str], output: int, inherits: Iterable[int]
) -> asyncio.subprocess.Process:
    """Start a program that leads a process group. Raises OSError."""
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=dict(environment),
        pass_fds=tuple(inherits),
        process_group=0,  # no session: Linux shares processors among sessions first, then among their threads
    )


class Template:
    """The supervisor's side. It has a process group of its own, so that the child's can be killed without it."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, link: socket.socket) -> None:
        self.process = process
        self._name = name
        self._link = link
        self._killed = False  # by us
        self._life: Forked | None = None  # the last one

    @classmethod
    async def start(cls, name: str, environment: Mapping[str, str], output: int, inherits: Iterable[int]) -> Template:
        """Start one for the child of that name; what it says before its first life goes to `output`.

        Raises:
            OSError: it cannot be started.
        """
        link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        link.setblocking(False)
        with theirs:
            try:
                words = [sys.executable, "-m", __name__, name, str(theirs.fileno()), str(os.getpid())]
                process = await execute(words, environment, output, [theirs.fileno(), *inherits])
            except OSError:
                link.close()
                raise
        return cls(name, process, link)

    @property
    def alive(self) -> bool:
        return self.process.returncode is None and not self._killed  # which takes a moment

    def bear(self, command: Sequence[str], status: int, output: int) -> Forked:
        """Have it begin a life as `command`, at once or as soon as everything is prepared.

        Args:
            command: Of the form `python -m MODULE ..`. It is given `--status-fd` and `--parent-pid`.
            status: Where the life reports to.
            output: Its stdout and stderr.

        Raises:
            OSError: the command is too long.
        """
        with contextlib.suppress(ConnectionError):  # it has just died, and the life ends with that
            socket.send_fds(self._link, [json.dumps(list(command)).encode()], [status, output])
        self._life = Forked(self)
        return self._life

    async def answer(self, within_s: float | None = None) -> dict[str, int]:
        """What it says next; nothing once it is dead, which it is when it says nothing in time."""
        with contextlib.suppress(OSError):
            try:
                async with asyncio.timeout(within_s):
                    told = await asyncio.get_running_loop().sock_recv(self._link, LARGEST_MESSAGE)
            except TimeoutError:
                log.warning("the template of %s says nothing and is killed", self._name)
                self.kill()
                return {}
            if told:
                answer: dict[str, int] = json.loads(told)
                return answer
        if not self._killed:
            log.warning("the template of %s %s", self._name, describe_exit(await self.process.wait()))
        return {}

    def kill(self) -> None:
        """And with it the child it has."""
        self._killed = True
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()

    async def end(self) -> None:
        """Returns when nothing is left of it."""
        self.kill()
        if self._life is not None:
            await self._life.wait()
        await self.process.wait()
        self._link.close()


class Forked:
    """One life of a template's child, with what `asyncio.subprocess.Process` offers of a process."""

    def __init__(self, template: Template) -> None:
        self._template = template
        self._born = False
        self._handle = -1  # of the process, once it is born
        self.pid = template.process.pid  # until it is born
        self.returncode: int | None = None
        self._ended = asyncio.create_task(self._follow())

    async def _follow(self) -> int:
        answer = await self._template.answer()
        if "pid" in answer:
            self.pid, self._born = answer["pid"], True
            await self._watch()
            answer = await self._template.answer(times.TEMPLATE_SILENT_S)  # one that has none hangs, or is dead
        if "code" in answer:
            if not self._born:
                self._template.kill()
            self.returncode = answer["code"]
            return self.returncode
        self.returncode = -signal.SIGKILL if self._born else await self._template.process.wait()
        return self.returncode

    async def _watch(self) -> None:
        """Until it is gone, with all that it held. It is its own death that is seen, whatever its template is at."""
        try:
            self._handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        ended, loop = asyncio.Event(), asyncio.get_running_loop()
        loop.add_reader(self._handle, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(self._handle)
            handle, self._handle = self._handle, -1
            _reap(handle)
            os.close(handle)

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def send_signal(self, signum: int) -> None:
        if self._handle >= 0:
            signal.pidfd_send_signal(self._handle, signum)
        else:
            self._template.kill()


def _reap(handle: int) -> None:
    """A child without a template is ours if we are the first process of a container."""
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_PIDFD, handle, os.WEXITED | os.WNOHANG)


def main(name: str, link: str, parent: str) -> None:
    """The template's side."""
    setproctitle(f"pagoda template ({name})")
    setthreadtitle("pagoda-template")  # a space in it, and Python 3.12 takes the niceness for the number of threads
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # who asks a child by its name may ask us, too
    die_with_parent(int(parent))
    put_off_collections()
    command = next_life(socket.socket(fileno=int(link)), int(parent))
    if command:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        setproctitle(os.fsencode(" ".join(command)).decode(errors="replace"))
        setthreadtitle(os.path.basename(command[0]))
        sys.exit(_call("main", command))


def _prepare(command: Sequence[str]) -> int:
    code = _call("prepare", command)
    gc.freeze()
    return code


def _call(function: str, command: Sequence[str]) -> int:
    """Of the module that a command names, with the words after it."""
    _, _, module, *words = command
    code: int = getattr(importlib.import_module(module), function)(words)
    return code


def next_life(link: socket.socket, parent: int) -> list[str]:
    """Fork whenever a life is asked for; returns its command in each child, and nothing once no more is wanted."""
    template, nowhere, prepared = os.getpid(), os.open(os.devnull, os.O_WRONLY), False
    while True:
        told, ends, _, _ = socket.recv_fds(link, LARGEST_MESSAGE, 2)
        if not told:
            return []
        status, output = ends
        _write_to(output)
        command = [*json.loads(told), f"--status-fd={status}"]
        code = EXIT_OK if prepared else _prepare([*command, f"--parent-pid={parent}"])
        prepared = code == EXIT_OK
        pid = _fork() if prepared else NONE
        if pid == 0:
            die_with_parent(template)
            os.setpgid(0, 0)
            _go_first()
            _answer(link, pid=os.getpid())  # itself, so that none is at work whom the supervisor does not know
            for inherited in (link.detach(), output, nowhere):
                os.close(inherited)
            return [*command, f"--parent-pid={template}"]
        os.close(status)
        _write_to(nowhere)  # what stays open here would never end for its reader
        os.close(output)
        if prepared:
            code = EXIT_CRASH if pid == NONE else os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        _answer(link, code=code)


def _fork() -> int:
    """As `os.fork`, but NONE when there is no room for another process for a while, which is told."""
    for pause_s in FORK_PAUSES_S:
        try:
            return os.fork()
        except OSError as error:
            print(f"cannot be forked: {error}", file=sys.stderr, flush=True)
            time.sleep(pause_s)
    return NONE


def _go_first() -> None:
    """Where memory runs out and the system chooses, have it take us and leave the template, which is as large."""
    with contextlib.suppress(OSError, ValueError):
        score = int(OOM_SCORE.read_text())
        OOM_SCORE.write_text(str(min(MOST_OOM_SCORE, score + OOM_MARGIN)))


def _write_to(output: int) -> None:
    for standard in (sys.stdout, sys.stderr):
        os.dup2(output, standard.fileno())


def _answer(link: socket.socket, **said: int) -> None:
    link.send(json.dumps(said).encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
