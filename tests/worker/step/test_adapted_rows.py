"""Rows and adapters: an adapter that cannot be loaded ends the row that asks; a row keeps its slot while it runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tests.worker.fakes_model import FakeLoaded, FakeModel, new_row

from pagoda_proto.adapters.files import AdapterError, AdapterGone
from pagoda_proto.adapters.identity import Adapter
from pagoda_proto.errors import ErrorCode
from pagoda_proto.steps import Chunk, StepPlan
from pagoda_worker.adapters.store import Room
from pagoda_worker.config import WorkerConfig
from pagoda_worker.rows.slots import NO_ADAPTER
from pagoda_worker.step.runner import ModelRunner

ONE, TWO, BAD, GONE = (Adapter(digit * 64, "/adapters") for digit in "12bc")


class FakeAdapters:
    """Slots by digest; records which were reported as in use."""

    count = 2
    named: Mapping[str, Adapter] = {}
    room = Room()

    def __init__(self) -> None:
        self.in_use: list[set[int]] = []

    def slot(self, adapter: Adapter, in_use: Collection[int]) -> int:
        self.in_use.append(set(in_use))
        if adapter == BAD:
            raise AdapterError("it does not fit")
        if adapter == GONE:
            raise AdapterGone("the files have changed")
        return int(adapter.digest[0]) - 1


def runner_of(adapters: FakeAdapters | None) -> tuple[ModelRunner, FakeModel]:
    model = FakeModel()
    loaded = FakeLoaded(model) if adapters is None else FakeLoaded(model, adapters=adapters)
    return ModelRunner(loaded, 16, WorkerConfig(block_size=16)), model  # type: ignore[arg-type]


def test_rows_have_the_slots_of_their_adapters_and_a_row_that_can_have_none_ends_alone() -> None:
    adapters = FakeAdapters()
    runner, model = runner_of(adapters)
    model.logits = lambda hidden, slots=None: FakeModel.logits(model, hidden)  # type: ignore[method-assign]
    assert runner.facts.max_adapters == 2
    asked = [None, ONE, BAD, TWO, GONE]
    rows = [new_row(index, [5, 6, 7], [index], adapter=adapter) for index, adapter in enumerate(asked)]
    chunks = [Chunk(index, 0, 3, True) for index in range(len(rows))]
    result = runner.execute(StepPlan(step=1, new_rows=rows, chunks=chunks))
    assert [(error.row_id, error.code, error.message) for error in result.errors] == [
        (2, ErrorCode.INVALID_ARGUMENT.value, "adapter: it does not fit"),
        (4, ErrorCode.ADAPTER_UNAVAILABLE.value, "adapter: the files have changed"),
    ]
    assert sorted(output.row_id for output in result.outputs) == [0, 1, 3]
    (batch,) = model.batches
    assert batch.slots is not None
    assert batch.slots.slots.tolist() == [NO_ADAPTER] * 3 + [0] * 3 + [1] * 3
    assert adapters.in_use == [{NO_ADAPTER}, {NO_ADAPTER, 0}, {NO_ADAPTER, 0}, {NO_ADAPTER, 0, 1}]
    again = new_row(5, [1], [5], adapter=ONE)
    runner.execute(StepPlan(step=2, finished_rows=[0, 1, 3], new_rows=[again], chunks=[Chunk(5, 0, 1, True)]))
    assert adapters.in_use[-1] == set(), "who has left needs no slot"


def test_rows_with_the_same_adapter_are_neighbours_and_each_gets_its_own_answer() -> None:
    runner, model = runner_of(FakeAdapters())
    model.logits = lambda hidden, slots=None: FakeModel.logits(model, hidden)  # type: ignore[method-assign]
    plain, _ = runner_of(None)
    asked = [TWO, ONE, None, TWO, ONE, None, ONE]
    prompts = [[5 + index] * (1 + index % 3) for index in range(len(asked))]
    chunks = [Chunk(index, 0, len(prompt), True) for index, prompt in enumerate(prompts)]
    rows = [new_row(index, prompts[index], [index], adapter=adapter) for index, adapter in enumerate(asked)]
    found = runner.execute(StepPlan(step=1, new_rows=rows, chunks=chunks))
    (batch,) = model.batches
    assert batch.slots is not None
    assert batch.slots.slots.tolist() == sorted(batch.slots.slots.tolist())
    alone = [new_row(index, prompts[index], [index]) for index in range(len(asked))]
    expected = plain.execute(StepPlan(step=1, new_rows=alone, chunks=chunks))
    by_row = {one.row_id: one.token_ids for one in expected.outputs}
    assert {one.row_id: one.token_ids for one in found.outputs} == by_row


def test_a_step_without_adapters_is_none_with_slots() -> None:
    runner, model = runner_of(FakeAdapters())
    runner.execute(StepPlan(step=1, new_rows=[new_row(0, [5], [0])], chunks=[Chunk(0, 0, 1, True)]))
    assert model.batches[0].slots is None


def test_a_worker_without_adapters_ends_rows_that_ask_for_one() -> None:
    runner, _ = runner_of(None)
    row = new_row(0, [5], [0], adapter=ONE)
    result = runner.execute(StepPlan(step=1, new_rows=[row], chunks=[Chunk(0, 0, 1, True)]))
    assert "no adapters are served" in result.errors[0].message
    assert runner.facts.max_adapters == 0
