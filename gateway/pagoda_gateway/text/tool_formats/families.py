"""The families, by the names that vLLM has for their formats. A new one is a row; a name may have several."""

from __future__ import annotations

from pagoda_gateway.text.tool_formats.braces import braces
from pagoda_gateway.text.tool_formats.format import ToolFormat
from pagoda_gateway.text.tool_formats.json_calls import JsonCall
from pagoda_gateway.text.tool_formats.named_bodies import NamedBody
from pagoda_gateway.text.tool_formats.pythonic import PythonCall
from pagoda_gateway.text.tool_formats.tagged_values import TaggedValues

_PYTHON_LIST = r"\s*\[\s*(NAMES)\s*\("
_QWEN3_CODER = TaggedValues(
    begin="<function=",
    after_name=">\n",
    key="<parameter=",
    value=">\n",
    value_end="\n</parameter>\n",
    end="</function>",
)
_DSML = TaggedValues(
    begin='<｜DSML｜invoke name="',
    after_name='">\n',
    key='<｜DSML｜parameter name="',
    value='"',
    typed=' string="|type|">',
    strings="true",
    others="false",
    value_end="</｜DSML｜parameter>\n",
    end="</｜DSML｜invoke>",
)
_GLM = TaggedValues(
    after_name="\n",
    key="<arg_key>",
    value="</arg_key>\n<arg_value>",
    value_end="</arg_value>\n",
    end="</tool_call>",
)

# Of formats whose marks a template has, the first one is taken: those that say more stand before those that say less.
TOOL_FORMATS = (
    ToolFormat(
        name="seed_oss",
        marks=("<seed:tool_call>",),
        begin="<seed:tool_call>",
        opening="\n",
        shape=TaggedValues(
            begin="<function=",
            after_name=">\n",
            key="<parameter=",
            value=">",
            value_end="</parameter>\n",
            end="</function>",
        ),
        end="\n</seed:tool_call>",
        again="\n",
    ),
    ToolFormat(
        name="minimax_m2",
        marks=("<minimax:tool_call>",),
        begin="<minimax:tool_call>",
        opening="\n",
        between="\n",
        shape=TaggedValues(
            begin='<invoke name="',
            after_name='">\n',
            key='<parameter name="',
            value='">',
            value_end="</parameter>\n",
            end="</invoke>",
        ),
        end="\n</minimax:tool_call>",
    ),
    ToolFormat(
        name="step3",
        marks=("<｜tool_calls_begin｜>", "steptml:invoke"),
        begin="<｜tool_calls_begin｜>",
        opening="\n",
        between="\n",
        shape=TaggedValues(
            begin='<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="',
            after_name='">',
            key='<steptml:parameter name="',
            value='">',
            value_end="</steptml:parameter>",
            end="</steptml:invoke><｜tool_call_end｜>",
        ),
        end="\n<｜tool_calls_end｜>",
    ),
    ToolFormat(
        name="deepseek_v32",
        marks=("<｜DSML｜", "function_calls"),
        begin="<｜DSML｜function_calls>",
        opening="\n",
        between="\n",
        shape=_DSML,
        end="\n</｜DSML｜function_calls>",
    ),
    ToolFormat(
        name="deepseek_v4",
        marks=("<｜DSML｜", "tool_calls"),
        begin="<｜DSML｜tool_calls>",
        opening="\n",
        between="\n",
        shape=_DSML,
        end="\n</｜DSML｜tool_calls>",
    ),
    ToolFormat(
        name="deepseek_v3",
        marks=("<｜tool▁calls▁begin｜>", "```json"),
        begin="<｜tool▁calls▁begin｜>",
        between="\n",
        shape=NamedBody(
            begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>", body="\n```json\n", end="\n```<｜tool▁call▁end｜>"
        ),
        end="<｜tool▁calls▁end｜>",
    ),
    ToolFormat(
        name="deepseek_v31",
        marks=("<｜tool▁calls▁begin｜>",),
        begin="<｜tool▁calls▁begin｜>",
        between="",
        shape=NamedBody(begin="<｜tool▁call▁begin｜>", body="<｜tool▁sep｜>", end="<｜tool▁call▁end｜>"),
        end="<｜tool▁calls▁end｜>",
    ),
    ToolFormat(
        name="kimi_k2",
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
        name="kimi_k3",
        marks=("<|open|>", "<|sep|>", "<|close|>"),
        begin="<|open|>tools<|sep|>",
        between="",
        shape=TaggedValues(
            begin='<|open|>call tool="',
            numbered='" index="',
            after_name='"<|sep|>',
            key='<|open|>argument key="',
            value='"',
            typed=' type="|type|"<|sep|>',
            value_end="<|close|>argument<|sep|>",
            end="<|close|>call<|sep|>",
        ),
        end="<|close|>tools<|sep|>",
    ),
    ToolFormat(
        name="openai",
        marks=("<|channel|>", "to=functions."),
        begin="<|channel|>commentary to=functions.",
        shape=NamedBody(body=" <|constrain|>json<|message|>"),
    ),
    ToolFormat(
        name="gemma4",
        marks=("<|tool_call>",),
        begin="<|tool_call>",
        shape=braces('<|"|>'),
        end="<tool_call|>",
        again="",
    ),
    ToolFormat(
        name="functiongemma",
        marks=("<start_function_call>",),
        begin="<start_function_call>",
        shape=braces("<escape>"),
        end="<end_function_call>",
        again="",
    ),
    ToolFormat(
        name="hunyuan_v3",
        marks=("<tool_sep>", "<arg_key>"),
        begin="<tool_calls>",
        between="\n",
        opening="\n",
        shape=TaggedValues(
            begin="<tool_call>",
            after_name="<tool_sep>\n",
            key="<arg_key>",
            value="</arg_key>\n<arg_value>",
            value_end="</arg_value>\n",
            end="</tool_call>",
        ),
        end="\n</tool_calls>",
    ),
    ToolFormat(
        name="glm45",
        marks=("<tool_call>", "<arg_key>", "\\n<arg_key>"),
        begin="<tool_call>",
        shape=_GLM,
        again="\n",
    ),
    ToolFormat(
        name="glm47",
        marks=("<tool_call>", "<arg_key>"),
        begin="<tool_call>",
        shape=TaggedValues(
            key="<arg_key>", value="</arg_key><arg_value>", value_end="</arg_value>", end="</tool_call>"
        ),
        again="",
    ),
    *(
        ToolFormat(
            name=name,
            marks=("<tool_call>", "<function="),
            begin="<tool_call>",
            opening="\n",
            shape=_QWEN3_CODER,
            end="\n</tool_call>",
            again="\n",
        )
        for name in ("qwen3_coder", "qwen3_xml")
    ),
    ToolFormat(
        name="minicpm5",
        marks=("<function name=", "<param name="),
        begin='<function name="',
        shape=TaggedValues(after_name='">', key='<param name="', value='">', value_end="</param>", end="</function>"),
        again="\n",
    ),
    ToolFormat(
        name="internlm",
        marks=("<|action_start|>", "<|plugin|>"),
        begin="<|action_start|>",
        opening=" <|plugin|>\n",
        shape=JsonCall(arguments="parameters"),
        end="<|action_end|>",
    ),
    ToolFormat(
        name="cohere_command",
        marks=("<|START_ACTION|>",),
        begin="<|START_ACTION|>",
        opening="[\n    ",
        between=",\n    ",
        shape=JsonCall(name="tool_name", arguments="parameters", id="tool_call_id"),
        end="\n]<|END_ACTION|>",
    ),
    ToolFormat(
        name="apertus",
        marks=("<|tools_prefix|>",),
        begin="<|tools_prefix|>",
        opening="[",
        between=", ",
        shape=JsonCall(keyed=True),
        end="]<|tools_suffix|>",
    ),
    ToolFormat(
        name="lfm2",
        marks=("<|tool_call_start|>",),
        begin="<|tool_call_start|>",
        opening="[",
        between=", ",
        shape=PythonCall(),
        end="]<|tool_call_end|>",
    ),
    ToolFormat(
        name="mistral",
        marks=("[TOOL_CALLS]", "[ARGS]"),
        begin="[TOOL_CALLS]",
        shape=NamedBody(body="[ARGS]"),
        again="",
        short_ids=True,
    ),
    ToolFormat(
        name="mistral",
        marks=("[TOOL_CALLS]",),
        begin="[TOOL_CALLS]",
        opening=" [",
        between=", ",
        shape=JsonCall(),
        end="]",
        short_ids=True,
    ),
    *(
        ToolFormat(
            name=name,
            marks=("<tool_calls>",),
            begin="<tool_calls>",
            opening="[",
            between=", ",
            shape=JsonCall(),
            end="]</tool_calls>",
        )
        for name in ("jamba", "hunyuan_a13b")
    ),
    ToolFormat(
        name="phi4_mini_json",
        marks=("<|tool|>", "<|/tool|>"),
        begin="functools",
        opening="[",
        between=", ",
        shape=JsonCall(),
        end="]",
    ),
    ToolFormat(
        name="granite",
        marks=("<|tool_call|>",),
        begin="<|tool_call|>",
        also=("<tool_call>",),
        opening="[",
        between=", ",
        shape=JsonCall(),
        end="]",
    ),
    *(
        ToolFormat(
            name=name,
            marks=("<tool_call>",),
            begin="<tool_call>",
            opening="\n",
            shape=JsonCall(),
            end="\n</tool_call>",
            again="\n",
        )
        for name in ("hermes", "granite4", "ernie45")
    ),
    ToolFormat(
        name="longcat",
        marks=("<longcat_tool_call>",),
        begin="<longcat_tool_call>",
        opening="\n",
        shape=JsonCall(),
        end="\n</longcat_tool_call>",
        again="\n",
    ),
    ToolFormat(
        name="granite-20b-fc",
        marks=("<function_call>",),
        begin="<function_call>",
        opening=" ",
        shape=JsonCall(),
        again="\n",
    ),
    ToolFormat(
        name="olmo3",
        marks=("<function_calls>",),
        begin="<function_calls>",
        opening="\n",
        between="\n",
        shape=PythonCall(),
        end="\n</function_calls>",
    ),
    *(
        ToolFormat(
            name="llama3_json",
            marks=(mark, '"parameters"'),
            begin="<|python_tag|>",
            between="; ",
            shape=JsonCall(arguments="parameters"),
            bare=r'\s*\{\s*"name"',
        )
        for mark in ("<|python_tag|>", "<|start_header_id|>")
    ),
    *(
        ToolFormat(
            name=name,
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
)
