"""Tool choice and reasoning through both chat APIs: requests become grammars, output becomes events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from llguidance import LLMatcher, LLTokenizer
from tests.gateway.fakes_engine import MODEL, Gateway, play
from tests.gateway.model_dir import CHAT_TEMPLATE, EOS, byte_level_tokenizer, write_model_dir
from tokenizers import AddedToken

from pagoda_gateway.text.model_text import ModelText
from pagoda_proto.errors import ErrorCode, PagodaError
from pagoda_proto.records import FinishReason, RequestRecord

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
ASK: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 200}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
OPENS = "{% if not enable_thinking is defined %}{% elif enable_thinking %}<think>\n{% else %}<think></think>{% endif %}"
THINKS = CHAT_TEMPLATE + "{# <think> </think> #}" + OPENS


def function(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA, **fields}}


TOOLS = [function("add"), function("sub")]
USES = [{"name": name, "input_schema": SCHEMA} for name in ("add", "sub")]


def call(name: str, arguments: str = '{"a": 1}') -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def thinking_model(root: Path, *said: str, template: str = THINKS, reason: FinishReason = FinishReason.STOP) -> Gateway:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens([AddedToken(text, special=False) for text in ("<think>", "</think>")])
    write_model_dir(root / "model", tokenizer, tokenizer_config={"chat_template": template})
    gateway = Gateway(root / "model", play([]))
    gateway.engine.load = msgspec.structs.replace(gateway.engine.load, max_model_len=4096)
    gateway.engine.script = play(*(gateway.ids(text) for text in said), reason=reason)
    return gateway


def last(gateway: Gateway) -> RequestRecord:
    return gateway.engine.generations[-1].record


def asked(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    return ({"model": MODEL, "input": "hello"} if path == RESPONSES else ASK) | fields


async def post(gateway: Gateway, path: str = CHAT, **fields: Any) -> dict[str, Any]:
    response = await gateway.client.post(path, json=asked(path, fields))
    assert response.status_code == 200, response.text
    return response.json()


async def refusal(gateway: Gateway, path: str = CHAT, **fields: Any) -> str:
    response = await gateway.client.post(path, json=asked(path, fields))
    assert response.status_code == 400, response.text
    return response.json()["error"]["message"]


def admits(text: ModelText, grammar: str, answer: str) -> bool:
    eos = text.tokenizer.token_to_id(EOS)
    known = LLTokenizer(text.tokenizer.to_str(), n_vocab=text.vocab_size, eos_token=[eos])
    matcher = LLMatcher(known, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = text.encode(answer, add_special_tokens=False)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


NAMED: dict[str, Any] = {"type": "function", "function": {"name": "sub"}}
ALLOWED: dict[str, Any] = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
OFTEN: dict[str, Any] = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED] * 1025}}
# What was requested, and whether text, a call of add, one of sub, and two calls are allowed.
CHOICES: list[tuple[dict[str, Any], tuple[bool, bool, bool, bool]]] = [
    ({}, (True, True, True, True)),
    ({"tool_choice": "auto", "parallel_tool_calls": False}, (True, True, True, False)),
    ({"tool_choice": "required"}, (False, True, True, True)),
    ({"tool_choice": "required", "parallel_tool_calls": False}, (False, True, True, False)),
    ({"tool_choice": NAMED}, (False, False, True, False)),
    ({"tool_choice": ALLOWED}, (False, False, True, True)),
]
SAME_CHOICES: list[dict[str, Any]] = [
    {},
    {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
    {"tool_choice": {"type": "any"}},
    {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
    {"tool_choice": {"type": "tool", "name": "sub"}},
]
FLAT = [{"type": "function", "name": name, "parameters": SCHEMA} for name in ("add", "sub")]
FLAT_CHOICES: list[dict[str, Any]] = [
    {},
    {"tool_choice": "auto", "parallel_tool_calls": False},
    {"tool_choice": "required"},
    {"tool_choice": "required", "parallel_tool_calls": False},
    {"tool_choice": {"type": "function", "name": "sub"}},
    {
        "tool_choice": {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "sub"}],
        }
    },
]
FLAT_OFTEN = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "sub"}] * 1025}
ALIKE = [
    *((MESSAGES, {"tools": USES} | fields, CHOICES[i][1]) for i, fields in enumerate(SAME_CHOICES)),
    *((RESPONSES, {"tools": FLAT} | fields, CHOICES[i][1]) for i, fields in enumerate(FLAT_CHOICES)),
]


@pytest.mark.parametrize(
    ("path", "fields", "allowed"), [*((CHAT, {"tools": TOOLS} | fields, may) for fields, may in CHOICES), *ALIKE]
)
async def test_a_tool_choice_is_kept_by_the_grammar(
    tmp_path: Path, path: str, fields: dict[str, Any], allowed: tuple[bool, ...]
) -> None:
    gateway = thinking_model(tmp_path, "x", template=CHAT_TEMPLATE)
    await post(gateway, path, **fields)
    grammar = last(gateway).task.params.grammar
    answers = ("hello", call("add"), call("sub"), call("sub") + "\n" + call("sub"))
    assert tuple(admits(gateway.text, grammar, answer) for answer in answers) == allowed
    assert not admits(gateway.text, grammar, call("add", '{"a": "x"}'))
    assert not admits(gateway.text, grammar, call("mul"))


async def test_without_a_use_for_tools_there_is_no_grammar(tmp_path: Path) -> None:
    gateway = thinking_model(tmp_path, "x")
    for path, fields in (
        (CHAT, {"tools": TOOLS, "tool_choice": "none"}),
        (MESSAGES, {"tools": USES, "tool_choice": {"type": "none"}}),
        (CHAT, {}),
        (MESSAGES, {}),
    ):
        await post(gateway, path, **fields)
        assert last(gateway).task.params.grammar == ""


@pytest.mark.parametrize(
    ("path", "fields", "says"),
    [
        (CHAT, {"tools": [function("f", strict=True, parameters={"not": {}})]}, "tools[0].function.parameters/not: "),
        (MESSAGES, {"tools": [{"name": "f", "input_schema": {"not": {}}, "strict": True}]}, "[0].input_schema/not: "),
        (RESPONSES, {"tools": [FLAT[0] | {"parameters": {"not": {}}, "strict": True}]}, "tools[0].parameters/not: "),
        (CHAT, {"tools": [function("f", parameters={"type": "array"})]}, "tools[0].function.parameters: must describe"),
        (MESSAGES, {"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "[0].input_schema: must describe"),
        (RESPONSES, {"tools": [FLAT[0] | {"parameters": {"type": ["array"]}}]}, "tools[0].parameters: must describe"),
        (RESPONSES, {"tools": FLAT, "tool_choice": {"type": "function", "name": "mul"}}, "names 'mul'"),
        (RESPONSES, {"tool_choice": "required"}, "tool_choice needs tools"),
        (CHAT, {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "mul"}}}, "names 'mul'"),
        (MESSAGES, {"tools": USES, "tool_choice": {"type": "tool", "name": "mul"}}, "names 'mul'"),
        (CHAT, {"tool_choice": "required"}, "tool_choice needs tools"),
        (MESSAGES, {"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
        (CHAT, {"tools": TOOLS, "tool_choice": OFTEN}, "at most 1024 items"),
        (RESPONSES, {"tools": FLAT, "tool_choice": FLAT_OFTEN}, "at most 1024 items"),
        (CHAT, {"tools": [TOOLS[0], TOOLS[0]]}, "must have a different name"),
        (MESSAGES, {"tools": [USES[0], USES[0]]}, "must have a different name"),
        (CHAT, {"tools": []}, "tools: empty array: expected an array with minimum length 1"),
        (CHAT, {"tools": TOOLS, "ignore_eos": True}, "ignore_eos"),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 2000}}, "greater than thinking.budget_tokens"),
        (CHAT, {"thinking_budget": 1, "thinking_token_budget": 2}, "differ"),
    ],
)  # fmt: skip
async def test_what_cannot_be_done_is_a_400(tmp_path: Path, path: str, fields: dict[str, Any], says: str) -> None:
    gateway = thinking_model(tmp_path, "x")
    assert says in await refusal(gateway, path, **fields)
    assert gateway.engine.generations == []


async def test_what_the_engine_core_refuses_is_asked_again_with_less(tmp_path: Path) -> None:
    gateway = thinking_model(tmp_path, call("add"), template=CHAT_TEMPLATE)
    said = gateway.engine.script
    asked: list[str] = []

    def script(record: RequestRecord) -> Any:
        asked.append(record.task.params.grammar)
        if len(asked) == 1:
            raise PagodaError(ErrorCode.INVALID_ARGUMENT, "this cannot be used", "grammar")
        return said(record)

    gateway.engine.script = script
    answer = await post(gateway, tools=TOOLS)
    assert answer["choices"][0]["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    exact, loose = asked
    assert not admits(gateway.text, exact, call("add", '{"b": 1}'))
    assert admits(gateway.text, loose, call("add", '{"b": 1}'))
    assert not admits(gateway.text, loose, call("add", "[1]"))


async def test_strict_tools_are_not_asked_again_with_less(tmp_path: Path) -> None:
    gateway = thinking_model(tmp_path)

    def script(record: RequestRecord) -> Any:
        raise PagodaError(ErrorCode.INVALID_ARGUMENT, "this cannot be used", "grammar")

    gateway.engine.script = script
    assert await refusal(gateway, tools=[function("f", strict=True)]) == "this cannot be used"


THOUGHT = "<think>\nHm.\n</think>\n\nHello."


async def test_thoughts_are_told_under_both_names(tmp_path: Path) -> None:
    gateway = thinking_model(tmp_path, THOUGHT)
    answer = await post(gateway)
    message = answer["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"], message["reasoning"]) == ("Hello.", "Hm.", "Hm.")
    num_thoughts = len(gateway.ids(THOUGHT[: THOUGHT.index("</think>")])) + 1
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_thoughts}


@pytest.mark.parametrize(
    ("fields", "said", "content", "num_thoughts"),
    [
        ({"chat_template_kwargs": {"enable_thinking": True}}, "Hm.</think>Hello.", "Hello.", 4),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "Hello.", "Hello.", 0),
        ({"reasoning_effort": "none"}, "Hello.", "Hello.", 0),
        ({}, "Hello.", "Hello.", 0),
    ],
)
async def test_where_the_template_leaves_the_model_thoughts_begin(
    tmp_path: Path, fields: dict[str, Any], said: str, content: str, num_thoughts: int
) -> None:
    gateway = thinking_model(tmp_path, said)
    answer = await post(gateway, **fields)
    message = answer["choices"][0]["message"]
    assert message["content"] == content
    assert message.get("reasoning") == ("Hm." if num_thoughts else None)
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_thoughts}


async def test_thoughts_have_a_budget(tmp_path: Path) -> None:
    gateway = thinking_model(tmp_path, THOUGHT)
    for fields in ({"thinking_budget": 4}, {"thinking_token_budget": 4}):
        await post(gateway, **fields)
        grammar = last(gateway).task.params.grammar
        assert admits(gateway.text, grammar, "<think>abcd</think>so")
        assert not admits(gateway.text, grammar, "<think>abcde</think>so")
    budget = {"type": "enabled", "budget_tokens": 1024}
    await post(gateway, MESSAGES, thinking=budget, max_tokens=2000)
    grammar = last(gateway).task.params.grammar
    assert admits(gateway.text, grammar, "x" * 1024 + "</think>so")
    assert not admits(gateway.text, grammar, "x" * 1025 + "</think>so")


async def test_thinking_that_is_disabled_is_no_thinking(tmp_path: Path) -> None:
    asked = {"thinking": {"type": "disabled"}}
    by_template = thinking_model(tmp_path / "switch", "Hello.")
    await post(by_template, MESSAGES, **asked)
    assert last(by_template).task.params.grammar == ""
    prompt = by_template.text.decode(last(by_template).prompt_token_ids, skip_special_tokens=False)
    assert prompt.endswith("<think></think>")
    by_grammar = thinking_model(tmp_path / "none", "Hello.", template=CHAT_TEMPLATE + "<think>\n{# </think> #}")
    await post(by_grammar, MESSAGES, **asked)
    grammar = last(by_grammar).task.params.grammar
    assert admits(by_grammar.text, grammar, "</think>so")
    assert not admits(by_grammar.text, grammar, "I</think>so")


async def test_thinking_blocks_of_messages(tmp_path: Path) -> None:
    gateway = thinking_model(tmp_path, THOUGHT + call("add"))
    message = await post(gateway, MESSAGES, tools=USES)
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use"]
    assert message["content"][0] == {"type": "thinking", "thinking": "Hm.", "signature": ""}
    assert message["content"][2]["input"] == {"a": 1}
    assert message["stop_reason"] == "tool_use"


async def test_reasoning_items_of_responses(tmp_path: Path) -> None:
    gateway = thinking_model(tmp_path, THOUGHT + call("add"))
    response = await post(gateway, RESPONSES, tools=FLAT)
    thought, message, use = response["output"]
    assert (thought["type"], thought["content"]) == ("reasoning", [{"type": "reasoning_text", "text": "Hm."}])
    assert (message["content"][0]["text"], use["name"], use["arguments"]) == ("Hello.", "add", '{"a": 1}')
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 4
    streamed = await gateway.client.post(RESPONSES, json=asked(RESPONSES, {"tools": FLAT, "stream": True}))
    events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    assert events[-1]["type"] == "response.completed"
    told = "".join(event["delta"] for event in events if event["type"] == "response.reasoning_text.delta")
    assert told == "Hm."
    strip = {"id", "call_id"}
    items = [{name: value for name, value in item.items() if name not in strip} for item in response["output"]]
    again = [
        {name: value for name, value in item.items() if name not in strip} for item in events[-1]["response"]["output"]
    ]
    assert again == items


async def test_a_call_that_breaks_off_has_no_input_but_a_reason(tmp_path: Path) -> None:
    gateway = thinking_model(tmp_path, call("add")[:-18], reason=FinishReason.LENGTH)
    message = await post(gateway, MESSAGES, tools=USES)
    assert (message["content"][0]["name"], message["content"][0]["input"]) == ("add", {})
    assert message["stop_reason"] == "max_tokens"
    answer = await post(gateway, CHAT, tools=TOOLS)
    assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"].startswith('{"a"')
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_a_call_that_a_stop_string_cuts_is_not_to_be_answered(tmp_path: Path) -> None:
    gateway = thinking_model(tmp_path, call("add"))
    (choice,) = (await post(gateway, CHAT, tools=TOOLS, stop="1}"))["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "1}")
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"a": '
    message = await post(gateway, MESSAGES, tools=USES, stop_sequences=["1}"])
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "1}")
    (item,) = (await post(gateway, RESPONSES, tools=FLAT, stop="1}"))["output"]
    assert (item["type"], item["status"]) == ("function_call", "incomplete")
    (choice,) = (await post(gateway, CHAT, tools=TOOLS, stop="</tool_call>"))["choices"]
    assert choice["finish_reason"] == "tool_calls"


async def test_ids_are_those_that_a_format_demands(tmp_path: Path) -> None:
    kimi = CHAT_TEMPLATE.replace("<tool_call>", "<|tool_calls_section_begin|>")
    said = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:7<|tool_call_argument_begin|>"
        '{"a": 1}<|tool_call_end|><|tool_calls_section_end|>'
    )
    gateway = thinking_model(tmp_path / "kimi", said, template=kimi)
    (made,) = (await post(gateway, tools=TOOLS))["choices"][0]["message"]["tool_calls"]
    assert made["id"] == "functions.add:7"
    mistral = CHAT_TEMPLATE.replace("<tool_call>", "[TOOL_CALLS] [ARGS]")
    gateway = thinking_model(tmp_path / "mistral", '[TOOL_CALLS]add[ARGS]{"a": 1}' * 2, template=mistral)
    found = (await post(gateway, tools=TOOLS))["choices"][0]["message"]["tool_calls"]
    assert all(len(each["id"]) == 9 and each["id"].isalnum() for each in found)
    assert found[0]["id"] != found[1]["id"]


async def test_the_official_openai_client_streams_thoughts_and_calls(tmp_path: Path) -> None:
    gateway = thinking_model(tmp_path, THOUGHT + call("add") + call("sub"))
    client = openai.AsyncOpenAI(api_key="x", base_url="http://gateway/v1", http_client=gateway.client)
    thoughts, told = "", 0
    async with client.chat.completions.stream(**ASK, tools=TOOLS) as stream:
        async for event in stream:
            if event.type == "chunk" and event.chunk.choices:
                delta = event.chunk.choices[0].delta
                thoughts += getattr(delta, "reasoning_content", None) or ""
                told += sum(bool(each.function.arguments) for each in delta.tool_calls or ())
        final = await stream.get_final_completion()
    message = final.choices[0].message
    assert (thoughts, message.content, final.choices[0].finish_reason) == ("Hm.", "Hello.", "tool_calls")
    assert [(each.function.name, json.loads(each.function.arguments)) for each in message.tool_calls] == [
        ("add", {"a": 1}),
        ("sub", {"a": 1}),
    ]
    assert told > 4  # arguments are streamed as they are written


async def test_thoughts_may_be_left_out_of_the_answer_but_not_of_the_count(tmp_path: Path) -> None:
    gateway = thinking_model(tmp_path, THOUGHT)
    fields = {"include_reasoning": False, "return_token_ids": True}
    whole = await post(gateway, **fields)
    message = whole["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "Hello.", "refusal": None}
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    told, ids = "", []
    client = openai.AsyncOpenAI(api_key="x", base_url="http://gateway/v1", http_client=gateway.client)
    async for chunk in await client.chat.completions.create(**ASK, stream=True, extra_body=fields):
        (choice,) = chunk.choices
        assert getattr(choice.delta, "reasoning", None) is None
        told += choice.delta.content or ""
        ids += getattr(choice, "token_ids", None) or []
    assert (told, ids) == ("Hello.", whole["choices"][0]["token_ids"])


async def test_reasoning_comes_back_under_either_name(tmp_path: Path) -> None:
    shows = "{% for message in messages %}{{ message.reasoning_content }}{% endfor %}"
    gateway = thinking_model(tmp_path, "x", template=shows)
    for name in ("reasoning", "reasoning_content"):
        await post(gateway, messages=[{"role": "assistant", "content": "y", name: "Hm."}])
        assert gateway.text.decode(last(gateway).prompt_token_ids) == "Hm."


@pytest.mark.parametrize("batch", [1, 4, 100])
async def test_log_probabilities_of_a_response_are_those_of_its_text(tmp_path: Path, batch: int) -> None:
    gateway = thinking_model(tmp_path, "x")
    gateway.engine.script = play(gateway.ids("I think</think>so it is"), batch=batch, reason=FinishReason.STOP)
    switch = {"chat_template_kwargs": {"enable_thinking": True}}
    answer = await post(gateway, RESPONSES, include=["message.output_text.logprobs"], **switch)
    thought, message = answer["output"]
    assert thought["content"][0]["text"] == "I think"
    assert message["content"][0]["text"] == "so it is"
    assert "".join(entry["token"] for entry in message["content"][0]["logprobs"]) == "so it is"
