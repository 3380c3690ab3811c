"""The engine core is the last tier that knows the model, so it checks again; admitted requests can run to their end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from pagoda_engine_core.config import EngineConfig
from pagoda_engine_core.dispatch.answers import Draining, Full, Sink, Submission
from pagoda_engine_core.dispatch.throughput import Throughput
from pagoda_engine_core.dispatch.waiting import Ahead
from pagoda_engine_core.grammars.verdicts import Verdict, Verdicts
from pagoda_engine_core.scheduling.request import Request
from pagoda_proto.adapters.identity import adapter_problems
from pagoda_proto.channel import MAX_ID_BYTES
from pagoda_proto.errors import ErrorCode, InvalidParams, PagodaError, Problem
from pagoda_proto.params import LAST_PRIORITY, MAX_SEED, MIN_PRIORITY, ModelLimits, check_for_model
from pagoda_proto.pooling.params import Readings, check_pooling
from pagoda_proto.records import MAX_WEIGHT, Pool, PriorOutput, RequestRecord
from pagoda_proto.steps import Hello
from pagoda_proto.times import NO_WORKER_WAIT_S

MAX_TENANT_BYTES = 256
MAX_ATTEMPT = 2**31 - 1
MAX_RETRY_AFTER_S = 300.0
FIRST_EXPECTED_OUTPUT = 128
"""Output tokens assumed per request until one has ended."""
LEAST_WEIGHT = 0.05
"""Least weight of the newest ending in the average output length."""


@dataclass(slots=True, eq=False)
class HeldSubmission:
    """A submission that waits for the model's limits, or until its grammar is checked.

    `since` is when its timeout starts.
    """

    submission: Submission
    since: float
    aborted: set[int] = field(default_factory=set)  # choices

    @property
    def num_tokens(self) -> int:
        return len(self.submission.record.prompt_token_ids)

    @property
    def grammar(self) -> str:
        return self.submission.record.task.params.grammar


class Admission:
    """Admits submissions. A submission is held, neither admitted nor refused, until a first worker has reported the
    model's limits and until its grammar is checked.

    `check` starts checking a grammar for a tenant; the caller passes the verdict to `judged`. Only new requests have
    their grammar checked: a check can fail by its time limit, and a request that has begun is never refused.
    """

    def __init__(self, config: EngineConfig, check: Callable[[str, str], object]) -> None:
        self._config = config
        self._check = check
        self._checking: dict[str, set[str]] = {}  # tenants, by grammar
        self._verdicts = Verdicts()
        self._held: dict[str, HeldSubmission] = {}
        self._num_held_tokens = 0
        self._throughput = Throughput()
        self._crowded = Throughput()  # while requests waited: a lone one gets far less from a worker than many
        self._expected_output = float(FIRST_EXPECTED_OUTPUT)
        self._num_ended = 0
        self.limits: ModelLimits | None = None
        self.readings = Readings()
        self.model_fingerprint = ""
        self.closed = False
        self.why_closed = ""

    @property
    def num_held(self) -> int:
        return len(self._held)

    def admit(
        self, submission: Submission, running: Submission | None, num_waiting: int, num_tokens: int, now: float
    ) -> Request | None:
        """The request to run, or None if it is held. `running` is an earlier attempt at it.

        `num_waiting` requests with `num_tokens` prompt tokens wait already. Raises PagodaError.
        """
        if self.closed:
            raise Draining(self.why_closed)
        held = self._held.get(submission.request_id)
        known = running or (held.submission if held else None)
        if known is not None and known.attempt >= submission.attempt:
            message = f"request {submission.request_id!r} is here already, as attempt {known.attempt}"
            raise PagodaError(ErrorCode.INVALID_ARGUMENT, message, "request_id")
        if known is None and not submission.resume.has_tokens:
            self._check_bounds(submission, num_waiting + len(self._held), num_tokens)
        if self.limits is None:
            self._hold(submission, now)
            return None
        self._check_model(submission)
        request = _request(submission, self.limits, self.readings)
        if self._may_compile(submission, now):
            return request
        self._hold(submission, now)
        return None

    def judged(self, grammar: str, verdict: Verdict, now: float) -> list[HeldSubmission]:
        """Record a verdict. Returns the submissions that were held for it."""
        self._checking.pop(grammar, None)
        self._verdicts.keep(grammar, verdict, now)
        waited = [held for held in self._held.values() if held.grammar == grammar]
        for held in waited:
            self._drop(held.submission.request_id)
        return waited

    def open(self, hello: Hello) -> list[HeldSubmission]:
        """Learn the model from its first worker. Returns the held submissions, which the caller admits now."""
        max_model_len = min(self._config.max_model_len or hello.max_model_len, hello.max_model_len)
        self.limits = ModelLimits(hello.vocab_size, max_model_len)
        self.readings = Readings(hello.pools, hello.pooled_width)
        if hello.pools:  # a model that pools yields no tokens
            self._expected_output = 0.0
        self.model_fingerprint = hello.model_fingerprint
        return self._take_held()

    def close(self, why: str) -> list[HeldSubmission]:
        """Admit nothing any more. Returns the held submissions."""
        self.closed, self.why_closed = True, why
        return self._take_held()

    def withdraw(self, request_id: str, choices: tuple[int, ...], sink: Sink | None) -> Submission | None:
        """Abort some choices of a held submission (all if none are named). Returns the submission if none are left.
        With `sink`, only if its answers go to that sink."""
        held = self._held.get(request_id)
        if held is None or (sink is not None and held.submission.sink is not sink):
            return None
        all_choices = set(range(held.submission.record.task.params.n))
        held.aborted |= all_choices & set(choices) if choices else all_choices
        if held.aborted != all_choices:
            return None
        self._drop(request_id)
        return held.submission

    def forget(self, sink: Sink) -> None:
        for request_id in [name for name, held in self._held.items() if held.submission.sink is sink]:
            self._drop(request_id)

    def forgive(self, seconds: float, now: float) -> None:
        """Exclude a time in which we did not run from timeouts and rates."""
        for held in self._held.values():
            held.since = min(held.since + seconds, now)
        for measured in (self._throughput, self._crowded):
            measured.forgive(seconds, now)

    def interrupted(self) -> None:
        """A worker is gone and its steps in flight yield nothing, so restart the measurements of throughput."""
        for measured in (self._throughput, self._crowded):
            measured.begin_anew()

    def expire(self, now: float) -> list[tuple[Submission, PagodaError]]:
        """Remove the submissions that were held for too long; returns them with their errors."""
        late = []
        for held in list(self._held.values()):
            submission = held.submission
            begun = submission.resume.has_tokens
            timeout_s = NO_WORKER_WAIT_S if begun else self._config.patience_s(submission.record.queue_timeout_s)
            if now - held.since >= timeout_s:
                self._drop(submission.request_id)
                code = ErrorCode.STREAM_INTERRUPTED if begun else ErrorCode.UNAVAILABLE
                what = "no worker came" if self.limits is None else "the grammar was not checked"
                late.append((submission, PagodaError(code, f"{what} within {timeout_s:g} s")))
        return late

    @property
    def needed_numerics(self) -> str:
        """The numerics that the first worker must have because a request that has begun is held."""
        begun = (held.submission.resume.begun for held in self._held.values())
        return next((one.numerics_id for one in begun if one is not None), "")

    # --- estimates of waiting times ----------------------------------------------------------------------------------

    def served(self, num_tokens: int, now: float, *, busy: bool, crowded: bool) -> None:
        """Count the tokens of requests that a step served; `busy` if requests are left, `crowded` if some wait."""
        self._throughput.served(num_tokens, now, busy=busy)
        self._crowded.served(num_tokens, now, busy=crowded)

    def note_length(self, num_output_tokens: int) -> None:
        """Count the output tokens of a request that has ended."""
        self._num_ended += 1
        weight = max(1 / self._num_ended, LEAST_WEIGHT)
        self._expected_output += (num_output_tokens - self._expected_output) * weight

    def check_wait(self, request: Request, ahead: Ahead) -> None:
        """Raises Full at once, not after its timeout, if a new request that must wait would wait longer than it may.
        Until a request has had to wait, the rate is unknown and no request is refused for it."""
        rate, patience_s = self._crowded.tokens_per_s, self._config.patience_s(request.record.queue_timeout_s)
        if not (rate and ahead.num_requests) or request.resumes:
            return
        wait_s = (ahead.num_tokens + self._expected_output * ahead.num_requests) / rate
        if wait_s > patience_s:
            request.let_go()
            raise Full(f"it would begin in about {math.ceil(wait_s)} s, and may wait {patience_s:g} s")

    def seconds_for(self, num_prompt_tokens: int, num_waiting: int, num_running: int) -> float:
        """Seconds until everything ahead of a new request is computed: waiting prompts, their output, and half the
        output of running requests. 0 while no rate is known."""
        rate = self._throughput.tokens_per_s
        if not rate:
            return 0.0
        num_outputs = self._expected_output * (num_waiting + self.num_held + num_running / 2)
        return min(MAX_RETRY_AFTER_S, max(1.0, (num_prompt_tokens + self._num_held_tokens + num_outputs) / rate))

    def _may_compile(self, submission: Submission, now: float) -> bool:
        """False while its grammar is being checked. Raises PagodaError if it was refused, or too many wait."""
        grammar = submission.record.task.params.grammar
        if not grammar or submission.resume.has_tokens:
            return True
        verdict = self._verdicts.find(grammar, now)
        if verdict is None:
            tenant = submission.record.tenant
            if tenant not in self._checking.get(grammar, ()):
                self._check(grammar, tenant)
                self._checking.setdefault(grammar, set()).add(tenant)
            return False
        if verdict.error is not None:
            raise verdict.error.anew()
        return True

    def _check_model(self, submission: Submission) -> None:
        begun = submission.resume.begun
        if begun is not None and begun.model_fingerprint != self.model_fingerprint:
            was, here = begun.model_fingerprint, self.model_fingerprint
            message = f"the request began with model {was!r}, and {here!r} is served here"
            raise PagodaError(ErrorCode.STREAM_INTERRUPTED, message, "begun")

    def _check_bounds(self, submission: Submission, num_waiting: int, num_tokens: int) -> None:
        if num_waiting >= self._config.max_queued_requests:
            raise Full(f"{num_waiting} requests are waiting")
        num_tokens += self._num_held_tokens + len(submission.record.prompt_token_ids)
        if num_tokens > self._config.max_queued_tokens:
            raise PagodaError(ErrorCode.OVERLOADED, f"{num_tokens} prompt tokens would be waiting")

    def _hold(self, submission: Submission, now: float) -> None:
        self._drop(submission.request_id)
        held = self._held[submission.request_id] = HeldSubmission(submission, now)
        self._num_held_tokens += held.num_tokens

    def _drop(self, request_id: str) -> None:
        held = self._held.pop(request_id, None)
        if held is not None:
            self._num_held_tokens -= held.num_tokens

    def _take_held(self) -> list[HeldSubmission]:
        held, self._held = self._held, {}
        self._num_held_tokens = 0
        return list(held.values())


def _request(submission: Submission, limits: ModelLimits, readings: Readings) -> Request:
    return Request(
        submission.record,
        max_output_tokens=check_submission(submission, limits, readings),
        now=submission.submitted_at,
        attempt=submission.attempt,
        resume=submission.resume,
    )


def check_submission(submission: Submission, limits: ModelLimits, readings: Readings) -> int:
    """The most outputs that a choice of this request may have; `readings` are the model's.

    Raises:
        InvalidParams: with every problem of the record, or every problem of the prior outputs.
        PagodaError: CONTEXT_LENGTH_EXCEEDED if prompt and requested output do not fit.
    """
    record, prior = submission.record, submission.resume.prior_outputs
    problems = list(record_problems(record, submission.attempt))
    if problems:
        raise InvalidParams(problems)
    max_output_tokens = _check_task(record, limits, readings)
    problems = [
        *_id_problems("eos_token_ids", record.task.eos_token_ids, limits),
        *_prior_problems(record.task.params.n, prior, max_output_tokens, limits),
    ]
    if problems:
        raise InvalidParams(problems)
    return max_output_tokens


def _check_task(record: RequestRecord, limits: ModelLimits, readings: Readings) -> int:
    """See `check_submission`."""
    if isinstance(record.task, Pool):
        check_pooling(record.task.pooling, record.prompt_token_ids, limits, readings)
        return 1
    if readings.outputs:
        message = f"this model gives {' and '.join(readings.outputs)} and does not generate text"
        raise InvalidParams([Problem("task", message)])
    return check_for_model(record.task.params, record.prompt_token_ids, limits)


def record_problems(record: RequestRecord, attempt: int) -> Iterator[Problem]:
    """Problems that do not depend on the model."""
    size = len(record.request_id.encode(errors="replace"))
    if not 1 <= size <= MAX_ID_BYTES:
        yield Problem("request_id", f"must have 1 to {MAX_ID_BYTES} bytes, got {size}")
    if not 0 <= attempt <= MAX_ATTEMPT:
        yield Problem("attempt", f"must be between 0 and {MAX_ATTEMPT}, got {attempt}")
    yield from adapter_problems(record.adapter)
    seed, asked = record.task.seed, record.task.params.seed
    if not 0 <= seed <= MAX_SEED:
        yield Problem("seed", f"must be between 0 and {MAX_SEED}, got {seed}")
    if record.task.params.grammar and not record.task.eos_token_ids:
        yield Problem("eos_token_ids", "a grammar needs an end-of-sequence token, and none was given")
    if asked is not None and asked != seed:
        yield Problem("seed", f"the seed in force ({seed}) is not the one asked for ({asked})")
    if not MIN_PRIORITY <= record.priority <= LAST_PRIORITY:
        yield Problem("priority", f"must be between {MIN_PRIORITY} and {LAST_PRIORITY}, got {record.priority}")
    if not 1 <= record.weight <= MAX_WEIGHT:
        yield Problem("weight", f"must be between 1 and {MAX_WEIGHT}, got {record.weight}")
    if len(record.tenant.encode(errors="replace")) > MAX_TENANT_BYTES:
        yield Problem("tenant", f"must have at most {MAX_TENANT_BYTES} bytes")
    if not (math.isfinite(record.queue_timeout_s) and record.queue_timeout_s >= 0):
        yield Problem("queue_timeout_s", f"must be 0 or a number of seconds, got {record.queue_timeout_s}")


def _prior_problems(
    num_choices: int, prior: Sequence[PriorOutput], max_output_tokens: int, limits: ModelLimits
) -> Iterator[Problem]:
    choices = [output.choice for output in prior]
    if len(set(choices)) != len(choices):
        yield Problem("prior_outputs", f"each choice may be given once, got {choices}")
    for output in prior:
        name = f"prior_outputs[{output.choice}]"
        if not 0 <= output.choice < num_choices:
            yield Problem(name, f"the request has {num_choices} choices")
        if len(output.token_ids) > max_output_tokens:
            yield Problem(name, f"at most {max_output_tokens} tokens are allowed, got {len(output.token_ids)}")
        yield from _id_problems(name, output.token_ids, limits)


def _id_problems(name: str, ids: Sequence[int], limits: ModelLimits) -> Iterator[Problem]:
    bad = next((token for token in ids if not 0 <= token < limits.vocab_size), None)
    if bad is not None:
        yield Problem(name, f"token ids must be between 0 and {limits.vocab_size - 1}, got {bad}")
