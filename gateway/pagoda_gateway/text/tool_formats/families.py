"""The model families, by vLLM's names for their formats. A new family is a row; a name may have several rows."""

from __future__ import annotations

from pagoda_gateway.text.tool_formats.braces import braces
from pagoda_gateway.text.tool_formats.format import ToolFormat
from pagoda_gateway.text.tool_formats.json_calls import JsonCall
from pagoda_gateway.text.tool_formats.named_bodies import NamedBody
from pagoda_gateway.text.tool_formats.pythonic import PythonCall
from pagoda_gateway.text.tool_formats.tagged_families import TAGGED_FAMILIES

_PYTHON_LIST = r"\s*\[\s*(NAMES)\s*\("

# The first format whose marks are all in the template is chosen, so more specific formats stand first.
TOOL_FORMATS = (
    *TAGGED_FAMILIES,
    ToolFormat(
        names=("deepseek_v3",),
        marks=("<｜tool▁calls▁begin｜>", "```json"),
        begin="<｜tool▁calls▁begin｜>",
        between="\n",
        shape=NamedBody(
            begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>", body="\n```json\n", end="\n```<｜tool▁call▁end｜>"
        ),
        end="<｜tool▁calls▁end｜>",
    ),
    ToolFormat(
        names=("deepseek_v31",),
        marks=("<｜tool▁calls▁begin｜>",),
        begin="<｜tool▁calls▁begin｜>",
        between="",
        shape=NamedBody(begin="<｜tool▁call▁begin｜>", body="<｜tool▁sep｜>", end="<｜tool▁call▁end｜>"),
        end="<｜tool▁calls▁end｜>",
    ),
    ToolFormat(
        names=("kimi_k2",),
        marks=("<|tool_calls_section_begin|>",),
        begin="<|tool_calls_section_begin|>",
        between="",
        shape=NamedBody(
            begin="<|tool_call_begin|>functions.",
            body="<|tool_call_argument_begin|>",
            end="<|tool_call_end|>",
            numbered=True,
            id_begin="functions.",
        ),
        end="<|tool_calls_section_end|>",
    ),
    ToolFormat(
        names=("plamo3",),
        marks=("<|plamo:begin_tool_requests:plamo|>",),
        begin="<|plamo:begin_tool_requests:plamo|>",
        between="",
        shape=NamedBody(
            begin="<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>",
            body="<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>",
            end="<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>",
        ),
        end="<|plamo:end_tool_requests:plamo|>",
    ),
    ToolFormat(
        names=("openai",),
        marks=("<|channel|>", "functions."),
        begin="<|channel|>commentary to=functions.",
        shape=NamedBody(body=" <|constrain|>json<|message|>"),
    ),
    ToolFormat(
        names=("gemma4",),
        marks=("<|tool_call>",),
        begin="<|tool_call>",
        shape=braces('<|"|>'),
        end="<tool_call|>",
        again="",
    ),
    ToolFormat(
        names=("functiongemma",),
        marks=("<start_function_call>",),
        begin="<start_function_call>",
        shape=braces("<escape>"),
        end="<end_function_call>",
        again="",
    ),
    ToolFormat(
        names=("internlm",),
        marks=("<|action_start|>", "<|plugin|>"),
        begin="<|action_start|>",
        opening=" <|plugin|>\n",
        shape=JsonCall(arguments="parameters"),
        end="<|action_end|>",
    ),
    ToolFormat(
        names=("cohere_command3", "cohere_command4", "cohere_command"),
        marks=("<|START_ACTION|>",),
        begin="<|START_ACTION|>",
        opening="[\n    ",
        between=",\n    ",
        shape=JsonCall(name="tool_name", arguments="parameters", id="tool_call_id"),
        end="\n]<|END_ACTION|>",
    ),
    ToolFormat(
        names=("apertus",),
        marks=("<|tools_prefix|>",),
        begin="<|tools_prefix|>",
        opening="[",
        between=", ",
        shape=JsonCall(keyed=True),
        end="]<|tools_suffix|>",
    ),
    ToolFormat(
        names=("lfm2",),
        marks=("<|tool_call_start|>",),
        begin="<|tool_call_start|>",
        opening="[",
        between=", ",
        shape=PythonCall(),
        end="]<|tool_call_end|>",
    ),
    ToolFormat(
        names=("mistral",),
        marks=("[TOOL_CALLS]", "[ARGS]"),
        begin="[TOOL_CALLS]",
        shape=NamedBody(body="[ARGS]"),
        again="",
        short_ids=True,
    ),
    ToolFormat(
        names=("mistral",),
        marks=("[TOOL_CALLS]",),
        begin="[TOOL_CALLS]",
        opening=" [",
        between=", ",
        shape=JsonCall(),
        end="]",
        short_ids=True,
    ),
    ToolFormat(
        names=("xlam",),
        marks=('[{"name": "tool_call_name", "arguments"',),
        also=("[TOOL_CALLS]",),
        opening="[",
        between=", ",
        shape=JsonCall(),
        end="]",
        bare=r'\s*\[\s*\{\s*"name"',
    ),
    ToolFormat(
        names=("jamba", "hunyuan_a13b"),
        marks=("<tool_calls>",),
        begin="<tool_calls>",
        opening="[",
        between=", ",
        shape=JsonCall(),
        end="]</tool_calls>",
    ),
    ToolFormat(
        names=("phi4_mini_json",),
        marks=("<|tool|>", "<|/tool|>"),
        begin="functools",
        opening="[",
        between=", ",
        shape=JsonCall(),
        end="]",
    ),
    ToolFormat(
        names=("granite",),
        marks=("<|tool_call|>",),
        begin="<|tool_call|>",
        also=("<tool_call>",),
        opening="[",
        between=", ",
        shape=JsonCall(),
        end="]",
    ),
    ToolFormat(
        names=("hermes", "qwen3_json", "granite4", "ernie45"),
        marks=("<tool_call>",),
        begin="<tool_call>",
        opening="\n",
        shape=JsonCall(),
        end="\n</tool_call>",
        again="\n",
    ),
    ToolFormat(
        names=("longcat",),
        marks=("<longcat_tool_call>",),
        begin="<longcat_tool_call>",
        opening="\n",
        shape=JsonCall(),
        end="\n</longcat_tool_call>",
        again="\n",
    ),
    ToolFormat(
        names=("gigachat3",),
        marks=("<|role_sep|>", "<|function_call|>"),
        begin="<|function_call|>",
        shape=JsonCall(),
    ),
    ToolFormat(
        names=("gigachat3",),
        marks=("<|role_sep|>", "'role': 'function call'"),
        begin="<|message_sep|>\n\nfunction call<|role_sep|>",
        also=("function call<|role_sep|>",),
        opening="\n",
        shape=JsonCall(),
    ),
    ToolFormat(
        names=("granite-20b-fc",),
        marks=("<function_call>",),
        begin="<function_call>",
        opening=" ",
        shape=JsonCall(),
        again="\n",
    ),
    ToolFormat(
        names=("olmo3",),
        marks=("<function_calls>",),
        begin="<function_calls>",
        opening="\n",
        between="\n",
        shape=PythonCall(),
        end="\n</function_calls>",
    ),
    *(
        ToolFormat(
            names=(name,),
            marks=marks,
            also=("<|python_start|>",),
            opening="[",
            between=", ",
            shape=PythonCall(),
            end="]",
            bare=_PYTHON_LIST,
        )
        for name, marks in (("llama4_pythonic", ("<|header_start|>", "func_name1(")), ("pythonic", ("func_name1(",)))
    ),
    *(
        ToolFormat(
            names=("llama3_json", "llama4_json"),
            marks=(mark, '"parameters"'),
            begin="<|python_tag|>",
            between="; ",
            shape=JsonCall(arguments="parameters"),
            bare=r'\s*\{\s*"name"',
        )
        for mark in ("<|python_tag|>", "<|start_header_id|>", "<|header_start|>")
    ),
)
