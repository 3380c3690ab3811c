"""Loads the back end for this device: the first tiles that compute correctly, and alike for every cut if any do."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial

import torch
from triton.runtime import driver

from pagoda_worker.kernels.ops import BackendError, Needs, guarded
from pagoda_worker.kernels.triton.ops import DTYPES, TritonOps, interpreted
from pagoda_worker.kernels.triton.plan import SHARED_BYTES, Tiles
from pagoda_worker.kernels.triton.selfcheck import verdict

log = logging.getLogger(__name__)

# Low tiles waste least; tiles of one height do not depend on the hardware's order of summation.
HEIGHTS = ((16, 128), (64, 128), (64, 64), (16, 16))
PROGRAMS_PER_PROCESSOR = 2


def load_triton(device: torch.device, needs: Needs) -> TritonOps:
    """The first of HEIGHTS that computes correctly and alike for every cut; failing that, the first that is correct.

    Raises:
        BackendError: it cannot serve this device or these needs, or computes something wrong.
    """
    if device.type != "cuda" and not interpreted():
        raise BackendError(f"kernels: triton needs a CUDA device, not {device.type}")
    if needs.dtype not in DTYPES:
        raise BackendError(f"kernels: triton has no kernels for {needs.dtype}")
    right: TritonOps | None = None
    reason = varies = ""
    for tiles in _tiles(device):
        ops = TritonOps(device, tiles, needs.dtype)
        try:
            found = guarded("triton", partial(verdict, ops, needs))
        except BackendError as error:  # cannot be compiled or launched here; lower tiles may work
            reason = reason or str(error)
            continue
        if not found.wrong and not found.varies:
            return ops
        if found.wrong:
            reason = reason or f"kernels: triton failed its self-check: {found.wrong}"
        elif right is None:
            right, varies = ops, found.varies or ""
    if right is None:
        raise BackendError(reason)
    log.warning("triton: %s: a recomputed request may differ", varies)
    return right.with_tiles(right.tiles, cuts_show=True)


def _tiles(device: torch.device) -> list[Tiles]:
    """The tiles to try, the fastest first; the last needs the least memory."""
    fill, shared_bytes = PROGRAMS_PER_PROCESSOR, SHARED_BYTES
    if device.type == "cuda":
        fill *= torch.cuda.get_device_properties(device).multi_processor_count
        shared_bytes = driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"]
    found = [Tiles(low=low, high=high, fill=fill, shared_bytes=shared_bytes) for low, high in HEIGHTS]
    return [*found, replace(found[-1], shared_bytes=0)]
