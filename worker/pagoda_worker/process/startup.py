"""From a configuration to a runner that has computed its first token: used by workers and offline."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from pagoda_worker.config import WorkerConfig
from pagoda_worker.device.accelerator import Accelerator
from pagoda_worker.kernel_choice import AUTO
from pagoda_worker.kernels.ops import BackendError, guarded
from pagoda_worker.loading.memory import DeviceUse, num_kv_blocks
from pagoda_worker.loading.model import LoadedModel
from pagoda_worker.loading.numerics import of_one_life
from pagoda_worker.loading.retention import context_cost, settled
from pagoda_worker.models.decoder import Decoder
from pagoda_worker.process.models import Models, Progress, kept_models, load_models
from pagoda_worker.speculation.choosing import make_drafter
from pagoda_worker.step.graphs import Graphed, ladder, reserve_for
from pagoda_worker.step.lines import Lines
from pagoda_worker.step.profiling import Rehearsal
from pagoda_worker.step.runner import ModelRunner

log = logging.getLogger(__name__)

STEP_SHARE = 16  # a step of a model that reads is assumed to need at most 1/16 of the device's memory

MakeAccelerator = Callable[[torch.device], Accelerator]


def load_runner(config: WorkerConfig, progress: Progress, recording: Progress = lambda done, of: None) -> ModelRunner:
    """Load the model, and its draft model if there is one, make their KV caches and warm up.

    Args:
        config: Which model, where and how.
        progress: Called with bytes loaded and bytes in all; an exception it raises ends the loading.
        recording: Called with decode steps recorded and steps in all, on a device that records.

    Raises:
        ValueError: the model or the configuration cannot be used.
        BackendError: the named kernels, or torch under `auto`, fail on the first steps.
    """
    models = kept_models(config) or load_models(config, progress)
    try:
        return _started(config, models, recording)
    except BackendError as error:
        if not config.kernels.startswith(AUTO) or models.loaded.ops.name == "torch":
            raise
        log.warning("torch serves: %s", error)
    del models  # its weights are packed for the failed back end, and their memory is needed
    config = replace(config, kernels=config.kernels.replace(AUTO, "torch", 1))
    return _started(config, load_models(config, progress), recording)


def _started(config: WorkerConfig, models: Models, recording: Progress) -> ModelRunner:
    """A runner that has computed its first token."""
    began, loaded = time.monotonic(), models.loaded
    config = config.settled(loaded.device.type)
    if not loaded.repeatable:
        loaded = replace(loaded, numerics_id=of_one_life(loaded.numerics_id))
    models = models._replace(loaded=loaded)
    runner = _generating(config, models, recording) if loaded.pooler is None else _reading(config, models)
    guarded(loaded.ops.name, runner.warm_up, but=(torch.AcceleratorError,))
    for name, adapter in loaded.adapters.named.items():
        if why := guarded(loaded.ops.name, partial(runner.first_token, adapter), but=(torch.AcceleratorError,)):
            raise ValueError(f"lora_modules: {name!a} at {adapter.path}: a token cannot be computed with it: {why}")
    facts, room = runner.facts, loaded.adapters.room
    if room.most:
        log.info(
            "adapters: memory for %d of up to %.1f MiB, %.1f MiB of it taken",
            room.most, room.each_bytes / 2**20, room.taken_bytes / 2**20,
        )  # fmt: skip
    for group in facts.kv_groups:
        if group.num_swap_blocks:
            log.info("swap space: %d blocks, each moved in %.2f ms", group.num_swap_blocks, 1000 * group.swap_block_s)
    _tell_kv_cache(config, loaded, runner)
    log.info("first step computed %.2f s later", time.monotonic() - began)
    return runner


def _tell_kv_cache(config: WorkerConfig, loaded: LoadedModel, runner: ModelRunner) -> None:
    """Log how much context the cache holds, and what a context costs."""
    facts = runner.facts
    for group in facts.kv_groups:
        what = f"the last {group.kept} tokens" if group.kept else "all tokens"
        log.info("KV cache: %d blocks of %d tokens, for layers that keep %s", group.num_blocks, facts.block_size, what)
    if facts.kv_groups:
        log.info("KV cache: %s", context_cost(settled(config, loaded)[0], config.block_size))


def _reading(config: WorkerConfig, models: Models) -> ModelRunner:
    (loaded,) = settled(config, models.loaded)
    if loaded.ops.own_threads:
        torch.set_num_threads(1)
    if loaded.device.type == "cpu":
        return ModelRunner(loaded, num_kv_blocks(config, loaded, at_first=models.available), config)
    accelerator = accelerator_of(loaded.device)

    def use() -> DeviceUse:
        free, total = accelerator.memory()
        return DeviceUse(total=total, in_use=total - free, step=total // STEP_SHARE, graphs=0)

    return ModelRunner(loaded, num_kv_blocks(config, loaded, use=use), config, None, accelerator)


def _generating(config: WorkerConfig, models: Models, recording: Progress) -> ModelRunner:
    loaded, *drafts = settled(config, models.loaded, *([models.draft] if models.draft else []))
    draft = drafts[0] if drafts else None
    if loaded.ops.own_threads:
        torch.set_num_threads(1)  # little is left to torch, and its threads spin after each piece
    if loaded.device.type == "cpu":
        left = loaded.adapters.room.left_bytes
        num_blocks = num_kv_blocks(config, loaded, draft, adapters_bytes=left, at_first=models.available)
        return ModelRunner(loaded, num_blocks, config, make_drafter(config, loaded, draft, num_blocks))
    return runner_on_device(loaded, draft, config, accelerator_of, recording)


def runner_on_device(
    loaded: LoadedModel,
    draft: LoadedModel | None,
    config: WorkerConfig,
    make_accelerator: MakeAccelerator,
    recording: Progress,
) -> ModelRunner:
    """A runner whose caches take what the device has left, and which records its decode steps where it can.

    Raises:
        NotEnoughMemory: the device has too little left.
        BackendError: the kernels fail on the largest step, or the device cannot record a decode step.
    """
    decoder = loaded.model
    accelerator = make_accelerator(loaded.device)
    sampler = loaded.ops.device_sampler(config.max_rows, loaded.vocab_size, accelerator.upload)
    rehearsal = Rehearsal((loaded,) if draft is None else (loaded, draft), config, accelerator, sampler)
    if config.enforce_eager or not (isinstance(decoder, Decoder) and loaded.ops.capturable):
        num_blocks = _num_blocks(rehearsal, lambda: 0)
        drafter = make_drafter(config, loaded, draft, num_blocks)
        return ModelRunner(loaded, num_blocks, config, drafter, accelerator, sampler)
    loaded = replace(loaded, spare_blocks=1)  # for padding

    def graphs() -> int:
        probe = _graphed(decoder, loaded, config, make_accelerator(loaded.device), num_blocks=1)
        taken = probe.captured(loaded.new_kv_cache(1, config.block_size))
        return probe.nbytes + reserve_for(probe.num_recordings, taken)

    num_blocks = _num_blocks(rehearsal, graphs, spare=loaded.spare_blocks)
    graphed = _graphed(decoder, loaded, config, accelerator, num_blocks)
    drafter = make_drafter(config, loaded, draft, num_blocks)
    runner = ModelRunner(replace(loaded, model=graphed), num_blocks, config, drafter, accelerator, sampler)
    graphed.capture(runner.kv_cache, recording)
    return runner


def _num_blocks(rehearsal: Rehearsal, graphs: Callable[[], int], spare: int = 0) -> int:
    rehearsal.warm_up()
    config = rehearsal.config
    left = rehearsal.models[0].adapters.room.left_bytes
    return num_kv_blocks(
        config, *rehearsal.models, use=lambda: rehearsal.device_use(graphs), spare=spare, adapters_bytes=left
    )


def _graphed(
    decoder: Decoder, loaded: LoadedModel, config: WorkerConfig, accelerator: Accelerator, num_blocks: int
) -> Graphed:
    """Padding goes to the block after the last allocatable one."""
    sizes = ladder(config.max_rows)
    lines = Lines(
        max_rows=sizes[-1],
        max_len=loaded.max_model_len,
        block_size=config.block_size,
        scratch_blocks=[one.num_blocks(num_blocks) for one in loaded.retentions],
        device=loaded.device,
    )
    return Graphed(decoder, accelerator, sizes, lines, adapted=loaded.adapters.count > 0)


def accelerator_of(device: torch.device) -> Accelerator:
    from pagoda_worker.device.cuda import CudaAccelerator

    return CudaAccelerator(device)
