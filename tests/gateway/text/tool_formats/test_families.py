"""Every family's text is parsed into its calls, whole or in pieces; its grammar writes what parses as valid calls."""

from __future__ import annotations

import functools
import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema.protocols import Validator
from tests.examples import few
from tests.gateway.text.tool_formats.walks import Vocabulary, markers_in, vocabulary, walk

from pagoda_gateway.text.events import CallArguments, CallBegun, CallEnded, Said, Text, merged
from pagoda_gateway.text.lark import Rules
from pagoda_gateway.text.tool_formats.choosing import TOOL_FORMAT_NAMES, recognised
from pagoda_gateway.text.tool_formats.families import TOOL_FORMATS
from pagoda_gateway.text.tool_formats.format import ToolFormat
from pagoda_gateway.text.tool_formats.functions import Function
from pagoda_gateway.text.tool_formats.reader import ToolReader
from pagoda_gateway.text.tool_formats.rules import calls_in_text, calls_only

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "s": {"type": "string"},
        "n": {"type": "integer"},
        "o": {"enum": ["x", "y"]},
        "b": {"type": "boolean"},
        "u": {"anyOf": [{"type": "string", "enum": ["p", "q"]}, {"type": "null"}]},
        "l": {"type": "array", "items": {"type": "number"}},
        "d": {
            "type": "object",
            "properties": {"k": {"type": "string"}, "j": {"type": "null"}},
            "required": ["k"],
            "additionalProperties": False,
        },
        "m": {"type": "string", "minLength": 2, "maxLength": 3},
        "r": {"$ref": "#/$defs/z"},
    },
    "required": ["s", "n"],
    "additionalProperties": False,
    "$defs": {"z": {"type": "string", "pattern": "^[a-c]+$"}},
}
ADD = Function(name="add", parameters=SCHEMA, strict=True)
GO = Function(name="go", parameters={"type": "object", "properties": {}})
FUNCTIONS = (ADD, GO)
ARGUMENTS = {"s": 'é "q"\n<b>', "n": 42}
J = json.dumps(ARGUMENTS, ensure_ascii=False)
V = ARGUMENTS["s"]
PY = "'é \"q\"\\n<b>'"

# What a family writes for a call of add with ARGUMENTS, then one of go without any.
GOLDEN = {
    "hermes": f'<tool_call>\n{{"name": "add", "arguments": {J}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "go", "arguments": {}}\n</tool_call>',
    "qwen3_coder": f"<tool_call>\n<function=add>\n<parameter=s>\n{V}\n</parameter>\n<parameter=n>\n42\n</parameter>\n"
    "</function>\n</tool_call>\n<tool_call>\n<function=go>\n</function>\n</tool_call>",
    "llama3_json": f'<|python_tag|>{{"name": "add", "parameters": {J}}}; {{"name": "go", "parameters": {{}}}}',
    "pythonic": f"[add(s={PY}, n=42), go()]",
    "llama4_pythonic": f"<|python_start|>[add(s={PY}, n=42), go()]",
    "olmo3": f"<function_calls>\nadd(s={PY}, n=42)\ngo()\n</function_calls>",
    "lfm2": f"<|tool_call_start|>[add(s={PY}, n=42), go()]<|tool_call_end|>",
    "mistral": f"[TOOL_CALLS]add[ARGS]{J}[TOOL_CALLS]go[ARGS]{{}}",
    "mistral (old)": f'[TOOL_CALLS] [{{"name": "add", "arguments": {J}}}, {{"name": "go", "arguments": {{}}}}]',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
    f"{J}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>go\n```json\n{{}}\n```<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "deepseek_v31": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{J}<｜tool▁call▁end｜>"
    "<｜tool▁call▁begin｜>go<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="add">\n<｜DSML｜parameter name="s" string="true">'
    f'{V}</｜DSML｜parameter>\n<｜DSML｜parameter name="n" string="false">42</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="go">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "deepseek_v4": '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="add">\n<｜DSML｜parameter name="s" string="true">'
    f'{V}</｜DSML｜parameter>\n<｜DSML｜parameter name="n" string="false">42</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    '<｜DSML｜invoke name="go">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
    "glm45": f"<tool_call>add\n<arg_key>s</arg_key>\n<arg_value>{V}</arg_value>\n<arg_key>n</arg_key>\n"
    "<arg_value>42</arg_value>\n</tool_call>\n<tool_call>go\n</tool_call>",
    "glm47": f"<tool_call>add<arg_key>s</arg_key><arg_value>{V}</arg_value><arg_key>n</arg_key>"
    "<arg_value>42</arg_value></tool_call><tool_call>go</tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
    f"{J}<|tool_call_end|><|tool_call_begin|>functions.go:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    "<|tool_calls_section_end|>",
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="add" index="1"<|sep|>'
    f'<|open|>argument key="s" type="string"<|sep|>{V}<|close|>argument<|sep|>'
    '<|open|>argument key="n" type="number"<|sep|>42<|close|>argument<|sep|><|close|>call<|sep|>'
    '<|open|>call tool="go" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
    "minimax_m2": f'<minimax:tool_call>\n<invoke name="add">\n<parameter name="s">{V}</parameter>\n'
    '<parameter name="n">42</parameter>\n</invoke>\n<invoke name="go">\n</invoke>\n</minimax:tool_call>',
    "gemma4": f'<|tool_call>call:add{{s:<|"|>{V}<|"|>,n:42}}<tool_call|><|tool_call>call:go{{}}<tool_call|>',
    "functiongemma": f"<start_function_call>call:add{{s:<escape>{V}<escape>,n:42}}<end_function_call>"
    "<start_function_call>call:go{}<end_function_call>",
    "granite": f'<|tool_call|>[{{"name": "add", "arguments": {J}}}, {{"name": "go", "arguments": {{}}}}]',
    "phi4_mini_json": f'functools[{{"name": "add", "arguments": {J}}}, {{"name": "go", "arguments": {{}}}}]',
    "jamba": f'<tool_calls>[{{"name": "add", "arguments": {J}}}, {{"name": "go", "arguments": {{}}}}]</tool_calls>',
    "seed_oss": f"<seed:tool_call>\n<function=add>\n<parameter=s>{V}</parameter>\n<parameter=n>42</parameter>\n"
    "</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=go>\n</function>\n</seed:tool_call>",
    "step3": "<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name=\"add\">"
    f'<steptml:parameter name="s">{V}</steptml:parameter><steptml:parameter name="n">42</steptml:parameter>'
    "</steptml:invoke><｜tool_call_end｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name=\"go\">"
    "</steptml:invoke><｜tool_call_end｜>\n<｜tool_calls_end｜>",
    "internlm": f'<|action_start|> <|plugin|>\n{{"name": "add", "parameters": {J}}}<|action_end|>'
    '<|action_start|><|plugin|>\n{"name": "go", "parameters": {}}<|action_end|>',
    "hy_v3": f"<tool_calls>\n<tool_call>add<tool_sep>\n<arg_key>s</arg_key>\n<arg_value>{V}</arg_value>\n"
    "<arg_key>n</arg_key>\n<arg_value>42</arg_value>\n</tool_call>\n<tool_call>go<tool_sep>\n</tool_call>\n</tool_calls>",
    "cohere_command3": f'<|START_ACTION|>[\n    {{"tool_call_id": "0", "tool_name": "add", "parameters": {J}}},\n    '
    '{"tool_call_id": "1", "tool_name": "go", "parameters": {}}\n]<|END_ACTION|>',
    "dots": f'<dots_function_call>\n<invoke name="add">\n<parameter name="s">{V}</parameter>\n'
    '<parameter name="n">42</parameter>\n</invoke>\n<invoke name="go">\n</invoke>\n</dots_function_call>',
    "deepseek_v41": '<｜DSML｜ calls>\n<｜DSML｜ invoke name="add">\n<｜DSML｜ parameter name="s" string="true">'
    f'{V}</｜DSML｜ parameter>\n<｜DSML｜ parameter name="n" string="false">42</｜DSML｜ parameter>\n'
    '</｜DSML｜ invoke>\n<｜DSML｜ invoke name="go">\n</｜DSML｜ invoke>\n</｜DSML｜ calls>',
    "hy_v4": f"<tool_calls><tool_call>add<arg_key>s</arg_key><arg_value>{V}</arg_value><arg_key>n</arg_key>"
    "<arg_value>42</arg_value></tool_call><tool_call>go</tool_call></tool_calls>",
    "k2_horizon": f"<ifm|tool_calls>\n<ifm|tool_call>add\n<ifm|arg_key>s</ifm|arg_key>\n<ifm|arg_value>{V}"
    "</ifm|arg_value>\n<ifm|arg_key>n</ifm|arg_key>\n<ifm|arg_value>42</ifm|arg_value>\n</ifm|tool_call>\n"
    "<ifm|tool_call>go\n</ifm|tool_call>\n</ifm|tool_calls>",
    "mimo": f"<tool_call><function=add><parameter=s>{V}</parameter><parameter=n>42</parameter></function></tool_call>"
    "<tool_call><function=go></function></tool_call>",
    "plamo3": "<|plamo:begin_tool_requests:plamo|><|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>add"
    "<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>"
    f"{J}<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|><|plamo:begin_tool_request:plamo|>"
    "<|plamo:begin_tool_name:plamo|>go<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|>"
    "<|plamo:constrain|>json<|plamo:msg|>{}<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>"
    "<|plamo:end_tool_requests:plamo|>",
    "xlam": f'[{{"name": "add", "arguments": {J}}}, {{"name": "go", "arguments": {{}}}}]',
    "gigachat3": f'<|function_call|>{{"name": "add", "arguments": {J}}}',
    "gigachat3 (old)": f'<|message_sep|>\n\nfunction call<|role_sep|>\n{{"name": "add", "arguments": {J}}}',
    "apertus": f'<|tools_prefix|>[{{"add": {J}}}, {{"go": {{}}}}]<|tools_suffix|>',
    "minicpm5": f'<function name="add"><param name="s"><![CDATA[{V}]]></param><param name="n">42</param></function>\n'
    '<function name="go"></function>',
}  # fmt: skip
GOLDEN["longcat"] = GOLDEN["hermes"].replace("tool_call>", "longcat_tool_call>")
GOLDEN["granite-20b-fc"] = GOLDEN["hermes"].replace("\n</tool_call>", "").replace("<tool_call>\n", "<function_call> ")
GOLDEN["openai"] = f"<|channel|>commentary to=functions.add <|constrain|>json<|message|>{J}"
for hunyuan in ("hy_v3", "hy_v4"):
    GOLDEN[f"{hunyuan} (old)"] = GOLDEN[hunyuan]
    GOLDEN[hunyuan] = GOLDEN[hunyuan].replace(">", ":opensource>").replace("<b:opensource>", "<b>")
ONE_CALL = ("openai", "gigachat3", "gigachat3 (old)")  # a call ends the answer
IDS = {"kimi_k2": ["functions.add:0", "functions.go:1"], "cohere_command3": ["0", "1"]}


def format_of(name: str) -> ToolFormat:
    named = [each for each in TOOL_FORMATS if name.split()[0] in each.names]
    return named[-1 if "old" in name else 0]


def read(tool_format: ToolFormat, pieces: list[str]) -> list[Said]:
    reader = ToolReader(tool_format, FUNCTIONS)
    return merged([event for piece in pieces for event in reader.push(piece)] + reader.flush())


def calls_of(events: list[Said]) -> list[tuple[str, str, bool]]:
    """Name, arguments and whether they are whole."""
    found: list[tuple[str, str, bool]] = []
    for event in events:
        match event:
            case CallBegun():
                assert event.index == len(found)
                found.append((event.name, "", False))
            case CallArguments():
                name, arguments, whole = found[event.index]
                assert not whole
                found[event.index] = name, arguments + event.text, False
            case CallEnded():
                found[event.index] = *found[event.index][:2], True
    return found


def text_of(events: list[Said]) -> str:
    return "".join(event.text for event in events if isinstance(event, Text))


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places})
    return [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]


def test_every_format_has_its_golden_text() -> None:
    known = {name.split()[0] for name in GOLDEN}
    assert all(not known.isdisjoint(each.names) for each in TOOL_FORMATS)


@pytest.mark.parametrize("name", GOLDEN)
def test_calls_are_read(name: str) -> None:
    events = read(format_of(name), [GOLDEN[name]])
    calls = calls_of(events)
    expected = [("add", ARGUMENTS, True), ("go", {}, True)][: 1 if name in ONE_CALL else 2]
    assert [(called, json.loads(arguments), whole) for called, arguments, whole in calls] == expected
    assert text_of(events) == ""
    assert [event.id for event in events if isinstance(event, CallBegun)] == IDS.get(name, [""] * len(calls))


@pytest.mark.parametrize("name", GOLDEN)
def test_text_around_calls_stays_and_arguments_stream(name: str) -> None:
    tool_format = format_of(name)
    reader = ToolReader(tool_format, FUNCTIONS)
    lead = "" if tool_format.bare and not tool_format.begin else "Well,\n"
    text = lead + GOLDEN[name]
    told = [reader.push(char) for char in text]
    assert text_of(merged([event for events in told for event in events] + reader.flush())) == lead.strip()
    first = text.index("q", text.index("é"))  # in the middle of the first argument
    assert any(isinstance(event, CallArguments) for events in told[: first + 1] for event in events)


@pytest.mark.parametrize("name", GOLDEN)
@settings(max_examples=few(20), deadline=None)
@given(data=st.data())
def test_it_does_not_matter_how_a_text_is_cut(name: str, data: st.DataObject) -> None:
    """Even if it breaks off, has text between its calls, or is malformed."""
    golden = GOLDEN[name]
    words = [*(word for word in format_of(name).markers if word), "}", '"', "'", "\\", "\n", "é🙂", " ", "x"]
    noise = st.lists(st.sampled_from(words), max_size=3).map("".join)
    whole = data.draw(noise) + golden[: data.draw(st.integers(0, len(golden)))] + data.draw(noise) + golden
    whole = whole[: data.draw(st.integers(0, len(whole)))]
    pieces = cut(whole, data.draw(st.lists(st.integers(0, 2000), max_size=12)))
    events = read(format_of(name), pieces)
    assert events == read(format_of(name), [whole])
    for _, arguments, ended in calls_of(events)[:-1]:
        assert arguments.startswith("{")
        assert ended


@pytest.mark.parametrize("name", GOLDEN)
def test_a_call_that_breaks_off_has_the_beginning_of_its_arguments(name: str) -> None:
    golden = GOLDEN[name]
    whole = calls_of(read(format_of(name), [golden]))[0][1]
    for end in range(len(golden)):
        calls = calls_of(read(format_of(name), [golden[:end]]))
        if calls:
            called, arguments, ended = calls[0]
            assert called == "add"
            assert arguments == whole if ended else whole.startswith(arguments)


@pytest.mark.parametrize("name", GOLDEN)
def test_what_only_looks_like_a_call_is_text(name: str) -> None:
    tool_format = format_of(name)
    begin = tool_format.begin or tool_format.opening
    for text in (f"see {begin} ?! and more", "nothing of the kind", " lead and trail \n", begin):
        assert text_of(read(tool_format, list(text))) == text


def known_to(tool_format: ToolFormat, *, as_tokens: bool) -> Vocabulary:
    """A tokenizer in which the format's markers are added tokens, or ordinary ones."""
    markers = markers_in(tool_format.markers)
    if as_tokens:
        return vocabulary(markers)
    words = (word for text in tool_format.markers for word in (*markers_in([text]), text.strip()))
    return vocabulary((), tuple(dict.fromkeys(word for word in words if len(word) > 1)))


@pytest.mark.parametrize("as_tokens", [True, False])
@pytest.mark.parametrize("name", GOLDEN)
def test_what_the_grammar_writes_are_valid_calls(name: str, as_tokens: bool) -> None:
    tool_format = format_of(name)
    known = known_to(tool_format, as_tokens=as_tokens)
    for seed, several in ((1, True), (2, True), (3, False)):
        rules = Rules(known.markers)
        only = walk(rules.grammar(calls_only(rules, tool_format, FUNCTIONS, several=several)), known, seed)
        events = read(tool_format, [only])
        assert text_of(events) == ""
        assert len(calls_of(events)) == 1 or several
        check_calls(events, at_least=1)
        rules = Rules(known.markers)
        mixed = walk(rules.grammar(calls_in_text(rules, tool_format, FUNCTIONS, several=several)), known, seed)
        check_calls(read(tool_format, [mixed]), at_least=0)


@functools.cache
def validator_of(name: str) -> Validator:
    """Cached, because jsonschema.validate would check the schema each time, which takes longer than all else here."""
    schema = {"add": SCHEMA, "go": {"type": "object"}}[name]
    kind = jsonschema.validators.validator_for(schema)
    kind.check_schema(schema)
    return kind(schema)


def check_calls(events: list[Said], at_least: int) -> None:
    calls = calls_of(events)
    assert len(calls) >= at_least
    for called, arguments, whole in calls:
        assert whole
        validator_of(called).validate(json.loads(arguments))


def test_templates_are_recognised_by_their_marks() -> None:
    for tool_format in TOOL_FORMATS:
        found = recognised(f"{{{{ tools }}}} {' '.join(tool_format.marks)}")
        assert found is not None
        if found is not tool_format:  # a more specific one
            assert set(found.marks) <= set(tool_format.marks)
    assert recognised("{{ tools }} in some other way") is None


def test_a_name_decides_where_it_is_given() -> None:
    for name in TOOL_FORMAT_NAMES:
        found = recognised("<tool_call>", name)
        assert found is not None
        assert name in found.names
    for name in ("hy_v3", "hy_v4"):
        found = recognised("{% set release = ':6124c78e' %} <tool_calls{}> <tool_sep{}> <arg_key{}>", name)
        assert found is not None
        assert found.begin == "<tool_calls:6124c78e>"
    old, new = (recognised(template, "mistral") for template in ("[TOOL_CALLS]", "[TOOL_CALLS] [ARGS]"))
    assert old != new


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ('{"x": 1e999}', '{"x": 1e999}'),
        ('{"x": "\\ud800"}', '{"x": "\\ud800"}'),
        ('"{\\"x\\": 1.50}"', '{"x": 1.50}'),
        ('"{\\"x\\": \\"\\ud800\\"}"', None),
        ('{"x": NaN}', None),
        ("[1]", None),
    ],
)
def test_arguments_that_come_late_are_told_as_they_were_written(written: str, arguments: str | None) -> None:
    text = f'<tool_call>{{"arguments": {written}, "name": "go"}}</tool_call>'
    events = read(format_of("hermes"), [text])
    if arguments is None:
        assert events == [Text(text)]
    else:
        assert calls_of(events) == [("go", arguments, True)]


@pytest.mark.parametrize(
    ("written", "call_id"), [('"7"', "7"), ("7", "7"), ("null", ""), ('"\\ud800"', ""), ("[]", "")]
)
def test_what_cannot_be_an_id_is_none(written: str, call_id: str) -> None:
    events = read(format_of("hermes"), [f'<tool_call>{{"id": {written}, "name": "go", "arguments": {{}}}}</tool_call>'])
    assert events[0] == CallBegun(0, "go", call_id)
