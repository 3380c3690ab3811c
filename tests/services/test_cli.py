"""The command line as a user meets it: real processes; a single one for all commands that only print."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pagoda.cli import COMMANDS
from pagoda.settings.flags import TITLES

Done = subprocess.CompletedProcess[str]
Told = Callable[..., Done]
# Reads commands one by one; reports each exit code and output as `python -m pagoda.cli` would give it.
ANSWERS = """
import contextlib, io, json, sys, traceback
from pagoda.cli import main

for line in sys.stdin:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(json.loads(line))
        except SystemExit as end:
            code = end.code
        except BaseException:
            traceback.print_exc()
            code = 1
    print(json.dumps([code, out.getvalue(), err.getvalue()]), flush=True)
"""


def pagoda(*words: str) -> Done:
    command = [sys.executable, "-m", "pagoda.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@contextlib.contextmanager
def answering(status: int) -> Iterator[str]:
    """The URL of a server that gives every request this status."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        do_POST = do_GET

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def told() -> Iterator[Told]:
    """Like `pagoda`, for commands that start nothing. As in a test, the environment has no PAGODA_ variables."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PAGODA_")}
    environment |= {"HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}
    command = [sys.executable, "-c", ANSWERS]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None
        assert stdout is not None

        def ask(*words: str) -> Done:
            stdin.write(json.dumps(words) + "\n")
            stdin.flush()
            return Done(words, *json.loads(stdout.readline()))

        yield ask


def test_the_words_of_many_commands_are_told_as_each_would(told: Told) -> None:
    """One command of each kind: help, a refusal by the parser, one by the settings, an answer."""
    for words in (("serve", "--help"), ("serve", "--prt", "1"), ("serve", "--workers", "0"), ("version",)):
        alone, beside = pagoda(*words), told(*words)
        assert (beside.returncode, beside.stdout, beside.stderr) == (alone.returncode, alone.stdout, alone.stderr)


def test_what_a_terminal_cannot_show_ends_no_command() -> None:
    a_command = "import pagoda.tools.version as version; version.main = lambda _: print('w\\xf6rker')"
    lines = f"{a_command}; import pagoda.cli; pagoda.cli.main(['version'])"
    command = [sys.executable, "-c", lines]
    done = subprocess.run(command, capture_output=True, check=False, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stdout) == (0, b"w\\xf6rker\n"), done.stderr


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_has_help(told: Told, command: str) -> None:
    done = told(command, "--help")
    assert done.returncode == 0, done.stderr
    assert f"pagoda {command}" in done.stdout


def test_an_engine_cores_help_says_that_keys_open_other_addresses(told: Told) -> None:
    assert " ".join(told("engine-core", "--help").stdout.split()).count("(loopback only without keys)") == 2


def test_the_help_lists_every_command(told: Told) -> None:
    text = told("--help").stdout
    assert all(command in text for command in COMMANDS)


def test_serve_has_the_flags_people_know(told: Told) -> None:
    text = told("serve", "--help").stdout
    flags = ("--port", "--served-model-name", "--max-model-len", "--dtype", "--workers", "--kv-cache-gib", "--config")
    assert all(flag in text for flag in flags)


def test_the_flags_of_serve_are_in_groups_and_the_common_ones_come_first(told: Told) -> None:
    text = told("serve", "--help").stdout
    places = [text.index(f"\n{title}:\n") for title in ("common options", *TITLES.values())]
    assert places[0] < text.index("\n  --kv-cache-gib") < min(places[1:])


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (("serve", "--prt", "1"), "unrecognized arguments: --prt"),
        (("serve", "--port", "x"), "port must be a whole number, got 'x' (from --port)"),
        (("serve", "--workers", "0"), "workers must be between 1 and 64, got 0 (from --workers)"),
        (("serve", "--prt", "1"), "; did you mean --port?"),
        (("serve", "--max-num-seqs", "1"), "unrecognized arguments: --max-num-seqs; here it is --max-rows"),
        (("bench", "serve", "--base-ur=x"), "unrecognized arguments: --base-ur; did you mean --base-url?"),
        (("serve", "--ping-interval-s", "0.01"), "ping_interval_s must be 0 or at least 0.1, got 0.01"),
        (("serve", "--drain-timeout-s", "-1"), "drain_timeout_s must be between 0 and 1000000, got -1.0"),
        (("serve", "--max-model-len", "-5"), "max_model_len must be 0 or between 2 and 2147483647, got -5"),
        (("doctor", "--port", "99999"), "argument --port: must be between 0 and 65535, got 99999"),
        (("engine-core",), "--listen is needed (PAGODA_LISTEN or listen in the settings file)"),
        (("worker",), "--engine is needed (PAGODA_ENGINE or engine in the settings file)"),
        (("gateway",), "--engine is needed (PAGODA_ENGINE or engine in the settings file)"),
        (("serve", "--config", "/no/such.yaml"), "config file /no/such.yaml cannot be read"),
        (("serve", "/no/such/model", "--port", "0"), "model /no/such/model: no such directory"),
        (("serve", "some-org/some-model", "--port", "0"), "HF_HUB_OFFLINE"),
        (
            ("gateway", "--engine=unix:/e", "--port=0", "--model=/no/such/model"),
            "model /no/such/model: no such directory",
        ),
        (("bench", "serve", "--base-url", "ftp://x"), "base URL must look like http://host:port"),
    ],
)
def test_what_cannot_work_is_one_line_and_exit_code_2(told: Told, words: tuple[str, ...], cause: str) -> None:
    done = told(*words)
    assert done.returncode == 2
    assert cause in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [("chat",), ("complete", "once"), ("bench", "serve")])
def test_a_server_that_is_not_there_is_one_line_and_exit_code_3(told: Told, words: tuple[str, ...]) -> None:
    done = told(*words, "--base-url", "http://127.0.0.1:1")
    assert done.returncode == 3
    assert done.stderr.startswith("pagoda: error: cannot connect to 127.0.0.1:1")


@pytest.mark.parametrize("words", [("chat",), ("complete", "once"), ("bench", "serve")])
@pytest.mark.parametrize(("status", "code"), [(502, 3), (503, 3), (504, 3), (500, 2), (401, 2)])
def test_what_may_succeed_later_is_exit_code_3(told: Told, words: tuple[str, ...], status: int, code: int) -> None:
    with answering(status) as url:
        done = told(*words, "--base-url", url)
    assert done.returncode == code
    assert done.stderr == f"pagoda: error: GET /v1/models: http {status}\n"


def test_an_answer_that_is_not_to_be_had_now_is_exit_code_3(told: Told) -> None:
    with answering(503) as url:
        done = told("complete", "once", "--model", "m", "--base-url", url)
    assert done.returncode == 3
    assert "http 503" in done.stderr


def test_config_validate_checks_what_only_a_tier_apart_reads(told: Told, tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text("port: 9000\nlisten: unix:/x\n")
    assert told("config", "validate", "--config", str(file)).returncode == 0
    file.write_text("worker_id: [1]\n")
    done = told("config", "validate", "--config", str(file))
    assert done.returncode == 2
    assert f"worker_id must be text, got [1] (from {file}: worker_id)" in done.stderr


def test_config_validate_checks_what_only_serve_can(told: Told) -> None:
    done = told(
        "config", "validate", "--port", "9001", "--metrics-port", "9000", "--workers", "2", "--engine-cores", "2"
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "metrics_port: engine core number 2 would take port 9001, the gateway's" in done.stderr
    done = told("config", "validate", "--served-model-name", "m", str(Path(__file__).parent))
    assert (done.returncode, done.stdout) == (2, "")
    assert "is read as a name: put MODEL before the flags" in done.stderr
    done = told("config", "validate", "--data-dir", "/a,b")
    assert (done.returncode, done.stdout) == (2, "")
    assert "data_dir must not contain a comma" in done.stderr


def test_config_show_prints_values_and_sources(told: Told, tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text("port: 77\n")
    done = told("config", "show", "--json", "--config", str(file), "--workers", "2", "some/model")
    rows = {(row["section"], row["option"]): row for row in json.loads(done.stdout)}
    assert rows["gateway", "port"]["value"] == 77
    assert rows["gateway", "port"]["source"] == f"{file}: port"
    assert rows["serve", "workers"] == {"section": "serve", "option": "workers", "value": 2, "source": "--workers"}
    assert rows["worker", "model"]["value"] == "some/model"
    assert "77" in told("config", "show", "--config", str(file)).stdout


def test_config_validate_is_quiet_when_all_is_well(told: Told) -> None:
    done = told("config", "validate")
    assert (done.returncode, done.stdout) == (0, "")


def test_version_names_what_is_installed() -> None:
    assert pagoda("version").stdout.startswith("pagoda 0.")
    assert pagoda("--version").stdout == pagoda("version").stdout


def test_doctor_reports_on_this_machine() -> None:
    done = pagoda("doctor", "--port", "0")
    assert done.returncode == 0, done.stdout
    for subject in ("python", "cores", "memory", "open files", "runtime directory"):
        assert subject in done.stdout
