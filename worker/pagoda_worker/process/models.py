"""What a worker reads from files, which may outlive the process that serves it.

If workers are forked off a template process, the template loads the models and computes nothing, and every fork finds
them in its memory. Weights are never written, so the forks share their pages, huge ones included, and start within
milliseconds however large the model is. Each fork makes its own KV cache and threads.
"""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from pagoda_worker.config import WorkerConfig
from pagoda_worker.device.available import host_available_bytes
from pagoda_worker.device.devices import may_be_on_gpu
from pagoda_worker.grammars.compiling import load_grammars
from pagoda_worker.kernels.choose import rest
from pagoda_worker.loading.heap import give_back
from pagoda_worker.loading.model import LoadedModel
from pagoda_worker.loading.readers import load_any_model
from pagoda_worker.speculation.choosing import check_invariant, load_draft_model

THREADS_END_S = 5.0

Progress = Callable[[int, int], None]

log = logging.getLogger(__name__)

_kept: dict[WorkerConfig, Models] = {}


class Models(NamedTuple):
    """The model and, if there is one, its draft model. `seconds` is how long they took to load; `available` the bytes
    the host had left then, if all forks are to size themselves like the first one; else 0."""

    loaded: LoadedModel
    draft: LoadedModel | None
    seconds: float
    available: int = 0


def load_models(config: WorkerConfig, progress: Progress) -> Models:
    """Load what `config` names; see `load_runner`."""
    started = time.monotonic()
    loaded, draft = load_any_model(config, progress), None
    if loaded.pooler is None:
        if config.speculation:
            check_invariant(loaded)
        draft = load_draft_model(config, loaded, progress)
        loaded = replace(loaded, grammars=load_grammars(Path(config.model), loaded.vocab_size))
    elif config.speculation:
        raise ValueError(f"speculation={config.speculation!r}: this model does not generate text")
    give_back()
    seconds = time.monotonic() - started
    log.info("weights read and packed in %.2f s", seconds)
    return Models(loaded, draft, seconds)


def keep_models(config: WorkerConfig, progress: Progress) -> None:
    """Load the models for the forks of this process, unless they may be on a GPU, which forks cannot share.

    Raises:
        ValueError: the model or the configuration cannot be used.
    """
    if may_be_on_gpu(config.device):
        return
    before = _num_threads()
    models = load_models(config, progress)
    if _at_rest(before):
        _kept[config] = models._replace(available=host_available_bytes(Path("/")))
        gc.freeze()
    else:
        log.warning("loading left threads, which a fork would lack: each restart of this worker loads its model again")


def kept_models(config: WorkerConfig) -> Models | None:
    """The models that our parent process loaded for us, if any; returned once, so that the caller can free them."""
    return _kept.pop(config, None)


def kept_s(config: WorkerConfig) -> float:
    """How long the kept models took to load; 0 if there are none."""
    return _kept[config].seconds if config in _kept else 0.0


def _at_rest(num_threads: int) -> bool:
    """Whether no more than `num_threads` threads are left, once compute threads have been told to end."""
    rest()
    until = time.monotonic() + THREADS_END_S
    while _num_threads() > num_threads:
        if time.monotonic() > until:
            return False
        time.sleep(0.001)
    return True


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task"))
