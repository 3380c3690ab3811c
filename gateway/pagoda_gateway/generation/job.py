"""A job is what was asked, complete: whoever has it can run it, and show what came of it, without the request.

It is written once, and can be stored: plain values all the way down.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pagoda_gateway.text.answers import HowRead
from pagoda_proto.adapters.identity import Adapter
from pagoda_proto.records import RequestRecord


class Shown(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the answer is to be shown; what the engine core is asked for is in the records.

    Attributes:
        n: Choices per prompt; of more that ran, the likeliest.
        how: How the text is read.
        stream: As events, and not as one object.
        usage: A stream tells its usage at its end; `running_usage`: in every chunk.
        logprobs: This many alternatives for every token; None shows nothing. `prompt_logprobs`: the same of prompts.
        token_ids: Token ids beside the text.
        thoughts: Where dialects have a place for them.
        echoes: By prompt, the text that its choices begin with.
        prompt_only: Nothing of the output.
        form_field: What errors call the `grammar` of the records.
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
    """`created` in Unix seconds; `model` is the served name; a record per prompt, alike but for prompt, id and seed.

    `owner` is the tenant who asked. `head` is what the answer says of what was asked, and `items` what the conversation
    is to be kept as, in dialects that have such. `loose_grammar` says less than the records' own, and is used where
    that cannot be, if it is not "". At `due_at`, in Unix seconds, it ends, whole or not; 0 is never. `ticket` is the
    name of the one that it has, if its client gave it a key.
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
        """The same, to be done at this time, which is so far away: until then it may wait to begin."""
        records = tuple(msgspec.structs.replace(record, queue_timeout_s=timeout_s) for record in self.records)
        return msgspec.structs.replace(self, records=records, due_at=at)

    def of_many(self) -> Job:
        """The same for whoever reads it, now or later, each with a time of its own: it waits as long as any may."""
        return self.due(0.0, 0.0)

    def loosened(self) -> Job:
        """The same with the grammar that says less."""
        records = []
        for record in self.records:
            params = msgspec.structs.replace(record.task.params, grammar=self.loose_grammar)
            task = msgspec.structs.replace(record.task, params=params)
            records.append(msgspec.structs.replace(record, task=task))
        return msgspec.structs.replace(self, records=tuple(records), loose_grammar="")
