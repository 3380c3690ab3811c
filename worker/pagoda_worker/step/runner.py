"""A step: apply the plan's changes, compute one batch, sample the rows that ask for it, and answer for every row.

`launch` does everything that needs no token of this step on the host, `collect` the rest. Where an accelerator computes
and chooses the tokens, the next step may be launched in between: it reads those tokens on the device. Where the host
chooses them, each launch first finishes the step before it, so a step never needs a token that does not exist yet; on a
CPU a launch does everything.

Rows are independent: a fault of one row (an invalid claim, logits that are not finite) ends that row and no other. An
exception is no row's fault: the step is lost, and the runner forgets all rows. They are recomputed from their records,
here or elsewhere, as if the process had died, but the weights stay loaded.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from pagoda_proto.adapters.identity import Adapter
from pagoda_proto.decodes import DecodeList, packed
from pagoda_proto.errors import ErrorCode
from pagoda_proto.params import SamplingParams
from pagoda_proto.pooling.params import PoolingParams
from pagoda_proto.steps import Chunk, KVGroup, NewRow, RowError, RowOutput, StepPlan, StepResult
from pagoda_worker.config import WorkerConfig
from pagoda_worker.device.accelerator import Accelerator
from pagoda_worker.kernels.ops import Cache
from pagoda_worker.loading.memory import num_swap_blocks
from pagoda_worker.loading.model import LoadedModel
from pagoda_worker.sampling.device_sampler import DeviceSampler
from pagoda_worker.sampling.sampler import Fault
from pagoda_worker.speculation.drafting import Drafter
from pagoda_worker.step.compute import Compute
from pagoda_worker.step.moving import BlockMover
from pagoda_worker.step.pending import OnDevice, OnHost, Pending
from pagoda_worker.step.reading import Reading
from pagoda_worker.step.table import UNKNOWN_ROW, RowTable, RunnerFacts, spans

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_PENDING = 2  # launched and not answered: one computes, one is queued behind it


class LostStep(RuntimeError):
    """Step `step` raised, and the runner has forgotten all rows. `reason` discloses none of their content."""

    def __init__(self, step: int, reason: str, *, out_of_memory: bool) -> None:
        super().__init__(f"step {step} is lost: {reason}")
        self.step = step
        self.reason = reason
        self.out_of_memory = out_of_memory


class ModelRunner:
    """Executes step plans on one model replica. Not thread-safe; one thread at a time calls it.

    `drafter` proposes draft tokens (None: no speculation), `accelerator` is that of the model's device (None on a CPU),
    `sampler` chooses tokens on that device.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        num_blocks: int,
        config: WorkerConfig,
        drafter: Drafter | None = None,
        accelerator: Accelerator | None = None,
        sampler: DeviceSampler | None = None,
    ) -> None:
        self._accelerator = accelerator
        self._compute: Compute | Reading
        if loaded.pooler is None:
            self._compute = Compute(loaded, num_blocks, config, drafter, accelerator, sampler)
        else:
            self._compute = Reading(loaded, loaded.pooler, num_blocks, config, accelerator)
        self.kv_cache: Sequence[Cache] = self._compute.kv
        caches = self._compute.caches
        shapes = [group for model, _ in caches for group in model.kv_groups]
        blocks = [one.num_blocks(num_blocks) for one in loaded.retentions] if num_blocks else []
        swap_blocks = num_swap_blocks(config, shapes, loaded.device.type == "cpu", loaded.retentions)
        self._mover = BlockMover(caches, config.block_size, spans(blocks), spans(swap_blocks), accelerator)
        kept = [one.kept for one in loaded.retentions]
        groups = [
            KVGroup(*sizes, self._mover.seconds_per_block(table))
            for table, sizes in enumerate(zip(blocks, kept, swap_blocks, strict=False))
        ]
        most_tokens = self._compute.most_tokens(config.max_tokens_per_step)
        self.facts = _facts(loaded, config, groups, most_tokens)
        self.depth = 1 if accelerator is None else MAX_PENDING  # how many steps to launch before the first is collected
        self._table = RowTable(self.facts, loaded.grammars, loaded.adapters)
        self._decodes = DecodeList()
        self._pending: deque[Pending] = deque()
        self._settled_at = 0.0
        self._last_failure = ""

    @property
    def num_rows(self) -> int:
        """Rows it holds, counting all steps launched so far."""
        return len(self._table)

    def reset(self) -> None:
        """Forget all rows and every unanswered step, once the device has finished them.

        The cache keeps its bytes; no later row reads them before writing them.
        """
        if self._pending and self._accelerator is not None:
            self._accelerator.synchronize()
        self._pending.clear()
        self._table.clear()
        self._decodes.clear()

    def warm_up(self) -> None:
        """Compute one token on the ordinary path, so that no request pays for first calls.

        Raises:
            RuntimeError: the model cannot do it.
        """
        if why := self.first_token():
            raise RuntimeError(f"the model failed its first step: {why}")

    def first_token(self, adapter: Adapter | None = None) -> str:
        """Compute one token, before there are any rows; returns why it cannot be computed, "" if it can."""
        pools = self.facts.pools
        row = NewRow(
            row_id=0,
            token_ids=[0],
            num_prompt_tokens=1,
            num_computed=0,
            block_ids=[span.start for span in spans(group.num_blocks for group in self.facts.kv_groups)],
            params=SamplingParams() if pools else SamplingParams(logprobs=0),  # exercises drawing and reporting, too
            seed=0,
            pooling=PoolingParams(output=pools[0]) if pools else None,
            adapter=adapter,
        )
        result = self.execute(StepPlan(step=0, new_rows=[row], chunks=[Chunk(0, 0, 1, True)]))
        self.reset()
        return result.errors[0].message if result.errors else ""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one plan. Every chunk that samples gets an output or an error; a row in `errors` has been dropped.

        Raises:
            LostStep: the step could not be computed.
            torch.AcceleratorError: the device is lost, and this process with it.
        """
        return self.collect(self.launch(plan))

    def launch(self, plan: StepPlan) -> Pending:
        """Take a plan and start its computation; on a CPU the step is over on return.

        Earlier steps are finished first if this one cannot begin before: because the host must choose their tokens, or
        because enough steps are pending.

        Raises:
            LostStep: this step, or one that had to be finished first, could not be computed.
            torch.AcceleratorError: the device is lost, and this process with it.
        """
        began = time.perf_counter()
        while self._pending and (isinstance(self._pending[-1].launched, OnHost) or len(self._pending) >= MAX_PENDING):
            self._settle_oldest()
        return self._or_lost(plan.step, (plan.num_rows, plan.num_tokens), lambda: self._launch(plan, began))

    def collect(self, pending: Pending) -> StepResult:
        """The answer to a launched plan, like that of `execute`; waits for the device if necessary.

        Raises:
            LostStep: this step, or one before it, could not be computed.
            torch.AcceleratorError: the device is lost, and this process with it.
        """
        while pending.result is None:
            self._settle_oldest()
        return pending.result

    def _launch(self, plan: StepPlan, began: float) -> Pending:
        table, mover = self._table, self._mover
        chunks = self._decodes.chunks(plan)
        table.apply(plan)
        if plan.swap_outs or plan.swap_ins or plan.block_copies:
            mover.swap_out(table.swap_outs(plan))
            mover.swap_in(table.swap_ins(plan))
            mover.copy(table.copies(plan))
        work = self._compute.arranged(table.accept(chunks))
        decoding = [chunk.row_id for chunk in chunks[: plan.decodes.count]]
        pending = Pending(step=plan.step, work=work, decoding=decoding, began=began, computing=time.perf_counter())
        earlier = [step.launched for step in self._pending if isinstance(step.launched, OnDevice)]
        pending.launched = self._compute.start(work, earlier)
        pending.errors = table.take_errors()
        if self._accelerator is None:  # all is computed
            self._settle(pending)
        else:
            self._pending.append(pending)
        return pending

    def _settle_oldest(self) -> None:
        pending = self._pending.popleft()
        sizes = [chunk.num_tokens for _, chunk in pending.work]
        self._or_lost(pending.step, (len(sizes), sum(sizes)), lambda: self._settle(pending))

    def _settle(self, pending: Pending) -> None:
        """Make the answer of a step; all before it are settled."""
        outputs = self._outputs(pending)
        lost = [RowError(row_id, ErrorCode.PROTOCOL_ERROR.value, UNKNOWN_ROW) for row_id in sorted(pending.lost)]
        failed = self._table.take_errors()
        for later in self._pending:
            later.lose(error.row_id for error in failed)
        done = time.perf_counter()
        tokens, outputs = packed(pending.decoding, outputs)
        pending.result = StepResult(
            step=pending.step,
            tokens=tokens,
            outputs=outputs,
            errors=pending.errors + lost + failed,
            elapsed_s=done - max(pending.began, self._settled_at),
            forward_s=done - max(pending.computing, self._settled_at),
        )
        self._settled_at = done

    def _outputs(self, pending: Pending) -> list[RowOutput]:
        """Finish a step. Rows with a fault end here; rows that ended earlier are skipped."""
        launched = pending.launched
        if launched is None:
            return []
        alive = [(row, chunk) for row, chunk in pending.work if row.row_id not in pending.lost]
        answers = self._compute.finish(launched, pending.work)
        outputs = []
        for row, _ in alive:
            match answers.get(row.row_id):
                case Fault(code, message):
                    self._table.fail(row.row_id, code, message)
                case RowOutput() as output:
                    outputs.append(output)
        return outputs

    def _or_lost(self, step: int, size: tuple[int, int], do: Callable[[], T]) -> T:
        """The result of `do`. If it raises, this step (of `size` rows and tokens) and all rows are lost."""
        try:
            with torch.inference_mode():
                return do()
        except torch.AcceleratorError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a model raises costs a step, never the process
            self._log_failure(error)
            out_of_memory, name = ran_out_of_memory(error), type(error).__name__
        # Only here are the error and the tensors held by its frames released.
        self.reset()
        if self._accelerator is not None:
            self._accelerator.empty_cache()
        reason = f"{'out of memory' if out_of_memory else name} in a step of {size[0]} rows and {size[1]} tokens"
        raise LostStep(step, reason, out_of_memory=out_of_memory)

    def _log_failure(self, error: Exception) -> None:
        """Log a failure with its traceback when it first appears, repetitions of it in one line each."""
        failure = f"{type(error).__name__}: {error}"
        log.error("step failed: %s", failure, exc_info=error if failure != self._last_failure else None)
        self._last_failure = failure


def ran_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out: numpy's or Python's, a device's, or the host's as torch reports it."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


def _facts(loaded: LoadedModel, config: WorkerConfig, groups: Sequence[KVGroup], most_tokens: int) -> RunnerFacts:
    return RunnerFacts(
        model_fingerprint=loaded.fingerprint,
        numerics_id=loaded.numerics_id,
        device=str(loaded.device),
        vocab_size=loaded.vocab_size,
        max_model_len=loaded.max_model_len,
        kv_groups=tuple(groups),
        block_size=config.block_size,
        max_rows=config.max_rows,
        max_tokens_per_step=most_tokens,
        pools=() if loaded.pooler is None else loaded.pooler.outputs,
        pooled_width=0 if loaded.pooler is None else loaded.pooler.width,
        max_adapters=loaded.adapters.count,
    )
