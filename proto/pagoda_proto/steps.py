"""Engine core ↔ worker: the closed union of messages on the ZMQ wire.

A step is planned by the engine core and executed by a worker. Plans carry only changes; the worker keeps the state of
every row and feeds its own last sampled token back, so plan n+1 may be sent before the result of plan n is in
(two steps in flight). Plans are executed strictly in order, which is what makes freeing and reusing blocks safe:
a block given to another row in plan n+1 is written there only after plan n is done with it.

    row      the schedulable unit: one choice of one request, while it is on a worker. `row_id` is never reused, so a
             result for a row that has since been finished, preempted or replayed is recognised and dropped.
    chunk    a run of a row's tokens to compute in this step. One rule covers prefill, chunked prefill, prefix hit,
             decode and resume: computed tokens chase total tokens.
    decode   a chunk of one token that samples the next, of a row that has computed all before. Most rows of most steps
             do nothing else, so a plan does not list them: see `Decodes`.
    draft    a guess at a row's next token. The worker makes it, computes it behind the chunk's own tokens and keeps it
             only if the token sampled in its place is the same, so drafts change how many tokens a step yields and
             never which. The engine core says how many a chunk may carry and sees none of them.

    swap     a move of a block between the KV cache and a *swap block* in the host's memory, where the K and V of a
             preempted row outlast its blocks.
    group    layers that keep the K and V of the same tokens. A row has a block table for each group, all as long as
             each other: entry i is where tokens [i, i + 1) * block_size are. What a group keeps no more has NO_BLOCK
             there in a new row; that a row which is there keeps less now is not said. Ids of blocks go through all
             groups, those of the second follow those of the first, and so do those of swap blocks. So only lists of
             `block_ids` tell groups apart: all of the first, then as many of the second.

Within a step a worker does, in order: drop `finished_rows`, add `new_rows`, append and replace blocks, swap blocks out,
swap blocks in, copy blocks, compute chunks (KV is written first, then attended), sample the rows whose chunk says so.
So a swap-out reads what earlier plans have written, whomever this one gives the block to; and a swap block that this
plan reads may be written again by the next.
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
"""Still spoken. What is new since then an older peer may leave out, and passes over where it is told (see Versions)."""
NO_TOKEN = -1
"""In `StepResult.tokens`: what the row yields stands elsewhere."""
NO_BLOCK = -1
"""In `NewRow.block_ids`: nothing is kept of these tokens."""
MAX_KV_GROUPS = 8
MAX_STEPS_IN_FLIGHT = 64
"""That any engine core may be told to have: each group has room for a token of each beyond what it keeps."""


class Versions(NamedTuple):
    """Of a contract: what one side speaks, the oldest and the newest. Two sides speak the newest that both know.

    A version that only adds what may be left out goes with the ones before: the oldest stays. Any other begins anew.
    """

    oldest: int
    newest: int

    def __str__(self) -> str:
        return str(self.newest) if self.oldest == self.newest else f"{self.oldest} to {self.newest}"

    def agreed(self, other: Versions) -> int | None:
        """None where there is none that both speak."""
        newest = min(self.newest, other.newest)
        return newest if newest >= max(self.oldest, other.oldest) else None


SPOKEN = Versions(OLDEST_PROTOCOL, PROTOCOL_VERSION)


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True):
    """Base of the union; the tag is the class name."""


# --- engine core -> worker -------------------------------------------------------------------------------------------


class NewRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A row seen by this worker for the first time.

    `token_ids` are prompt then output tokens so far; the first `num_prompt_tokens` are prompt, the rest stay output
    for ever (penalties, min_tokens and the random stream count them as output also after a replay). `num_computed`
    leading tokens already have their KV in `block_ids` (prefix hit, shared prompt, or swapped in by the same plan).
    `adapter` is what the row is computed with beside the model's weights; the worker reads it when it has not yet.
    `seed` and `choice` key the random stream; `eos_token_ids` is empty when the request ignores end of sequence.
    `domain`: rows that say the same may have drafts from one another's outputs; None: from its own text alone.
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
    pooling: PoolingParams | None = None  # its prompt is read: the last of it yields `RowOutput.pooled` and no token
    domain: str | None = None


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """Compute tokens [start, start + num_tokens) of a row; if `sample`, sample the token after the last of them.

    The token at `start` may be one the engine core has not seen yet: the worker's own last sample. A chunk that
    samples may carry up to `num_drafts` drafts, for which the row has blocks; until its result is in, nothing can be
    planned for the row.
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
    """Copy-on-write: entry `index` of the row's block table of the group that `block_id` is of becomes `block_id` (see
    `block_copies`)."""

    row_id: int
    index: int
    block_id: int


class Decodes(msgspec.Struct, frozen=True, array_like=True):
    """Which rows decode: those of the plan before, in their order, less `left`, with `joined` put in one by one.

    What comes of it must be `count` rows, whose ids and starts have these sums. Each row's start is its last one and 1.
    """

    count: int = 0
    row_id_sum: int = 0
    start_sum: int = 0
    left: list[int] = []
    joined: list[tuple[int, int, int]] = []  # (place, row id, start), by place


class StepPlan(Message, frozen=True, tag="plan"):
    """One step: decodes, then chunks, each of another row. `step` counts up from 1 per epoch without gaps."""

    step: int
    finished_rows: list[int] = []
    new_rows: list[NewRow] = []
    append_blocks: list[AppendBlocks] = []
    replace_blocks: list[ReplaceBlock] = []
    swap_outs: list[tuple[int, int]] = []  # (block, swap block)
    swap_ins: list[tuple[int, int]] = []  # (swap block, block)
    block_copies: list[tuple[int, int]] = []  # (source, destination), done before anything is computed
    decodes: Decodes = Decodes()
    chunks: list[Chunk] = []

    @property
    def num_rows(self) -> int:
        return self.decodes.count + len(self.chunks)

    @property
    def num_tokens(self) -> int:
        """Tokens to compute, with as many drafts as are allowed."""
        return self.decodes.count + sum(chunk.num_tokens + chunk.num_drafts for chunk in self.chunks)


class Welcome(Message, frozen=True, tag="welcome"):
    """The worker is admitted under `epoch`; everything it held before is void."""

    epoch: int
    engine_boot_id: str
    lease_s: float  # a worker that hears nothing from the engine core for this long stops and registers anew


class Refused(Message, frozen=True, tag="refused"):
    """Registration denied; `reason` says why, `final` that trying again cannot help."""

    reason: str
    final: bool = False


class BeatAck(Message, frozen=True, tag="beat_ack"):
    """Answers a Beat and renews the worker's lease."""


class Drain(Message, frozen=True, tag="drain"):
    """Nothing is left to do there: finish the current step, say Goodbye, exit."""


class ResetWorker(Message, frozen=True, tag="reset"):
    """Forget all rows; the engine core has replayed them elsewhere."""


# --- worker -> engine core -------------------------------------------------------------------------------------------


class KVGroup(msgspec.Struct, frozen=True, array_like=True):
    """What a worker has for the layers that keep the K and V of the same tokens: of all (`kept` is 0), or at least of
    the `kept` before the next that is to be computed."""

    num_blocks: int
    kept: int = 0
    num_swap_blocks: int = 0
    swap_block_s: float = 0.0  # how long it takes to move one block, as measured at start

    def room_in_flight(self, block_size: int, max_model_len: int) -> int:
        """Tokens of one row that may be planned and not confirmed, by what there is beyond a window."""
        if not self.kept or self.num_blocks * block_size >= max_model_len:
            return sys.maxsize
        return (self.num_blocks - -(-self.kept // block_size) - 2) * block_size


class Hello(Message, frozen=True, tag="hello"):
    """Registration. `worker_id` is the stable name, `incarnation` 64 random bits (hex) of this process, `registration`
    counts up with every one of its attempts: each has sockets and routing ids of its own
    (`{incarnation}.{registration}/d` and `/c`), so that nothing of an earlier one can stand in its way or be taken for
    it.

    It is said in the oldest version that the worker speaks, which `oldest_protocol` names where that is not `protocol`,
    the newest; from the Welcome on both sides say all in the version of that.

    `host_id` and `pid` let an engine core on the same host watch the process itself. `pools` are the outputs of a model
    that reads (see `pooling`), each vector of `pooled_width` numbers. Without `kv_groups` it keeps no K and V: every
    prompt is computed whole, in one chunk, if need be in a step of its own, however long. `start_s` is how long it took
    to load and warm up, as long as its successor will.
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
    max_adapters: int = 0  # that rows may have at once, each counted once; without any, rows with one fail
    oldest_protocol: int = 0
    start_s: float = 0.0

    @property
    def spoken(self) -> Versions:
        return Versions(self.oldest_protocol or self.protocol, self.protocol)

    @property
    def num_blocks(self) -> int:
        """Of all groups together."""
        return sum(group.num_blocks for group in self.kv_groups)

    @property
    def num_swap_blocks(self) -> int:
        """Of all groups together."""
        return sum(group.num_swap_blocks for group in self.kv_groups)


class TopLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of one token, its rank (1 = most likely), and the most likely alternatives, best first."""

    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class RowOutput(msgspec.Struct, frozen=True, array_like=True):
    """What a step yields for one row: one sampled token for a chunk that samples, and one more per draft that held; or
    what a prompt was read as.

    The K and V of all `token_ids` but the last are computed.
    """

    row_id: int
    token_ids: list[int]
    logprobs: list[TopLogprobs] | None = None  # one per token, if the row asked
    prompt_logprobs: list[TopLogprobs] | None = None  # for prompt tokens start+1 .. of this chunk, if the row asked
    num_drafted: int = 0  # drafts that were tried in this step
    num_drafts: int = 0  # drafts that the worker would try with the row's next token
    pooled: bytes = b""  # of a row that is read: what `pooling` asks for, float32, little-endian


class RowError(msgspec.Struct, frozen=True, array_like=True):
    """This row failed in this step; the worker has dropped it. `code` is an ErrorCode value."""

    row_id: int
    code: str
    message: str


class StepResult(Message, frozen=True, tag="result"):
    """Answers exactly one StepPlan. Chunks that did not sample are not listed.

    `tokens` is empty, or has one of each row that decodes, in the plan's order: its token if that is all there is to
    say, NO_TOKEN if `outputs` or `errors` has the row.
    """

    step: int
    tokens: list[int] = []
    outputs: list[RowOutput] = []
    errors: list[RowError] = []
    elapsed_s: float = 0.0  # receipt of the plan to result ready
    forward_s: float = 0.0  # of which in the model and the sampler


class Beat(Message, frozen=True, tag="beat"):
    """Sent every `times.BEAT_S` by a thread beside the step loop, which itself says since when it is busy."""

    busy_s: float  # how long the step now running has run; 0 when idle
    rss_bytes: int = 0  # resident memory of the process; 0 where the system does not tell
    leaving: bool = False  # it was asked to end: nothing new, and a Drain once it holds nothing


class StepFailed(Message, frozen=True, tag="step_failed"):
    """The step raised. No row of it is to blame yet: the worker has forgotten all rows and registers anew, after the
    device ran out of memory with a smaller `max_tokens_per_step`."""

    step: int
    reason: str


class Goodbye(Message, frozen=True, tag="goodbye"):
    """The worker leaves by its own will; its rows may be replayed at once."""

    reason: str = ""


ToWorker = StepPlan | Welcome | Refused | BeatAck | Drain | ResetWorker
FromWorker = Hello | StepResult | StepFailed | Beat | Goodbye
