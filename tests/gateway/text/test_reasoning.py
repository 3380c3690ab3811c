"""Reasoning is separated from answers, however a text is split; the prompt's end shows in which the model starts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import few

from pagoda_gateway.text.events import Said, Text, Thought, merged
from pagoda_gateway.text.reasoning import (
    REASONING_FORMAT_NAMES,
    REASONING_FORMATS,
    ReasoningFormat,
    ReasoningReader,
    Thinking,
    recognised_reasoning,
)

HARMONY = (
    "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis<|message|>Two.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>Said."
)


def named(name: str) -> ReasoningFormat:
    return next(each for each in REASONING_FORMATS if name in each.names)


def read(name: str, pieces: list[str], thinking: Thinking = Thinking.POSSIBLE) -> list[Said]:
    reader = ReasoningReader(named(name), thinking)
    return merged([event for piece in pieces for event in reader.push(piece)] + reader.flush())


@pytest.mark.parametrize("name", REASONING_FORMAT_NAMES)
def test_thoughts_come_first(name: str) -> None:
    told = named(name)
    answer = told.answer or ""
    text = f"\n{told.open}\nIs it?\n\nYes.\n{told.close}{told.again}\n\n{answer}It is.\n"
    assert read(name, [text]) == [Thought("Is it?\n\nYes."), Text("It is.\n")]
    opened = text[text.index("\nIs") :]
    assert read(name, [opened], Thinking.OPEN) == [Thought("Is it?\n\nYes."), Text("It is.\n")]


@pytest.mark.parametrize("name", REASONING_FORMAT_NAMES)
def test_without_thoughts_a_text_stays_as_it_is(name: str) -> None:
    for text in (" It is.\n", f"It is {named(name).open} so", "", "<"):
        for thinking in (Thinking.POSSIBLE, Thinking.OVER):
            if not named(name).again:
                assert "".join(event.text for event in read(name, [text], thinking) if isinstance(event, Text)) == text


def test_thoughts_that_break_off_are_thoughts() -> None:
    assert read("qwen3", ["<think>\nHm, </thi"]) == [Thought("Hm, </thi")]
    assert read("qwen3", ["Hm, "], Thinking.OPEN) == [Thought("Hm,")]


def test_channels_may_alternate() -> None:
    assert read("openai_gptoss", [HARMONY]) == [Thought("One.\nTwo."), Text("Said.")]
    called = HARMONY.replace("<|channel|>final<|message|>Said.", "<|channel|>commentary to=functions.f <|message|>{}")
    assert read("openai_gptoss", [called])[1] == Text("<|channel|>commentary to=functions.f <|message|>{}")


@pytest.mark.parametrize("name", ["qwen3", "openai_gptoss", "mistral", "granite", "hunyuan_a13b"])
@settings(max_examples=few(40), deadline=None)
@given(data=st.data())
def test_it_does_not_matter_how_a_text_is_cut(name: str, data: st.DataObject) -> None:
    told = named(name)
    words = [told.open, told.close, *told.layout, "\n", " ", "<", "x", "é🙂", told.open[:3], told.close[:-1]]
    text = "".join(data.draw(st.lists(st.sampled_from(words), max_size=12)))
    ends = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]
    thinking = data.draw(st.sampled_from(Thinking))
    assert read(name, pieces, thinking) == read(name, [text], thinking)


@pytest.mark.parametrize(
    ("prompt", "thinking"),
    [
        ("<|im_start|>assistant\n", Thinking.POSSIBLE),
        ("<|im_start|>assistant\n<think>\n", Thinking.OPEN),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", Thinking.OVER),
        ("user: what is <think>?\nassistant:", Thinking.POSSIBLE),
    ],
)
def test_the_end_of_a_prompt_says_where_the_model_is(prompt: str, thinking: Thinking) -> None:
    assert named("qwen3").at(prompt) is thinking


def test_templates_are_recognised_by_their_marks() -> None:
    for told in REASONING_FORMATS:
        found = recognised_reasoning(" ".join(told.marks))
        assert found is not None
        assert (found.open, found.close) == (told.open, told.close)
    assert recognised_reasoning("{{ messages }}") is None
    chosen = recognised_reasoning("</think>", "mistral")
    assert chosen is not None
    assert chosen.open == "[THINK]"
