"""Which back end serves, decided once at start. A named one that cannot serve is an error; `auto` takes another."""

from __future__ import annotations

import torch

from pagoda_worker.kernels.ops import BACKENDS, BackendError, Needs, Ops


def load_ops(device: torch.device, choice: str, needs: Needs) -> tuple[Ops, str]:
    """The back end for `device`, and why it was chosen (for the log).

    Args:
        device: Where tensors live.
        choice: "auto" or a name of BACKENDS.
        needs: What it must be able to do.

    Raises:
        BackendError: `choice` is not known, or was named and cannot run here.
    """
    if choice not in ("auto", *BACKENDS):
        raise BackendError(f"kernels: must be auto or one of {', '.join(BACKENDS)}, got {choice!r}")
    if choice == "reference":
        from pagoda_worker.kernels.reference import ReferenceOps

        return ReferenceOps(device), "named in the configuration"
    reason = "named in the configuration" if choice != "auto" else f"the best for {device.type}"
    if choice == "native" or (choice == "auto" and device.type == "cpu"):
        try:
            return _native(device, needs), reason
        except BackendError as error:
            if choice == "native":
                raise
            reason = f"native kernels cannot serve: {error}"
    if choice == "triton" or (choice == "auto" and device.type == "cuda"):
        try:
            return _triton(device, needs), reason
        except BackendError as error:
            if choice == "triton":
                raise
            reason = f"triton kernels cannot serve: {error}"
    from pagoda_worker.kernels.aten import AtenOps

    return AtenOps(device), reason


def _native(device: torch.device, needs: Needs) -> Ops:
    """Raises BackendError when they cannot serve here, or compute something wrong on this machine."""
    from pagoda_worker.kernels.cpu.native import load_native
    from pagoda_worker.kernels.cpu.selfcheck import problem

    native = load_native(device, needs)
    found = problem(native)
    if found:
        raise BackendError(f"kernels: native failed its self-check: {found}")
    return native


def _triton(device: torch.device, needs: Needs) -> Ops:
    """Raises BackendError like `_native`, and when Triton is not installed."""
    try:
        from pagoda_worker.kernels.triton.ops import load_triton
    except ImportError as error:
        raise BackendError(f"kernels: triton cannot be imported: {error}") from error
    return load_triton(device, needs)
