"""Offline generation: `LLM` holds a model, and drives its engine core in the caller's thread.

from pagoda import LLM, SamplingParams

with LLM("path/to/model") as llm:
    outputs = llm.generate(["Hello", "The sky is"], SamplingParams(max_tokens=16))
    print(outputs[0].outputs[0].text)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pagoda.offline.beams import BeamSearchOutput, BeamSearchParams, searched
from pagoda.offline.conversations import conversations
from pagoda.offline.local import Local, LoRARequest, Prompt, as_list, failure
from pagoda.offline.outputs import OfflineRequest, RequestOutput
from pagoda.offline.reading import (
    ClassificationOutput,
    EmbeddingOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ReadRequest,
    Reads,
    ScoringOutput,
)
from pagoda.offline.replaying import replayed
from pagoda.processes.garbage import fewer_collections
from pagoda_gateway.generation.transcripts import Transcript
from pagoda_proto.adapters.identity import Adapter
from pagoda_proto.errors import ErrorCode, InvalidParams, PagodaError, Problem
from pagoda_proto.params import SamplingParams
from pagoda_proto.pooling.params import PoolingParams
from pagoda_proto.records import Delta, NextTokens
from pagoda_worker.rows.processors import Processor, with_processor

Messages = Sequence[Mapping[str, Any]]

PROGRESS_EVERY_S = 0.1


class GenerationFailed(PagodaError):
    """Some prompts failed. `outputs` has the outputs of the others in their places, and None for those that failed."""

    def __init__(self, cause: PagodaError, outputs: list[RequestOutput | None]) -> None:
        super().__init__(cause.code, cause.message, cause.param)
        self.outputs = outputs


class LLM:
    """A model for offline use. Only one call runs at a time; calls from other threads wait.

    Args:
        model: Directory of a checkpoint or hub id, the bundled demo model if empty; or an already wired `Local`.
        options: Options of the engine core and of the worker by name (`dtype`, `max_model_len`, `kv_cache_gib`, ..).

    Raises:
        TypeError: an unknown option.
        ConfigError: options or model files that cannot be used.
    """

    def __init__(self, model: str | Local = "", **options: Any) -> None:
        self._local = Local.load(model, options)
        self._lock = threading.Lock()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        logits_processors: Processor | Sequence[Processor | None] | None = None,
        lora_request: LoRARequest | str | None = None,
    ) -> list[RequestOutput]:
        """Continue prompts: text, token ids, or {"prompt": ..} / {"prompt_token_ids": ..}; one or a list of them.

        Args:
            sampling_params: For all prompts, or one for each; the model author's defaults if None.
            use_tqdm: Show progress with token rates if standard error is a terminal.
            logits_processors: For all prompts, or one or None for each: a function from a choice's output tokens and
                the logits that follow them (numpy, [vocab_size] float32) to the logits to sample from. These replace
                the model's own: all other parameters apply to them, and log-probabilities are computed from them.
            lora_request: An adapter for all prompts: a name in `lora_modules`, or a request as in vLLM, with a path
                below `lora_dir`.

        Returns:
            One output per prompt, in the order of the prompts.

        Raises:
            PagodaError: prompts or parameters are not valid; nothing was generated.
            GenerationFailed: some prompts failed while running; it carries the outputs of the others.
        """
        given = as_list(prompts)
        if sampling_params is None:
            sampling_params = self._local.default_params()
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * len(given)
        several = sampling_params if isinstance(sampling_params, Sequence) else ()
        if len(several) != len(given) or not all(isinstance(one, SamplingParams) for one in several):
            message = f"must be one SamplingParams for all prompts or one for each, got {sampling_params!r:.64}"
            raise InvalidParams([Problem("sampling_params", f"{message} for {len(given)}")])
        if logits_processors is not None:
            sampling_params = _processed(sampling_params, logits_processors)
        return self._run(self._open(given, sampling_params, self._local.adapter(lora_request)), use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        use_tqdm: bool = False,
        lora_request: LoRARequest | str | None = None,
    ) -> list[BeamSearchOutput]:
        """The likeliest continuations of each prompt that a search with `params.beam_width` beams finds.

        Raises:
            PagodaError: a prompt does not fit, or the width exceeds the number of log-probabilities available.
        """
        outputs = self.generate(prompts, params.asked(), use_tqdm, lora_request=lora_request)
        return [searched(output, params) for output in outputs]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | str | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer a conversation (a list of {"role", "content"}), or each of several.

        Args:
            template_options: `tools`, `add_generation_prompt`, `continue_final_message`, and whatever the model's chat
                template reads.

        Raises:
            TypeError: the template does not read an option.
            PagodaError: as `generate`, and if the template rejects these messages.
        """
        known = {"tools", "add_generation_prompt", "continue_final_message"} | self._local.text.template_options
        for name in template_options:
            if name not in known:
                raise TypeError(
                    f"chat() got an unexpected option {name!r}; this model takes {', '.join(sorted(known))}"
                )
        several = conversations(messages)
        prompts = [self._local.text.encode_chat(one, **template_options) for one in several]
        return self.generate(prompts, sampling_params, use_tqdm, lora_request=lora_request)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        use_tqdm: bool = True,
        *,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        """The embedding of each prompt.

        Args:
            pooling_params: Deviations from what the model's files say: length, dimensions.
            truncate_prompt_tokens: Keep only this many tokens of each prompt; -1 for as many as the model takes.

        Raises:
            PagodaError: a prompt does not fit, or the model makes no embeddings.
            GenerationFailed: some prompts failed while running.
        """
        return self._reads(use_tqdm).embed(prompts, pooling_params, truncate_prompt_tokens)

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool = True,
        *,
        pooling_task: str | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """The model's output for each prompt: `pooling_task` is embed, token_embed or classify; if None, what
        `pooling_params` say, or what the model is for. Raises as `embed` does, and if the two differ."""
        return self._reads(use_tqdm).encode(prompts, pooling_params, pooling_task, truncate_prompt_tokens)

    def classify(
        self, prompts: Prompt | Sequence[Prompt], use_tqdm: bool = True, *, truncate_prompt_tokens: int | None = None
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
        """The probability of each of the model's labels. Raises as `embed` does."""
        return self._reads(use_tqdm).classify(prompts, None, truncate_prompt_tokens)

    def reward(
        self, prompts: Prompt | Sequence[Prompt], use_tqdm: bool = True, *, truncate_prompt_tokens: int | None = None
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
        """The raw scores of the model's head, without activation. Raises as `embed` does."""
        return self._reads(use_tqdm).classify(prompts, False, truncate_prompt_tokens)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        use_tqdm: bool = True,
        *,
        truncate_prompt_tokens: int | None = None,
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """Score pairs of texts: one against several, or two equally long lists pairwise. Raises as `embed` does."""
        return self._reads(use_tqdm).score(data_1, data_2, truncate_prompt_tokens)

    def _reads(self, show_progress: bool) -> Reads:
        return Reads(self._local, lambda requests: self._run(requests, show_progress))

    def replay(self, transcript: Transcript, use_tqdm: bool = False) -> Transcript:
        """Recompute a request from the transcript that a server kept (`read_transcript`); returns a new transcript.
        `differences` says where the two differ.

        Raises:
            PagodaError: it does not fit the model.
            GenerationFailed: it failed while running.
        """
        return replayed(self._local, lambda requests: self._run(requests, use_tqdm), transcript)

    @property
    def model_fingerprint(self) -> str:
        """Identifies the weights by their content."""
        return self._local.engine.load().model_fingerprint

    @property
    def numerics_id(self) -> str:
        """Identifies everything else that results depend on: kernels, dtypes, formats."""
        return self._local.engine.load().numerics_id

    @property
    def vocab_size(self) -> int:
        """Width of the logits; all token ids are below it."""
        return self._local.limits.vocab_size

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of a prompt and its output together."""
        return self._local.limits.max_model_len

    def default_sampling_params(self) -> SamplingParams:
        """The parameters that the model's author recommends (generation_config.json)."""
        return self._local.default_params()

    def bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """`SamplingParams.bad_words_token_ids` for words given as text."""
        return self._local.text.bad_words(words)

    def tokenize(self, text: str) -> list[int]:
        """Token ids of a text, as `generate` sees it."""
        return self._local.text.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._local.text.decode(token_ids)

    def close(self) -> None:
        """Release the model. Closing twice does nothing."""
        with self._lock:
            self._local.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @fewer_collections()
    def _open(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], adapter: Adapter | None = None
    ) -> list[OfflineRequest]:
        opened, errors = [], {}
        for index, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
            try:
                opened.append(self._local.open(prompt, one, adapter=adapter))
            except PagodaError as error:
                errors[index] = error
        if errors:
            raise failure(errors)
        return opened

    @fewer_collections()
    def _run(self, requests: list[Any], show_progress: bool) -> list[Any]:
        self._local.check_process()
        engine = self._local.engine
        with self._lock, _Display(len(requests), show_progress) as display:
            collector = _Collector(self._local, requests)
            for request in requests:
                engine.submit(request.record, collector)
            try:
                while collector.num_open:
                    engine.step()
                    display.show(collector)
            finally:
                collector.abort_open()
        errors = {index: request.error for index, request in enumerate(requests) if request.error is not None}
        if errors:
            raise GenerationFailed(failure(errors), [None if r.error else r.output for r in requests])
        return [request.output for request in requests]


def _processed(
    params: Sequence[SamplingParams], processors: Processor | Sequence[Processor | None]
) -> list[SamplingParams]:
    given = [processors] * len(params) if callable(processors) else list(processors)
    if len(given) != len(params):
        message = f"must be one for all prompts or one for each, got {len(given)} for {len(params)}"
        raise InvalidParams([Problem("logits_processors", message)])
    pairs = zip(params, given, strict=True)
    return [one if processor is None else with_processor(one, processor) for one, processor in pairs]


class _Collector:
    """The sink of one call: passes deltas to their requests."""

    def __init__(self, local: Local, requests: list[OfflineRequest | ReadRequest]) -> None:
        self._engine = local.engine
        self._open = {request.record.request_id: request for request in requests}
        self.num_input_tokens = 0
        self.num_output_tokens = 0
        self.num_ended = 0

    @property
    def num_open(self) -> int:
        return len(self._open)

    def accepted(self, request_id: str, attempt: int, stream: int) -> None: ...

    def rejected(self, request_id: str, attempt: int, error: PagodaError, retry_after_s: float) -> None:
        self._end(request_id, error)

    def migrate(self, request_id: str, attempt: int, reason: str) -> None:
        self._end(request_id, PagodaError(ErrorCode.UNAVAILABLE, reason))

    def next_tokens(self, tokens: NextTokens) -> None:
        self.deltas(tokens.deltas())

    def deltas(self, deltas: list[Delta]) -> None:
        for delta in deltas:
            request = self._open.get(delta.request_id)
            if request is None:
                continue
            self.num_output_tokens += len(delta.tokens.token_ids)
            stopped = request.take(delta)
            if stopped is not None:
                self._engine.abort(delta.request_id, (stopped,))
            if request.ended and delta.ends_request:
                self.num_input_tokens += len(request.record.prompt_token_ids)
                self._end(delta.request_id, None)

    def _end(self, request_id: str, error: PagodaError | None) -> None:
        request = self._open.pop(request_id, None)
        if request is not None:
            self.num_ended += 1
            if error is not None:
                request.error = error

    def abort_open(self) -> None:
        """Leave nothing behind in the engine core, even if the caller interrupts us."""
        for request_id in self._open:
            self._engine.abort(request_id)
        while self._open and self._engine.step(0.0):
            pass


class _Display:
    """Progress with token rates on standard error, if that is a terminal."""

    def __init__(self, total: int, wanted: bool) -> None:
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("{task.fields[rates]}"), console=console, disable=not (wanted and console.is_terminal),
        )  # fmt: skip
        self._task = self._progress.add_task("generating", total=total, rates="")
        self._started = time.monotonic()
        self._shown_at = 0.0

    def show(self, collector: _Collector) -> None:
        now = time.monotonic()
        if self._progress.disable or (now - self._shown_at < PROGRESS_EVERY_S and collector.num_open):
            return
        self._shown_at = now
        elapsed_s = now - self._started
        rates = (
            f"in {collector.num_input_tokens / elapsed_s:.0f} tokens/s, "
            f"out {collector.num_output_tokens / elapsed_s:.0f} tokens/s"
        )
        self._progress.update(self._task, completed=collector.num_ended, rates=rates)

    def __enter__(self) -> _Display:
        if not self._progress.disable:  # rich before 14.3 would end even then with an empty line
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._progress.disable:
            self._progress.stop()
