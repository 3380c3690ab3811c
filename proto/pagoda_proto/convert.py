"""Protobuf <-> structs, the only converter here. Inbound values are validated by the struct they become."""

from __future__ import annotations

from typing import Any

from pagoda_proto.engine.v1 import engine_pb2 as pb
from pagoda_proto.errors import ErrorCode
from pagoda_proto.params import SamplingParams
from pagoda_proto.records import Begun, Delta, FinishReason, LedgerEntry, Load, PriorOutput, RequestRecord, Usage
from pagoda_proto.steps import TopLogprobs

_SCALARS = (
    "n", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "seed", "max_tokens", "min_tokens", "ignore_eos", "logprobs", "prompt_logprobs",
)  # fmt: skip
_TOKEN_LISTS = ("stop_token_ids", "allowed_token_ids")
TEXT_ONLY = ("stop", "include_stop_str_in_output", "skip_special_tokens")  # never leave the text side

_REASON_TO_PB = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
    FinishReason.ERROR: pb.FINISH_REASON_ERROR,
}
_REASON_FROM_PB = {value: key for key, value in _REASON_TO_PB.items()}


def params_to_pb(params: SamplingParams) -> pb.SamplingParams:
    message = pb.SamplingParams()
    for name in _SCALARS:
        value = getattr(params, name)
        if value is not None:
            setattr(message, name, value)
    for name in _TOKEN_LISTS:
        getattr(message, name).extend(getattr(params, name))
    message.logit_bias.update(params.logit_bias)
    for word in params.bad_words_token_ids:
        message.bad_words_token_ids.add().token_ids.extend(word)
    return message


def params_from_pb(message: pb.SamplingParams) -> SamplingParams:
    """Raises InvalidParams with every problem found."""
    fields: dict[str, Any] = {name: getattr(message, name) for name in _SCALARS if message.HasField(name)}
    fields |= {name: tuple(getattr(message, name)) for name in _TOKEN_LISTS}
    return SamplingParams(
        **fields,
        logit_bias=dict(message.logit_bias),
        bad_words_token_ids=tuple(tuple(word.token_ids) for word in message.bad_words_token_ids),
    )


def record_to_pb(record: RequestRecord) -> pb.RequestRecord:
    return pb.RequestRecord(
        request_id=record.request_id,
        prompt_token_ids=record.prompt_token_ids,
        params=params_to_pb(record.params),
        seed=record.seed,
        eos_token_ids=record.eos_token_ids,
        cache_salt=record.cache_salt,
        priority=record.priority,
        queue_timeout_s=record.queue_timeout_s,
    )


def record_from_pb(message: pb.RequestRecord) -> RequestRecord:
    """Raises InvalidParams when the parameters are not valid."""
    return RequestRecord(
        request_id=message.request_id,
        prompt_token_ids=list(message.prompt_token_ids),
        params=params_from_pb(message.params),
        seed=message.seed,
        eos_token_ids=tuple(message.eos_token_ids),
        cache_salt=message.cache_salt,
        priority=message.priority,
        queue_timeout_s=message.queue_timeout_s,
    )


def prior_to_pb(prior: PriorOutput) -> pb.ChoiceTokens:
    return pb.ChoiceTokens(choice=prior.choice, token_ids=prior.token_ids, finished=prior.finished)


def prior_from_pb(message: pb.ChoiceTokens) -> PriorOutput:
    return PriorOutput(choice=message.choice, token_ids=list(message.token_ids), finished=message.finished)


def begun_to_pb(begun: Begun) -> pb.Begun:
    return pb.Begun(**{name: getattr(begun, name) for name in Begun.__struct_fields__})


def begun_from_pb(message: pb.Begun) -> Begun:
    return Begun(**{name: getattr(message, name) for name in Begun.__struct_fields__})


def error_code_from(name: str) -> ErrorCode | None:
    """The code of this name; INTERNAL for one that only another version knows, None for none."""
    try:
        return ErrorCode(name) if name else None
    except ValueError:
        return ErrorCode.INTERNAL


def _logprobs_to_pb(entries: list[TopLogprobs] | None) -> list[pb.TokenLogprobs]:
    return [
        pb.TokenLogprobs(logprob=e.logprob, rank=e.rank, top_ids=e.top_ids, top_logprobs=e.top_logprobs)
        for e in entries or ()
    ]


def _logprobs_from_pb(entries: Any) -> list[TopLogprobs] | None:
    return [TopLogprobs(e.logprob, e.rank, list(e.top_ids), list(e.top_logprobs)) for e in entries] or None


def delta_to_pb(delta: Delta) -> pb.Delta:
    message = pb.Delta(
        request_id=delta.request_id,
        attempt=delta.attempt,
        choice=delta.choice,
        first_index=delta.first_index,
        token_ids=delta.token_ids,
        logprobs=_logprobs_to_pb(delta.logprobs),
        prompt_logprobs=_logprobs_to_pb(delta.prompt_logprobs),
        finish_reason=_REASON_TO_PB[delta.finish_reason],
        stop_token_id=-1 if delta.stop_token_id is None else delta.stop_token_id,
        error_code=delta.error_code or "",
        error_message=delta.error_message,
        ledger=[pb.LedgerEntry(cause=entry.cause, seconds=entry.seconds) for entry in delta.ledger or ()],
    )
    if delta.usage is not None:
        message.usage.CopyFrom(
            pb.Usage(
                prompt_tokens=delta.usage.prompt_tokens,
                cached_prompt_tokens=delta.usage.cached_prompt_tokens,
                output_tokens=delta.usage.output_tokens,
                preemptions=delta.usage.preemptions,
                replays=delta.usage.replays,
            )
        )
    if delta.begun is not None:
        message.begun.CopyFrom(begun_to_pb(delta.begun))
    return message


def delta_from_pb(message: pb.Delta) -> Delta:
    """A finish reason or error code of another version costs its own request its meaning, and nobody the session."""
    usage = message.usage
    known = message.finish_reason in _REASON_FROM_PB
    reason = _REASON_FROM_PB[message.finish_reason] if known else FinishReason.ERROR
    return Delta(
        request_id=message.request_id,
        attempt=message.attempt,
        choice=message.choice,
        first_index=message.first_index,
        token_ids=list(message.token_ids),
        logprobs=_logprobs_from_pb(message.logprobs),
        prompt_logprobs=_logprobs_from_pb(message.prompt_logprobs),
        finish_reason=reason,
        stop_token_id=None if message.stop_token_id < 0 else message.stop_token_id,
        error_code=error_code_from(message.error_code) if known else ErrorCode.INTERNAL,
        error_message=message.error_message,
        usage=Usage(
            prompt_tokens=usage.prompt_tokens,
            cached_prompt_tokens=usage.cached_prompt_tokens,
            output_tokens=usage.output_tokens,
            preemptions=usage.preemptions,
            replays=usage.replays,
        )
        if message.HasField("usage")
        else None,
        ledger=[LedgerEntry(entry.cause, entry.seconds) for entry in message.ledger] or None,
        begun=begun_from_pb(message.begun) if message.HasField("begun") else None,
    )


def load_to_pb(load: Load) -> pb.Load:
    return pb.Load(**{name: getattr(load, name) for name in Load.__struct_fields__})


def load_from_pb(message: pb.Load) -> Load:
    return Load(**{name: getattr(message, name) for name in Load.__struct_fields__})
