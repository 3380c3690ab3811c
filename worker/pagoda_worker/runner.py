"""A step is: take the plan's changes, compute one batch, sample the rows that ask, and answer for every row.

`launch` does all of it that needs no token of this step on the host, `collect` the rest. Where an accelerator computes
and chooses the tokens, the next step may be launched in between: it reads those tokens on the device. Everywhere else
the next launch begins by finishing the step before it, so a step never sees a token that is not there.

Rows are independent: whatever goes wrong with one (a claim that does not hold, logits that are no numbers) ends that
row and no other. A failure of the forward pass itself ends the rows of that step, and the runner goes on.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from pagoda_proto.errors import ErrorCode
from pagoda_proto.params import SamplingParams
from pagoda_proto.steps import Chunk, NewRow, RowError, RowOutput, StepPlan, StepResult, TopLogprobs
from pagoda_worker.accelerator import Accelerator
from pagoda_worker.batch import Batch, build_batch
from pagoda_worker.config import WorkerConfig
from pagoda_worker.device_sampler import NO_TOKEN, DeviceSampler, GreedySampler
from pagoda_worker.feeding import feed, uploaded
from pagoda_worker.kernels.ops import Cache
from pagoda_worker.loading import LoadedModel
from pagoda_worker.logprobs import RawLogprobs
from pagoda_worker.pending import OnDevice, OnHost, Pending, Work
from pagoda_worker.rows import Row
from pagoda_worker.sampler import NOT_A_NUMBER, Fault, Sample, sample
from pagoda_worker.table import UNKNOWN_ROW, RowTable, RunnerFacts

log = logging.getLogger(__name__)

T = TypeVar("T")

HOST = torch.device("cpu")
MAX_PENDING = 2  # launched and not answered: one computes, one waits behind it
# Logits of prompt tokens are wanted for every position; this many rows of them exist at once.
PROMPT_LOGIT_ROWS = 64


class ModelRunner:
    """Executes step plans on one model replica. Not thread-safe; one thread at a time calls it.

    `accelerator` is that of the model's device, None on a CPU; `sampler` chooses tokens there.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        num_blocks: int,
        config: WorkerConfig,
        accelerator: Accelerator | None = None,
        sampler: DeviceSampler | None = None,
    ) -> None:
        self.facts = RunnerFacts(
            model_fingerprint=loaded.fingerprint,
            numerics_id=loaded.numerics_id,
            device=str(loaded.device),
            vocab_size=loaded.vocab_size,
            max_model_len=loaded.max_model_len,
            num_blocks=num_blocks,
            block_size=config.block_size,
            max_rows=config.max_rows,
            max_tokens_per_step=config.max_tokens_per_step,
        )
        self._model = loaded.model
        self._ops = loaded.ops
        self._device = loaded.device
        self._accelerator = accelerator
        self._sampler = sampler or GreedySampler()
        self._kv = loaded.new_kv_cache(num_blocks, config.block_size)
        self._table = RowTable(self.facts)
        self._pending: deque[Pending] = deque()
        self._settled_at = 0.0
        self._last_failure = ""

    @property
    def kv_cache(self) -> Cache:
        return self._kv

    def reset(self) -> None:
        """Forget all rows and every step that was not answered, once the device is done with them.

        The cache keeps its bytes, which no later row reads before writing them.
        """
        if self._pending and self._accelerator is not None:
            self._accelerator.synchronize()
        self._pending.clear()
        self._table.clear()

    def warm_up(self) -> None:
        """Compute one token along the ordinary path, so that the first request pays for no first call.

        Raises:
            RuntimeError: the model cannot do it.
        """
        row = NewRow(
            row_id=0,
            token_ids=[0],
            num_prompt_tokens=1,
            num_computed=0,
            block_ids=[0],
            params=SamplingParams(temperature=0.0),
            seed=0,
        )
        result = self.execute(StepPlan(step=0, new_rows=[row], chunks=[Chunk(0, 0, 1, True)]))
        self.reset()
        if result.errors:
            raise RuntimeError(f"the model failed its first step: {result.errors[0].message}")

    def execute(self, plan: StepPlan) -> StepResult:
        """Run one plan. Every chunk that samples gets an output or an error; a row in `errors` has been dropped.

        Raises:
            torch.AcceleratorError: the device is lost, and this process with it.
        """
        return self.collect(self.launch(plan))

    def launch(self, plan: StepPlan) -> Pending:
        """Take a plan and set its computation going; on a CPU the forward pass is over on return.

        Earlier steps are finished first where this one cannot begin without: their tokens are the host's to choose,
        or enough steps are under way.

        Raises:
            torch.AcceleratorError: the device is lost, and this process with it.
        """
        began = time.perf_counter()
        while self._pending and (isinstance(self._pending[-1].launched, OnHost) or len(self._pending) >= MAX_PENDING):
            self._settle(self._pending.popleft())
        copies = self._table.apply(plan)
        work = self._table.accept(plan.chunks)
        pending = Pending(step=plan.step, work=work, began=began, computing=time.perf_counter())
        pending.launched = self._guarded(lambda: self._start(copies, work), work, copies)
        if pending.launched is None:
            pending.work = []  # its rows, if any, have ended
        pending.errors = self._table.take_errors()
        self._pending.append(pending)
        return pending

    def collect(self, pending: Pending) -> StepResult:
        """The answer to a launched plan, as `execute` gives it; waits for the device if need be.

        Raises:
            torch.AcceleratorError: the device is lost, and this process with it.
        """
        while pending.result is None:
            self._settle(self._pending.popleft())
        return pending.result

    def _start(self, copies: list[tuple[int, int]], work: Work) -> OnDevice | OnHost | None:
        if copies:
            self._ops.copy_blocks(self._kv, copies)
        if not work:
            return None
        batch = self._batch(work)
        hidden = self._model.forward(batch, self._kv)
        rows = [row for row, chunk in work if chunk.sample]
        logits = self._model.logits(hidden[batch.logit_indices]) if rows else None
        for row, chunk in work:
            row.num_computed = chunk.start + chunk.num_tokens
        if self._accelerator is None or not self._device_chooses(work, rows):
            return OnHost(starts=batch.query_starts, hidden=hidden, logits=logits)
        ids = batch.token_ids[:0] if logits is None else self._sampler.sample(logits, rows)
        fetch = self._accelerator.fetch(ids)
        promised = {row.row_id: (index, row.promise()) for index, row in enumerate(rows)}
        return OnDevice(ids=ids, fetch=fetch, promised=promised)

    def _device_chooses(self, work: Work, rows: list[Row]) -> bool:
        return self._sampler.takes(rows) and all(row.params.prompt_logprobs is None for row, _ in work)

    def _batch(self, work: Work) -> Batch:
        """The step's batch on the device; tokens that only the device knows are put in there."""
        if self._accelerator is None:
            return build_batch(work, self.facts.block_size, self._device)
        batch = uploaded(build_batch(work, self.facts.block_size, HOST), self._accelerator)
        for earlier in self._pending:
            if isinstance(earlier.launched, OnDevice):
                promised = earlier.launched.promised
                fed = [(batch.query_starts[i + 1] - 1, row.row_id) for i, (row, _) in enumerate(work)]
                fed = [(place, row_id) for place, row_id in fed if row_id in promised]
                sources = [promised[row_id][0] for _, row_id in fed]
                feed(batch, [place for place, _ in fed], sources, earlier.launched.ids, self._accelerator)
        return batch

    def _settle(self, pending: Pending) -> None:
        """Make the answer of the oldest pending step."""
        launched, outputs = pending.launched, None
        if launched is not None:
            alive = [(row, chunk) for row, chunk in pending.work if row.row_id not in pending.lost]
            outputs = self._guarded(lambda: self._finish(launched, pending), alive)
        lost = [RowError(row_id, ErrorCode.PROTOCOL_ERROR.value, UNKNOWN_ROW) for row_id in sorted(pending.lost)]
        failed = self._table.take_errors()
        for later in self._pending:
            later.lose(error.row_id for error in failed)
        done = time.perf_counter()
        pending.result = StepResult(
            step=pending.step,
            outputs=outputs or [],
            errors=pending.errors + lost + failed,
            elapsed_s=done - max(pending.began, self._settled_at),
            forward_s=done - max(pending.computing, self._settled_at),
        )
        self._settled_at = done

    def _guarded(self, do: Callable[[], T], work: Work, copies: list[tuple[int, int]] | None = None) -> T | None:
        """What `do` returns. None when it failed: these rows have ended, and holders of half-made copies too."""
        try:
            with torch.inference_mode():
                return do()
        except torch.AcceleratorError:
            raise
        except torch.OutOfMemoryError as error:
            self._log_failure(error)
            log.error("a lower gpu_memory_utilization, max_tokens_per_step or max_rows leaves more room")
            tokens = sum(chunk.num_tokens for _, chunk in work)
            message = f"the device ran out of memory in a step of {len(work)} rows and {tokens} tokens"
        except Exception as error:  # noqa: BLE001 - whatever the model raises ends these rows, never the process
            self._log_failure(error)
            message = f"the step failed: {type(error).__name__}"
        for row, _ in work:
            self._table.fail(row.row_id, ErrorCode.INTERNAL, message)
        self._table.fail_holders((target for _, target in copies or ()), ErrorCode.INTERNAL, message)
        if self._accelerator is not None:  # the failed step's tensors are let go of only now that its error is
            self._accelerator.empty_cache()
        return None

    def _log_failure(self, error: Exception) -> None:
        """Trace a failure when it first appears; repetitions of it get one line each."""
        failure = f"{type(error).__name__}: {error}"
        log.error("step failed: %s", failure, exc_info=error if failure != self._last_failure else None)
        self._last_failure = failure

    def _finish(self, launched: OnDevice | OnHost, pending: Pending) -> list[RowOutput]:
        work, prompt = pending.work, {}
        if isinstance(launched, OnDevice):
            samples = self._fetched(launched, work)
        else:
            samples = self._chosen(launched, work)
            prompt = {
                row.row_id: self._prompt_logprobs(row, chunk, launched.hidden[start : start + chunk.num_tokens])
                for (row, chunk), start in zip(work, launched.starts, strict=False)
                if row.params.prompt_logprobs is not None
            }
        rows = [row for row, _ in work if row.row_id not in pending.lost]
        answers = (self._answer(row, samples.get(row.row_id), prompt.get(row.row_id)) for row in rows)
        return [answer for answer in answers if answer is not None]

    def _fetched(self, launched: OnDevice, work: Work) -> dict[int, Sample | Fault]:
        """What the device chose, taken by the rows it was promised to."""
        ids = launched.fetch.wait()
        samples: dict[int, Sample | Fault] = {}
        for row, chunk in work:
            if chunk.sample:
                index, place = launched.promised[row.row_id]
                samples[row.row_id] = NOT_A_NUMBER if ids[index] == NO_TOKEN else Sample(ids[index], None)
                row.fulfil(place, max(0, ids[index]))
        return samples

    def _chosen(self, launched: OnHost, work: Work) -> dict[int, Sample | Fault]:
        """What the host chooses, taken by the rows."""
        rows = [row for row, chunk in work if chunk.sample]
        if launched.logits is None:
            return {}
        samples = dict(zip((row.row_id for row in rows), sample(launched.logits, rows), strict=True))
        for row in rows:
            if isinstance(sampled := samples[row.row_id], Sample):
                row.append(sampled.token_id)
        return samples

    def _answer(
        self, row: Row, sampled: Sample | Fault | None, prompt: list[TopLogprobs] | Fault | None
    ) -> RowOutput | None:
        """What came of a row's chunk; None when there is nothing to say."""
        for outcome in (prompt, sampled):
            if isinstance(outcome, Fault):
                self._table.fail(row.row_id, outcome.code, outcome.message)
                return None
        tokens, logprobs = [], None
        if isinstance(sampled, Sample):
            tokens = [sampled.token_id]
            logprobs = None if sampled.logprobs is None else [sampled.logprobs]
        prompt_logprobs = prompt if isinstance(prompt, list) and prompt else None
        if not tokens and prompt_logprobs is None:
            return None
        return RowOutput(row.row_id, tokens, logprobs, prompt_logprobs)

    def _prompt_logprobs(self, row: Row, chunk: Chunk, hidden: torch.Tensor) -> list[TopLogprobs] | Fault:
        """Reports on prompt tokens `chunk.start + 1` onwards, each from the `hidden` [n, H] of the token before it."""
        count = min(chunk.num_tokens, row.num_prompt_tokens - 1 - chunk.start)
        targets = row.tokens.array[chunk.start + 1 : chunk.start + 1 + max(0, count)]
        reports: list[TopLogprobs] = []
        for start in range(0, len(targets), PROMPT_LOGIT_ROWS):
            part = targets[start : start + PROMPT_LOGIT_ROWS].tolist()
            logits = self._model.logits(hidden[start : start + len(part)])
            reports.extend(_reports(logits, part, row.params.prompt_logprobs or 0))
        return reports if len(reports) == len(targets) else NOT_A_NUMBER


def _reports(logits: torch.Tensor, targets: list[int], num_top: int) -> Iterator[TopLogprobs]:
    """One report per row of `logits` [n, V], up to the first whose logits are not finite."""
    host = logits.cpu().numpy()
    tops = host.max(axis=-1)
    for values, top, target in zip(host, tops.tolist(), targets, strict=True):
        if not float("-inf") < top < float("inf"):
            return
        yield RawLogprobs(values, top, num_top).of(target)
