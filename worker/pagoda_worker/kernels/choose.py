"""Which back end serves, decided once at start. A named one that cannot serve is an error; `auto` takes another."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from pagoda_worker.cuda import device_seconds
from pagoda_worker.kernel_choice import AUTO, FAMILIES, FLASH, parse_choice
from pagoda_worker.kernels import trial
from pagoda_worker.kernels.flash import NotInstalled, load_flash
from pagoda_worker.kernels.mixed import mix
from pagoda_worker.kernels.ops import BackendError, Needs, Ops

log = logging.getLogger(__name__)

MARGIN = 0.9  # flash-attention must take less than this share of Triton's time: starts are to choose alike


def load_ops(
    device: torch.device, choice: str, needs: Needs, clock: trial.Clock = device_seconds
) -> tuple[Ops, list[str]]:
    """The operations for `device`, and what there is to say about the choice (for the log).

    Args:
        device: Where tensors live.
        choice: See `kernel_choice`.
        needs: What they must be able to do.
        clock: For `auto`, where it measures.

    Raises:
        BackendError: `choice` is not known, or something that was named cannot run here.
    """
    try:
        chosen = parse_choice(choice)
    except ValueError as error:
        raise BackendError(str(error)) from error
    parts, remarks = _automatic(device, needs) if chosen.base == AUTO else (_everything(chosen.base, device, needs), [])
    loaded = {ops.name: ops for ops in parts.values()}

    def load(name: str) -> Ops:
        if name not in loaded:
            loaded[name] = load_flash(load("triton"), needs) if name == FLASH else LOADERS[name](device, needs)
        return loaded[name]

    if chosen.base == AUTO and "attention" not in chosen.overrides:
        parts["attention"] = _faster_attention(parts["attention"], needs, clock)
    for family, name in chosen.overrides.items():
        parts[family] = load(name)
    return mix(parts), remarks


def _everything(name: str, device: torch.device, needs: Needs) -> dict[str, Ops]:
    return dict.fromkeys(FAMILIES, LOADERS[name](device, needs))


def _automatic(device: torch.device, needs: Needs) -> tuple[dict[str, Ops], list[str]]:
    """The fastest that works: what fails its check here is left to torch."""
    if device.type != "cpu":
        return _automatic_on_gpu(device, needs)
    from pagoda_worker.kernels.cpu.native import load_native
    from pagoda_worker.kernels.cpu.selfcheck import problems

    try:
        native = load_native(device, needs)
    except BackendError as error:
        return _everything("torch", device, needs), [f"torch serves: {error}"]
    found = problems(native)
    torch_ops = _torch(device, needs) if found else native
    parts = {family: torch_ops if family in found else native for family in FAMILIES}
    return parts, [f"{family} by torch: the native kernels failed their check: {why}" for family, why in found.items()]


def _automatic_on_gpu(device: torch.device, needs: Needs) -> tuple[dict[str, Ops], list[str]]:
    try:
        ops, why = _checked_triton(device, needs)
    except BackendError as error:
        return _everything("torch", device, needs), [f"torch serves: {error}"]
    parts: dict[str, Ops] = dict.fromkeys(FAMILIES, ops)
    if why is None:
        return parts, []
    return parts | {"sampling": _torch(device, needs)}, [f"sampling by torch: the triton kernels failed: {why}"]


def _faster_attention(ours: Ops, needs: Needs, clock: trial.Clock) -> Ops:
    """`ours`, or instead of Triton flash-attention: where it is installed, can serve this model and is clearly faster.

    A model that is not ours to know is left to Triton, which refuses nothing that its layers may ask.
    """
    if ours.name != "triton" or not needs.attention:
        return ours
    try:
        flash = load_flash(ours, needs)
        triton_times, flash_times = trial.measure((ours, flash), needs, clock)
    except NotInstalled:
        return ours
    except (BackendError, RuntimeError) as error:  # a lost device will be met again, by what cannot do without
        log.info("attention by triton: %s", error)
        return ours
    faster = flash if flash_times.of_a_request < MARGIN * triton_times.of_a_request else ours
    log.info(
        "attention by %s: %s takes %s, triton %s; it must save %d %%; attention=%s makes this choice without measuring",
        *(faster.name, flash.numerics, flash_times, triton_times, round(100 * (1 - MARGIN)), faster.name),
    )
    return faster


def _reference(device: torch.device, needs: Needs) -> Ops:
    from pagoda_worker.kernels.reference import ReferenceOps

    return ReferenceOps(device)


def _torch(device: torch.device, needs: Needs) -> Ops:
    from pagoda_worker.kernels.aten import AtenOps

    return AtenOps(device, needs.dtype)


def _native(device: torch.device, needs: Needs) -> Ops:
    """Raises BackendError when they cannot serve here, or compute something wrong on this machine."""
    from pagoda_worker.kernels.cpu.native import load_native
    from pagoda_worker.kernels.cpu.selfcheck import problems

    native = load_native(device, needs)
    found = problems(native)
    if found:
        raise BackendError(f"kernels: native failed its self-check: {'; '.join(found.values())}")
    return native


def _triton(device: torch.device, needs: Needs) -> Ops:
    """Raises BackendError like `_native`, and when Triton is not installed."""
    ops, why = _checked_triton(device, needs)
    if why is not None:
        raise BackendError(f"kernels: triton failed its self-check: {why}")
    return ops


def _checked_triton(device: torch.device, needs: Needs) -> tuple[Ops, str | None]:
    """The back end, and what is wrong with its sampling, which it can do without; raises BackendError."""
    try:
        from pagoda_worker.kernels.triton.ops import load_triton
        from pagoda_worker.kernels.triton.selfcheck import sampling_problem
    except ImportError as error:
        raise BackendError(f"kernels: triton cannot be imported: {error}") from error
    ops = load_triton(device, needs)
    return ops, sampling_problem(ops)


LOADERS: dict[str, Callable[[torch.device, Needs], Ops]] = {
    "reference": _reference,
    "torch": _torch,
    "native": _native,
    "triton": _triton,
}
