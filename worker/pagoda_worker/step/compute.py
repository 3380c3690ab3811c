"""Computes a step in two halves: `start` needs no token of this step on the host, `finish` makes the answers.

Which half chooses the tokens is decided once per step. Without an accelerator, or if any row needs the host, `finish`
does. Otherwise `start` has the device choose them and promises each row a token that only the device knows yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from pagoda_proto.errors import ErrorCode
from pagoda_proto.steps import Chunk, RowOutput, TopLogprobs
from pagoda_worker.config import WorkerConfig
from pagoda_worker.device.accelerator import Accelerator
from pagoda_worker.loading.model import LoadedModel
from pagoda_worker.models.recorded import Recorded
from pagoda_worker.rows.batch import NO_DRAFTS, Batch, build_batch
from pagoda_worker.rows.layouts import Layouts
from pagoda_worker.rows.processors import Processor, apply, processor_of
from pagoda_worker.rows.rows import Ids, Row
from pagoda_worker.rows.slots import TokenSlots, slots_of
from pagoda_worker.sampling.device_sampler import Chosen, DeviceSampler, GreedySampler, samples_of
from pagoda_worker.sampling.sampler import NOT_A_NUMBER, NOTHING_ALLOWED, Fault, Sample
from pagoda_worker.speculation.drafting import Drafter, NoDrafts
from pagoda_worker.speculation.verification import sample_drafted
from pagoda_worker.step.feeding import feed, uploaded
from pagoda_worker.step.graphs import Computed, Graphed
from pagoda_worker.step.pending import OnDevice, OnHost, Work

HOST = torch.device("cpu")
# Prompt log-probabilities need logits at every position; this many rows of logits exist at once.
PROMPT_LOGIT_ROWS = 64

Sampled = dict[int, list[Sample] | Fault]


class Compute:
    """A model, its KV cache, and the parts that draft and choose tokens. It changes rows, and never ends one.

    `kv` is the model's cache; `caches` are that one and the drafter's. See `ModelRunner` for the rest.
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
        self.kv = loaded.new_kv_cache(num_blocks, config.block_size)
        self._model = loaded.model
        self._graphed = loaded.model if isinstance(loaded.model, Graphed) else None
        self._recorded = loaded.model if isinstance(loaded.model, Recorded) else None
        self._ops = loaded.ops
        self._device = loaded.device
        self._block_size = config.block_size
        self._layouts = Layouts(config.block_size)
        self._adapts = loaded.adapters.count > 0
        self._drafter = drafter or NoDrafts()
        self.caches = ((loaded, self.kv), *self._drafter.caches)
        self._accelerator = accelerator
        self._sampler = sampler or GreedySampler()
        self._may_promise = accelerator is not None and not self._drafter.reads_all

    def most_tokens(self, configured: int) -> int:
        """Tokens of a step."""
        return configured

    def arranged(self, work: Work) -> Work:
        """`work` in the order that is cheapest for `start`; no answer depends on it."""
        if self._graphed is not None:
            return self._graphed.arranged(work)
        # Kernels read an adapter once for neighbours that have it.
        return sorted(work, key=lambda item: item[0].slot) if self._adapts else work

    def start(self, work: Work, earlier: Sequence[OnDevice] = ()) -> OnDevice | OnHost | None:
        """Launch the computation; None if there is nothing to answer. `earlier` steps are not finished yet."""
        if not work:
            return None
        drafts: Mapping[int, Ids] = self._drafter.draft(work)
        num_drafted = {row_id: len(tokens) for row_id, tokens in drafts.items()}
        drafts, (batch, hidden, logits, advance) = self._forward_finite(work, drafts, earlier)
        rows = [row for row, chunk in work if chunk.sample]
        for row, chunk in work:
            row.num_computed = chunk.start + chunk.num_tokens
        if self._accelerator is None or drafts or not self._device_chooses(work, rows):
            return OnHost(
                starts=batch.query_starts, hidden=hidden, logits=logits, drafts=drafts, num_drafted=num_drafted
            )
        chosen = Chosen(batch.token_ids[:0]) if logits is None else self._sampler.sample(logits, rows)
        advance(chosen.ids)
        fetch = self._accelerator.fetch(*chosen.tensors)
        promised = {row.row_id: (index, row.promise()) for index, row in enumerate(rows)}
        return OnDevice(ids=chosen.ids, fetch=fetch, promised=promised)

    def _forward_finite(
        self, work: Work, drafts: Mapping[int, Ids], earlier: Sequence[OnDevice]
    ) -> tuple[Mapping[int, Ids], Computed]:
        """The drafts kept, and the computed step; no drafts are kept if they make any hidden state non-finite.

        A masked K or V that is not finite still spoils attention, so what the drafts wrote is zeroed.
        """
        computed = self._forward(work, drafts, earlier)
        if not drafts or computed.hidden.isfinite().all():
            return drafts, computed
        self._erase(computed.batch, work)
        return NO_DRAFTS, self._forward(work, NO_DRAFTS, earlier)

    def _device_chooses(self, work: Work, rows: Sequence[Row]) -> bool:
        plain = all(row.params.prompt_logprobs is None and processor_of(row.params) is None for row, _ in work)
        return self._may_promise and plain and self._sampler.takes(rows)

    def _forward(self, work: Work, drafts: Mapping[int, Ids], earlier: Sequence[OnDevice]) -> Computed:
        replayed = self._graphed.replayed(work, earlier) if self._graphed is not None and not drafts else None
        if replayed is not None:
            return replayed
        if self._accelerator is None:
            batch = self._layouts.next(work, drafts)
        else:
            batch = uploaded(build_batch(work, self._block_size, HOST, drafts), self._accelerator)
            for step in earlier:
                self._feed(batch, work, step, self._accelerator)
        decoded = self._recorded.decoded(batch, self.kv) if self._recorded is not None else None
        if decoded is not None:
            return Computed(batch, *decoded)
        hidden = self._model.forward(batch, self.kv)
        logits = self._logits(hidden[batch.logit_indices], batch.logit_slots) if batch.num_logits else None
        return Computed(batch, hidden, logits)

    def _logits(self, hidden: torch.Tensor, slots: TokenSlots | None) -> torch.Tensor:
        return self._model.logits(hidden) if slots is None else self._model.logits(hidden, slots=slots)

    def _feed(self, batch: Batch, work: Work, step: OnDevice, accelerator: Accelerator) -> None:
        """Write the tokens promised by `step` at the ends of their rows."""
        fed = [(i, step.promised[row.row_id][0]) for i, (row, _) in enumerate(work) if row.row_id in step.promised]
        places = [batch.query_starts[i + 1] - 1 for i, _ in fed]
        feed(batch, places, [source for _, source in fed], step.ids, accelerator)

    def _erase(self, batch: Batch, work: Work) -> None:
        """Zero the K and V of a step's drafts."""
        bounds = zip(batch.query_starts, batch.query_starts[1:], work, strict=False)
        places = [place for start, end, (_, chunk) in bounds for place in range(start + chunk.num_tokens, end)]
        for cache in self.kv:
            shape = cache.shape
            zeros = torch.zeros(len(places), shape.num_kv_heads, shape.head_dim, dtype=shape.dtype, device=self._device)
            indices = batch.at(shape.table).kv_indices[places]
            for layer in range(shape.num_layers):
                self._ops.write_kv(zeros, zeros, cache, layer, indices)

    def finish(self, launched: OnDevice | OnHost, work: Work) -> dict[int, RowOutput | Fault]:
        """The outcome of the step, by row id; rows with nothing to report are left out."""
        prompt: dict[int, list[TopLogprobs] | Fault] = {}
        num_drafted: Mapping[int, int] = {}
        rows = [row for row, chunk in work if chunk.sample]
        samples: Sampled = {}
        if isinstance(launched, OnDevice):
            samples = _fetched(launched, rows)
        else:
            num_drafted = launched.num_drafted
            if launched.logits is not None:
                samples = sample_drafted(self._sample, launched.logits, rows, launched.drafts)
            prompt = {
                row.row_id: self._prompt_logprobs(row, chunk, launched.hidden[start : start + chunk.num_tokens])
                for (row, chunk), start in zip(work, launched.starts, strict=False)
                if row.params.prompt_logprobs is not None
            }
        answers: dict[int, RowOutput | Fault] = {}
        for row, _ in work:
            row_id = row.row_id
            answer = self._answer(row, samples.get(row_id), prompt.get(row_id), num_drafted.get(row_id, 0))
            if answer is not None:
                answers[row_id] = answer
        return answers

    def _sample(self, logits: torch.Tensor, rows: Sequence[Row]) -> list[Sample | Fault]:
        """See `Ops.sample`. Logits stay on a device that can choose for these rows, though the host waits for it."""
        processed = [(i, row, one) for i, row in enumerate(rows) if (one := processor_of(row.params)) is not None]
        failed = {i: fault for i, row, one in processed if (fault := _processed(logits[i], row, one)) is not None}
        chosen = self._choose(logits, rows)
        return [failed.get(i, one) for i, one in enumerate(chosen)] if failed else chosen

    def _choose(self, logits: torch.Tensor, rows: Sequence[Row]) -> list[Sample | Fault]:
        if self._accelerator is None or not self._sampler.takes(rows):
            return _explained(self._ops.sample(logits, rows), rows)
        chosen = self._sampler.sample(logits, rows)
        return _explained(samples_of(rows, [tensor.cpu() for tensor in chosen.tensors]), rows)

    def _answer(
        self, row: Row, sampled: list[Sample] | Fault | None, prompt: list[TopLogprobs] | Fault | None, num_drafted: int
    ) -> RowOutput | Fault | None:
        for outcome in (prompt, sampled):
            if isinstance(outcome, Fault):
                return outcome
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
        """Log-probabilities of prompt tokens from `chunk.start + 1` on, each from the `hidden` [n, H] of the token
        before."""
        count = min(chunk.num_tokens, row.num_prompt_tokens - 1 - chunk.start)
        targets = row.tokens.array[chunk.start + 1 : chunk.start + 1 + max(0, count)]
        reports: list[TopLogprobs] = []
        for start in range(0, len(targets), PROMPT_LOGIT_ROWS):
            part = targets[start : start + PROMPT_LOGIT_ROWS].tolist()
            logits = self._logits(hidden[start : start + len(part)], slots_of(row.slot, len(part), self._device))
            reports += self._ops.report(logits, part, row.params.prompt_logprobs or 0)
        return reports if len(reports) == len(targets) else NOT_A_NUMBER


def _processed(logits: torch.Tensor, row: Row, processor: Processor) -> Fault | None:
    """Let the row's own logits processor change its logits [V]; returns the fault, if any."""
    host = logits.cpu().numpy()
    problem = apply(processor, row.outputs.tolist(), host)
    if problem:
        return Fault(ErrorCode.INVALID_ARGUMENT, problem)
    logits.copy_(torch.from_numpy(host))
    return None


def _explained(samples: Sequence[Sample | Fault], rows: Sequence[Row]) -> list[Sample | Fault]:
    """Replace "nothing allowed" by the matcher's error where a failed matcher is the cause."""
    return [
        Fault(ErrorCode.INVALID_ARGUMENT, f"grammar: {row.matcher.error}")
        if one == NOTHING_ALLOWED and row.matcher is not None and row.matcher.error
        else one
        for one, row in zip(samples, rows, strict=True)
    ]


def _fetched(launched: OnDevice, rows: Sequence[Row]) -> Sampled:
    """The tokens chosen by the device, given to the rows they were promised to."""
    samples: Sampled = {}
    for row, one in zip(rows, _explained(samples_of(rows, launched.fetch.wait()), rows), strict=True):
        _, place = launched.promised[row.row_id]
        row.fulfil(place, 0 if isinstance(one, Fault) else one.token_id)
        samples[row.row_id] = one if isinstance(one, Fault) else [one]
    return samples
