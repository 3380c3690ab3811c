"""Chooses the back end, once at start. If a named back end cannot serve, that is an error; `auto` takes another.

A back end may involve a compiler, a driver or a library built for another machine. Whatever it raises while it is
loaded and checked means that it cannot serve here, and leaves this module as a BackendError.
"""

from __future__ import annotations

import ctypes
import logging
import platform
from collections.abc import Callable, Collection

import torch

from pagoda_worker.device.cuda import device_seconds
from pagoda_worker.kernel_choice import AUTO, FAMILIES, FLASH, parse_choice
from pagoda_worker.kernels import flash, trial
from pagoda_worker.kernels.cpu import library
from pagoda_worker.kernels.mixed import mix
from pagoda_worker.kernels.ops import BackendError, Needs, Ops, guarded
from pagoda_worker.kernels.reference import ReferenceOps

log = logging.getLogger(__name__)

Load = Callable[[torch.device, Needs], tuple[Ops, dict[str, str]]]
"""Loads a back end; also returns, by family of operations, why it cannot serve that family here."""

VECTORISED = ("x86_64", "AMD64")  # machines for which the native kernels have vector levels, not just the plain one
OMP_PAUSE_HARD = 2  # OpenMP 5.0, `omp_pause_resource_t`
MARGIN = 0.9  # flash-attention must take less than this share of Triton's time, so that restarts choose alike


def load_ops(
    device: torch.device, choice: str, needs: Needs, clock: trial.Clock = device_seconds, machine: str = ""
) -> tuple[Ops, list[str]]:
    """The operations for `device`, and remarks on the choice for the log.

    Args:
        device: Where tensors live.
        choice: See `kernel_choice`.
        needs: What the model requires of them.
        clock: Used when `auto` measures.
        machine: The processor's family, as `platform.machine` names it; "" is this machine's.

    Raises:
        BackendError: `choice` is unknown, or a back end that it names cannot run here.
    """
    try:
        chosen = parse_choice(choice)
    except ValueError as error:
        raise BackendError(str(error)) from error
    loader, left = _Loader(device, needs), [family for family in FAMILIES if family not in chosen.overrides]
    if chosen.base == AUTO:
        parts, remarks = _automatic(loader, left, machine or platform.machine())
        if "attention" in left:
            parts["attention"] = _faster_attention(parts["attention"], needs, clock)
    else:
        parts, remarks = dict.fromkeys(FAMILIES, loader.named(chosen.base, left)), []
    for family, name in chosen.overrides.items():
        parts[family] = loader.named(name, [family])
    return mix(parts), remarks


def rest() -> None:
    """End the compute threads of the back ends before a fork, which would not inherit them. New ones start with the
    next computation."""
    library.rest()
    pause = getattr(ctypes.CDLL(torch._C.__file__), "omp_pause_resource_all", None)  # of torch's own OpenMP
    if pause is not None:
        pause(OMP_PAUSE_HARD)


class _Loader:
    """Loads each back end once."""

    def __init__(self, device: torch.device, needs: Needs) -> None:
        self.device, self.needs = device, needs
        self._loaded: dict[str, tuple[Ops, dict[str, str]]] = {}

    def load(self, name: str) -> tuple[Ops, dict[str, str]]:
        """See `Load`; raises BackendError."""
        if name not in self._loaded:
            load = self._flash if name == FLASH else lambda: LOADERS[name](self.device, self.needs)
            self._loaded[name] = guarded(name, load)
        return self._loaded[name]

    def named(self, name: str, families: Collection[str]) -> Ops:
        """The back end that was asked for by name.

        Raises:
            BackendError: it cannot serve one of `families` here.
        """
        ops, unfit = self.load(name)
        reasons = [f"{family}: {why}" for family, why in unfit.items() if family in families]
        if reasons:
            raise BackendError(f"kernels: {name} cannot serve {'; '.join(reasons)}")
        return ops

    def _flash(self) -> tuple[Ops, dict[str, str]]:
        return flash.load_flash(self.named("triton", ["attention"]), self.needs), {}


def _automatic(loader: _Loader, families: Collection[str], machine: str) -> tuple[dict[str, Ops], list[str]]:
    """The fastest back end that works; torch serves the families that it cannot."""
    name = "native" if loader.device.type == "cpu" else "triton"
    try:
        if name == "native" and machine not in VECTORISED:
            raise BackendError(f"kernels: native lacks vector code for {machine}, which torch's libraries have")
        ops, unfit = loader.load(name)
    except BackendError as error:
        return dict.fromkeys(FAMILIES, loader.named("torch", families)), [f"torch serves: {error}"]
    unfit = {family: why for family, why in unfit.items() if family in families}
    other = loader.named("torch", unfit) if unfit else ops
    parts = {family: other if family in unfit else ops for family in FAMILIES}
    return parts, [f"{family} by torch, not by {name}: {why}" for family, why in unfit.items()]


def _faster_attention(ours: Ops, needs: Needs, clock: trial.Clock) -> Ops:
    """`ours`, or flash-attention in place of Triton if it is installed, can serve this model and is clearly faster.

    Models we know nothing about stay with Triton, which supports everything their layers may ask for. Times vary from
    start to start, yet the workers of one engine core must choose alike: the log says which option ensures that.
    """
    if ours.name != "triton" or not needs.attention or not flash.installed():
        return ours

    def compare() -> tuple[Ops, list[trial.Times]]:
        theirs = flash.load_flash(ours, needs)
        return theirs, trial.measure((ours, theirs), needs, clock)

    try:
        theirs, (triton_times, flash_times) = guarded(FLASH, compare)
    except BackendError as error:  # if the device is lost, whatever needs it will fail later
        log.info("attention by triton: %s", error)
        return ours
    faster = theirs if flash_times.of_a_request < MARGIN * triton_times.of_a_request else ours
    log.info(
        "attention by %s: %s takes %s, triton %s; it must save %d %%; on workers that are to choose alike, "
        "--kernels auto,attention=%s makes this choice without measuring",
        *(faster.name, theirs.numerics, flash_times, triton_times, round(100 * (1 - MARGIN)), faster.name),
    )
    return faster


def _torch(device: torch.device, needs: Needs) -> tuple[Ops, dict[str, str]]:
    from pagoda_worker.kernels.aten import AtenOps  # on import, looks up operations that not every torch has

    return AtenOps(device, needs.dtype), {}


def _native(device: torch.device, needs: Needs) -> tuple[Ops, dict[str, str]]:
    from pagoda_worker.kernels.cpu.load import load_native, unfit
    from pagoda_worker.kernels.cpu.selfcheck import problems

    native = load_native(device, needs)
    wrong = {family: f"failed its self-check: {problem}" for family, problem in problems(native).items()}
    return native, unfit(needs) | wrong


def _triton(device: torch.device, needs: Needs) -> tuple[Ops, dict[str, str]]:
    try:
        from pagoda_worker.kernels.triton.load import load_triton
        from pagoda_worker.kernels.triton.ops import BIDIRECTIONAL, PLAIN_CACHE
        from pagoda_worker.kernels.triton.selfcheck import sampling_problem
    except ImportError as error:
        raise BackendError(f"kernels: triton cannot be imported: {error}") from error
    ops = load_triton(device, needs)
    problem = sampling_problem(ops, needs)
    unfit = {} if problem is None else {"sampling": f"failed its self-check: {problem}"}
    if any(not shape.causal for shape in needs.attention):
        unfit["attention"] = BIDIRECTIONAL
    if needs.quantized_cache:
        unfit["attention"] = PLAIN_CACHE
    return ops, unfit


LOADERS: dict[str, Load] = {
    "reference": lambda device, needs: (ReferenceOps(device), {}),
    "torch": _torch,
    "native": _native,
    "triton": _triton,
}
