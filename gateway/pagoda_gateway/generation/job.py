"""A job is a complete request: whoever holds it can run it and format its answer without the HTTP request.

It never changes once written, and can be stored, because it consists of plain values only.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pagoda_gateway.text.answers import HowRead
from pagoda_proto.adapters.identity import Adapter
from pagoda_proto.records import RequestRecord


class Shown(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to present the answer; the records say what the engine core generates.

    Attributes:
        n: Choices to return per prompt; if more ran, the likeliest ones.
        how: How to parse the text.
        stream: Send events instead of one object.
        usage: End a stream with its usage; `running_usage`: report it in every chunk.
        logprobs: Number of alternatives per token; None shows nothing. `prompt_logprobs`: the same for prompt tokens.
        token_ids: Send token ids beside the text.
        thoughts: Show reasoning, in dialects that have a field for it.
        echoes: For each prompt, the text that its choices begin with.
        prompt_only: Show none of the output.
        form_field: The name by which errors call the records' `grammar`.
    """

    n: int = 1
    how: HowRead = HowRead()
    stream: bool = False
    usage: bool = False
    running_usage: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    token_ids: bool = False
    thoughts: bool = True
    echoes: tuple[str, ...] | None = None
    prompt_only: bool = False
    form_field: str = ""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """`created` is in Unix seconds and `model` is the served name. `records` has one record per prompt; they differ
    only in prompt, id and seed.

    `owner` is the tenant. In dialects that use them, `head` holds the request's fields that the answer repeats, and
    `items` the conversation as it will be stored. If `loose_grammar` is not "", it is a weaker grammar for when the
    records' own cannot be used. The job ends at `due_at` (Unix seconds), complete or not; 0 means never. `ticket` is
    the name of its ticket, if its client sent a key.
    """

    id: str
    created: int
    model: str
    records: tuple[RequestRecord, ...]
    shown: Shown = Shown()
    loose_grammar: str = ""
    owner: str = ""
    due_at: float = 0.0
    ticket: str = ""
    head: dict[str, Any] = {}
    items: bytes = b""

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(record.prompt_token_ids) for record in self.records)

    @property
    def adapter(self) -> Adapter | None:
        return self.records[0].adapter if self.records else None

    def due(self, at: float, timeout_s: float) -> Job:
        """A copy due at `at`, which is `timeout_s` from now; it may wait in the queue until then."""
        records = tuple(msgspec.structs.replace(record, queue_timeout_s=timeout_s) for record in self.records)
        return msgspec.structs.replace(self, records=records, due_at=at)

    def of_many(self) -> Job:
        """A copy without a deadline, for readers that each have their own: it may queue as long as any request."""
        return self.due(0.0, 0.0)

    def loosened(self) -> Job:
        """A copy with the weaker grammar."""
        records = []
        for record in self.records:
            params = msgspec.structs.replace(record.task.params, grammar=self.loose_grammar)
            task = msgspec.structs.replace(record.task, params=params)
            records.append(msgspec.structs.replace(record, task=task))
        return msgspec.structs.replace(self, records=tuple(records), loose_grammar="")
