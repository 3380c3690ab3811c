"""The back end as this device can have it: the first tiles that compute right, and alike for every cut if any do."""

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

# Low tiles waste least, tiles of one height need no luck with the hardware.
HEIGHTS = ((16, 128), (64, 128), (64, 64), (16, 16))
PROGRAMS_PER_PROCESSOR = 2


def load_triton(device: torch.device, needs: Needs) -> TritonOps:
    """The first of HEIGHTS that computes right and alike for every cut; without such, the first that computes right.

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
        except BackendError as error:  # cannot be made or launched here; lower tiles may
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
    """What to try, the fastest first; the last takes the least memory of all."""
    fill, shared_bytes = PROGRAMS_PER_PROCESSOR, SHARED_BYTES
    if device.type == "cuda":
        fill *= torch.cuda.get_device_properties(device).multi_processor_count
        shared_bytes = driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"]
    found = [Tiles(low=low, high=high, fill=fill, shared_bytes=shared_bytes) for low, high in HEIGHTS]
    return [*found, replace(found[-1], shared_bytes=0)]
