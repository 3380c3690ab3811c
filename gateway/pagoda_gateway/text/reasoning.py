"""Separates a model's reasoning from its answer: it comes first, between two marks, and the prompt may have opened it.

The end of the prompt shows whether the model thinks: if the template has opened the thoughts, they continue; if it has
closed them, there are none; otherwise the model may open them itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pagoda_gateway.text.events import Said, Text, Thought, merged
from pagoda_gateway.text.source import Reading, Source
from pagoda_gateway.text.tool_formats.choosing import fitting, names_of
from pagoda_gateway.text.tool_formats.tagged_families import HY_RELEASES


class Thinking(StrEnum):
    """What an answer may begin with."""

    OPEN = "open"  # thoughts that the prompt has opened
    POSSIBLE = "possible"  # the mark that opens them
    OVER = "over"  # neither


@dataclass(frozen=True, kw_only=True)
class ReasoningFormat:
    """How a model family marks its reasoning.

    Attributes:
        names: vLLM's names for it; one format may have several.
        marks: A chat template that contains all of these uses it.
        open, close: Marks around thoughts.
        implied: Answers begin with thoughts, though nothing opens them.
        layout: Other text between thoughts and answer that belongs to neither.
        again: If set, thoughts may be opened anywhere, also after others; this text stands between them.
        answer: Text with which a plain answer begins.
    """

    names: tuple[str, ...]
    marks: tuple[str, ...]
    open: str = "<think>"
    close: str = "</think>"
    implied: bool = False
    layout: tuple[str, ...] = ()
    again: str = ""
    answer: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        return self.open, self.close, *self.layout, self.again, self.answer

    def at(self, prompt: str) -> Thinking:
        """The state in which the end of a prompt leaves the model."""
        end = prompt.rstrip()
        if end.endswith(self.close):
            return Thinking.OVER
        return Thinking.OPEN if self.implied or end.endswith(self.open) else Thinking.POSSIBLE


REASONING_FORMATS = (
    ReasoningFormat(names=("seed_oss",), marks=("seed:think",), open="<seed:think>", close="</seed:think>"),
    ReasoningFormat(
        names=("openai_gptoss",),
        marks=("<|channel|>", "analysis"),
        open="<|channel|>analysis<|message|>",
        close="<|end|>",
        layout=("<|start|>assistant", "<|channel|>final<|message|>", "<|channel|>commentary<|message|>", "<|end|>"),
        again="<|start|>assistant",
        answer="<|channel|>final<|message|>",
    ),
    ReasoningFormat(
        names=("kimi_k3",),
        marks=("<|open|>", "<|sep|>", "<|close|>"),
        open="<|open|>think<|sep|>",
        close="<|close|>think<|sep|>",
        layout=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
        again="<|open|>response<|sep|>",
    ),
    ReasoningFormat(names=("gemma4",), marks=("<|channel>",), open="<|channel>thought\n", close="<channel|>"),
    ReasoningFormat(names=("mistral",), marks=("[THINK]",), open="[THINK]", close="[/THINK]"),
    ReasoningFormat(
        names=("cohere_command3", "cohere_command4", "cohere_command"),
        marks=("<|START_THINKING|>",),
        open="<|START_THINKING|>",
        close="<|END_THINKING|>",
        layout=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
        answer="<|START_RESPONSE|>",
    ),
    ReasoningFormat(names=("apertus",), marks=("<|inner_prefix|>",), open="<|inner_prefix|>", close="<|inner_suffix|>"),
    ReasoningFormat(names=("kimi_vl",), marks=("◁/think▷",), open="◁think▷", close="◁/think▷"),
    ReasoningFormat(
        names=("granite",),
        marks=("Here is my thought process:", "Here is my response:"),
        open="Here is my thought process:",
        close="Here is my response:",
    ),
    ReasoningFormat(names=("minimax_m2",), marks=("<minimax:tool_call>", "</think>")),
    ReasoningFormat(
        names=("hunyuan_a13b",), marks=("<think>", "<answer>"), layout=("<answer>", "</answer>"), answer="<answer>\n"
    ),
    ReasoningFormat(
        names=("ernie45",), marks=("<think>", "<response>"), layout=("<response>", "</response>"), answer="<response>\n"
    ),
    ReasoningFormat(names=("step3",), marks=("steptml", "</think>"), implied=True),
    *(
        ReasoningFormat(
            names=("hy_v3", "hy_v4"),
            marks=(release, "</think"),
            open=f"<think{release}>",
            close=f"</think{release}>",
        )
        for release in HY_RELEASES
        if release
    ),
    ReasoningFormat(names=("minimax_m3",), marks=("mm:think",), open="<mm:think>", close="</mm:think>"),
    ReasoningFormat(
        names=("plamo3",),
        marks=("<|plamo:begin_think:plamo|>",),
        open="<|plamo:begin_think:plamo|>",
        close="<|plamo:end_think:plamo|>",
    ),
    ReasoningFormat(  # at its default effort; other efforts have other marks
        names=("k2_horizon",), marks=("<ifm|think>",), open="<ifm|think>", close="</ifm|think>"
    ),
    ReasoningFormat(
        names=(
            *("qwen3", "deepseek_r1", "deepseek_v3", "deepseek_v4", "deepseek_v41", "exaone4", "glm45", "glm47"),
            *("granite_thinking_parser", "holo2", "hy_v3", "hy_v4", "kimi_k2", "ling3", "mimo", "minicpmv"),
            *("nemotron_v3", "olmo3", "poolside_v1", "step3p5"),
        ),
        marks=("</think>",),
    ),
)
REASONING_FORMAT_NAMES = names_of(REASONING_FORMATS)


def recognised_reasoning(template: str, name: str = "") -> ReasoningFormat | None:
    return fitting(REASONING_FORMATS, template, name)


class ReasoningReader:
    """Text in, thoughts and text out, however the input is split. White space next to marks is layout."""

    def __init__(self, reasoning: ReasoningFormat, thinking: Thinking) -> None:
        self._format = reasoning
        self._thinking = thinking
        self._said: list[Said] = []
        self._source = Source()
        self._held: list[str] = []  # white space at the end of a thought, dropped if a mark follows
        self._lead = ""  # between thoughts
        self._thought = False
        self._trims = False  # leading white space of the next text is dropped
        self._reading = self._read()
        next(self._reading, None)

    def push(self, text: str) -> list[Said]:
        self._source.feed(text)
        return self._go_on()

    def flush(self) -> list[Said]:
        """End of the text."""
        self._source.end()
        return self._go_on()

    def _go_on(self) -> list[Said]:
        next(self._reading, None)
        said = merged(self._said)
        self._said.clear()
        return said

    def _read(self) -> Reading[None]:
        told, source = self._format, self._source
        opened = self._thinking is Thinking.OPEN
        if self._thinking is Thinking.POSSIBLE:
            lead = yield from source.space()
            opened = yield from source.take(told.open)
            self._say("" if opened else lead)
        if opened:
            yield from self._thoughts()
        markers = (*((told.open,) if told.again else ()), *told.layout)
        while markers and (marker := (yield from source.until(markers, self._say))) is not None:
            self._trims = True
            if marker == told.open:
                yield from self._thoughts()
        while (yield from source.peek()):
            self._say(source.rest())

    def _thoughts(self) -> Reading[None]:
        self._held, self._trims = [], True
        self._lead = "\n" if self._thought else ""
        yield from self._source.until((self._format.close,), self._think)
        self._trims = True

    def _think(self, text: str) -> None:
        text = text.lstrip() if self._trims else text
        shown = text.rstrip()
        if shown:
            self._trims, self._thought = False, True
            self._said.append(Thought("".join([self._lead, *self._held, shown])))
            self._lead, self._held = "", []
        self._held.append(text[len(shown) :])

    def _say(self, text: str) -> None:
        text = text.lstrip() if self._trims else text
        if text:
            self._trims = False
            self._said.append(Text(text))
