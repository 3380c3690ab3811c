"""How to parse an answer, and the grammar that makes it parseable: thoughts first, then calls, text or a form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from pagoda_gateway.text.events import Said, Text, merged
from pagoda_gateway.text.lark import GAP, Rules
from pagoda_gateway.text.reasoning import ReasoningFormat, ReasoningReader, Thinking, recognised_reasoning
from pagoda_gateway.text.tool_formats.choosing import recognised
from pagoda_gateway.text.tool_formats.format import ToolFormat
from pagoda_gateway.text.tool_formats.functions import Function
from pagoda_gateway.text.tool_formats.reader import ToolReader
from pagoda_gateway.text.tool_formats.rules import beginning, calls_in_text, calls_only, calls_or
from pagoda_proto import grammars


class Demand(StrEnum):
    """Whether an answer may or must have calls."""

    AUTO = "auto"
    REQUIRED = "required"


class Calling(msgspec.Struct, frozen=True, kw_only=True):
    """What may be called in an answer: one of `functions`, or, with `several`, more than one."""

    functions: tuple[Function, ...]
    demand: Demand = Demand.AUTO
    several: bool = True


class HowRead(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to parse a text: `thinking` is None if thoughts are not separated from text; `functions` may be called."""

    thinking: Thinking | None = None
    functions: tuple[Function, ...] = ()


@dataclass(frozen=True)
class Formats:
    """Formats of a model's chat template, None if it has none. `tokens` are the ids of markers that are tokens."""

    tools: ToolFormat | None
    reasoning: ReasoningFormat | None
    tokens: Mapping[str, int]

    @staticmethod
    def of(template: str, added: Mapping[str, int], tool_parser: str = "", reasoning_parser: str = "") -> Formats:
        """Formats that the operator names, else those that the template's source shows; `added`: token ids by text."""
        tools = recognised(template, tool_parser)
        reasoning = recognised_reasoning(template, reasoning_parser)
        markers = " ".join(text for each in (tools, reasoning) if each is not None for text in each.markers)
        return Formats(tools, reasoning, {text: i for text, i in added.items() if text in markers})

    def visible(self, how: HowRead) -> frozenset[int]:
        """Tokens that must be visible in a text to be parsed like this, special or not."""
        read = [self.tools if how.functions else None, self.reasoning if how.thinking is not None else None]
        markers = " ".join(text for each in read if each is not None for text in each.markers)
        return frozenset(i for text, i in self.tokens.items() if text in markers)


class AnswerReader:
    """Text in, events out, however the input is split."""

    def __init__(self, formats: Formats, how: HowRead) -> None:
        self._reasoning = self._tools = None
        if formats.reasoning is not None and how.thinking is not None:
            self._reasoning = ReasoningReader(formats.reasoning, how.thinking)
        if formats.tools is not None and how.functions:
            self._tools = ToolReader(formats.tools, how.functions)

    @property
    def called(self) -> bool:
        """Whether there are calls so far, all of them complete."""
        return self._tools is not None and self._tools.num_calls > 0 and not self._tools.in_call

    def push(self, text: str) -> list[Said]:
        said: list[Said] = [Text(text)] if text else []
        if self._reasoning is not None:
            said = self._reasoning.push(text)
        return self._with_calls(said)

    def flush(self) -> list[Said]:
        """End of the text."""
        said = self._with_calls([] if self._reasoning is None else self._reasoning.flush())
        return merged([*said, *(() if self._tools is None else self._tools.flush())])

    def _with_calls(self, said: list[Said]) -> list[Said]:
        if self._tools is None:
            return said
        found: list[Said] = []
        for each in said:
            found += self._tools.push(each.text) if isinstance(each, Text) else [each]
        return merged(found)


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer may contain.

    `form` is the grammar of its text, "" for any. `budget` is the most tokens of thoughts. `thinks`: None leaves it to
    the model, False makes it answer at once.
    """

    calling: Calling | None = None
    form: str = ""
    budget: int | None = None
    thinks: bool | None = None

    def grammar(self, formats: Formats, thinking: Thinking | None) -> str:
        """The grammar of the whole answer, "" if it may be anything. Raises NotEnforced."""
        may_think = thinking in (Thinking.OPEN, Thinking.POSSIBLE)
        silenced = may_think and (self.budget == 0 or self.thinks is False)
        limited = may_think and self.budget is not None
        if not (self.calling or self.form or silenced or limited):
            return ""
        if self.form and not self.calling and thinking in (None, Thinking.OVER):
            return self.form
        rules = Rules(formats.tokens)
        reasoning = formats.reasoning if thinking is not None else None
        answer = rules.rule(self._answer(rules, formats, reasoning, thinking))
        return rules.grammar(self._thoughts(rules, reasoning, thinking, answer, silenced))

    def _answer(
        self, rules: Rules, formats: Formats, reasoning: ReasoningFormat | None, thinking: Thinking | None
    ) -> str:
        opens = reasoning.open if reasoning is not None and thinking is Thinking.POSSIBLE else ""
        begins = rules.spell(reasoning.answer) if reasoning is not None else ""
        other = f"{begins} {self._form(rules)}" if self.form else ""
        if self.calling is None or formats.tools is None:
            return other or f"{begins} {rules.text(first=beginning(opens))}"
        tools, functions, several = formats.tools, self.calling.functions, self.calling.several
        if self.calling.demand is Demand.REQUIRED:
            return calls_only(rules, tools, functions, several=several)
        if begins and not other:
            other = f"{begins} {rules.text(tools.triggers)}"
        if other:
            return calls_or(rules, tools, functions, other, several=several)
        return calls_in_text(rules, tools, functions, several=several, avoid=opens)

    def _form(self, rules: Rules) -> str:
        """Add the form's grammar as a part of this one."""
        first, *others = grammars.parts_of(self.form)
        for other in others:
            rules.part(other)
        return rules.part(first)

    def _thoughts(
        self,
        rules: Rules,
        reasoning: ReasoningFormat | None,
        thinking: Thinking | None,
        answer: str,
        silenced: bool,
    ) -> str:
        if reasoning is None or thinking is Thinking.OVER:
            return answer
        rest = rules.spell(reasoning.close)
        if not silenced:
            rest = rules.up_to([reasoning.close], max_tokens=self.budget)
        gap = "" if not (self.form or (self.calling and self.calling.demand is Demand.REQUIRED)) else GAP
        between = f"{rules.spell(reasoning.again)} {gap}"
        if thinking is Thinking.OPEN:
            return f"{rest} {between} {answer}"
        if silenced:
            return answer
        times = "*" if reasoning.again else "?"
        return f"({rules.spell(reasoning.open)} {rest} {between}){times} {answer}"
