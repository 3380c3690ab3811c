"""A template is a process that prepares everything a child needs and does nothing else; each life of the child is a
fork of it.

Nearly all of a start is the same in every life: a worker's imports take two seconds, and loading its model may take
minutes. The template does this once, before the first life; every later life begins within milliseconds.

A template has one child at a time. It dies with its supervisor, and the child dies with its template. So killing a
template kills its child, too, and the supervisor starts both anew.

The protocol uses one SEQPACKET socket. The supervisor sends the words of a command with two descriptors to which the
life writes. The life first answers with its pid; the template answers with the exit code when the life is over. A
template that cannot fork a life answers with an exit code alone, and is then replaced.

The module of a command has two functions that take the words after the module's name and return an exit code:
`prepare`, which the template calls with the words of the first life, and `main`, which each life calls.
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
FORK_PAUSES_S = (0.1, 0.4, 1.0, 2.5)  # after each failed attempt
OOM_SCORE = Path("/proc/self/oom_score_adj")  # in thousandths of memory, see proc(5)
OOM_MARGIN, MOST_OOM_SCORE = 20, 1000
LARGEST_MESSAGE = 256 * 1024  # bytes; more than a socket accepts in one message

log = logging.getLogger(__name__)


@functools.cache
def supported() -> bool:
    """True on Linux 5.3 or later; elsewhere a child would outlive its template, or its end could not be watched."""
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
        process_group=0,  # not a session: Linux divides processors between sessions first, then between their threads
    )


class Template:
    """The supervisor's side. A template has its own process group, so that the child's can be killed without it."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, link: socket.socket) -> None:
        self.process = process
        self._name = name
        self._link = link
        self._killed = False  # by us
        self._life: Forked | None = None  # the last one

    @classmethod
    async def start(cls, name: str, environment: Mapping[str, str], output: int, inherits: Iterable[int]) -> Template:
        """Start a template for the child of that name; its output before the first life goes to `output`.

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
        return self.process.returncode is None and not self._killed  # a kill takes a moment to show in `returncode`

    def bear(self, command: Sequence[str], status: int, output: int) -> Forked:
        """Have it fork a life that runs `command`, at once or as soon as it is prepared.

        Args:
            command: Of the form `python -m MODULE ..`; `--status-fd` and `--parent-pid` are appended.
            status: The descriptor to which the life reports.
            output: The life's stdout and stderr.

        Raises:
            OSError: the command is too long.
        """
        with contextlib.suppress(ConnectionError):  # the template has just died, which also ends the life
            socket.send_fds(self._link, [json.dumps(list(command)).encode()], [status, output])
        self._life = Forked(self)
        return self._life

    async def answer(self, within_s: float | None = None) -> dict[str, int]:
        """Its next message; empty once it is dead. It is killed if it does not answer in time."""
        with contextlib.suppress(OSError):
            try:
                async with asyncio.timeout(within_s):
                    told = await asyncio.get_running_loop().sock_recv(self._link, LARGEST_MESSAGE)
            except TimeoutError:
                log.warning("the template of %s is silent and is killed", self._name)
                self.kill()
                return {}
            if told:
                answer: dict[str, int] = json.loads(told)
                return answer
        if not self._killed:
            log.warning("the template of %s %s", self._name, describe_exit(await self.process.wait()))
        return {}

    def kill(self) -> None:
        """Kill it, and with it its child."""
        if self.alive:
            self._killed = True
            with contextlib.suppress(ProcessLookupError):  # not `Process.kill`, which may take asyncio's exit code
                os.kill(self.process.pid, signal.SIGKILL)

    async def end(self) -> None:
        """Kill it; returns when it and its child are gone."""
        self.kill()
        if self._life is not None:
            await self._life.wait()
        await self.process.wait()
        self._link.close()


class Forked:
    """One life of a template's child, with the interface of `asyncio.subprocess.Process`."""

    def __init__(self, template: Template) -> None:
        self._template = template
        self._born = False
        self._handle = -1  # the pidfd, once it is forked
        self.pid = template.process.pid  # the template's until it is forked
        self.returncode: int | None = None
        self._ended = asyncio.create_task(self._follow())

    async def _follow(self) -> int:
        answer = await self._template.answer()
        if "pid" in answer:
            self.pid, self._born = answer["pid"], True
            await self._watch()
            answer = await self._template.answer(times.TEMPLATE_SILENT_S)  # without an answer it hangs or is dead
        if "code" in answer:
            if not self._born:
                self._template.kill()
            self.returncode = answer["code"]
            return self.returncode
        self.returncode = -signal.SIGKILL if self._born else await self._template.process.wait()
        return self.returncode

    async def _watch(self) -> None:
        """Wait until it is gone, with everything it held. This sees its own death, whatever its template is doing."""
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
    """Reap a child whose template is gone: if we are a container's first process, it has become ours."""
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_PIDFD, handle, os.WEXITED | os.WNOHANG)


def main(name: str, link: str, parent: str) -> None:
    """The template's side."""
    setproctitle(f"pagoda template ({name})")
    setthreadtitle("pagoda-template")  # with a space in it, Python 3.12 takes the niceness for the number of threads
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # a signal sent to children by name may reach us, too
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
    """Call a function of the module that a command names, with the words after the module."""
    _, _, module, *words = command
    code: int = getattr(importlib.import_module(module), function)(words)
    return code


def next_life(link: socket.socket, parent: int) -> list[str]:
    """Fork whenever a life is requested; returns its command in each child, and [] in the template at the end."""
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
            _answer(link, pid=os.getpid())  # sent by the life, so that none works that the supervisor does not know
            for inherited in (link.detach(), output, nowhere):
                os.close(inherited)
            return [*command, f"--parent-pid={template}"]
        os.close(status)
        _write_to(nowhere)  # the reader of `output` sees its end only once no copy is open here
        os.close(output)
        if prepared:
            code = EXIT_CRASH if pid == NONE else os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        _answer(link, code=code)


def _fork() -> int:
    """Like `os.fork`, but retries for a while if no process can be created, saying so; then returns NONE."""
    for pause_s in FORK_PAUSES_S:
        try:
            return os.fork()
        except OSError as error:
            print(f"cannot be forked: {error}", file=sys.stderr, flush=True)
            time.sleep(pause_s)
    return NONE


def _go_first() -> None:
    """If memory runs out, have the kernel kill this life rather than the template, which is as large."""
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
