"""Input and output of the engine core as Python structs: the request record and the deltas of its choices.

The gateway (through `convert`, over gRPC) and the offline `LLM` (directly) use the same structs, so a request and an
answer each have one definition.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

import msgspec

from pagoda_proto.adapters.identity import Adapter
from pagoda_proto.errors import ErrorCode
from pagoda_proto.params import SamplingParams, num_candidates
from pagoda_proto.pooling.params import PoolingParams
from pagoda_proto.steps import TopLogprobs, Versions

SESSION_PROTOCOL = 7
"""Version of the protocol between gateway and engine core (engine.proto). Every change raises it, except a new arm of
`task` and `result`."""
OLDEST_SESSION_PROTOCOL = 6
"""Oldest version still spoken. A breaking change raises it to the newest; an optional addition leaves it."""
SESSION_SPOKEN = Versions(OLDEST_SESSION_PROTOCOL, SESSION_PROTOCOL)
SESSION_PROTOCOL_KEY, OLDEST_SESSION_PROTOCOL_KEY = "pagoda-protocol", "pagoda-protocol-oldest"
"""Metadata of a Session call: the versions the gateway speaks. The engine core answers with the common one in
`Load.protocol`."""


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Generate(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Continue the prompt. `seed` is the seed in force: `params.seed`, or the one drawn at admission.

    Raises InvalidParams for a beam search that would need more log-probabilities than rows report.
    """

    params: SamplingParams
    seed: int
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.params.use_beam_search:
            num_candidates(self.params, len(self.ends))

    @property
    def ends(self) -> frozenset[int]:
        """The tokens that end a choice."""
        eos = () if self.params.ignore_eos else self.eos_token_ids
        return frozenset(eos + self.params.stop_token_ids)


class Pool(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Read the prompt. For transport and scheduling it is a generation with one output."""

    pooling: PoolingParams

    @property
    def params(self) -> SamplingParams:
        return ONE_OUTPUT

    @property
    def seed(self) -> int:
        return 0

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return ()


ONE_OUTPUT = SamplingParams(max_tokens=1)

Task = Generate | Pool
"""Kinds of tasks: one struct per arm of `task` in engine.proto."""


MAX_WEIGHT = 1000


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Everything an answer depends on besides weights and numerics. Written once, never changed.

    `cache_salt` is the prefix-cache domain. `priority`: lower runs earlier under the priority policy. `tenant` is the
    caller, as far as the gateway can tell; under the fair policy waiting tenants are served in proportion to `weight`.
    `queue_timeout_s` is capped at the engine core's own, which 0 selects. `adapter` holds weights added to the model's
    own.
    """

    request_id: str
    prompt_token_ids: list[int]
    task: Task
    cache_salt: str = ""
    priority: int = 0
    queue_timeout_s: float = 0.0
    tenant: str = ""
    weight: int = 1
    adapter: Adapter | None = None


class PriorOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one choice that were emitted before this attempt; they remain output tokens."""

    choice: int
    token_ids: list[int]
    finished: bool = False


class Begun(msgspec.Struct, frozen=True, kw_only=True):
    """Weights and numerics of a request's first token. The request continues only where both are the same.

    `cached_prompt_tokens` is the number that usage reports, also after a replay.
    """

    model_fingerprint: str
    numerics_id: str
    cached_prompt_tokens: int = 0


class Resume(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of earlier attempts of a generation; without tokens, it starts from the beginning."""

    prior_outputs: tuple[PriorOutput, ...] = ()
    begun: Begun | None = None

    @property
    def has_tokens(self) -> bool:
        return any(output.token_ids for output in self.prior_outputs)


FROM_THE_START = Resume()


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    cached_prompt_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    replays: int = 0


class LedgerEntry(msgspec.Struct, frozen=True):
    """Why time passed. The entries of a request sum to its latency in the engine core."""

    cause: str
    seconds: float


class Tokens(msgspec.Struct, kw_only=True, tag=True):
    """New tokens of a generation. `first_index` is the output position of `token_ids[0]`.

    `begun` comes with a request's first tokens, `stop_token_id` with the ending that the token caused.
    """

    first_index: int
    token_ids: list[int]
    logprobs: list[TopLogprobs] | None = None
    prompt_logprobs: list[TopLogprobs] | None = None
    stop_token_id: int | None = None
    begun: Begun | None = None


class Pooled(msgspec.Struct, kw_only=True, tag=True):
    """The pooled output of a prompt, float32 little-endian; empty if the request ended otherwise."""

    data: bytes = b""


Result = Tokens | Pooled
"""Results of tasks: one struct per arm of `result` in engine.proto."""


def nothing_of(task: Task, first_index: int = 0) -> Result:
    """A result with no new output, at output position `first_index`."""
    return Pooled() if isinstance(task, Pool) else Tokens(first_index=first_index, token_ids=[])


class Delta(msgspec.Struct, kw_only=True):
    """New output of one choice, or its ending. `result` has the kind of the record's task.

    `usage` and `ledger` come with the last delta of a request's last choice: that delta is the request's ending.
    """

    request_id: str
    choice: int
    result: Result
    attempt: int = 0
    finish_reason: FinishReason | None = None
    error_code: ErrorCode | None = None
    error_message: str = ""
    usage: Usage | None = None
    ledger: list[LedgerEntry] | None = None

    @property
    def ends_request(self) -> bool:
        return self.usage is not None

    @property
    def tokens(self) -> Tokens:
        """The new tokens of a generation; none for any other task."""
        return self.result if isinstance(self.result, Tokens) else Tokens(first_index=0, token_ids=[])

    @property
    def pooled(self) -> bytes:
        """The pooled output of a prompt; empty for a generation."""
        return self.result.data if isinstance(self.result, Pooled) else b""

    @property
    def has_output(self) -> bool:
        return bool(self.tokens.token_ids or self.pooled)


class Stream(msgspec.Struct, frozen=True, kw_only=True):
    """The output of one choice of one attempt, on its way to the submitter. `number` identifies it on a session."""

    number: int
    request_id: str
    attempt: int
    choice: int


class NextTokens(msgspec.Struct, kw_only=True):
    """Ordinary deltas (one token, nothing else) of many choices, as columns of equal length."""

    streams: list[Stream] = []
    first_indexes: list[int] = []
    token_ids: list[int] = []

    def __len__(self) -> int:
        return len(self.streams)

    def extend(self, other: NextTokens) -> None:
        self.streams += other.streams
        self.first_indexes += other.first_indexes
        self.token_ids += other.token_ids

    def parted(self, chosen: Callable[[Stream], bool]) -> tuple[NextTokens, NextTokens]:
        """The tokens of chosen streams, and the others."""
        parts = NextTokens(), NextTokens()
        for stream, index, token in zip(self.streams, self.first_indexes, self.token_ids, strict=True):
            part = parts[not chosen(stream)]
            part.streams.append(stream)
            part.first_indexes.append(index)
            part.token_ids.append(token)
        return parts

    def deltas(self) -> list[Delta]:
        columns = zip(self.streams, self.first_indexes, self.token_ids, strict=True)
        return [
            Delta(
                request_id=stream.request_id,
                attempt=stream.attempt,
                choice=stream.choice,
                result=Tokens(first_index=index, token_ids=[token]),
            )
            for stream, index, token in columns
        ]


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """The current state of an engine core; see `Load` in engine.proto. Limits are 0 until a worker has registered."""

    engine_id: str
    num_workers: int = 0
    num_waiting: int = 0
    num_running: int = 0
    kv_usage: float = 0.0
    draining: bool = False
    vocab_size: int = 0
    max_model_len: int = 0
    seconds_since_progress: float = 0.0
    model_fingerprint: str = ""
    numerics_id: str = ""
    protocol: int = 0
    policy: str = ""
