"""A step is: take the plan's changes, compute one batch, sample the rows that ask, and answer for every row.

Rows are independent: whatever goes wrong with one (a claim that does not hold, logits that are no numbers) ends that
row and no other. A failure of the forward pass itself ends the rows of that step, and the runner goes on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

import torch

from pagoda_proto.errors import ErrorCode
from pagoda_proto.params import SamplingParams
from pagoda_proto.steps import Chunk, NewRow, RowOutput, StepPlan, StepResult, TopLogprobs
from pagoda_worker.batch import NO_DRAFTS, Batch, build_batch
from pagoda_worker.config import WorkerConfig
from pagoda_worker.drafting import Drafter, NoDrafts
from pagoda_worker.loading import LoadedModel
from pagoda_worker.rows import Ids, Row
from pagoda_worker.sampler import NOT_A_NUMBER, Fault, Sample
from pagoda_worker.table import RowTable, RunnerFacts
from pagoda_worker.verification import sample_drafted

log = logging.getLogger(__name__)

Work = Sequence[tuple[Row, Chunk]]
# Logits of prompt tokens are wanted for every position; this many rows of them exist at once.
PROMPT_LOGIT_ROWS = 64


class ModelRunner:
    """Executes step plans on one model replica. Not thread-safe; one thread at a time calls it."""

    def __init__(
        self, loaded: LoadedModel, num_blocks: int, config: WorkerConfig, drafter: Drafter | None = None
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
        self._kv = loaded.new_kv_cache(num_blocks, config.block_size)
        self._drafter = drafter or NoDrafts()
        self._table = RowTable(self.facts)
        self._last_failure = ""

    def reset(self) -> None:
        """Forget all rows. The cache keeps its bytes, which no later row reads before writing them."""
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
        started = time.perf_counter()
        copies = self._table.apply(plan)
        work = self._table.accept(plan.chunks)
        computing = time.perf_counter()
        outputs = self._guarded(copies, work)
        done = time.perf_counter()
        return StepResult(
            step=plan.step,
            outputs=outputs,
            errors=self._table.take_errors(),
            elapsed_s=done - started,
            forward_s=done - computing,
        )

    def _guarded(self, copies: list[tuple[int, int]], work: Work) -> list[RowOutput]:
        try:
            with torch.inference_mode():
                if copies:
                    self._ops.copy_blocks(self._kv, copies)
                    self._drafter.copy_blocks(copies)
                return self._compute(work) if work else []
        except torch.AcceleratorError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever the model raises ends these rows, never the process
            self._log_failure(error)
            message = f"the step failed: {type(error).__name__}"
            for row, _ in work:
                self._table.fail(row.row_id, ErrorCode.INTERNAL, message)
            self._table.fail_holders((target for _, target in copies), ErrorCode.INTERNAL, message)
            return []

    def _log_failure(self, error: Exception) -> None:
        """Trace a failure when it first appears; repetitions of it get one line each."""
        failure = f"{type(error).__name__}: {error}"
        log.error("step failed: %s", failure, exc_info=error if failure != self._last_failure else None)
        self._last_failure = failure

    def _compute(self, work: Work) -> list[RowOutput]:
        drafts: Mapping[int, Ids] = self._drafter.draft(work)
        num_drafted = {row_id: len(tokens) for row_id, tokens in drafts.items()}
        batch, hidden = self._forward(work, drafts)
        if drafts and not hidden.isfinite().all():  # a draft may be no number, and masks do not hide those
            self._erase(batch, work)
            drafts = NO_DRAFTS
            batch, hidden = self._forward(work, drafts)
        rows = [row for row, chunk in work if chunk.sample]
        samples: dict[int, list[Sample] | Fault] = {}
        if rows:
            samples = sample_drafted(self._ops.sample, self._model.logits(hidden[batch.logit_indices]), rows, drafts)
        prompt = {
            row.row_id: self._prompt_logprobs(row, chunk, hidden[start : start + chunk.num_tokens])
            for (row, chunk), start in zip(work, batch.query_starts, strict=False)
            if row.params.prompt_logprobs is not None
        }
        answers = (
            self._answer(row, chunk, samples.get(row.row_id), prompt.get(row.row_id), num_drafted.get(row.row_id, 0))
            for row, chunk in work
        )
        return [answer for answer in answers if answer is not None]

    def _forward(self, work: Work, drafts: Mapping[int, Ids]) -> tuple[Batch, torch.Tensor]:
        batch = build_batch(work, self.facts.block_size, self._device, drafts)
        return batch, self._model.forward(batch, self._kv)

    def _erase(self, batch: Batch, work: Work) -> None:
        """Make the K and V of a step's drafts zero."""
        bounds = zip(batch.query_starts, batch.query_starts[1:], work, strict=False)
        places = [place for start, end, (_, chunk) in bounds for place in range(start + chunk.num_tokens, end)]
        shape = self._kv.shape
        zeros = torch.zeros(len(places), shape.num_kv_heads, shape.head_dim, dtype=shape.dtype, device=self._device)
        for layer in range(shape.num_layers):
            self._ops.write_kv(zeros, zeros, self._kv, layer, batch.kv_indices[places])

    def _answer(
        self,
        row: Row,
        chunk: Chunk,
        sampled: list[Sample] | Fault | None,
        prompt: list[TopLogprobs] | Fault | None,
        num_drafted: int,
    ) -> RowOutput | None:
        """Advance the row by its chunk and say what came of it; None when there is nothing to say."""
        for outcome in (prompt, sampled):
            if isinstance(outcome, Fault):
                self._table.fail(row.row_id, outcome.code, outcome.message)
                return None
        row.num_computed = chunk.start + chunk.num_tokens
        prompt_logprobs = prompt if isinstance(prompt, list) and prompt else None
        if not isinstance(sampled, list):
            return None if prompt_logprobs is None else RowOutput(row.row_id, [], None, prompt_logprobs)
        num_accepted = len(sampled) - 1
        row.num_computed += num_accepted
        hint = self._drafter.learn(row, num_drafted, num_accepted)
        tokens = [one.token_id for one in sampled]
        logprobs = [one.logprobs for one in sampled if one.logprobs is not None] or None
        return RowOutput(row.row_id, tokens, logprobs, prompt_logprobs, num_drafted, hint)

    def _prompt_logprobs(self, row: Row, chunk: Chunk, hidden: torch.Tensor) -> list[TopLogprobs] | Fault:
        """Reports on prompt tokens `chunk.start + 1` onwards, each from the `hidden` [n, H] of the token before it."""
        count = min(chunk.num_tokens, row.num_prompt_tokens - 1 - chunk.start)
        targets = row.tokens.array[chunk.start + 1 : chunk.start + 1 + max(0, count)]
        reports: list[TopLogprobs] = []
        for start in range(0, len(targets), PROMPT_LOGIT_ROWS):
            part = targets[start : start + PROMPT_LOGIT_ROWS].tolist()
            logits = self._model.logits(hidden[start : start + len(part)])
            reports += self._ops.report(logits, part, row.params.prompt_logprobs or 0)
        return reports if len(reports) == len(targets) else NOT_A_NUMBER
