"""Loads a model as the process that forks workers does, deletes its files, and computes in forks.

kept_program.py '{"model": .., ..}'      options of a worker; prints a line of JSON for each of two forks
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from tests.worker.fakes_model import Driver

from pagoda_proto.params import SamplingParams
from pagoda_worker.config import WorkerConfig
from pagoda_worker.process.models import keep_models, kept_s
from pagoda_worker.process.startup import load_runner

PROMPT, NUM_TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], 12


def computed(config: WorkerConfig) -> dict[str, Any]:
    """The runner's facts, and the tokens that its model generates."""
    runner = load_runner(config, lambda done, of: None)
    facts = runner.facts
    told = {"which": [facts.model_fingerprint, facts.numerics_id, facts.num_blocks], "tokens": []}
    if facts.num_blocks:
        driver = Driver(runner, block_size=facts.block_size)
        new = [driver.add(1, PROMPT, params=SamplingParams())]
        for _ in range(NUM_TOKENS):
            [output] = driver.run(new).outputs
            told["tokens"] += output.token_ids
            new = []
    return told


def compute_on_all_threads() -> None:
    """Use all threads, as quantising a large matrix does."""
    torch.ones(10**6).add_(1.0)


def main(options: dict[str, Any]) -> None:
    config = WorkerConfig(**options)
    keep_models(config, lambda done, of: compute_on_all_threads())
    for file in Path(config.model).iterdir():
        os.truncate(file, 1)  # a process that reads a mapping of it now gets SIGBUS
    shutil.rmtree(Path(config.model))
    for _ in range(2):
        pid = os.fork()
        if pid == 0:
            seconds = kept_s(config)
            print(json.dumps({"seconds": seconds, **computed(config)}), flush=True)
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
