"""Tokenises text in pieces, so that the context length bounds the cost, however long the text is.

A text that is certainly too long is refused before any work is done; one that is probably too long is counted slice by
slice until that is certain. Only short work runs on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from pydantic import BaseModel

from pagoda_gateway.catalogue import ServedModel
from pagoda_gateway.generation.answers import Plan, plan_of
from pagoda_gateway.http.text_pool import LARGE_SIZE, TextPool
from pagoda_gateway.text.answers import Wanted
from pagoda_gateway.text.conversation import Chat, text_size
from pagoda_gateway.text.detokenizer import Detokenizer
from pagoda_gateway.text.model_text import ModelText
from pagoda_gateway.text.reasoning import Thinking
from pagoda_proto.errors import ErrorCode, InvalidParams, PagodaError, Problem
from pagoda_proto.params import too_long

SLICE_CHARS = 32 * 1024
CHARS_PER_TOKEN = 8  # a text of at most this many characters per token of context is tokenised without counting first
CHARS_PER_VALUE = 8  # cost of a number or an empty object, in characters
IDS_PER_PIECE = 16 * 1024
CERTAIN = 2  # slicing splits words, so a count is only certainly too large beyond twice the limit


class ChatPrompt(NamedTuple):
    """`thinking` is the reasoning state at the end of the prompt; None if reasoning cannot be told from text."""

    token_ids: list[int]
    thinking: Thinking | None


@dataclass(frozen=True)
class Reader:
    """Tokenises the text of one request; the pool takes turns between clients.

    `asked` is the number of output tokens that the request wants, for error messages; None for as many as fit.
    `max_chars`, if given, is the limit instead of the context. `keep`, if given, keeps only the last `keep` tokens.
    """

    pool: TextPool
    model: ServedModel
    client: str
    param: str
    asked: int | None = None
    max_chars: int | None = None
    keep: int | None = None

    async def chat(self, size: int, read: Callable[[], Chat], add_special_tokens: bool = False) -> ChatPrompt:
        """Render and tokenise a chat of `size` characters, which `read` parses.

        Raises:
            PagodaError: the template does not accept it, or it does not fit.
        """
        model_text = self.model.text

        def render() -> tuple[str, Thinking | None]:
            chat = read()
            template = model_text.template(bool(chat.tools))
            if chat.tools and (model_text.formats.tools is None or not template.knows_tools):
                message = "this model's chat template has no tool calls, or none in a form that is known here"
                raise PagodaError(ErrorCode.INVALID_ARGUMENT, message, "tools")
            template.check_kwargs(chat.options)
            self.check_size(text_size([chat.turns, chat.tools, chat.options]))
            text = model_text.render_marked(chat)
            return text, _thinking(model_text, chat, text)

        text, thinking = await self.pool.run(self.client, size, render)
        self.check_size(len(text))
        await self._count(text)
        encode = partial(model_text.encode_marked, text, add_special_tokens)
        token_ids = await self.pool.run(self.client, len(text), encode, native=True)
        return ChatPrompt(last(token_ids, self.keep), thinking)

    async def plan(self, size: int, wanted: Wanted, thinking: Thinking | None, place: Callable[[str], str]) -> Plan:
        """Plan the grammar and parsing of a chat's answer; its tools have `size` characters. Raises InvalidParams."""
        return await self.pool.run(
            self.client, size, partial(plan_of, self.model.text.formats, wanted, thinking, place)
        )

    async def text_ids(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """Token ids of plain texts. Raises PagodaError CONTEXT_LENGTH_EXCEEDED."""
        for text in texts:
            self.check_size(len(text))
        found: list[list[int]] = []
        for part in _batches(texts):
            await self._count(part[0])  # a text longer than a slice is alone in its batch

            def work(part: Sequence[str] = part) -> list[list[int]]:
                encode = self.model.text.encode
                opening = [] if self.keep is None else encode("", add_special_tokens)
                return [last(encode(text, add_special_tokens), self.keep, opening) for text in part]

            found += await self.pool.run(self.client, sum(map(len, part)), work, native=True)
        return found

    async def check(self, text: str) -> None:
        """Reject a text that is certainly too long. Raises PagodaError."""
        self.check_size(len(text))
        await self._count(text)

    def check_size(self, num_chars: int) -> None:
        """Reject, before any work, a text that is certainly too long. Raises PagodaError."""
        if self.max_chars is not None:
            if num_chars > self.max_chars:
                message = f"at most {self.max_chars} characters are allowed, got {num_chars}"
                raise InvalidParams([Problem(self.param, message)])
            return
        limit = self.model.limits.max_model_len
        at_least = self.model.text.min_tokens_of(num_chars)
        if at_least > limit:
            raise self._too_long(limit, at_least)

    async def _count(self, text: str) -> None:
        limit = self.model.limits.max_model_len
        if self.max_chars is not None or len(text) <= max(SLICE_CHARS, CHARS_PER_TOKEN * limit):
            return
        count = 0
        for start in range(0, len(text), SLICE_CHARS):
            part = text[start : start + SLICE_CHARS]
            encode = partial(self.model.text.encode, part, add_special_tokens=False)
            count += len(await self.pool.run(self.client, len(part), encode, native=True))
            if count > CERTAIN * limit:
                raise self._too_long(limit, count // CERTAIN)

    def _too_long(self, limit: int, at_least: int) -> PagodaError:
        return too_long(limit, at_least, 1 if self.asked is None else self.asked, self.param, at_least=True)


def num_kept(truncate: int | None, asked: int | None, max_model_len: int) -> int | None:
    """How many tokens of a prompt `truncate_prompt_tokens` keeps: -1 keeps all that leave room for `asked` tokens.

    Raises:
        InvalidParams: it exceeds the context.
    """
    if truncate is not None and truncate > max_model_len:
        message = f"must be at most {max_model_len}, this model's context, got {truncate}"
        raise InvalidParams([Problem("truncate_prompt_tokens", message)])
    return max(1, max_model_len - max(1, asked or 1)) if truncate == -1 else truncate


def last(token_ids: list[int], keep: int | None, opening: Sequence[int] = ()) -> list[int]:
    """The last `keep` tokens, or all if None; special tokens that the tokenizer puts first stay in front."""
    if keep is None or len(token_ids) <= keep:
        return token_ids
    begins = len(opening) if len(opening) < keep and token_ids[: len(opening)] == list(opening) else 0
    return token_ids[:begins] + token_ids[len(token_ids) - keep + begins :]


def _thinking(text: ModelText, chat: Chat, prompt: str) -> Thinking | None:
    """The reasoning state at the end of the prompt; None if the model has no reasoning format known here."""
    reasoning = text.formats.reasoning
    if reasoning is None:
        return None
    if not chat.continue_final_message:
        return reasoning.at(prompt)
    begun = prompt.rfind(reasoning.open)
    return Thinking.OPEN if begun > prompt.rfind(reasoning.close) and not chat.turns[-1].calls else Thinking.OVER


def _batches(texts: Sequence[str]) -> Iterator[list[str]]:
    """Group texts, in order, into batches of at most one slice, or of a single longer text."""
    batch: list[str] = []
    size = 0
    for text in texts:
        if batch and size + len(text) > SLICE_CHARS:
            yield batch
            batch, size = [], 0
        batch.append(text)
        size += len(text)
    if batch:
        yield batch


def work_size(value: Any) -> int:
    """The size of part of a body: its characters, plus a constant for every other value. Counting stops once it is
    large."""
    waiting, size = [value], 0
    while waiting and size <= LARGE_SIZE:
        item = waiting.pop()
        size += len(item) if isinstance(item, str) else CHARS_PER_VALUE
        if isinstance(item, BaseModel):
            waiting += vars(item).values()
        elif isinstance(item, Mapping):
            waiting += item.values()
        elif isinstance(item, list):
            waiting += item
    return size


def at_most(name: str, count: int, limit: int) -> None:
    """Raises InvalidParams."""
    if count > limit:
        raise InvalidParams([Problem(name, f"at most {limit} are allowed, got {count}")])


async def text_of(
    pool: TextPool, text: ModelText, client: str, token_ids: Sequence[int], *, skip_special_tokens: bool = False
) -> str:
    """Detokenise a whole token sequence, likewise in pieces."""
    detokenizer = Detokenizer(text.table, skip_special_tokens=skip_special_tokens, at_start=True)
    pieces: list[str] = []
    for start in range(0, len(token_ids), IDS_PER_PIECE):
        part = token_ids[start : start + IDS_PER_PIECE]
        pieces.append(await pool.run(client, len(part), partial(detokenizer.push, part)))
    return "".join(pieces) + detokenizer.flush()
