"""The only converter between protobuf messages and structs. The structs validate inbound values."""

from __future__ import annotations

from typing import Any

import msgspec
from google.protobuf.unknown_fields import UnknownFieldSet

from pagoda_proto.adapters.identity import Adapter
from pagoda_proto.engine.v1 import engine_pb2 as pb
from pagoda_proto.errors import ErrorCode, InvalidParams, Problem, error_code_from
from pagoda_proto.params import SamplingParams
from pagoda_proto.pooling.params import PoolingParams
from pagoda_proto.records import (
    Begun,
    Delta,
    FinishReason,
    Generate,
    LedgerEntry,
    Load,
    NextTokens,
    Pool,
    Pooled,
    PriorOutput,
    RequestRecord,
    Result,
    Resume,
    Task,
    Tokens,
    Usage,
)
from pagoda_proto.steps import TopLogprobs

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
    for field in pb.SamplingParams.DESCRIPTOR.fields:
        value = getattr(params, field.name)
        if field.name == "bad_words_token_ids":
            message.bad_words_token_ids.extend(pb.TokenSequence(token_ids=word) for word in value)
        elif isinstance(value, dict):
            getattr(message, field.name).update(value)
        elif isinstance(value, tuple):
            getattr(message, field.name).extend(value)
        elif value is not None:
            setattr(message, field.name, value)
    return message


def params_from_pb(message: pb.SamplingParams) -> SamplingParams:
    """Raises InvalidParams with every problem found."""
    fields: dict[str, Any] = {field.name: value for field, value in message.ListFields()}
    for name, value in fields.items():
        if name == "bad_words_token_ids":
            fields[name] = tuple(tuple(word.token_ids) for word in value)
        elif name == "logit_bias":
            fields[name] = dict(value)
        elif not isinstance(value, int | float | str):
            fields[name] = tuple(value)
    return SamplingParams(**fields)


def _generate_to_pb(task: Generate) -> pb.Generate:
    return pb.Generate(params=params_to_pb(task.params), seed=task.seed, eos_token_ids=task.eos_token_ids)


def _generate_from_pb(message: pb.Generate) -> Generate:
    params = params_from_pb(message.params)
    return Generate(params=params, seed=message.seed, eos_token_ids=tuple(message.eos_token_ids))


def _pool_to_pb(task: Pool) -> pb.Pool:
    fields = {name: getattr(task.pooling, name) for name in PoolingParams.__struct_fields__}
    return pb.Pool(**{name: value for name, value in fields.items() if value is not None})


def _pool_from_pb(message: pb.Pool) -> Pool:
    return Pool(pooling=PoolingParams(**{field.name: value for field, value in message.ListFields()}))


def _task_from_pb(message: pb.RequestRecord) -> Task:
    """Raises InvalidParams if the parameters are invalid or the task is unknown here."""
    match message.WhichOneof("task"):
        case "generate":
            return _generate_from_pb(message.generate)
        case "pool":
            return _pool_from_pb(message.pool)
        case _:
            raise InvalidParams([Problem("task", _no_task(message))])


def record_to_pb(record: RequestRecord) -> pb.RequestRecord:
    task = record.task
    return pb.RequestRecord(
        request_id=record.request_id,
        prompt_token_ids=record.prompt_token_ids,
        cache_salt=record.cache_salt,
        priority=record.priority,
        queue_timeout_s=record.queue_timeout_s,
        tenant=record.tenant,
        weight=record.weight,
        adapter=None if record.adapter is None else pb.Adapter(**msgspec.structs.asdict(record.adapter)),
        generate=_generate_to_pb(task) if isinstance(task, Generate) else None,
        pool=_pool_to_pb(task) if isinstance(task, Pool) else None,
    )


def record_from_pb(message: pb.RequestRecord) -> RequestRecord:
    """Raises InvalidParams if the parameters are invalid or the task is unknown here."""
    return RequestRecord(
        request_id=message.request_id,
        prompt_token_ids=list(message.prompt_token_ids),
        cache_salt=message.cache_salt,
        priority=message.priority,
        queue_timeout_s=message.queue_timeout_s,
        tenant=message.tenant,
        weight=message.weight or 1,
        adapter=Adapter(message.adapter.digest, message.adapter.path) if message.HasField("adapter") else None,
        task=_task_from_pb(message),
    )


def _no_task(message: pb.RequestRecord) -> str:
    known = ", ".join(arm.name for arm in message.DESCRIPTOR.oneofs_by_name["task"].fields)
    strange = UnknownFieldSet(message)
    told = f"field {strange[0].field_number}, which is not known here" if len(strange) else "none"
    return f"must be one of {known}; the record has {told}"


def prior_to_pb(prior: PriorOutput) -> pb.PriorOutput:
    return pb.PriorOutput(choice=prior.choice, token_ids=prior.token_ids, finished=prior.finished)


def prior_from_pb(message: pb.PriorOutput) -> PriorOutput:
    return PriorOutput(choice=message.choice, token_ids=list(message.token_ids), finished=message.finished)


def resume_to_pb(resume: Resume) -> pb.Resume:
    begun = None if resume.begun is None else begun_to_pb(resume.begun)
    return pb.Resume(prior_outputs=map(prior_to_pb, resume.prior_outputs), begun=begun)


def resume_from_pb(message: pb.Resume) -> Resume:
    return Resume(
        prior_outputs=tuple(map(prior_from_pb, message.prior_outputs)),
        begun=begun_from_pb(message.begun) if message.HasField("begun") else None,
    )


def begun_to_pb(begun: Begun) -> pb.Begun:
    return pb.Begun(**{name: getattr(begun, name) for name in Begun.__struct_fields__})


def begun_from_pb(message: pb.Begun) -> Begun:
    return Begun(**{name: getattr(message, name) for name in Begun.__struct_fields__})


def _logprobs_to_pb(entries: list[TopLogprobs]) -> list[pb.TopLogprobs]:
    return [
        pb.TopLogprobs(logprob=e.logprob, rank=e.rank, top_ids=e.top_ids, top_logprobs=e.top_logprobs) for e in entries
    ]


def _logprobs_from_pb(entries: Any) -> list[TopLogprobs]:
    return [TopLogprobs(e.logprob, e.rank, list(e.top_ids), list(e.top_logprobs)) for e in entries]


def delta_to_pb(delta: Delta) -> pb.Delta:
    message = pb.Delta()
    write_delta(delta, message)
    return message


def write_delta(delta: Delta, message: pb.Delta) -> None:
    """Fill in an empty message. On the path of every token sent in a delta; most deltas have only tokens."""
    message.request_id = delta.request_id
    message.attempt = delta.attempt
    message.choice = delta.choice
    if isinstance(delta.result, Tokens):
        _write_tokens(delta.result, message.tokens)
    else:
        message.pooled.data = delta.result.data
        message.pooled.SetInParent()
    if delta.finish_reason is not None:
        message.finish_reason = _REASON_TO_PB[delta.finish_reason]
    if delta.error_code is not None:
        message.error_code = delta.error_code
    if delta.error_message:
        message.error_message = delta.error_message
    if delta.usage is not None:
        message.usage.CopyFrom(pb.Usage(**msgspec.structs.asdict(delta.usage)))
    if delta.ledger is not None:
        message.ledger.extend(pb.LedgerEntry(cause=entry.cause, seconds=entry.seconds) for entry in delta.ledger)


def _write_tokens(tokens: Tokens, message: pb.Tokens) -> None:
    message.first_index = tokens.first_index
    message.token_ids.extend(tokens.token_ids)
    if tokens.logprobs is not None:
        message.logprobs.extend(_logprobs_to_pb(tokens.logprobs))
    if tokens.prompt_logprobs is not None:
        message.prompt_logprobs.extend(_logprobs_to_pb(tokens.prompt_logprobs))
    if tokens.stop_token_id is not None:
        message.stop_token_id = tokens.stop_token_id
    if tokens.begun is not None:
        message.begun.CopyFrom(begun_to_pb(tokens.begun))


def write_next_tokens(tokens: NextTokens, message: pb.NextTokens) -> None:
    """Fill in an empty message."""
    message.streams.extend([stream.number for stream in tokens.streams])
    message.first_indexes.extend(tokens.first_indexes)
    message.token_ids.extend(tokens.token_ids)


def delta_from_pb(message: pb.Delta) -> Delta:
    """A result, finish reason or error code from another version only makes its own request fail, not the session."""
    known = message.finish_reason in _REASON_FROM_PB and message.WhichOneof("result") is not None
    return Delta(
        request_id=message.request_id,
        attempt=message.attempt,
        choice=message.choice,
        result=_result_from_pb(message),
        finish_reason=_REASON_FROM_PB[message.finish_reason] if known else FinishReason.ERROR,
        error_code=error_code_from(message.error_code) if known else ErrorCode.INTERNAL,
        error_message=message.error_message,
        usage=_usage_from_pb(message.usage) if message.HasField("usage") else None,
        ledger=[LedgerEntry(entry.cause, entry.seconds) for entry in message.ledger] if message.ledger else None,
    )


def _result_from_pb(message: pb.Delta) -> Result:
    if message.WhichOneof("result") == "pooled":
        return Pooled(data=message.pooled.data)
    return _tokens_from_pb(message.tokens)


def _tokens_from_pb(message: pb.Tokens) -> Tokens:
    return Tokens(
        first_index=message.first_index,
        token_ids=list(message.token_ids),
        logprobs=_logprobs_from_pb(message.logprobs) if message.logprobs else None,
        prompt_logprobs=_logprobs_from_pb(message.prompt_logprobs) if message.prompt_logprobs else None,
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
        begun=begun_from_pb(message.begun) if message.HasField("begun") else None,
    )


def _usage_from_pb(message: pb.Usage) -> Usage:
    return Usage(**{name: getattr(message, name) for name in Usage.__struct_fields__})


def load_to_pb(load: Load) -> pb.Load:
    return pb.Load(**{name: getattr(load, name) for name in Load.__struct_fields__})


def load_from_pb(message: pb.Load) -> Load:
    return Load(**{name: getattr(message, name) for name in Load.__struct_fields__})
