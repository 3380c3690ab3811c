"""`pagoda doctor`: checks this machine, and says what to do about problems. Exit code 1 if something would not work."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from pagoda.processes.machine import available_cores, cpu_flags, cpu_quota, has_nvidia_device, memory_info, memory_limit
from pagoda.processes.ports import address_problem
from pagoda.processes.rundir import runtime_dir
from pagoda.settings.flags import add_named_options, given_flags
from pagoda.settings.numbers import whole
from pagoda.settings.options import ModelSourceConfig
from pagoda.settings.problems import ConfigError
from pagoda.settings.resolving import environment_value, resolve
from pagoda.tools import checkpoints
from pagoda.tools.http_stream import Connection, HttpError, Target
from pagoda.tools.version import version_of
from pagoda_worker.config import WorkerConfig
from pagoda_worker.kernels.cpu.build import LIBRARY

GIB = 1024**3
LEAST_FILES = 4096
LEAST_MEMORY = 2 * GIB
FAST_FLAGS = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd", "bf16", "i8mm")
GPU_TIMEOUT_S = 60.0
HOST, ASK_TIMEOUT_S = "127.0.0.1", 3.0
ASK_TORCH = "from pagoda_worker.device.devices import describe_gpus; print(*describe_gpus(), sep='\\n')"
# Options that determine how much memory a context takes; `serve` has the same ones.
CONTEXT_OPTIONS = (
    "revision", "max_model_len", "device", "dtype", "kv_cache_dtype", "kv_retention", "block_size",
    "max_tokens_per_step", "kernels",
)  # fmt: skip
_COLOURS = {"ok": "green", "warn": "yellow", "FAIL": "red"}


class Finding(NamedTuple):
    """One line of the report; `state` is ok, warn or FAIL; `advice` says what to do unless ok."""

    state: str
    what: str
    advice: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    help_text = "also report the memory of a context of this model: directory, GGUF file or hub id"
    parser.add_argument("positional_model", metavar="MODEL", nargs="?", default=None, help=help_text)
    parser.add_argument("--port", type=whole(0, 65535), default=8000, help="HTTP port to check [8000]")
    add_named_options(parser, "serve", CONTEXT_OPTIONS)


def main(arguments: argparse.Namespace) -> int:
    console = Console(highlight=False, soft_wrap=True)
    failed = False
    given = given_flags(arguments, "serve")
    del given["port"]  # only checked
    if given and "model" not in given:
        raise ConfigError([f"--{name.replace('_', '-')} needs a MODEL, and none is given" for name in given])
    for finding in examine(arguments.port, given):
        failed |= finding.state == "FAIL"
        advice = f" -> {finding.advice}" if finding.advice else ""
        console.print(f"{finding.state:4}", style=_COLOURS[finding.state], end="  ")
        console.print(finding.what + advice, markup=False)
    return 1 if failed else 0


def examine(port: int, given: Mapping[str, Any]) -> Iterator[Finding]:
    """Run every check in turn; `given` holds the options of the named model, if any."""
    checks: tuple[Callable[[], Finding], ...] = (
        _python, _cores, _instructions, _memory, _files, _kernels, _torch, _gpus,
        lambda: _port(port), _hub_cache, _runtime_directory,
    )  # fmt: skip
    for check in checks:
        yield check()
    if "model" in given:
        yield from _contexts(given)


def _python() -> Finding:
    text = f"python {sys.version.split()[0]}"
    return (
        Finding("ok", text) if sys.version_info >= (3, 11) else Finding("FAIL", text, "python 3.11 or newer is needed")
    )


def _cores() -> Finding:
    quota = cpu_quota()
    text = f"{available_cores()} of {os.cpu_count()} cores usable, quota {'none' if quota is None else f'{quota:g}'}"
    if quota is not None and quota < 1:
        return Finding("warn", text, "less than one core: raise the CPU limit of the container")
    return Finding("ok", text)


def _instructions() -> Finding:
    found = [flag for flag in FAST_FLAGS if flag in cpu_flags()]
    if "avx2" in found:
        return Finding("ok", f"processor has {' '.join(found)}")
    if "asimd" in found:
        return Finding("warn", f"processor has {' '.join(found)}", "no kernels use them yet, so torch computes")
    return Finding("warn", f"processor has none of {' '.join(FAST_FLAGS)}", "generation will be slow")


def _memory() -> Finding:
    info, limit = memory_info(), memory_limit()
    available = info.get("MemAvailable", 0)
    usable = available if limit is None else min(available, limit)
    text = f"memory {usable / GIB:.1f} GiB usable of {info.get('MemTotal', 0) / GIB:.1f} GiB"
    text += "" if limit is None else f", limited to {limit / GIB:.1f} GiB"
    return Finding("ok", text) if usable >= LEAST_MEMORY else Finding("warn", text, "only very small models will fit")


def _files() -> Finding:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # servers raise the soft limit to it
    text = f"open files: hard limit {hard}"
    enough = hard < 0 or hard >= LEAST_FILES
    return Finding("ok", text) if enough else Finding("warn", text, "raise the limit (ulimit -H -n, LimitNOFILE)")


def _kernels() -> Finding:
    if LIBRARY.exists():
        return Finding("ok", "native CPU kernels are built")
    found = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    mend = (
        "reinstall Pagoda to build them" if found else "install g++, then reinstall Pagoda; until then torch computes"
    )
    return Finding("warn", "native CPU kernels are not built", mend)


def _torch() -> Finding:
    version = version_of("torch")
    if version == "not installed":
        return Finding("warn", "torch is not installed", "pip install -e '.[worker]' where workers run")
    return Finding("ok", f"torch {version}")


def _gpus() -> Finding:
    """Asks torch only if there is a device, and in a separate process, because a driver may hang."""
    if not has_nvidia_device():
        return Finding("ok", "no NVIDIA GPU: workers compute on the CPU")
    advice = "workers compute on the CPU until a CUDA build of torch that fits the driver is installed"
    try:
        done = subprocess.run(
            [sys.executable, "-c", ASK_TORCH], capture_output=True, text=True, timeout=GPU_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Finding("warn", f"the GPU driver did not answer within {GPU_TIMEOUT_S:g} s", advice)
    last = (done.stderr.strip().splitlines() or ["torch could not be queried"])[-1]
    if done.returncode:
        return Finding("warn", f"torch cannot use the GPU: {last.split('Error: ', 1)[-1]}", advice)
    return Finding("ok", f"GPUs: {'; '.join(done.stdout.splitlines())}")


def _port(port: int) -> Finding:
    problem = address_problem(HOST, port)
    if not problem:
        return Finding("ok", f"port {port} is free")
    model = asyncio.run(_model_served_at(port))
    if model:
        return Finding("ok", f"port {port} is used by a running Pagoda that serves {model}")
    return Finding("FAIL", problem, "or check another port with --port")


async def _model_served_at(port: int) -> str:
    """The model that a Pagoda at this port serves; "" if it is another server or does not say."""
    try:
        target = Target(f"http://{HOST}:{port}")
        connection = await Connection.open(target)
        answer = await connection.exchange(target.request("GET", "/v1/models"), lambda now, event: None, ASK_TIMEOUT_S)
        connection.close()
        (model,) = (one["id"] for one in json.loads(answer.body)["data"] if one["owned_by"] == "pagoda")
    except (HttpError, ValueError, LookupError, TypeError):
        return ""
    return str(model)


def _hub_cache() -> Finding:
    home = environment_value("HF_HUB_CACHE") or environment_value("HF_HOME") or "~/.cache/huggingface"
    path = Path(home).expanduser()
    nearest = next(p for p in (path, *path.parents) if p.exists())
    if os.access(nearest, os.W_OK):
        return Finding("ok", f"hub cache {path} is writable, {shutil.disk_usage(nearest).free / GIB:.1f} GiB free")
    return Finding("warn", f"hub cache {path} is not writable", "set HF_HOME; without it only local models work")


def _runtime_directory() -> Finding:
    try:
        with runtime_dir("") as path:
            return Finding("ok", f"runtime directory {path.parent} is usable")
    except ConfigError as error:
        return Finding("FAIL", str(error), "set XDG_RUNTIME_DIR or give --data-dir")


def _contexts(given: Mapping[str, Any]) -> Iterator[Finding]:
    """Does not read the weights, nor download those of a hub model."""
    try:
        settings = resolve("serve", given)
        revision = settings.build(ModelSourceConfig).revision
        path = checkpoints.locate(settings.build(WorkerConfig).model, revision, weights=False)
        config = settings.build(WorkerConfig, model=str(path))
        from pagoda_worker.checkpoints.config_reader import UnsupportedConfig
        from pagoda_worker.loading.foresight import contexts_of

        try:
            yield from (Finding("ok", f"model: {line}") for line in contexts_of(config))
        except UnsupportedConfig as error:
            yield Finding(
                "warn", f"model: {error}", "the memory of a context is known only once a worker has loaded the model"
            )
    except ImportError as error:
        yield Finding("warn", f"model: {error}", "run this where workers are installed to see the memory of a context")
    except (ConfigError, ValueError) as error:
        yield Finding("FAIL", f"model: {error}", "no worker would serve the model with these options")
