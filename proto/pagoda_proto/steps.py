"""Engine core ↔ worker: the closed union of messages on the ZMQ wire.

The engine core plans a step and a worker executes it. Plans carry only changes; the worker keeps the state of every row
and feeds back its own last sampled token, so plan n+1 may be sent before the result of plan n arrives (two steps in
flight). The worker executes plans strictly in order, which makes freeing and reusing blocks safe: a block given to
another row in plan n+1 is written there only after plan n is done with it.

    row      the schedulable unit: one choice of one request, while it is on a worker. `row_id` is never reused, so a
             result for a row that has since been finished, preempted or replayed is recognised and dropped.
    chunk    a run of a row's tokens to compute in this step. One rule covers prefill, chunked prefill, prefix hit,
             decode and resume: computed tokens chase total tokens.
    decode   a one-token chunk that samples the next token, of a row that has computed all tokens before. Most rows of
             most steps do nothing else, so plans do not list them: see `Decodes`.
    draft    a guess at a row's next token. The worker makes it, computes it after the chunk's own tokens and keeps it
             only if the token sampled in its place is the same, so drafts change how many tokens a step yields, never
             which. The engine core says how many a chunk may carry and sees none of them.

    swap     a move of a block between the KV cache and a *swap block* in host memory, where the K and V of a preempted
             row outlive its blocks.
    group    layers that keep the K and V of the same tokens. A row has a block table for each group, all of the same
             length: entry i is for tokens [i, i + 1) * block_size. In a new row, entries that a group no longer keeps
             hold NO_BLOCK; a plan does not say when an existing row keeps less. Block ids are numbered through all
             groups, those of the second after those of the first, and so are swap block ids. So only lists of
             `block_ids` are ordered by group: all of the first, then as many of the second.

Within a step a worker does, in order: drop `finished_rows`, add `new_rows`, append and replace blocks, swap blocks out,
swap blocks in, copy blocks, compute chunks (KV is written first, then attended to), sample the rows whose chunk says
so. So a swap-out reads what earlier plans have written, even if this plan gives the block to another row; and the next
plan may write a swap block that this plan reads.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import msgspec

from pagoda_proto.adapters.identity import Adapter
from pagoda_proto.params import DEFAULT_MAX_TOKENS_PER_STEP, SamplingParams
from pagoda_proto.pooling.params import PoolingParams

PROTOCOL_VERSION = 9
OLDEST_PROTOCOL = PROTOCOL_VERSION
"""Oldest version still spoken. An older peer may omit what is new since then, and ignores it (see Versions)."""
NO_TOKEN = -1
"""In `StepResult.tokens`: the row's output is elsewhere in the result."""
NO_BLOCK = -1
"""In `NewRow.block_ids`: these tokens are no longer kept."""
MAX_KV_GROUPS = 8
MAX_STEPS_IN_FLIGHT = 64
"""The limit of the option: each group has room for one token of each step in flight beyond what it keeps."""


class Versions(NamedTuple):
    """The protocol versions that one side speaks, oldest to newest. Two sides speak the newest that both know.

    A version that only adds optional parts is compatible with those before: `oldest` stays. Any other raises it.
    """

    oldest: int
    newest: int

    def __str__(self) -> str:
        return str(self.newest) if self.oldest == self.newest else f"{self.oldest} to {self.newest}"

    def agreed(self, other: Versions) -> int | None:
        """The newest common version; None if there is none."""
        newest = min(self.newest, other.newest)
        return newest if newest >= max(self.oldest, other.oldest) else None


SPOKEN = Versions(OLDEST_PROTOCOL, PROTOCOL_VERSION)


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True):
    """Base of the union; the tag is the class name."""


# --- engine core -> worker -------------------------------------------------------------------------------------------


class NewRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A row seen by this worker for the first time.

    `token_ids` are prompt then output tokens so far; the first `num_prompt_tokens` are prompt, the rest stay output
    for good (penalties, min_tokens and the random stream count them as output after a replay, too). The KV of the first
    `num_computed` tokens is already in `block_ids` (prefix hit, shared prompt, or swapped in by the same plan).
    `adapter` is added to the model's weights for this row; the worker loads it if it has not yet. `seed` and `choice`
    key the random stream; `eos_token_ids` is empty if the request ignores end of sequence. Rows with the same `domain`
    may draft from each other's outputs; None: only from the row's own text.
    """

    row_id: int
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed: int
    block_ids: list[int]
    params: SamplingParams
    seed: int
    choice: int = 0
    eos_token_ids: tuple[int, ...] = ()
    adapter: Adapter | None = None
    pooling: PoolingParams | None = None  # its last chunk yields `RowOutput.pooled`, no token
    domain: str | None = None


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """Compute tokens [start, start + num_tokens) of a row; if `sample`, sample the token after the last of them.

    The token at `start` may be one the engine core has not seen yet: the worker's own last sample. A chunk that
    samples may carry up to `num_drafts` drafts, for which the row has blocks; nothing can be planned for the row until
    its result arrives.
    """

    row_id: int
    start: int
    num_tokens: int
    sample: bool
    num_drafts: int = 0


class AppendBlocks(msgspec.Struct, frozen=True, array_like=True):
    """Append `block_ids` to the row's block tables, as many to each."""

    row_id: int
    block_ids: list[int]


class ReplaceBlock(msgspec.Struct, frozen=True, array_like=True):
    """Copy-on-write: entry `index` of the row's block table, in the group of `block_id`, becomes `block_id` (see
    `block_copies`)."""

    row_id: int
    index: int
    block_id: int


class Decodes(msgspec.Struct, frozen=True, array_like=True):
    """Which rows decode: those of the previous plan, in order, without `left`, with `joined` inserted one by one.

    The result must have `count` rows, with these sums of ids and starts. A row's start is one more than its last.
    """

    count: int = 0
    row_id_sum: int = 0
    start_sum: int = 0
    left: list[int] = []
    joined: list[tuple[int, int, int]] = []  # (place, row id, start), by place


class StepPlan(Message, frozen=True, tag="plan"):
    """One step: decodes, then chunks, each of a different row. `step` counts up from 1 per epoch without gaps."""

    step: int
    finished_rows: list[int] = []
    new_rows: list[NewRow] = []
    append_blocks: list[AppendBlocks] = []
    replace_blocks: list[ReplaceBlock] = []
    swap_outs: list[tuple[int, int]] = []  # (block, swap block)
    swap_ins: list[tuple[int, int]] = []  # (swap block, block)
    block_copies: list[tuple[int, int]] = []  # (source, destination), done before computing
    decodes: Decodes = Decodes()
    chunks: list[Chunk] = []

    @property
    def num_rows(self) -> int:
        return self.decodes.count + len(self.chunks)

    @property
    def num_tokens(self) -> int:
        """Tokens to compute, including all allowed drafts."""
        return self.decodes.count + sum(chunk.num_tokens + chunk.num_drafts for chunk in self.chunks)


class Welcome(Message, frozen=True, tag="welcome"):
    """The worker is admitted under `epoch`; all state it held before is void."""

    epoch: int
    engine_boot_id: str
    lease_s: float  # a worker that hears nothing from the engine core for this long registers anew


class Refused(Message, frozen=True, tag="refused"):
    """Registration refused because of `reason`; `final`: retrying cannot help."""

    reason: str
    final: bool = False


class BeatAck(Message, frozen=True, tag="beat_ack"):
    """Answers a Beat and renews the worker's lease."""


class Drain(Message, frozen=True, tag="drain"):
    """Leave: finish the current step, say Goodbye, exit."""


class ResetWorker(Message, frozen=True, tag="reset"):
    """Forget all rows; the engine core has replayed them elsewhere."""


# --- worker -> engine core -------------------------------------------------------------------------------------------


class KVGroup(msgspec.Struct, frozen=True, array_like=True):
    """A worker's blocks for the layers that keep the K and V of the same tokens: all tokens (`kept` is 0), or at least
    the `kept` tokens before the next one to compute."""

    num_blocks: int
    kept: int = 0
    num_swap_blocks: int = 0
    swap_block_s: float = 0.0  # time to move one block, as measured at startup

    def room_in_flight(self, block_size: int, max_model_len: int) -> int:
        """Most tokens of one row that may be planned but not confirmed, given the blocks beyond a window."""
        if not self.kept or self.num_blocks * block_size >= max_model_len:
            return sys.maxsize
        return (self.num_blocks - -(-self.kept // block_size) - 2) * block_size


class Hello(Message, frozen=True, tag="hello"):
    """Registration. `worker_id` is the stable name, `incarnation` 64 random bits (hex) of this process. `registration`
    counts its attempts to register: each has its own sockets and routing ids (`{incarnation}.{registration}/d` and
    `/c`), so an earlier one cannot block it or be mistaken for it.

    A worker sends it in the oldest version it speaks, `oldest_protocol` (0: the same as `protocol`, the newest). From
    the Welcome on, both sides use the version of the Welcome.

    `host_id` and `pid` let an engine core on the same host watch the process itself. `pools` are the outputs of a model
    that pools (see `pooling`), with vectors of `pooled_width` numbers. Without `kv_groups` the worker keeps no K and V:
    every prompt, however long, is computed whole in one chunk, if necessary in its own step. `start_s` is how long it
    took to load and warm up, and how long a successor will take.
    """

    protocol: int
    worker_id: str
    incarnation: str
    registration: int
    model_fingerprint: str
    numerics_id: str
    vocab_size: int
    max_model_len: int
    block_size: int
    device: str
    host_id: str
    pid: int
    max_rows: int = 256
    max_tokens_per_step: int = DEFAULT_MAX_TOKENS_PER_STEP
    kv_groups: tuple[KVGroup, ...] = ()
    pools: tuple[str, ...] = ()
    pooled_width: int = 0
    max_adapters: int = 0  # most different adapters of rows at once; 0: rows with one fail
    oldest_protocol: int = 0
    start_s: float = 0.0

    @property
    def spoken(self) -> Versions:
        return Versions(self.oldest_protocol or self.protocol, self.protocol)

    @property
    def num_blocks(self) -> int:
        """Total of all groups."""
        return sum(group.num_blocks for group in self.kv_groups)

    @property
    def num_swap_blocks(self) -> int:
        """Total of all groups."""
        return sum(group.num_swap_blocks for group in self.kv_groups)


class TopLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of one token, its rank (1 = most likely), and the most likely alternatives, best first."""

    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class RowOutput(msgspec.Struct, frozen=True, array_like=True):
    """Output of a step for one row: one sampled token for a chunk that samples, plus one per accepted draft; or the
    pooled output of a prompt.

    The K and V of all `token_ids` but the last are computed.
    """

    row_id: int
    token_ids: list[int]
    logprobs: list[TopLogprobs] | None = None  # one per token, if asked for
    prompt_logprobs: list[TopLogprobs] | None = None  # for prompt tokens start+1 .. of this chunk, if asked for
    num_drafted: int = 0  # drafts verified in this step
    num_drafts: int = 0  # drafts that the worker proposes for the row's next token
    pooled: bytes = b""  # what the row's `pooling` asks for, float32, little-endian


class RowError(msgspec.Struct, frozen=True, array_like=True):
    """This row failed in this step; the worker has dropped it. `code` is an ErrorCode value."""

    row_id: int
    code: str
    message: str


class StepResult(Message, frozen=True, tag="result"):
    """Answers exactly one StepPlan. Chunks that did not sample are not listed.

    `tokens` is empty, or has one entry for each decoding row, in the plan's order: its token if that is all its output,
    NO_TOKEN if the row is in `outputs` or `errors`.
    """

    step: int
    tokens: list[int] = []
    outputs: list[RowOutput] = []
    errors: list[RowError] = []
    elapsed_s: float = 0.0  # receipt of the plan to result ready
    forward_s: float = 0.0  # of which in the model and the sampler


class Beat(Message, frozen=True, tag="beat"):
    """Heartbeat, sent every `times.BEAT_S` by its own thread; the step loop itself records since when it is busy."""

    busy_s: float  # how long the current step has been running; 0 if idle
    rss_bytes: int = 0  # resident memory of the process; 0 if unknown
    leaving: bool = False  # it was asked to end: send nothing new, and Drain once it holds no rows


class StepFailed(Message, frozen=True, tag="step_failed"):
    """The step raised; no row is blamed yet. The worker has forgotten all rows and registers anew, with a smaller
    `max_tokens_per_step` if the device ran out of memory."""

    step: int
    reason: str


class Goodbye(Message, frozen=True, tag="goodbye"):
    """The worker leaves by itself; its rows may be replayed at once."""

    reason: str = ""


ToWorker = StepPlan | Welcome | Refused | BeatAck | Drain | ResetWorker
FromWorker = Hello | StepResult | StepFailed | Beat | Goodbye
