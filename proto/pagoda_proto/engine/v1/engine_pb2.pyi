from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORT: FinishReason
FINISH_REASON_ERROR: FinishReason

class SamplingParams(_message.Message):
    __slots__ = ("n", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "max_tokens", "min_tokens", "stop_token_ids", "ignore_eos", "logit_bias", "allowed_token_ids", "bad_words_token_ids", "logprobs", "prompt_logprobs", "grammar", "use_beam_search", "length_penalty")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    N_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    USE_BEAM_SEARCH_FIELD_NUMBER: _ClassVar[int]
    LENGTH_PENALTY_FIELD_NUMBER: _ClassVar[int]
    n: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    max_tokens: int
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    logit_bias: _containers.ScalarMap[int, float]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words_token_ids: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    logprobs: int
    prompt_logprobs: int
    grammar: str
    use_beam_search: bool
    length_penalty: float
    def __init__(self, n: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_words_token_ids: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., grammar: _Optional[str] = ..., use_beam_search: bool = ..., length_penalty: _Optional[float] = ...) -> None: ...

class TokenSequence(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class RequestRecord(_message.Message):
    __slots__ = ("request_id", "prompt_token_ids", "cache_salt", "priority", "queue_timeout_s", "generate", "pool", "tenant", "weight", "adapter")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    GENERATE_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    cache_salt: str
    priority: int
    queue_timeout_s: float
    generate: Generate
    pool: Pool
    tenant: str
    weight: int
    adapter: Adapter
    def __init__(self, request_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., cache_salt: _Optional[str] = ..., priority: _Optional[int] = ..., queue_timeout_s: _Optional[float] = ..., generate: _Optional[_Union[Generate, _Mapping]] = ..., pool: _Optional[_Union[Pool, _Mapping]] = ..., tenant: _Optional[str] = ..., weight: _Optional[int] = ..., adapter: _Optional[_Union[Adapter, _Mapping]] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("digest", "path")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    digest: str
    path: str
    def __init__(self, digest: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class Generate(_message.Message):
    __slots__ = ("params", "seed", "eos_token_ids")
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    params: SamplingParams
    seed: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, params: _Optional[_Union[SamplingParams, _Mapping]] = ..., seed: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Pool(_message.Message):
    __slots__ = ("output", "normalize", "activate", "dimensions", "second_start", "skip", "unseen")
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    NORMALIZE_FIELD_NUMBER: _ClassVar[int]
    ACTIVATE_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    SECOND_START_FIELD_NUMBER: _ClassVar[int]
    SKIP_FIELD_NUMBER: _ClassVar[int]
    UNSEEN_FIELD_NUMBER: _ClassVar[int]
    output: str
    normalize: bool
    activate: bool
    dimensions: int
    second_start: int
    skip: int
    unseen: int
    def __init__(self, output: _Optional[str] = ..., normalize: bool = ..., activate: bool = ..., dimensions: _Optional[int] = ..., second_start: _Optional[int] = ..., skip: _Optional[int] = ..., unseen: _Optional[int] = ...) -> None: ...

class ClientFrame(_message.Message):
    __slots__ = ("submit", "abort", "more")
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    submit: Submit
    abort: Abort
    more: _containers.RepeatedCompositeFieldContainer[ClientFrame]
    def __init__(self, submit: _Optional[_Union[Submit, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., more: _Optional[_Iterable[_Union[ClientFrame, _Mapping]]] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("record", "attempt", "resume")
    RECORD_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    record: RequestRecord
    attempt: int
    resume: Resume
    def __init__(self, record: _Optional[_Union[RequestRecord, _Mapping]] = ..., attempt: _Optional[int] = ..., resume: _Optional[_Union[Resume, _Mapping]] = ...) -> None: ...

class Resume(_message.Message):
    __slots__ = ("prior_outputs", "begun")
    PRIOR_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    prior_outputs: _containers.RepeatedCompositeFieldContainer[PriorOutput]
    begun: Begun
    def __init__(self, prior_outputs: _Optional[_Iterable[_Union[PriorOutput, _Mapping]]] = ..., begun: _Optional[_Union[Begun, _Mapping]] = ...) -> None: ...

class Begun(_message.Message):
    __slots__ = ("model_fingerprint", "numerics_id", "cached_prompt_tokens")
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_ID_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model_fingerprint: str
    numerics_id: str
    cached_prompt_tokens: int
    def __init__(self, model_fingerprint: _Optional[str] = ..., numerics_id: _Optional[str] = ..., cached_prompt_tokens: _Optional[int] = ...) -> None: ...

class PriorOutput(_message.Message):
    __slots__ = ("choice", "token_ids", "finished")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    choice: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finished: bool
    def __init__(self, choice: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., finished: bool = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("request_id", "choices")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    choices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[str] = ..., choices: _Optional[_Iterable[int]] = ...) -> None: ...

class ServerFrame(_message.Message):
    __slots__ = ("accepted", "rejected", "outputs", "load", "migrate", "more")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    MIGRATE_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    accepted: Accepted
    rejected: Rejected
    outputs: StepOutputs
    load: Load
    migrate: Migrate
    more: _containers.RepeatedCompositeFieldContainer[ServerFrame]
    def __init__(self, accepted: _Optional[_Union[Accepted, _Mapping]] = ..., rejected: _Optional[_Union[Rejected, _Mapping]] = ..., outputs: _Optional[_Union[StepOutputs, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., migrate: _Optional[_Union[Migrate, _Mapping]] = ..., more: _Optional[_Iterable[_Union[ServerFrame, _Mapping]]] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("request_id", "attempt", "stream")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STREAM_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    stream: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., stream: _Optional[int] = ...) -> None: ...

class Rejected(_message.Message):
    __slots__ = ("request_id", "attempt", "code", "message", "param", "retry_after_s", "of_all")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    OF_ALL_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    code: str
    message: str
    param: str
    retry_after_s: float
    of_all: bool
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., code: _Optional[str] = ..., message: _Optional[str] = ..., param: _Optional[str] = ..., retry_after_s: _Optional[float] = ..., of_all: bool = ...) -> None: ...

class StepOutputs(_message.Message):
    __slots__ = ("deltas", "tokens")
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    deltas: _containers.RepeatedCompositeFieldContainer[Delta]
    tokens: NextTokens
    def __init__(self, deltas: _Optional[_Iterable[_Union[Delta, _Mapping]]] = ..., tokens: _Optional[_Union[NextTokens, _Mapping]] = ...) -> None: ...

class NextTokens(_message.Message):
    __slots__ = ("streams", "first_indexes", "token_ids")
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEXES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    streams: _containers.RepeatedScalarFieldContainer[int]
    first_indexes: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, streams: _Optional[_Iterable[int]] = ..., first_indexes: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("request_id", "attempt", "choice", "tokens", "pooled", "finish_reason", "error_code", "error_message", "usage", "ledger")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    POOLED_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_CODE_FIELD_NUMBER: _ClassVar[int]
    ERROR_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    LEDGER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    choice: int
    tokens: Tokens
    pooled: Pooled
    finish_reason: FinishReason
    error_code: str
    error_message: str
    usage: Usage
    ledger: _containers.RepeatedCompositeFieldContainer[LedgerEntry]
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., choice: _Optional[int] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ..., pooled: _Optional[_Union[Pooled, _Mapping]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., error_code: _Optional[str] = ..., error_message: _Optional[str] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., ledger: _Optional[_Iterable[_Union[LedgerEntry, _Mapping]]] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("first_index", "token_ids", "logprobs", "prompt_logprobs", "stop_token_id", "begun")
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    first_index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TopLogprobs]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TopLogprobs]
    stop_token_id: int
    begun: Begun
    def __init__(self, first_index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TopLogprobs, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TopLogprobs, _Mapping]]] = ..., stop_token_id: _Optional[int] = ..., begun: _Optional[_Union[Begun, _Mapping]] = ...) -> None: ...

class Pooled(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class TopLogprobs(_message.Message):
    __slots__ = ("logprob", "rank", "top_ids", "top_logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    rank: int
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., rank: _Optional[int] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "cached_prompt_tokens", "output_tokens", "preemptions", "replays")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    REPLAYS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    cached_prompt_tokens: int
    output_tokens: int
    preemptions: int
    replays: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., cached_prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ..., replays: _Optional[int] = ...) -> None: ...

class LedgerEntry(_message.Message):
    __slots__ = ("cause", "seconds")
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    cause: str
    seconds: float
    def __init__(self, cause: _Optional[str] = ..., seconds: _Optional[float] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("engine_id", "num_workers", "num_waiting", "num_running", "kv_usage", "draining", "vocab_size", "max_model_len", "seconds_since_progress", "model_fingerprint", "numerics_id", "protocol", "policy")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    KV_USAGE_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    SECONDS_SINCE_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_ID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    num_workers: int
    num_waiting: int
    num_running: int
    kv_usage: float
    draining: bool
    vocab_size: int
    max_model_len: int
    seconds_since_progress: float
    model_fingerprint: str
    numerics_id: str
    protocol: int
    policy: str
    def __init__(self, engine_id: _Optional[str] = ..., num_workers: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_running: _Optional[int] = ..., kv_usage: _Optional[float] = ..., draining: bool = ..., vocab_size: _Optional[int] = ..., max_model_len: _Optional[int] = ..., seconds_since_progress: _Optional[float] = ..., model_fingerprint: _Optional[str] = ..., numerics_id: _Optional[str] = ..., protocol: _Optional[int] = ..., policy: _Optional[str] = ...) -> None: ...

class Migrate(_message.Message):
    __slots__ = ("request_id", "attempt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("record",)
    RECORD_FIELD_NUMBER: _ClassVar[int]
    record: RequestRecord
    def __init__(self, record: _Optional[_Union[RequestRecord, _Mapping]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("delta",)
    DELTA_FIELD_NUMBER: _ClassVar[int]
    delta: Delta
    def __init__(self, delta: _Optional[_Union[Delta, _Mapping]] = ...) -> None: ...

class ListWorkersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Worker(_message.Message):
    __slots__ = ("worker_id", "state", "epoch", "device", "numerics_id", "num_blocks", "num_free_blocks", "num_rows", "steps_done", "pid", "rss_bytes")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    STEPS_DONE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    RSS_BYTES_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    state: str
    epoch: int
    device: str
    numerics_id: str
    num_blocks: int
    num_free_blocks: int
    num_rows: int
    steps_done: int
    pid: int
    rss_bytes: int
    def __init__(self, worker_id: _Optional[str] = ..., state: _Optional[str] = ..., epoch: _Optional[int] = ..., device: _Optional[str] = ..., numerics_id: _Optional[str] = ..., num_blocks: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_rows: _Optional[int] = ..., steps_done: _Optional[int] = ..., pid: _Optional[int] = ..., rss_bytes: _Optional[int] = ...) -> None: ...

class ListWorkersResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[Worker]
    def __init__(self, workers: _Optional[_Iterable[_Union[Worker, _Mapping]]] = ...) -> None: ...

class GetStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatsResponse(_message.Message):
    __slots__ = ("load", "blocks_total", "blocks_used", "blocks_cached", "prompt_tokens", "cached_prompt_tokens", "output_tokens", "preemptions", "replays", "worker_deaths", "steps", "draft_tokens", "accepted_draft_tokens", "swap_preemptions", "swapped_out_blocks", "swapped_in_blocks", "swap_blocks_total", "swap_blocks_used")
    LOAD_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_CACHED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    REPLAYS_FIELD_NUMBER: _ClassVar[int]
    WORKER_DEATHS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SWAP_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    SWAPPED_OUT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SWAPPED_IN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SWAP_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    SWAP_BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    load: Load
    blocks_total: int
    blocks_used: int
    blocks_cached: int
    prompt_tokens: int
    cached_prompt_tokens: int
    output_tokens: int
    preemptions: int
    replays: int
    worker_deaths: int
    steps: int
    draft_tokens: int
    accepted_draft_tokens: int
    swap_preemptions: int
    swapped_out_blocks: int
    swapped_in_blocks: int
    swap_blocks_total: int
    swap_blocks_used: int
    def __init__(self, load: _Optional[_Union[Load, _Mapping]] = ..., blocks_total: _Optional[int] = ..., blocks_used: _Optional[int] = ..., blocks_cached: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_prompt_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ..., replays: _Optional[int] = ..., worker_deaths: _Optional[int] = ..., steps: _Optional[int] = ..., draft_tokens: _Optional[int] = ..., accepted_draft_tokens: _Optional[int] = ..., swap_preemptions: _Optional[int] = ..., swapped_out_blocks: _Optional[int] = ..., swapped_in_blocks: _Optional[int] = ..., swap_blocks_total: _Optional[int] = ..., swap_blocks_used: _Optional[int] = ...) -> None: ...

class ResetPrefixCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResetPrefixCacheResponse(_message.Message):
    __slots__ = ("blocks_dropped",)
    BLOCKS_DROPPED_FIELD_NUMBER: _ClassVar[int]
    blocks_dropped: int
    def __init__(self, blocks_dropped: _Optional[int] = ...) -> None: ...

class DrainWorkerRequest(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class DrainWorkerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
