"""The outputs of a runner while rows decode together."""

from __future__ import annotations

from collections.abc import Sequence

from bench.device.job import Steady

from pagoda_proto.adapters.identity import Adapter
from pagoda_proto.steps import StepResult
from pagoda_worker.step.pending import Pending
from pagoda_worker.step.runner import ModelRunner


def outputs_of(
    runner: ModelRunner, given: Sequence[list[int]], count: int, adapters: Sequence[Adapter | None] = (None,)
) -> tuple[list[list[int]], Steady]:
    """`count` tokens of each row, and the `Steady` that generated them."""
    collect, outputs = runner.collect, [list[int]() for _ in given]

    def collected(pending: Pending) -> StepResult:
        result = collect(pending)
        for output in result.outputs:
            outputs[output.row_id] += output.token_ids
        return result

    runner.collect = collected  # type: ignore[method-assign]
    steady = Steady(runner, given, adapters)
    steady.run(count - 1)
    steady.settle()
    runner.collect = collect  # type: ignore[method-assign]
    return outputs, steady
