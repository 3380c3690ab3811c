"""Children forked from templates, by a supervisor in a process of its own; see also test_supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tests.services.processes.supervising import STEADY, Running, gone, supervise

from pagoda.processes.exit_codes import EXIT_CONFIG
from pagoda.processes.template import Template

pytestmark = pytest.mark.e2e

CHILD = "tests.services.processes.child_program"

NO_ROOM = """
import os, socket, sys
from pagoda.processes import template

refusals, fork = int(sys.argv[2]), os.fork

def refuse():
    global refusals
    refusals -= 1
    if refusals >= 0:
        raise BlockingIOError(11, "no more processes")
    return fork()

os.fork, template.FORK_PAUSES_S = refuse, (0.0, 0.0)
template.next_life(socket.socket(fileno=int(sys.argv[1])), os.getppid())
"""


def up(running: Running) -> tuple[psutil.Process, psutil.Process]:
    """The next life that is up, and its template."""
    event = running.event(event="ready")
    return psutil.Process(event["pid"]), psutil.Process(event["parent"])


def rests(template: psutil.Process) -> bool:
    """Wait until it has open only its standard streams, its link and its /dev/null; False if it keeps more.

    A life may be up before its template has closed what it forked it with.
    """
    own, deadline = [*4 * [os.devnull], "socket"], time.monotonic() + 60
    while sorted(file.split(":")[0] for file in _files(template)) != own:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _files(template: psutil.Process) -> list[str]:
    files = []
    for descriptor in Path(f"/proc/{template.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # just closed
            files.append(os.readlink(descriptor))
    return files


def test_every_life_is_a_fork_of_one_template() -> None:
    with supervise(one=STEADY) as running:
        first, template = up(running)
        first.kill()
        second, same = up(running)
        assert (second != first, same) == (True, template)
        assert template.parent() == psutil.Process(running.process.pid)


def test_a_template_opens_nothing_more_with_every_life() -> None:
    with supervise(one=STEADY) as running:
        for _ in range(5):
            child, template = up(running)
            assert rests(template)
            child.kill()


def test_a_process_list_shows_the_command_of_a_child_and_no_command_of_a_template() -> None:
    with supervise(one=STEADY) as running:
        child, template = up(running)
        command = [sys.executable, "-m", "tests.services.processes.child_program", *STEADY]
        assert child.cmdline()[:-2] == command  # without its status options
        assert " ".join(template.cmdline()).strip() == "pagoda template (one)"
        assert child.name() == Path(sys.executable).name[:15]
        assert " " not in template.name()
        assert os.getpgid(child.pid) == child.pid != os.getpgid(template.pid)


def test_a_system_without_memory_takes_a_child_before_its_template() -> None:
    with supervise(one=STEADY) as running:
        of_child, of_template = (int(Path(f"/proc/{one.pid}/oom_score_adj").read_text()) for one in up(running))
        assert of_child == min(1000, of_template + 20)


def test_a_life_has_what_one_that_is_started_afresh_has() -> None:
    """It has the same descriptors and its spec's environment; the template has its own process group and files."""
    begun = []
    for how in ("forked", "afresh"):
        with supervise(how, one=STEADY) as running:
            begun.append(running.event(event="ready"))
            if how == "forked":
                template = psutil.Process(begun[-1]["parent"])
                assert os.getpgid(template.pid) == template.pid
                assert rests(template)
    assert begun[0]["files"] == begun[1]["files"]
    assert begun[0]["told"] == begun[1]["told"] == "by its spec"


def test_a_supervisor_opens_nothing_more_with_every_template() -> None:
    with supervise(one=STEADY) as running:
        counts = set()
        for _ in range(4):
            _, template = up(running)
            counts.add(psutil.Process(running.process.pid).num_fds())
            template.kill()
        assert max(counts) - min(counts) <= 1  # the life's handle, which may be opened after the life is up


def test_a_killed_template_takes_its_child_along_and_both_come_back(capfd: pytest.CaptureFixture[str]) -> None:
    with supervise(one=STEADY) as running:
        child, template = up(running)
        template.kill()
        assert running.event(event="died")["code"] == -signal.SIGKILL
        assert gone(child.pid)
        _, other = up(running)
        assert other != template
    assert "WARNING:pagoda.processes.template:the template of one was killed by SIGKILL\n" in capfd.readouterr().err


def test_a_frozen_template_and_a_deaf_child_end_with_the_supervisor() -> None:
    with supervise(quick=["deaf", *STEADY]) as running:
        child, template = up(running)
        template.suspend()
        running.process.terminate()
        assert running.end() == 0
        assert gone(child.pid)
        assert gone(template.pid)


def test_a_template_that_is_frozen_while_its_child_dies_is_replaced() -> None:
    """At once, not after a silence: nobody watches this child's heartbeats."""
    with supervise(one=STEADY) as running:
        child, template = up(running)
        template.suspend()
        child.kill()
        assert running.event(event="died")["code"] == -signal.SIGKILL
        _, other = up(running)
        assert other != template
        assert gone(template.pid)


def test_a_child_that_falls_silent_is_killed_and_its_template_is_not() -> None:
    with supervise(mute=STEADY) as running:
        _, template = up(running)
        assert running.event(event="died")["code"] == -signal.SIGKILL
        assert up(running)[1] == template


def test_a_child_that_falls_silent_before_it_is_up_takes_its_template_along() -> None:
    with supervise(mute=["prepare", "linger"]) as running:
        first = running.event(event="prepares")["pid"]
        assert running.event(event="died")["code"] == -signal.SIGKILL
        assert running.event(event="prepares")["pid"] != first


def test_a_life_that_ends_by_itself_before_it_is_up_is_not_born_of_the_same_template_again(tmp_path: Path) -> None:
    """It may have died of state inherited from its template; not so if it was killed or had come up."""
    with supervise(one=["prepare", f"crash-once={tmp_path / 'crashed'}", *STEADY]) as running:
        first = running.event(event="prepares")["pid"]
        assert running.event(event="died")["code"] == 1
        child, template = up(running)
        assert template.pid != first
        child.kill()
        assert up(running)[1] == template


def test_what_asks_all_processes_of_a_child_to_stop_stops_it_in_order() -> None:
    """As `pkill` does with a name that child and template share."""
    with supervise(one=STEADY) as running:
        child, template = up(running)
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            template.send_signal(signum)
        child.terminate()
        assert running.event(event="died")["code"] == 0
        assert up(running)[1] == template


def test_a_stop_before_the_first_life_is_obeyed_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    with supervise(slow=STEADY) as running:
        [template] = _children(running)
        running.process.terminate()
        assert running.end() in (0, -signal.SIGTERM)  # the latter before it handles signals
        assert gone(template.pid)
    assert "did not stop within" not in capfd.readouterr().err


def _children(running: Running) -> list[psutil.Process]:
    while not (found := psutil.Process(running.process.pid).children()):
        time.sleep(0.01)
    return found


def test_what_lives_have_in_common_is_prepared_once_by_their_template() -> None:
    """Its output goes where that of its first life goes."""
    with supervise(one=["prepare", *STEADY]) as running:
        prepared = running.event(event="prepares")["pid"]
        child, template = up(running)
        assert prepared == template.pid
        for _ in range(2):
            child.kill()
            assert running.event(event="died")["code"] == -signal.SIGKILL
            event = running.event(child="one")
            assert event["event"] == "ready"
            child = psutil.Process(event["pid"])
            assert event["parent"] == template.pid
        template.kill()
        assert running.event(event="prepares")["pid"] != template.pid


def test_what_is_told_while_preparing_is_a_line_of_the_child() -> None:
    with supervise(one=["prepare", *STEADY]) as running:
        assert running.event(child="one", event="line")["line"] == "prepares"


def test_a_configuration_that_is_refused_while_preparing_is_not_tried_again(capfd: pytest.CaptureFixture[str]) -> None:
    with supervise(one=["prepare", "prepare:why=a flag is wrong", f"prepare:exit={EXIT_CONFIG}", *STEADY]) as running:
        assert running.end() == EXIT_CONFIG
    assert "one cannot start: a flag is wrong\n" in capfd.readouterr().err


def test_what_crashes_while_preparing_is_prepared_anew_by_another_template(tmp_path: Path) -> None:
    with supervise(one=["prepare", f"prepare:crash-once={tmp_path / 'crashed'}", *STEADY]) as running:
        first = running.event(event="prepares")["pid"]
        assert running.event(event="died")["code"] == 1
        assert running.event(event="prepares")["pid"] != first
        up(running)


def test_what_fails_while_preparing_three_times_ends_the_whole(capfd: pytest.CaptureFixture[str]) -> None:
    with supervise(good=STEADY, one=["prepare", "prepare:exit=1", *STEADY]) as running:
        assert running.end() == 1
    told = capfd.readouterr().err
    assert "one died 3 times without ever becoming ready; giving up: exited with code 1\n" in told
    assert "SIGKILL" not in told


@pytest.mark.parametrize("by_us", [True, False])
def test_what_ended_a_template_is_known_although_it_is_killed_again(
    by_us: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    def until_dead(pid: int) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):  # asyncio on Python 3.11 has a thread that waits for it
            while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.01)

    async def kill_twice() -> int:
        template = await Template.start("one", os.environ, sys.stderr.fileno(), [])
        if by_us:
            template.kill()
        else:
            os.kill(template.process.pid, signal.SIGKILL)
        until_dead(template.process.pid)
        await template.end()
        return await template.process.wait()

    assert asyncio.run(kill_twice()) == -signal.SIGKILL
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("name", ["one", "mute"])
def test_a_template_that_prepares_for_ever_ends_with_the_supervisor_or_by_its_silence(name: str) -> None:
    with supervise(**{name: ["prepare", "prepare:linger", *STEADY]}) as running:
        template = psutil.Process(running.event(event="prepares")["pid"])
        if name == "one":
            running.process.terminate()
            assert running.end() == 0
        else:
            assert running.event(event="prepares")["pid"] != template.pid
        assert gone(template.pid)


def test_what_cannot_be_imported_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    with supervise(good=STEADY, unloadable=["prepare:import=no_such_module", *STEADY]) as running:
        while "No module named 'no_such_module'" not in running.event(event="line")["line"]:
            pass
        assert running.end() == 1
    told = capfd.readouterr().err
    assert "unloadable died 3 times without ever becoming ready; giving up: exited with code 1\n" in told


def test_a_command_that_is_no_text_is_shown_as_far_as_it_is() -> None:
    with supervise(one=["\udcff", *STEADY]) as running:
        child, _ = up(running)
        assert "\N{REPLACEMENT CHARACTER}" in " ".join(child.cmdline())


def test_a_command_that_is_too_long_ends_the_whole(capfd: pytest.CaptureFixture[str]) -> None:
    with supervise(long=STEADY) as running:
        assert running.end() == 1
    assert "long cannot be started: " in capfd.readouterr().err


@pytest.mark.parametrize(("refusals", "answers"), [(1, ["pid", "code"]), (2, ["code"])])
def test_a_fork_without_room_is_told_and_tried_again_and_then_a_crash(refusals: int, answers: list[str]) -> None:
    link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    reads, writes = os.pipe()
    with link, theirs:
        command = [sys.executable, "-c", NO_ROOM, str(theirs.fileno()), str(refusals)]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        socket.send_fds(link, [json.dumps(["", "-m", CHILD]).encode()], [writes, writes])
        os.close(writes)
        told = [json.loads(link.recv(100)) for _ in answers]
        assert [*map(list, told)] == [[answer] for answer in answers]
        assert told[-1] == {"code": 2 - len(answers)}
        link.shutdown(socket.SHUT_WR)
        assert process.wait(60) == 0
    with open(reads, "rb") as output:
        assert output.read() == refusals * b"cannot be forked: [Errno 11] no more processes\n"
