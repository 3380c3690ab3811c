"""Whether what is fast is also right: greedy tokens against the reference, and the tests of the kernels."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Timer

import torch
from bench.device.job import Job, serve
from bench.device.models import load, records_steps, row_of, runner_of, shapes
from bench.device.report import Line, attempt

from pagoda_proto.steps import Chunk
from pagoda_worker.config import WorkerConfig
from pagoda_worker.kernels.choose import load_ops
from pagoda_worker.kernels.ops import Needs
from pagoda_worker.loading.model import LoadedModel
from pagoda_worker.rows.batch import build_batch

ROOT = Path(__file__).parents[2]
PROMPT_LENGTHS = (1, 15, 16, 17, 63, 64, 65, 100, 127, 200, 255, 256, 257, 300, 511, 700)
OUTPUT_LEN = 64
SMALL_STEPS = {"max_tokens_per_step": 512, "chunk_size": 192}  # prompts come in chunks, beside rows that decode
# Of the spread of a position's logits. bfloat16 rounds a logit by up to 0.4 % of itself, and the highest of 150,000 is
# about 4.5 spreads, so rounding alone moves it by 0.02; the layers' own rounding is of the same kind.
TOLERANCE = 0.1
SUITE = ("tests/worker/device/test_cuda.py", "tests/worker/kernels/triton")
SMOKE_SUITE = ("tests/worker/device/test_cuda.py", "tests/worker/kernels/triton/test_interpreter.py")
SUITE_PROCESSES = 8  # most of a test's time is compiling
KILLED_BEFORE_S = 5.0  # the end of its time, so that it can still be said what ran
# That of the repository names plug-ins which need not be here.
INI = "[pytest]\nmarkers =\n  slow: -\n  gpu: -\n"


def tokens(job: Job) -> None:
    attempt("greedy tokens", _tokens, job)


def _tokens(job: Job) -> None:
    fields = shapes(job.smoke)["small"]
    lengths, count = ((1, 17, 40), 6) if job.smoke else (PROMPT_LENGTHS, OUTPUT_LEN)
    rng = random.Random(7)
    prompts = [[rng.randrange(fields["vocab_size"]) for _ in range(length)] for length in lengths]
    room = max(sum(lengths) + len(prompts) * (count + job.block_size), fields["max_position_embeddings"])
    options = {"block_size": job.block_size, "max_rows": len(prompts), "num_blocks": -(-room // job.block_size)}
    loaded, config, _ = load(job.hardware, fields, kernels=job.kernels, **options)
    for how, eager in (("recorded decode steps", False), ("launched decode steps", True)):
        one = replace(config, enforce_eager=eager)
        attempt(f"greedy tokens, {how}", _compare, job, loaded, one, prompts, count, f"greedy tokens, {how}")


def _compare(
    job: Job, loaded: LoadedModel, config: WorkerConfig, prompts: list[list[int]], count: int, what: str
) -> Iterator[Line]:
    """What is served, position by position, against the reference's choice after the very same tokens."""
    if not (config.enforce_eager or records_steps(loaded, config)):
        raise RuntimeError(f"{loaded.ops.name} kernels record no steps")
    outputs, _ = serve(runner_of(job.hardware, loaded, config), prompts, count, SMALL_STEPS)
    gaps = torch.cat(list(_gaps(job, prompts, outputs)))
    chosen, gap = gaps.unbind(1)
    clear = gap > TOLERANCE
    wrong = clear & (chosen > 0)
    note = f"of {int(clear.sum())} positions; {int((~clear).sum())} of {len(gaps)} left out, where the reference's two "
    note += f"best logits are within {TOLERANCE} of the logits' spread; {loaded.ops.name}; worst choice "
    note += f"{float(chosen.max()):.2g} below the best"
    yield Line(what=what, value=float(wrong.sum()), unit="mismatches", bar=0.0, note=note)


@torch.inference_mode()
def _gaps(job: Job, prompts: Sequence[list[int]], outputs: Sequence[list[int]]) -> Iterator[torch.Tensor]:
    """Per output token: how far the reference's logit of it is below its best, and its second best below its best, in
    units of the spread of the position's logits. The reference computes in float32 from the same bfloat16 weights."""
    fields, device = shapes(job.smoke)["small"], job.hardware.device
    loaded, _, _ = load(job.hardware, fields, kernels="reference", dtype="float32")
    for prompt, output in zip(prompts, outputs, strict=True):
        known = prompt + output[:-1]
        kv = loaded.new_kv_cache(-(-len(known) // 16), 16)
        row = row_of(0, known, list(range(-(-len(known) // 16))))
        batch = build_batch([(row, Chunk(0, 0, len(known), True))], 16, device)
        hidden = loaded.model.forward(batch, kv)[len(prompt) - 1 :]
        logits = loaded.model.logits(hidden)
        best = logits.topk(2).values
        taken = logits.gather(1, torch.tensor(output, device=device)[:, None])[:, 0]
        spread = logits.std(1)
        yield torch.stack(((best[:, 0] - taken) / spread, (best[:, 0] - best[:, 1]) / spread), 1).cpu()


def suite(job: Job) -> None:
    """The kernels' tests if pytest is at hand, else what a worker checks before it serves."""
    if find_spec("pytest") and find_spec("hypothesis"):
        attempt("kernel tests", _suite, job)
        return
    attempt("kernel self-check", _self_check, job)


def _self_check(job: Job) -> Iterator[Line]:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        needs = Needs(dtype=dtype, head_dims=(128,), adapters=True, experts=True)
        ops, _ = load_ops(job.hardware.device, "triton", needs)
        yield Line(what=f"kernel self-check {dtype}", value=0.0, unit="failed", bar=0.0, note=ops.numerics)


def _suite(job: Job) -> Iterator[Line]:
    """Failures are printed as they come; what has not run when the time is over is said to be missing."""
    found: Counter[str] = Counter()
    with TemporaryDirectory() as directory:
        ini = Path(directory) / "pytest.ini"
        ini.write_text(INI)
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        started = subprocess.Popen(
            _command(job, ini), cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
        )  # fmt: skip
        killer = Timer(max(0.0, job.left_s - KILLED_BEFORE_S), started.kill)
        killer.start()
        for line in started.stdout or ():
            print(line, end="", file=sys.stderr, flush=True)
            outcome = re.search(r"\b(PASSED|FAILED|ERROR|SKIPPED)\b", line)
            if outcome and "::" in line and "%]" in line:
                found[outcome[1]] += 1
        code = started.wait()
        killer.cancel()
    ended = {0: "all ran", 1: "all ran"}.get(
        code, f"pytest ended with {code}" if code > 0 else "the others had no time"
    )
    note = f"{found['PASSED']} passed, {found['SKIPPED']} skipped; {ended}"
    if not found:
        raise RuntimeError(f"no test ran: {note}")
    yield Line(what="kernel tests", value=float(found["FAILED"] + found["ERROR"]), unit="failed", bar=0.0, note=note)


def _command(job: Job, ini: Path) -> list[str]:
    return [
        sys.executable, "-m", "pytest", "-v", "--tb=short", "-m", "not slow", "-p", "no:cacheprovider",
        "--import-mode=importlib", f"--rootdir={ROOT}", "-c", str(ini), "--device", job.hardware.device.type,
        *(("-n", str(SUITE_PROCESSES)) if find_spec("xdist") and not job.smoke else ()),
        *(SMOKE_SUITE if job.smoke else SUITE),
    ]  # fmt: skip
