"""A chat template is a program of the model's author: it runs in a sandbox, and sees messages, tools and plain values.

The environment is that of Hugging Face's `apply_chat_template` (same options, filters and globals), so a template
renders the same here as there. Templates come from the model directory or the operator, never from a request.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from pagoda_proto.errors import ErrorCode, PagodaError

MAX_TEMPLATE_BYTES = 256 * 1024
MAX_OUTPUT_CHARS = 4 * 1024 * 1024
MAX_STEPS = 1_000_000  # calls and loop iterations in one rendering
MAX_RENDER_S = 5.0  # of the thread's CPU time, so a busy machine refuses nothing
MAX_ERROR_CHARS = 256
_CONTINUE_TAG = "\ue000pagoda-continue\ue000 "  # private use: no sensible message contains it
# Only the gateway may set these, whatever a template reads.
RESERVED = frozenset({
    "messages", "tools", "documents", "tokenize", "chat_template", "add_generation_prompt", "continue_final_message",
    "return_dict", "return_tensors", "return_assistant_tokens_mask", "padding", "truncation", "max_length",
    "add_special_tokens", "range", "bos_token", "eos_token", "pad_token", "unk_token",
})  # fmt: skip
_RENDER_ERRORS = (TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError, RecursionError)

Message = Mapping[str, Any]


class BadTemplate(ValueError):
    """The template itself is at fault: too large, or not valid Jinja."""


class _Generation(Extension):
    """`{% generation %}` marks what training should learn; rendering ignores it."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Namespace(Namespace):
    """jinja's namespace without underscore names, which lead towards Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        for name in dict(*args[1:], **kwargs):
            _check_name(name)
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError("a namespace cannot hold names that start with an underscore")


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Effort:
    """What one rendering has spent. All repetition in a template is by loops or calls, and both pay here."""

    def __init__(self) -> None:
        self._num_left = MAX_STEPS
        self._ends_at = time.thread_time() + MAX_RENDER_S

    def spend(self) -> None:
        self._num_left -= 1
        if self._num_left < 0 or time.thread_time() > self._ends_at:
            raise SecurityError("the template takes too long")


_effort: ContextVar[_Effort] = ContextVar("_effort")


class _Sandbox(ImmutableSandboxedEnvironment):
    """Bounds the size of repeated values by the size of an output, and the number of operations by `_Effort`."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not _small_power(left, right):
            raise SecurityError("a power is too large")
        if operator == "*":
            for items, times in ((left, right), (right, left)):
                if hasattr(items, "__len__") and isinstance(times, int) and len(items) * times > MAX_OUTPUT_CHARS:
                    raise SecurityError("a repetition is too long")
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _effort.get().spend()
        if isinstance(__obj, LoopContext):  # a recursive loop descends
            args = (__self.turns(args[0]), *args[1:]) if args else args
        return super().call(__context, __obj, *args, **kwargs)

    def turns(self, items: Iterable[Any]) -> Iterator[Any]:
        """Yield `items`, each of which costs a step. Every loop of a template runs over this (see `_generate`)."""
        effort = _effort.get()
        for item in items:
            effort.spend()
            yield item

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        for loop in source.find_all(nodes.For):
            loop.iter = nodes.Call(nodes.EnvironmentAttribute("turns"), [loop.iter], [], None, None)
        return super()._generate(source, *args, **kwargs)


def _small_power(base: Any, exponent: Any) -> bool:
    if isinstance(base, int) and isinstance(exponent, int) and exponent > 0:
        return exponent * math.log2(abs(base) + 1) <= 4096
    return True


def _environment() -> _Sandbox:
    env = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    env.filters["tojson"] = _tojson
    globals: dict[str, Callable[..., Any]] = {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _make_dict,
        "namespace": _Namespace,
    }
    env.globals.update(globals)
    return env


def thinking_switch(variables: frozenset[str]) -> str:
    """The variable that tells a template whether to think, "" if it has none."""
    return next((name for name in ("enable_thinking", "thinking") if name in variables), "")


class ChatTemplate:
    """One compiled template.

    `variables` are the names it reads from its caller. `reads_parts`: content may be a list of text parts.
    `knows_tools`: it shows tools to the model.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises BadTemplate."""
        if len(source.encode()) > MAX_TEMPLATE_BYTES:
            raise BadTemplate(f"a chat template has at most {MAX_TEMPLATE_BYTES} bytes")
        env = _environment()
        try:
            self.variables = frozenset(meta.find_undeclared_variables(env.parse(source)))
            self._template = env.from_string(source)
        except (TemplateSyntaxError, RecursionError) as error:
            raise BadTemplate(f"the chat template does not compile: {error}") from error
        self._special_tokens = dict(special_tokens)
        self.knows_tools = "tools" in self.variables

    @cached_property
    def reads_parts(self) -> bool:
        """Whether a list of one part renders as its text does."""
        text = "a part"
        try:
            as_text, as_part = (
                self.render([{"role": "user", "content": content}])
                for content in (text, [{"type": "text", "text": text}])
            )
        except PagodaError:
            return False
        return text in as_text and as_text == as_part

    def check_kwargs(self, kwargs: Mapping[str, Any]) -> None:
        """Accept only plain values for variables that the template reads and that are not reserved.

        Raises:
            PagodaError: INVALID_ARGUMENT naming the key.
        """
        for name, value in kwargs.items():
            problem = ""
            if name in RESERVED:
                problem = "cannot be set by a request"
            elif name not in self.variables:
                problem = "is not used by this model's chat template"
            elif not isinstance(value, str | int | float | bool | None):
                problem = "must be a string, number, boolean or null"
            if problem:
                name = name[:64]
                message = f"chat_template_kwargs.{name} {problem}"
                raise PagodaError(ErrorCode.INVALID_ARGUMENT, message, f"chat_template_kwargs.{name}")

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text for the model. `continue_final_message` leaves the last message open.

        Raises:
            PagodaError: INVALID_ARGUMENT (param "messages") if the template refuses or cannot render the messages.
        """
        if continue_final_message:
            messages = [*messages[:-1], _tag(messages[-1])]
        variables = {
            **self._special_tokens,
            **(kwargs or {}),
            "messages": messages,
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self._collect(variables)
        except _RENDER_ERRORS as error:
            raise _bad_messages(_explain(error)) from error
        return _cut_at_tag(text) if continue_final_message else text

    def _collect(self, variables: dict[str, Any]) -> str:
        _effort.set(_Effort())
        pieces: list[str] = []
        total = 0
        for piece in self._template.generate(variables):
            total += len(piece)
            if total > MAX_OUTPUT_CHARS:
                raise TemplateError(f"the rendered chat has more than {MAX_OUTPUT_CHARS} characters")
            pieces.append(piece)
        return "".join(pieces)


def _bad_messages(why: str) -> PagodaError:
    return PagodaError(ErrorCode.INVALID_ARGUMENT, why, "messages")


def _explain(error: Exception) -> str:
    """Show what template authors say through `raise_exception`; of other errors only the type."""
    said = f": {str(error)[:MAX_ERROR_CHARS]}" if isinstance(error, TemplateError) else f" ({type(error).__name__})"
    return f"the chat template cannot render these messages{said}"


def _tag(message: Message) -> Message:
    match message.get("content"):
        case str() as text:
            return {**message, "content": text + _CONTINUE_TAG}
        case [*parts, {"text": str() as text} as last]:
            return {**message, "content": [*parts, {**last, "text": text + _CONTINUE_TAG}]}
    raise _bad_messages("continue_final_message needs a final message with text")


def _cut_at_tag(text: str) -> str:
    """The text up to the tag; if the template trimmed the message, trailing space is trimmed too, as HF does."""
    at = text.rfind(_CONTINUE_TAG.strip())
    if at < 0:
        raise _bad_messages("the chat template drops the final message, so it cannot be continued")
    return text[:at] if text.startswith(_CONTINUE_TAG, at) else text[:at].rstrip()
