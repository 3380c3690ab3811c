"""How a reply is judged; shared by the evaluation through a server and the local one."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from demo.schema import Example, Message

# Tasks whose accuracy must not fall below a bar.
BARS = {"one_digit_sum": 0.9, "reverse": 0.9, "capital": 0.9}

_TOOL_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


@dataclass(frozen=True)
class Call:
    """One tool call; arguments are parsed, or None where they are not JSON."""

    name: str
    arguments: Any


@dataclass(frozen=True)
class Reply:
    """What came back: visible text and tool calls."""

    text: str
    calls: list[Call] = field(default_factory=list)


@dataclass(frozen=True)
class Outcome:
    """One judged example."""

    task: str
    correct: bool
    question: str
    expected: str
    got: str


def _json_or_none(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def parse_reply(text: str) -> Reply:
    """Splits raw model output into text and tool calls, as a server's parser would."""
    calls = []
    for body in _TOOL_CALL.findall(text):
        value = _json_or_none(body)
        if isinstance(value, dict):
            calls.append(Call(str(value.get("name")), value.get("arguments")))
    return Reply(_TOOL_CALL.sub("", text).strip(), calls)


def message_calls(message: Message) -> list[Call]:
    """The tool calls of a message in the OpenAI form."""
    functions = [call["function"] for call in message.get("tool_calls") or []]
    return [Call(f["name"], _json_or_none(f["arguments"])) for f in functions]


def is_correct(example: Example, reply: Reply) -> bool:
    """Exact match; JSON and tool calls are compared as values, not as text."""
    expected = message_calls(example.answer)
    if expected or reply.calls:
        return reply.calls == expected
    answer = str(example.answer["content"])
    if example.task == "extract_json":
        return bool(_json_or_none(reply.text) == json.loads(answer))
    return reply.text.strip() == answer


def judge(example: Example, reply: Reply) -> Outcome:
    expected = example.answer.get("content") or str(message_calls(example.answer))
    return Outcome(
        task=example.task,
        correct=is_correct(example, reply),
        question=str(example.messages[-1]["content"]),
        expected=str(expected),
        got=reply.text or str(reply.calls),
    )


def accuracies(outcomes: list[Outcome]) -> dict[str, tuple[int, int]]:
    """task -> (correct, total), in the order in which the tasks were evaluated."""
    total = Counter(outcome.task for outcome in outcomes)
    correct = Counter(outcome.task for outcome in outcomes if outcome.correct)
    return {task: (correct[task], total[task]) for task in total}


def below_bar(results: dict[str, tuple[int, int]]) -> list[str]:
    """Tasks that were evaluated and miss their bar."""
    return [task for task, bar in BARS.items() if task in results and results[task][0] < bar * results[task][1]]
