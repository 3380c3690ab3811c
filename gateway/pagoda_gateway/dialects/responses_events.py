"""A response is what its events add up to: whole or streamed, live or stored, one `Telling` produces it.

Events are numbered. Except for where the text is split, their content depends on the record alone, so a telling that
starts again can leave out what was told before (`AlreadyTold`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagoda_gateway.generation.updates import Update
from pagoda_gateway.text.events import CallArguments, CallBegun, Event, Finish, Text, Thought
from pagoda_proto.errors import PagodaError
from pagoda_proto.records import FinishReason, Usage

Told = dict[str, Any]  # an event
INCOMPLETE = {FinishReason.LENGTH: "max_output_tokens"}
LAST = ("response.completed", "response.incomplete", "response.failed")


@dataclass
class AlreadyTold:
    """How much of a response's events its reader already has; usually nothing.

    Attributes:
        num_events: Number of events.
        units: Units of content, whose order is always the same: one per character of a delta, and one per event that
            is not a delta.
        logprobs: Entries of log-probabilities in deltas.
        ended: The response, if its last event is known.
    """

    num_events: int = 0
    units: int = 0
    logprobs: int = 0
    ended: Told | None = None

    def add(self, event: Mapping[str, Any]) -> None:
        self.num_events += 1
        if event["type"] in LAST:
            self.ended = event["response"]
        self.units += len(event["delta"]) if "delta" in event else 1
        self.logprobs += len(event["logprobs"]) if "delta" in event and "logprobs" in event else 0

    def rest_of(self, event: Told) -> Told | None:
        """The event without the part already known; None if nothing is left."""
        if "delta" not in event:
            known, self.units = self.units > 0, max(0, self.units - 1)
            return None if known else event
        chars = min(self.units, len(event["delta"]))
        self.units -= chars
        event["delta"] = event["delta"][chars:]
        if "logprobs" in event:
            entries = min(self.logprobs, len(event["logprobs"]))
            self.logprobs -= entries
            event["logprobs"] = event["logprobs"][entries:]
        return event if event["delta"] or event.get("logprobs") or not chars else None


class Telling:
    """Produces the events of one response. `response` is the object so far, starting with `head`; ids derive from
    `name`.

    An event refers to the response as it is just then: write it before asking for the next one.
    """

    def __init__(self, head: Mapping[str, Any], name: str, known: AlreadyTold | None = None) -> None:
        self.response: dict[str, Any] = {**head, "status": "in_progress", "output": [], "usage": None}
        self._name = name
        self._known = known
        self._num_told = known.num_events if known is not None else 0
        self._finish: Finish | None = None
        self._item: Told = {}  # the open item
        self._pieces: list[str] = []  # of its text
        self._logprobs: list[Told] = []

    def begin(self) -> Iterator[Told]:
        waits = bool(self.response.get("background"))
        before = self.response | {"status": "queued"} if waits else self.response
        yield from self._tell({"type": "response.created", "response": before})
        if waits:
            yield from self._tell({"type": "response.queued", "response": before})
        yield from self._tell({"type": "response.in_progress", "response": self.response})

    def update(self, update: Update, logprobs: Sequence[Told]) -> Iterator[Told]:
        """`logprobs`: of the update's tokens, if requested. They are sent with the next text."""
        self._logprobs += logprobs
        for said in update.events:
            for event in self._said(said):
                yield from self._tell(event)

    def finish(self, usage: Usage, now: int, num_thoughts: int | None = None) -> Iterator[Told]:
        """`num_thoughts`: number of reasoning tokens, if it is certain."""
        reason = INCOMPLETE.get(self._finish.reason) if self._finish else None
        status = "incomplete" if reason else "completed"
        self.response |= {"status": status, "usage": _usage(usage, num_thoughts or 0)}
        self.response |= {"incomplete_details": {"reason": reason}} if reason else {"completed_at": now}
        yield from self._tell({"type": f"response.{status}", "response": self.response})

    def fail(self, error: PagodaError, usage: Usage) -> Iterator[Told]:
        code = "rate_limit_exceeded" if error.status.http == 429 else "server_error"
        failure = {"code": code, "message": error.message}
        self._stop()
        self.response.pop("completed_at", None)
        self.response |= {"status": "failed", "error": failure, "incomplete_details": None, "usage": _usage(usage)}
        yield from self._tell({"type": "response.failed", "response": self.response})

    def cancel(self, usage: Usage) -> Iterator[Told]:
        """End as cancelled. The API has no event for this, so the last event is `response.incomplete`."""
        self._stop()
        self.response |= {"status": "cancelled", "usage": _usage(usage)}
        yield from self._tell({"type": "response.incomplete", "response": self.response})

    def take_back(self, num_events: int) -> None:
        """Reuse the numbers of the last events, which nobody has seen."""
        self._num_told -= num_events

    def _stop(self) -> None:
        """End the open item as incomplete and keep it; whatever follows was never told before."""
        self._known = None
        for _ in self._end("incomplete"):
            pass

    def _tell(self, event: Told) -> Iterator[Told]:
        left = event if self._known is None else self._known.rest_of(event)
        if left is not None:
            yield {"type": left["type"], "sequence_number": self._num_told, **left}
            self._num_told += 1

    def _said(self, said: Event) -> Iterator[Told]:
        match said:
            case Text():
                if self._kind != "message":
                    yield from self._begin({"type": "message", "role": "assistant", "content": []}, "msg")
                    yield from self._begin_part({"type": "output_text", "text": "", "annotations": [], "logprobs": []})
                logprobs, self._logprobs = self._logprobs, []
                yield self._delta("response.output_text", said.text, logprobs)
            case Thought():
                if self._kind != "reasoning":
                    yield from self._begin({"type": "reasoning", "summary": [], "content": []}, "rs")
                    yield from self._begin_part({"type": "reasoning_text", "text": ""})
                yield self._delta("response.reasoning_text", said.text)
            case CallBegun():
                call_id = said.id or self._id("call")
                call = {"type": "function_call", "call_id": call_id, "name": said.name, "arguments": ""}
                yield from self._begin(call, "fc")
            case CallArguments():
                yield self._delta("response.function_call_arguments", said.text)
            case Finish():
                self._finish = said
                broken = said.reason in INCOMPLETE or (self._kind == "function_call" and not said.called)
                yield from self._end("incomplete" if broken else "completed")

    @property
    def _kind(self) -> str:
        """The type of the open item; "" if there is none."""
        return str(self._item["type"]) if self._item else ""

    @property
    def _index(self) -> int:
        return len(self.response["output"]) - 1

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{self._name}{len(self.response['output']):04x}"

    def _begin(self, item: Told, prefix: str) -> Iterator[Told]:
        yield from self._end("completed")
        self._logprobs = [] if prefix == "fc" else self._logprobs
        self._item = {"id": self._id(prefix), **item, "status": "in_progress"}
        self.response["output"].append(self._item)
        yield {"type": "response.output_item.added", "output_index": self._index, "item": self._item}

    def _begin_part(self, part: Told) -> Iterator[Told]:
        self._item["content"].append(part)
        yield {"type": "response.content_part.added", **self._place(), "part": part}

    def _place(self) -> Told:
        place = {"item_id": self._item["id"], "output_index": self._index}
        return place | ({"content_index": 0} if "content" in self._item else {})

    def _delta(self, kind: str, text: str, logprobs: list[Told] | None = None) -> Told:
        self._pieces.append(text)
        told = {"type": f"{kind}.delta", **self._place(), "delta": text}
        if logprobs is None:
            return told
        self._item["content"][0]["logprobs"] += logprobs
        return told | {"logprobs": logprobs}

    def _end(self, status: str) -> Iterator[Told]:
        if not self._item:
            return
        text, self._pieces = "".join(self._pieces), []
        if self._kind == "function_call":
            self._item["arguments"] = text
            done = {"type": "response.function_call_arguments.done", **self._place(), "arguments": text}
            yield done | {"name": self._item["name"]}
        else:
            for part in self._item["content"]:  # one, or none if it broke off before that
                part["text"] = text
                logprobs = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
                yield {"type": f"response.{part['type']}.done", **self._place(), "text": text} | logprobs
                yield {"type": "response.content_part.done", **self._place(), "part": part}
        self._item["status"] = status
        yield {"type": "response.output_item.done", "output_index": self._index, "item": self._item}
        self._item = {}


def _usage(usage: Usage, num_thoughts: int = 0) -> Told:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_prompt_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": num_thoughts},
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
    }
