"""Models that outlive the process that serves them: what forks compute with them, and when none is kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worker.models.checkpoints import NATIVE, make_model, save
from tests.worker.process import kept_program

from pagoda_worker.config import WorkerConfig
from pagoda_worker.kernels.cpu.build import LIBRARY
from pagoda_worker.loading import memory
from pagoda_worker.process import models
from pagoda_worker.process.models import keep_models, kept_models, kept_s
from pagoda_worker.process.startup import load_runner

MIB = 2**20
PLAIN = {"num_blocks": 64, "threads": 2, "kv_cache_dtype": "int8"}
WAYS: dict[str, dict[str, Any]] = {
    "torch": {"kernels": "torch", "dtype": "float32", "kv_cache_dtype": "auto"},
    **({"native": {}, "int4": {"quantization": "int4"}} if LIBRARY.exists() else {}),
    "draft": {"kernels": "torch", "dtype": "float32", "kv_cache_dtype": "auto", "speculation": "draft-model"},
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save(make_model(*NATIVE["llama"]), tmp_path / "model", torch.bfloat16)


@pytest.fixture(autouse=True)
def none_kept() -> None:
    models._kept.clear()


def in_forks(options: dict[str, Any]) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", kept_program.__name__, json.dumps(options)]
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}  # as `serve` does
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == 2, done.stderr
    return found


@pytest.mark.parametrize("way", WAYS)
def test_forks_compute_with_it_what_a_process_computes_that_loaded_it_itself(way: str, model: Path) -> None:
    """By then the model's files are deleted."""
    options = {"model": str(model)} | PLAIN | WAYS[way]
    if way == "draft":
        options["draft_model"] = str(save(make_model(*NATIVE["llama"]), model.parent / "draft", torch.bfloat16))
    alone = kept_program.computed(WorkerConfig(**options))
    for fork in in_forks(options):
        assert fork.pop("seconds") > 0.0
        assert fork == alone


def keep(model: Path, **options: Any) -> WorkerConfig:
    config = WorkerConfig(model=str(model), kernels="torch", dtype="float32", **options)
    keep_models(config, lambda done, of: None)
    return config


def test_it_is_kept_for_its_configuration_and_given_once(model: Path) -> None:
    config = keep(model)
    assert kept_models(WorkerConfig(model=str(model), kernels="torch", dtype="float32", max_rows=3)) is None
    seconds = kept_s(config)
    given = kept_models(config)
    assert given is not None
    assert given.seconds == seconds > 0.0
    assert kept_models(config) is None
    assert kept_s(config) == 0.0


@pytest.mark.parametrize("repeatable", [True, False])
def test_two_lives_of_what_cannot_be_repeated_claim_different_numerics(repeatable: bool, model: Path) -> None:
    config = keep(model, num_blocks=64)
    [kept] = models._kept.values()
    kept = kept._replace(loaded=replace(kept.loaded, repeatable=repeatable))
    claimed = set()
    for _ in range(2):
        models._kept[config] = kept  # as each fork finds it
        claimed.add(load_runner(config, lambda done, of: None).facts.numerics_id)
    assert len(claimed) == (1 if repeatable else 2)


def test_every_life_has_as_many_blocks_as_the_first(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By then other workers have filled their blocks."""
    monkeypatch.setattr(models, "host_available_bytes", lambda root: 8 * MIB)
    config = keep(model, workers_here=4, max_rows=10**4)
    [kept] = models._kept.values()
    found = []
    for left in (8, 8 - 3 * 0.6 * 2):
        models._kept[config] = kept
        monkeypatch.setattr(memory, "host_available_bytes", lambda root, left=left: int(left * MIB))
        found.append(load_runner(config, lambda done, of: None).facts.num_blocks)
    assert found[0] == found[1] > 0


def test_what_may_come_to_a_gpu_is_not_kept(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "may_be_on_gpu", lambda device: device == "auto:1")
    monkeypatch.setattr(models, "load_models", None)
    assert kept_models(keep(model, device="auto:1")) is None


def test_nothing_is_kept_beside_a_thread_that_stays(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    load, over = models.load_models, threading.Event()
    thread = threading.Thread(target=over.wait)

    def load_beside(*given: Any) -> models.Models:
        thread.start()
        return load(*given)

    monkeypatch.setattr(models, "load_models", load_beside)
    monkeypatch.setattr(models, "THREADS_END_S", 0.05)
    monkeypatch.setattr(models, "_num_threads", threading.active_count)  # other tests' threads may still be ending
    config = keep(model)
    over.set()
    thread.join()
    assert kept_models(config) is None
    assert "loading left threads" in caplog.text
