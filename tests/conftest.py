"""Every test starts without Pagoda's environment variables and with the Hugging Face hub offline."""

from __future__ import annotations

import asyncio
import functools
import gc
import importlib
import inspect
import itertools
import os
import random
import sys
from collections.abc import Awaitable, Callable, Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from tests.distribution import pytest_xdist_make_scheduler as pytest_xdist_make_scheduler
from tests.examples import THOROUGH

from pagoda_worker.kernels.cpu import build as building
from pagoda_worker.library_choice import choose_libraries

# Hypothesis imports this module in the middle of a test, and pytest parses it to rewrite it. Before 3.11.8 and 3.12.2,
# CPython's parser may fail if garbage collection runs Python code meanwhile (gh-106905), and Hypothesis has a GC hook.
importlib.import_module("hypothesis.internal.conjecture.optimiser")

# Triton reads this when it is first imported, and decides whether to interpret its kernels; see --device.
INTERPRET = "TRITON_INTERPRET"
NO_LIBRARY = "none"
# pytest-timeout has to end the whole process. Coroutine tests are cancelled this much earlier and show where they hung.
SOONER_S = 20

# Examples have no deadline, so a busy machine fails no test. On a CI server the examples are the same in every run.
settings.register_profile(
    "pagoda",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=bool(os.environ.get("CI")),
    print_blob=True,
)
settings.register_profile(THOROUGH, settings.get_profile("pagoda"), max_examples=1000, derandomize=False)
settings.load_profile("pagoda")
choose_libraries()  # before any test or its child process computes


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device", choices=("auto", "cpu", "cuda"), default="auto",
        help="where the GPU kernels are tested: on a cpu Triton interprets them; auto takes a GPU if there is one",
    )  # fmt: skip
    parser.addoption(
        "--capabilities", default="86",
        help="GPUs whose machine code is made of every kernel; 80,86,89,90,120 are all that are supported, of which 86 "
        "has the instructions of 80 and 89, and least shared memory",
    )  # fmt: skip
    parser.addoption(
        "--level", choices=(NO_LIBRARY, *(level.name for level in building.LEVELS)),
        help="as on a machine with no higher level of the CPU kernels, or with no compiler at all: for the length of "
        "the run the library is built so, and child processes see it too",
    )  # fmt: skip
    parser.addoption(
        "--order-seed", type=int, default=0,
        help="run modules, and the tests of each, in an order drawn with this seed; 0: as they are written",
    )  # fmt: skip


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep a module's tests together, so that its fixtures start once. Run modules with long tests first, so that no
    test process is left waiting for another at the end."""
    for item in items:
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
            item.obj = _within(_timeout_s(item) - SOONER_S, item.obj)
    modules: dict[str, list[pytest.Item]] = {}
    for item in items:
        modules.setdefault(item.nodeid.partition("::")[0], []).append(item)
    if seed := config.getoption("--order-seed"):
        rng = random.Random(seed)
        shuffled = rng.sample(list(modules.values()), len(modules))
        items[:] = [item for module in shuffled for item in rng.sample(module, len(module))]
    else:
        items[:] = itertools.chain(*sorted(modules.values(), key=lambda module: not any(map(_is_long, module))))


def _is_long(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) for name in ("e2e", "slow"))


def _timeout_s(item: pytest.Item) -> float:
    mark = item.get_closest_marker("timeout")
    return float(mark.args[0] if mark else item.config.getini("timeout"))


def _within(timeout_s: float, test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    @functools.wraps(test)
    async def limited(*args: object, **kwargs: object) -> None:
        async with asyncio.timeout(timeout_s):
            await test(*args, **kwargs)

    return limited


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    device = config.getoption("--device")
    if device == "cpu" or (device == "auto" and not Path("/dev/nvidiactl").exists()):
        os.environ.setdefault(INTERPRET, "1")
    elif device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise pytest.UsageError("--device cuda: torch sees no CUDA device")
        os.environ.pop(INTERPRET, None)
    if not hasattr(config, "workerinput"):  # only the controller, not each xdist worker
        _set_library(config.getoption("--level"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Disable the garbage collector: imports and collection leave hardly any garbage, and searching for it took a third
    of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Exclude everything imported so far from garbage collection, including the one at process exit.

    torch gets one thread: with several test processes, each matrix product would wait for a thread whose core another
    process occupies.
    """
    gc.freeze()
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        _put_back(os.getpid())


def _set_library(level: str | None) -> None:
    for kept in building.LIBRARY.parent.glob("libpagoda.*.kept.so"):  # left by a run that was killed
        pid = int(kept.name.split(".")[1])
        if not Path(f"/proc/{pid}").exists():
            _put_back(pid)
    if level is None or not building.LIBRARY.exists():
        return
    building.LIBRARY.replace(_kept(os.getpid()))
    if level != NO_LIBRARY and building.build(highest=level) is None:
        raise pytest.UsageError(f"--level {level}: there is no C++ compiler here")


def _kept(pid: int) -> Path:
    """Where process `pid` keeps the library that was installed before its run."""
    return building.LIBRARY.with_name(f"libpagoda.{pid}.kept.so")


def _put_back(pid: int) -> None:
    if _kept(pid).exists():
        _kept(pid).replace(building.LIBRARY)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("PAGODA_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("NO_COLOR", "1")
