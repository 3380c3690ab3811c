"""From a loaded model to a runner on a device: what is measured, how much the cache gets, what is recorded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worker.adapters.files import adapter_of
from tests.worker.fakes_accelerator import FakeAccelerator
from tests.worker.fakes_capturable import BLOCK, MAX_LEN, VOCAB, CapturableOps, decoder
from tests.worker.fakes_model import Driver, new_row
from tests.worker.models.checkpoints import NATIVE, make_model, save
from tests.worker.step.test_adapted_rows import FakeAdapters

from pagoda_proto.params import SamplingParams
from pagoda_proto.steps import Chunk, StepPlan
from pagoda_worker.adapters.store import NO_ADAPTERS, Adapters
from pagoda_worker.config import WorkerConfig
from pagoda_worker.kernels import choose
from pagoda_worker.kernels.aten import AtenOps
from pagoda_worker.kernels.cpu.build import LIBRARY
from pagoda_worker.kernels.ops import BackendError
from pagoda_worker.loading import memory
from pagoda_worker.loading.memory import GIB, NotEnoughMemory
from pagoda_worker.loading.model import LoadedModel
from pagoda_worker.process.startup import load_runner, runner_on_device
from pagoda_worker.rows.batch import Batch
from pagoda_worker.rows.rows import Row
from pagoda_worker.rows.slots import TokenSlots
from pagoda_worker.sampling.device_sampler import Chosen, GreedySampler
from pagoda_worker.step.graphs import ladder
from pagoda_worker.step.lines import Lines
from pagoda_worker.step.profiling import Rehearsal, largest_steps
from pagoda_worker.step.runner import ModelRunner

CPU = torch.device("cpu")
MANNERS = [{"temperature": 0.0}, {"temperature": 0.0}, {"temperature": 0.8}]


def loaded_by(ops: AtenOps) -> LoadedModel:
    model = decoder(ops)
    return LoadedModel(
        model=model, kv_groups=model.kv_groups, ops=ops, dtype=torch.bfloat16, device=CPU, vocab_size=VOCAB,
        max_model_len=MAX_LEN, fingerprint="tiny", numerics_id="tiny", batch_invariant=ops.batch_invariant,
    )  # fmt: skip


def config(**changes: Any) -> WorkerConfig:
    values: dict[str, Any] = {"block_size": BLOCK, "max_rows": 5, "max_tokens_per_step": 40}
    return WorkerConfig(**(values | changes))


class Device:
    """Makes accelerators of one fake device and counts them."""

    def __init__(self, **facts: Any) -> None:
        self.facts = facts
        self.made: list[FakeAccelerator] = []

    def __call__(self, device: torch.device) -> FakeAccelerator:
        self.made.append(FakeAccelerator(**self.facts))
        return self.made[-1]


def start(
    device: Device, ops: AtenOps, the_config: WorkerConfig, draft: LoadedModel | None = None
) -> tuple[ModelRunner, list[tuple[int, int]]]:
    told: list[tuple[int, int]] = []
    return runner_on_device(loaded_by(ops), draft, the_config, device, lambda done, of: told.append((done, of))), told


@pytest.mark.parametrize(
    ("tokens", "rows", "max_len", "sizes"),
    [
        (40, 5, 96, [[8] * 5, [40]]),
        (41, 5, 20, [[9, 8, 8, 8, 8], [14, 14, 13]]),
        (3, 5, 96, [[1, 1, 1], [3]]),
        (8192, 2, 20, [[20, 20]]),
    ],
)
def test_the_largest_steps(tokens: int, rows: int, max_len: int, sizes: list[list[int]]) -> None:
    batches = list(largest_steps(config(max_tokens_per_step=tokens, max_rows=rows), max_len))
    assert [batch.query_lens for batch in batches] == sizes
    for batch in batches:
        assert len(batch.logit_indices) == batch.num_rows
        assert int(batch.kv_indices.max()) < BLOCK


def test_the_largest_steps_want_the_logits_of_drafts() -> None:
    speculative = config(speculation="suffix", max_drafts=6)
    wide, long = largest_steps(speculative, 96)
    assert (wide.query_lens, len(wide.logit_indices)) == ([8] * 5, 5 * 7)
    assert (long.query_lens, len(long.logit_indices)) == ([40], 7)
    (short,) = largest_steps(replace(speculative, max_tokens_per_step=1), 96)
    assert (short.query_lens, len(short.logit_indices)) == ([1], 1)


@pytest.mark.parametrize("adapters", [NO_ADAPTERS, FakeAdapters()])
def test_what_adapters_add_is_warmed_and_measured(adapters: Adapters) -> None:
    """In warm-up steps every token has an adapter, if there may be any."""
    loaded, seen = replace(loaded_by(AtenOps(CPU)), adapters=adapters), []

    class Seen:
        def forward(self, batch: Batch, kv: Any) -> torch.Tensor:
            seen.append(batch)
            return torch.zeros(batch.num_tokens, 1)

        def logits(self, hidden: torch.Tensor, *, slots: TokenSlots | None = None) -> torch.Tensor:
            assert (None if slots is None else len(slots.there)) == (len(hidden) if adapters.count else None)
            return torch.zeros(len(hidden), VOCAB)

    rehearsal = Rehearsal([replace(loaded, model=Seen())], config(), FakeAccelerator(), GreedySampler())
    rehearsal.warm_up()
    rehearsal.device_use(lambda: 0)
    assert len(seen) == 5
    for batch in seen:
        slots = None if batch.slots is None else batch.slots.there.tolist()
        assert slots == ([0] * batch.num_tokens if adapters.count else None)


def test_what_is_measured() -> None:
    accelerator = FakeAccelerator(free=60, total=80, bytes_per_step=7)
    use = Rehearsal([loaded_by(AtenOps(CPU))], config(), accelerator, GreedySampler()).device_use(lambda: 5)
    assert use == (80, 20, 7, 5)
    assert accelerator.journal == ["synchronized", "emptied"]  # memory in use is read while no step holds any


def test_what_is_measured_has_the_choice_of_tokens() -> None:
    sizes = []

    class Asked(GreedySampler):
        def takes(self, rows: Sequence[Row]) -> bool:
            return True

        def sample(self, logits: torch.Tensor, rows: Sequence[Row]) -> Chosen:
            assert len(logits) == len(rows)
            sizes.append(len(rows))
            return super().sample(logits, rows)

    Rehearsal([loaded_by(AtenOps(CPU))], config(), FakeAccelerator(), Asked()).device_use(lambda: 0)
    assert sizes == [5, 1]


def test_a_step_that_does_not_fit_names_the_options() -> None:
    class Small(FakeAccelerator):
        def peak_of(self, run: Any) -> int:
            raise torch.OutOfMemoryError("tried to allocate 9 GiB")

    message = "max_tokens_per_step=40 tokens and max_rows=5 rows does not fit"
    with pytest.raises(NotEnoughMemory, match=message):
        Rehearsal([loaded_by(AtenOps(CPU))], config(), Small(), GreedySampler()).device_use(lambda: 0)


def test_the_cache_takes_what_step_and_graphs_leave() -> None:
    (group,) = loaded_by(AtenOps(CPU)).kv_groups
    bytes_per_block = group.bytes_per_block(BLOCK)
    graphs = [1000, 100]
    lines = Lines(max_rows=5, max_len=MAX_LEN, block_size=BLOCK, scratch_blocks=[0], device=CPU).nbytes
    whole = 13 * bytes_per_block + 500 + 1000 + 100 * (len(ladder(5)) - 1) + lines
    facts = {"free": whole, "total": whole, "bytes_per_step": 500}

    device = Device(**facts, bytes_per_capture=lambda number: graphs[min(number, 1)])
    runner, told = start(device, CapturableOps(CPU), config(gpu_memory_utilization=1))
    assert runner.facts.num_blocks == 13 - 1  # one block for padding
    assert [cache.num_blocks for cache in runner.kv_cache] == [runner.facts.num_blocks + 1]  # type: ignore[attr-defined]
    assert told == [(number, len(ladder(5))) for number in range(1, len(ladder(5)) + 1)]

    less = Device(**(facts | {"free": whole - 1}), bytes_per_capture=lambda number: graphs[min(number, 1)])
    assert start(less, CapturableOps(CPU), config(gpu_memory_utilization=1))[0].facts.num_blocks == 12 - 1

    eager, told = start(Device(**facts), CapturableOps(CPU), config(enforce_eager=True, gpu_memory_utilization=1))
    assert eager.facts.num_blocks == (whole - 500) // bytes_per_block
    assert told == []


@pytest.mark.parametrize("option", ["num_blocks", "kv_cache_gib"])
def test_nothing_is_measured_for_a_cache_of_a_given_size(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the device nor its host."""
    monkeypatch.setattr(memory, "host_available_bytes", lambda _: 0)
    block_bytes = sum(shape.bytes_per_block(BLOCK) for shape in loaded_by(CapturableOps(CPU)).kv_groups)
    device = Device(free=0, total=GIB)
    runner, _ = start(
        device, CapturableOps(CPU), config(**{option: 30 if option == "num_blocks" else 30.5 * block_bytes / GIB})
    )
    assert runner.facts.num_blocks == 30
    assert len(device.made) == 1


def test_operations_that_cannot_be_recorded_are_launched_one_by_one() -> None:
    device = Device()
    _, told = start(device, AtenOps(CPU), config())
    assert told == []
    assert sum(accelerator.captures for accelerator in device.made) == 0


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_a_draft_model_on_a_device(enforce_eager: bool) -> None:
    """It shares the memory; its drafts are all accepted, since it is the model itself, also after replayed steps."""
    draft = loaded_by(CapturableOps(CPU))
    bytes_per_block = 2 * draft.kv_groups[0].bytes_per_block(BLOCK)
    device = Device(free=20 * bytes_per_block, total=20 * bytes_per_block, bytes_per_step=500)
    options = config(speculation="draft-model", draft_model="it", enforce_eager=enforce_eager)
    runner, _ = start(device, CapturableOps(CPU), options, draft)
    spare = 0 if enforce_eager else 1
    assert runner.facts.num_blocks == (int(20 * bytes_per_block * 0.9) - 500) // bytes_per_block - spare

    blocks = list(range(MAX_LEN // BLOCK))
    new = [new_row(1, [3, 1, 4, 1, 5], blocks)]
    tokens: list[int] = []
    for step, drafts in enumerate((0, 2, 0, 0, 3, 0, 1), 1):
        known = 5 + len(tokens)
        chunk = Chunk(1, known - 1, 1, True, drafts) if tokens else Chunk(1, 0, 5, True)
        (output,) = runner.execute(StepPlan(step=step, new_rows=new, chunks=[chunk])).outputs
        assert (output.num_drafted, len(output.token_ids)) == (drafts, 1 + drafts)
        new, tokens = [], tokens + output.token_ids
    assert (device.made[0].replays > 0) is not enforce_eager
    plain = ModelRunner(loaded_by(CapturableOps(CPU)), 60, config())
    driver = Driver(plain)
    results = [driver.run([driver.add(1, [3, 1, 4, 1, 5])])] + [driver.run([]) for _ in tokens[1:]]
    assert tokens == [result.outputs[0].token_ids[0] for result in results]


def streams(runner: ModelRunner, ahead: int) -> dict[int, list[int]]:
    """Tokens of rows that begin one after the other, with up to `ahead` steps launched before one is collected."""
    driver, found, pending = Driver(runner), {}, []
    for step in range(14):
        new = []
        if step < 5:
            params = SamplingParams(**MANNERS[step % 3])
            new = [driver.add(step, [(7 * step + i) % VOCAB for i in range(3 + 5 * step)], params=params, seed=step)]
            found[step] = []
        plan = driver.plan(new, chunk_tokens=9)
        pending.append(runner.launch(plan))
        while len(pending) > ahead:
            result = runner.collect(pending.pop(0))
            assert result.errors == []
            for output in result.outputs:
                found[output.row_id] += output.token_ids
    return found


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("ahead", [0, 1])
def test_tokens_are_those_of_a_host(enforce_eager: bool, ahead: int) -> None:
    device = Device()
    runner, _ = start(device, CapturableOps(CPU), config(enforce_eager=enforce_eager))
    plain = ModelRunner(loaded_by(CapturableOps(CPU)), 60, config())
    found, expected = streams(runner, ahead), streams(plain, 0)
    assert {row: tokens for row, tokens in found.items() if tokens} == {
        row: tokens[: len(found[row])] for row, tokens in expected.items()
    }
    assert (device.made[0].replays > 0) is not enforce_eager


def test_kernels_that_fail_at_the_largest_step_are_named() -> None:
    class Fails(CapturableOps):
        def attend(self, *operands: Any) -> torch.Tensor:
            raise OSError("no compiler")

    with pytest.raises(BackendError, match="torch failed: OSError: no compiler"):
        start(Device(), Fails(CPU), config())


@pytest.mark.parametrize("broken", ["linear", "attend", "new_kv_cache"])
def test_when_the_first_step_fails_auto_takes_the_next_back_end(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Fails(AtenOps):
        name = "native"

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no compiler")

    setattr(Fails, broken, fail)
    monkeypatch.setitem(choose.LOADERS, "native", lambda device, needs: (Fails(device, needs.dtype), {}))
    model = str(save(make_model(*NATIVE["llama"]), tmp_path, torch.bfloat16))
    with pytest.raises(BackendError, match=r"native failed: .*OSError"):
        load_runner(WorkerConfig(model=model, kernels="native", num_blocks=64), lambda done, of: None)
    runner = load_runner(WorkerConfig(model=model, num_blocks=64), lambda done, of: None)
    assert runner.execute(StepPlan(step=1, new_rows=[new_row(1, [3], [0])], chunks=[Chunk(1, 0, 1, True)])).outputs
    assert "torch serves: " in caplog.text
    assert "OSError" in caplog.text


def test_warm_up_leaves_no_row() -> None:
    runner, _ = start(Device(), CapturableOps(CPU), config())
    runner.warm_up()
    assert streams(runner, 1) == streams(start(Device(), CapturableOps(CPU), config())[0], 1)


@pytest.fixture
def torch_threads() -> Iterator[int]:
    """A number that no machine has by default."""
    before = torch.get_num_threads()
    yield 3
    torch.set_num_threads(before)


@pytest.mark.parametrize("kernels", ["torch", *(["native"] if LIBRARY.exists() else [])])
def test_torch_has_no_threads_beside_those_of_the_kernels(kernels: str, tmp_path: Path, torch_threads: int) -> None:
    model = save(make_model(*NATIVE["llama"]), tmp_path, torch.bfloat16)
    config = WorkerConfig(model=str(model), kernels=kernels, num_blocks=64, threads=torch_threads)
    load_runner(config, lambda done, of: None)
    assert torch.get_num_threads() == (1 if kernels == "native" else torch_threads)


def test_what_is_kept_for_adapters_is_told_and_not_given_to_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = save(make_model(*NATIVE["llama"]), tmp_path / "model")
    monkeypatch.setattr(memory, "host_available_bytes", lambda root: 10 * memory.CPU_CAP_BYTES // 1000)
    options = {"model": str(path), "lora_dir": str(tmp_path), "max_loras": 2, "kernels": "torch", "max_rows": 4096}
    caplog.set_level("INFO")
    blocks = [
        load_runner(WorkerConfig(**options, max_lora_gib=gib), lambda done, of: None).facts.kv_groups[0].num_blocks
        for gib in (0.005, 0.015)
    ]
    assert "adapters: memory for 2 of up to 5.1 MiB, 0.0 MiB of it taken" in caplog.text
    assert blocks[0] == pytest.approx(3 * blocks[1], rel=0.01)


@pytest.mark.parametrize("broken", ["one", "two"])
def test_named_adapters_with_which_nothing_finite_is_computed_end_the_start(broken: str, tmp_path: Path) -> None:
    path = save(make_model(*NATIVE["llama"]), tmp_path / "model")
    paths = {name: tmp_path / name for name in ("one", "two")}
    for name, one in paths.items():
        adapter_of(path, one, size=1e30 if name == broken else 0.06)
    named = ",".join(f"{name}={one}" for name, one in paths.items())
    config = WorkerConfig(model=str(path), lora_modules=named, max_loras=1, kernels="torch", num_blocks=32)
    with pytest.raises(ValueError, match=f"lora_modules: '{broken}' at .*{broken}: .* are not finite"):
        load_runner(config, lambda done, of: None)
    adapter_of(path, paths[broken])
    runner = load_runner(config, lambda done, of: None)
    assert (runner.num_rows, runner.facts.max_adapters) == (0, 1)
