"""From a configuration to a runner that has computed its first token: where a worker and offline use begin."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from pagoda_worker.config import WorkerConfig
from pagoda_worker.drafting import check_invariant, load_draft_model, make_drafter
from pagoda_worker.loading import load_model
from pagoda_worker.memory import num_kv_blocks
from pagoda_worker.runner import ModelRunner

log = logging.getLogger(__name__)


def load_runner(config: WorkerConfig, progress: Callable[[int, int], None]) -> ModelRunner:
    """Load the model, and its draft model if there is one, make their KV caches and warm up.

    Args:
        config: Which model, where and how.
        progress: Called with bytes loaded and bytes in all; what it raises ends the loading.

    Raises:
        ValueError: the model or the configuration cannot be used.
        RuntimeError: the model fails on its first token.
    """
    started = time.monotonic()
    loaded = load_model(config, progress)
    if config.speculation:
        check_invariant(loaded)
    draft = load_draft_model(config, loaded, progress)
    read = time.monotonic()
    log.info("weights read and packed in %.2f s", read - started)
    num_blocks = num_kv_blocks(config, loaded, draft)
    runner = ModelRunner(loaded, num_blocks, config, make_drafter(config, draft, num_blocks))
    runner.warm_up()
    log.info("first step computed %.2f s later", time.monotonic() - read)
    return runner
