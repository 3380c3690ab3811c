"""Every test starts from an environment without Pagoda's own variables, and offline as far as the hub is concerned."""

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

# Hypothesis imports this in the midst of a test, and pytest parses what it imports. CPython before 3.11.8 and 3.12.2
# may fail to while a collection of garbage runs Python code (gh-106905), as Hypothesis has it do by then.
importlib.import_module("hypothesis.internal.conjecture.optimiser")

# Triton decides when it is first imported, by whomever, whether its kernels are interpreted; see --device.
INTERPRET = "TRITON_INTERPRET"
NO_LIBRARY = "none"
# pytest-timeout ends the whole process, as it must: a coroutine is told to end before, and the test says where it was.
SOONER_S = 20

# A busy machine is no failure: examples have no deadline. A build server tries the same examples every time.
settings.register_profile(
    "pagoda",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=bool(os.environ.get("CI")),
    print_blob=True,
)
settings.register_profile(THOROUGH, settings.get_profile("pagoda"), max_examples=1000, derandomize=False)
settings.load_profile("pagoda")
choose_libraries()  # before any test, or process of one, computes


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
    """Modules stay together: what they start is started once. Those with tests that take long begin first, so that in
    the end no process of the run waits for another's."""
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
    if not hasattr(config, "workerinput"):  # one process of a run does it for all
        _set_library(config.getoption("--level"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Next to nothing of what is imported and collected is garbage: looking for it took a third of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """What was imported stays: no collection of garbage looks through it, be it once, nor does the end of the process.

    What is left to torch has one thread: with several test processes, each product would wait for its share of a core
    that another one has.
    """
    gc.freeze()
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        _put_back(os.getpid())


def _set_library(level: str | None) -> None:
    for kept in building.LIBRARY.parent.glob("libpagoda.*.kept.so"):  # of a run that was killed
        pid = int(kept.name.split(".")[1])
        if not Path(f"/proc/{pid}").exists():
            _put_back(pid)
    if level is None or not building.LIBRARY.exists():
        return
    building.LIBRARY.replace(_kept(os.getpid()))
    if level != NO_LIBRARY and building.build(highest=level) is None:
        raise pytest.UsageError(f"--level {level}: there is no C++ compiler here")


def _kept(pid: int) -> Path:
    """What was installed before the run of this process."""
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
