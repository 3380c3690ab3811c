"""A transcript records a finished request and its outcome, so that whoever has it can replay the request.

Tokens follow from record, weights and numerics, so a replay differs only if one of these does, or if there is a fault.
A transcript does not say who asked, and holds prompt and answer as token ids. It is untrusted input: its size is
bounded before it is read, and its content is checked like a request.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from pagoda_gateway.generation.job import Job
from pagoda_gateway.generation.updates import Update
from pagoda_gateway.text.answers import HowRead
from pagoda_gateway.text.events import Finish
from pagoda_gateway.text.tool_formats.functions import Function
from pagoda_gateway.version import VERSION
from pagoda_proto.adapters.identity import DIGEST
from pagoda_proto.errors import PagodaError
from pagoda_proto.params import MAX_SEED, MAX_STOP_TOKEN_IDS, MAX_TOKENS_CEILING, SamplingParams
from pagoda_proto.records import Begun, FinishReason, Generate, RequestRecord
from pagoda_proto.steps import TopLogprobs

FORMAT = 1
MAX_TRANSCRIPT_BYTES = 4 * 1024 * 1024
MAX_PARTS = 128  # prompts of one request
MAX_SCHEMA_DEPTH = 64  # of a function's parameters
BYTES_PER_TOKEN, BYTES_PER_LOGPROB = 2, 8  # as JSON, with separators; few take less


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`TopLogprobs`, with None for minus infinity, which JSON does not have."""

    logprob: float | None
    rank: int
    top_ids: list[int]
    top_logprobs: list[float | None]


class ToldChoice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What a client received of one choice, or would have: up to the stop string, if one ended it."""

    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None


class TranscriptPart(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A prompt and its choices, with the identities of weights and numerics, which also determine the answer."""

    record: RequestRecord
    model_fingerprint: str
    numerics_id: str
    choices: list[ToldChoice]
    prompt_logprobs: list[TokenLogprobs] | None = None


class Transcript(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """`id`, `created` (Unix seconds) and `model` are those of the answer. `how` the text was parsed determines in which
    tokens a stop string was looked for. `adapter` is the adapter's digest, because its path is private to the server;
    `version` is the program's."""

    id: str
    created: int
    model: str
    parts: list[TranscriptPart]
    format: int
    version: str
    how: HowRead = HowRead()
    adapter: str = ""


class _PartNamed(msgspec.Struct, frozen=True):
    record: dict[str, Any]


class _Named(msgspec.Struct, frozen=True):
    """The fields of a transcript by name, at the places where decoding would ignore unknown ones."""

    parts: list[_PartNamed]
    how: dict[str, Any] = {}


class Difference(NamedTuple):
    """The first difference in a choice. `position` is that of an output token (of a prompt token, if `what` says so);
    None if all tokens are equal but the endings differ."""

    part: int
    choice: int
    position: int | None
    what: str

    def __str__(self) -> str:
        place = f"prompt {self.part}, choice {self.choice}"
        return f"{place}: {self.what}" if self.position is None else f"{place}, token {self.position}: {self.what}"


class Outcomes:
    """Collects the updates of numbered choices as they come, up to the size of a transcript."""

    def __init__(self) -> None:
        self._tokens: dict[int, list[int]] = {}
        self._logprobs: dict[int, list[TokenLogprobs]] = {}
        self._endings: dict[int, Finish] = {}
        self._num_bytes = 0  # an estimate

    @property
    def too_many(self) -> bool:
        """Whether it exceeds a transcript's size; then nothing is kept any more."""
        return self._num_bytes > MAX_TRANSCRIPT_BYTES

    def take(self, update: Update) -> None:
        num_logprobs = sum(1 + len(entry.top_ids) for entry in update.logprobs or ())
        self._num_bytes += BYTES_PER_TOKEN * len(update.token_ids) + BYTES_PER_LOGPROB * num_logprobs
        if self.too_many:
            self._tokens.clear()
            self._logprobs.clear()
            return
        self._tokens.setdefault(update.choice, []).extend(update.token_ids)
        if update.logprobs is not None:
            self._logprobs.setdefault(update.choice, []).extend(map(_in_json, update.logprobs))
        if update.finish is not None:
            self._endings[update.choice] = update.finish

    def choice(self, index: int) -> ToldChoice:
        """A choice that has ended. Raises KeyError for others."""
        ending = self._endings[index]
        return ToldChoice(
            token_ids=self._tokens.get(index, []),
            finish_reason=ending.reason,
            stop_reason=ending.stop_reason,
            logprobs=self._logprobs.get(index),
        )


def part_of(
    record: RequestRecord, begun: Begun, choices: list[ToldChoice], prompt_logprobs: Sequence[TopLogprobs]
) -> TranscriptPart:
    return TranscriptPart(
        record=_of_nobody(record),
        model_fingerprint=begun.model_fingerprint,
        numerics_id=begun.numerics_id,
        choices=choices,
        prompt_logprobs=[_in_json(entry) for entry in prompt_logprobs] or None,
    )


def transcript_of(job: Job, parts: list[TranscriptPart]) -> Transcript:
    adapter = "" if job.adapter is None else job.adapter.digest
    return Transcript(
        id=job.id,
        created=job.created,
        model=job.model,
        parts=parts,
        format=FORMAT,
        version=VERSION,
        how=job.shown.how,
        adapter=adapter,
    )


def _of_nobody(record: RequestRecord) -> RequestRecord:
    """The fields that determine the tokens, without those that say who asked, from where, and how urgently."""
    return RequestRecord(request_id=record.request_id, prompt_token_ids=record.prompt_token_ids, task=record.task)


def _in_json(entry: TopLogprobs) -> TokenLogprobs:
    top = [_finite(value) for value in entry.top_logprobs]
    return TokenLogprobs(_finite(entry.logprob), entry.rank, entry.top_ids, top)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def read_transcript(data: bytes) -> Transcript:
    """Raises ValueError if `data` is not a transcript, with a message for whoever supplied it."""
    if len(data) > MAX_TRANSCRIPT_BYTES:
        raise ValueError(f"a transcript has at most {MAX_TRANSCRIPT_BYTES} bytes")
    try:
        transcript = msgspec.json.decode(data, type=Transcript)
        unknown = sorted(_unknown(msgspec.json.decode(data, type=_Named)))
    except (msgspec.DecodeError, PagodaError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"this is not a transcript: {error}") from error
    if unknown:
        raise ValueError(f"this transcript has fields that this version does not know: {', '.join(unknown)[:200]}")
    for problem in _problems(transcript):
        raise ValueError(f"this transcript contradicts itself: {problem}")
    return transcript


def _unknown(raw: _Named) -> Iterator[str]:
    """Fields that decoding would ignore, but because of which another version may compute differently."""
    known = set(Generate.__struct_fields__) | {"type"}
    yield from map(ascii, raw.how.keys() - set(HowRead.__struct_fields__))
    for function in raw.how.get("functions", ()):
        yield from map(ascii, function.keys() - set(Function.__struct_fields__))
    for part in raw.parts:
        record, task = part.record, part.record["task"]
        yield from map(ascii, record.keys() - set(RequestRecord.__struct_fields__))
        yield from map(ascii, task.keys() - known)
        yield from map(ascii, task.get("params", {}).keys() - set(SamplingParams.__struct_fields__))


def _problems(transcript: Transcript) -> Iterator[str]:
    if transcript.format != FORMAT:
        yield f"it is of format {transcript.format}, this version reads {FORMAT}"
    if not 1 <= len(transcript.parts) <= MAX_PARTS:
        yield f"1 to {MAX_PARTS} parts are possible, it has {len(transcript.parts)}"
    if transcript.adapter and not DIGEST.fullmatch(transcript.adapter):
        yield "adapter is no digest"
    if _is_deep([function.parameters for function in transcript.how.functions]):
        yield f"parameters of a function are nested deeper than {MAX_SCHEMA_DEPTH} levels"
    for i, part in enumerate(transcript.parts):
        task = part.record.task
        if not isinstance(task, Generate) or len(part.choices) != task.params.n:
            yield f"part {i} asks for other than its {len(part.choices)} choices"
        elif not 0 <= task.seed <= MAX_SEED or not _are_ends(task.eos_token_ids):
            yield f"part {i} has a seed or an end of sequence that is none"
        elif part.record != _of_nobody(part.record):
            yield f"part {i} says who asked, which changes no token"
        elif any(c.logprobs is not None and len(c.logprobs) != len(c.token_ids) for c in part.choices):
            yield f"part {i} has not one log-probability for each token"


def _is_deep(values: list[Any]) -> bool:
    for _ in range(MAX_SCHEMA_DEPTH):
        inner = (each.values() if isinstance(each, dict) else each for each in values if isinstance(each, dict | list))
        values = [value for one in inner for value in one]
    return bool(values)


def _are_ends(token_ids: Sequence[int]) -> bool:
    return len(token_ids) <= MAX_STOP_TOKEN_IDS and all(0 <= each <= MAX_TOKENS_CEILING for each in token_ids)


def other_conditions(kept: Transcript, model_fingerprint: str, numerics_id: str) -> list[str]:
    """Differences in weights and numerics, because of which equal tokens are not to be expected here."""
    found = []
    for name, here in (("model_fingerprint", model_fingerprint), ("numerics_id", numerics_id)):
        there = {getattr(part, name) for part in kept.parts} - {here}
        found += [f"{name}: it was made with {other!a}, here it is {here!a}" for other in sorted(there)]
    return found


def differences(kept: Transcript, now: Transcript) -> Iterator[Difference]:
    """The first difference of each choice, in order. `now` must be a replay of `kept`."""
    for index, (old, new) in enumerate(zip(kept.parts, now.parts, strict=True)):
        where = _first(old.prompt_logprobs, new.prompt_logprobs)
        if where is not None:
            yield Difference(index, 0, where + 1, "the log-probability of this prompt token is another one")
        for choice, (one, other) in enumerate(zip(old.choices, new.choices, strict=True)):
            found = _difference(one, other)
            if found is not None:
                yield Difference(index, choice, *found)


def _difference(old: ToldChoice, new: ToldChoice) -> tuple[int | None, str] | None:
    where = _first(old.token_ids, new.token_ids)
    scored = _first(old.logprobs, new.logprobs)
    if where is not None and (scored is None or where <= scored):
        was, is_now = (ids[where] if where < len(ids) else "the end" for ids in (old.token_ids, new.token_ids))
        return where, f"it was {was}, now it is {is_now}"
    if scored is not None:
        return scored, "the token is the same, its log-probabilities are not"
    before, after = ((each.finish_reason.value, each.stop_reason) for each in (old, new))
    return None if before == after else (None, f"it ended by {before}, now it ends by {after}")


def _first(old: Sequence[object] | None, new: Sequence[object] | None) -> int | None:
    """The first index at which two lists differ or only one of them ends; None if they are equal."""
    one, other = old or (), new or ()
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))
