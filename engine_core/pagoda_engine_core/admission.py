"""The engine core is the last to know the model, so it checks again; what passes here can run to its end."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from pagoda_engine_core.answers import Sink, Submission
from pagoda_engine_core.config import EngineConfig
from pagoda_engine_core.request import Request
from pagoda_proto.channel import MAX_ID_BYTES
from pagoda_proto.errors import ErrorCode, InvalidParams, PagodaError, Problem
from pagoda_proto.params import MAX_SEED, ModelLimits, check_for_model
from pagoda_proto.records import PriorOutput, RequestRecord
from pagoda_proto.steps import Hello

MAX_ATTEMPT = 2**31 - 1
RATE_WINDOW_S = 2.0


class FrontDoor:
    """Lets submissions in. Until a first worker has told the model's limits they are held, neither in nor refused."""

    def __init__(self, config: EngineConfig, now: float) -> None:
        self._config = config
        self._held: dict[str, Submission] = {}
        self._num_held_tokens = 0
        self._window_began = now
        self._window_tokens = 0
        self._tokens_per_s = 0.0
        self.limits: ModelLimits | None = None
        self.closed = False

    @property
    def num_held(self) -> int:
        return len(self._held)

    def admit(
        self, submission: Submission, running: Submission | None, num_waiting: int, num_tokens: int
    ) -> Request | None:
        """The request to run, or None while it is held. `running` is an earlier attempt of it.

        `num_waiting` requests with `num_tokens` prompt tokens wait behind the door. Raises PagodaError.
        """
        if self.closed:
            raise PagodaError(ErrorCode.UNAVAILABLE, "the engine core is draining")
        known = running or self._held.get(submission.request_id)
        if known is not None and known.attempt >= submission.attempt:
            message = f"request {submission.request_id!r} is here already, as attempt {known.attempt}"
            raise PagodaError(ErrorCode.INVALID_ARGUMENT, message, "request_id")
        if known is None:
            self._check_bounds(submission, num_waiting + len(self._held), num_tokens)
        if self.limits is None:
            self._drop(submission.request_id)
            self._held[submission.request_id] = submission
            self._num_held_tokens += len(submission.record.prompt_token_ids)
            return None
        return _request(submission, self.limits)

    def open(self, hello: Hello) -> list[Submission]:
        """The model's limits are known; the submissions that were held, to be admitted now."""
        max_model_len = min(self._config.max_model_len or hello.max_model_len, hello.max_model_len)
        self.limits = ModelLimits(hello.vocab_size, max_model_len)
        return self._take_held()

    def close(self) -> list[Submission]:
        """Nothing gets in any more; the submissions that were held."""
        self.closed = True
        return self._take_held()

    def withdraw(self, request_id: str, sink: Sink | None) -> Submission | None:
        """Stop holding a submission, if it is held (and `sink`, if given, is where its answers go)."""
        held = self._held.get(request_id)
        if held is None or (sink is not None and held.sink is not sink):
            return None
        return self._drop(request_id)

    def forget(self, sink: Sink) -> None:
        for request_id in [name for name, held in self._held.items() if held.sink is sink]:
            self._drop(request_id)

    def expire(self, now: float) -> list[tuple[Submission, PagodaError]]:
        """Submissions that were held for too long, and what to tell them."""
        late = []
        for held in list(self._held.values()):
            timeout_s = held.record.queue_timeout_s or self._config.queue_timeout_s
            if now - held.submitted_at >= timeout_s:
                self._drop(held.request_id)
                late.append((held, PagodaError(ErrorCode.UNAVAILABLE, f"no worker has come within {timeout_s:g} s")))
        return late

    def computed(self, num_tokens: int, now: float) -> None:
        """So many tokens are computed in one step; their rate tells how long a queue takes."""
        self._window_tokens += num_tokens
        age_s = now - self._window_began
        if age_s >= RATE_WINDOW_S:
            self._tokens_per_s = self._window_tokens / age_s
            self._window_began, self._window_tokens = now, 0

    def seconds_for(self, num_tokens: int) -> float:
        """When to come back if so many tokens are before you: 1 to 60 s."""
        return min(60.0, max(1.0, (num_tokens + self._num_held_tokens) / max(1.0, self._tokens_per_s)))

    def _check_bounds(self, submission: Submission, num_waiting: int, num_tokens: int) -> None:
        if num_waiting >= self._config.max_queued_requests:
            raise PagodaError(ErrorCode.OVERLOADED, f"{num_waiting} requests are waiting")
        num_tokens += self._num_held_tokens + len(submission.record.prompt_token_ids)
        if num_tokens > self._config.max_queued_tokens:
            raise PagodaError(ErrorCode.OVERLOADED, f"{num_tokens} prompt tokens would be waiting")

    def _drop(self, request_id: str) -> Submission | None:
        held = self._held.pop(request_id, None)
        if held is not None:
            self._num_held_tokens -= len(held.record.prompt_token_ids)
        return held

    def _take_held(self) -> list[Submission]:
        held, self._held = self._held, {}
        self._num_held_tokens = 0
        return list(held.values())


def _request(submission: Submission, limits: ModelLimits) -> Request:
    return Request(
        submission.record,
        max_output_tokens=check_submission(submission.record, submission.attempt, submission.prior, limits),
        now=submission.submitted_at,
        attempt=submission.attempt,
        prior=submission.prior,
    )


def check_submission(record: RequestRecord, attempt: int, prior: Sequence[PriorOutput], limits: ModelLimits) -> int:
    """The most output tokens a choice of this request may have.

    Raises:
        InvalidParams: with every problem of the record, or every problem of the prior outputs.
        PagodaError: CONTEXT_LENGTH_EXCEEDED when prompt and requested output do not fit.
    """
    problems = list(record_problems(record, attempt))
    if problems:
        raise InvalidParams(problems)
    max_output_tokens = check_for_model(record.params, record.prompt_token_ids, limits)
    problems = [*_eos_problems(record, limits), *_prior_problems(record, prior, max_output_tokens, limits)]
    if problems:
        raise InvalidParams(problems)
    return max_output_tokens


def record_problems(record: RequestRecord, attempt: int) -> Iterator[Problem]:
    """What is wrong whatever the model."""
    size = len(record.request_id.encode(errors="replace"))
    if not 1 <= size <= MAX_ID_BYTES:
        yield Problem("request_id", f"must have 1 to {MAX_ID_BYTES} bytes, got {size}")
    if not 0 <= attempt <= MAX_ATTEMPT:
        yield Problem("attempt", f"must be between 0 and {MAX_ATTEMPT}, got {attempt}")
    if not 0 <= record.seed <= MAX_SEED:
        yield Problem("seed", f"must be between 0 and {MAX_SEED}, got {record.seed}")
    if record.params.seed is not None and record.params.seed != record.seed:
        yield Problem("seed", f"the seed in force ({record.seed}) is not the one asked for ({record.params.seed})")
    if not (math.isfinite(record.queue_timeout_s) and record.queue_timeout_s >= 0):
        yield Problem("queue_timeout_s", f"must be 0 or a number of seconds, got {record.queue_timeout_s}")


def _eos_problems(record: RequestRecord, limits: ModelLimits) -> Iterator[Problem]:
    yield from _id_problems("eos_token_ids", record.eos_token_ids, limits)


def _prior_problems(
    record: RequestRecord, prior: Sequence[PriorOutput], max_output_tokens: int, limits: ModelLimits
) -> Iterator[Problem]:
    choices = [output.choice for output in prior]
    if len(set(choices)) != len(choices):
        yield Problem("prior_outputs", f"each choice may be given once, got {choices}")
    for output in prior:
        name = f"prior_outputs[{output.choice}]"
        if not 0 <= output.choice < record.params.n:
            yield Problem(name, f"the request has {record.params.n} choices")
        if len(output.token_ids) > max_output_tokens:
            yield Problem(name, f"at most {max_output_tokens} tokens are allowed, got {len(output.token_ids)}")
        yield from _id_problems(name, output.token_ids, limits)


def _id_problems(name: str, ids: Sequence[int], limits: ModelLimits) -> Iterator[Problem]:
    bad = next((token for token in ids if not 0 <= token < limits.vocab_size), None)
    if bad is not None:
        yield Problem(name, f"token ids must be between 0 and {limits.vocab_size - 1}, got {bad}")
