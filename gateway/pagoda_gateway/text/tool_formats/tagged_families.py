"""The model families that tag values: each argument is a key and a value between marks."""

from __future__ import annotations

from pagoda_gateway.text.tool_formats.format import ToolFormat
from pagoda_gateway.text.tool_formats.tagged_values import TaggedValues

HY_RELEASES = (":opensource", ":6124c78e", "")  # suffixes of tag names in Hunyuan's releases


def _dsml(gap: str) -> TaggedValues:
    """`gap` precedes the names of its tags."""
    return TaggedValues(
        begin=f'<｜DSML｜{gap}invoke name="',
        after_name='">\n',
        key=f'<｜DSML｜{gap}parameter name="',
        value='"',
        typed=' string="|type|">',
        strings="true",
        others="false",
        value_end=f"</｜DSML｜{gap}parameter>\n",
        end=f"</｜DSML｜{gap}invoke>",
    )


TAGGED_FAMILIES = (
    ToolFormat(
        names=("seed_oss",),
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
    *(
        ToolFormat(
            names=(name,),
            marks=(f"<{tag}>",),
            begin=f"<{tag}>",
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
            end=f"\n</{tag}>",
        )
        for name, tag in (("minimax_m2", "minimax:tool_call"), ("dots", "dots_function_call"))
    ),
    ToolFormat(
        names=("step3",),
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
        names=("deepseek_v41",),
        marks=("｜DSML｜", " calls>"),
        begin="<｜DSML｜ calls>",
        opening="\n",
        between="\n",
        shape=_dsml(" "),
        end="\n</｜DSML｜ calls>",
    ),
    ToolFormat(
        names=("deepseek_v32",),
        marks=("｜DSML｜", "function_calls>"),
        begin="<｜DSML｜function_calls>",
        opening="\n",
        between="\n",
        shape=_dsml(""),
        end="\n</｜DSML｜function_calls>",
    ),
    ToolFormat(
        names=("deepseek_v4",),
        marks=("｜DSML｜", "tool_calls>"),
        begin="<｜DSML｜tool_calls>",
        opening="\n",
        between="\n",
        shape=_dsml(""),
        end="\n</｜DSML｜tool_calls>",
    ),
    ToolFormat(
        names=("kimi_k3",),
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
    *(
        ToolFormat(
            names=("hy_v3", "hunyuan_v3"),
            marks=(release, "<tool_sep", "<arg_key"),
            begin=f"<tool_calls{release}>",
            opening="\n",
            between="\n",
            shape=TaggedValues(
                begin=f"<tool_call{release}>",
                after_name=f"<tool_sep{release}>\n",
                key=f"<arg_key{release}>",
                value=f"</arg_key{release}>\n<arg_value{release}>",
                value_end=f"</arg_value{release}>\n",
                end=f"</tool_call{release}>",
            ),
            end=f"\n</tool_calls{release}>",
        )
        for release in HY_RELEASES
    ),
    *(
        ToolFormat(
            names=("hy_v4",),
            marks=(release, "<tool_calls", "<arg_key"),
            begin=f"<tool_calls{release}>",
            between="",
            shape=TaggedValues(
                begin=f"<tool_call{release}>",
                key=f"<arg_key{release}>",
                value=f"</arg_key{release}><arg_value{release}>",
                value_end=f"</arg_value{release}>",
                end=f"</tool_call{release}>",
            ),
            end=f"</tool_calls{release}>",
        )
        for release in HY_RELEASES
    ),
    ToolFormat(
        names=("k2_horizon",),
        marks=("<ifm|tool_calls>", "<ifm|arg_key>"),
        begin="<ifm|tool_calls>",
        opening="\n",
        between="\n",
        shape=TaggedValues(
            begin="<ifm|tool_call>",
            after_name="\n",
            key="<ifm|arg_key>",
            value="</ifm|arg_key>\n<ifm|arg_value>",
            value_end="</ifm|arg_value>\n",
            end="</ifm|tool_call>",
        ),
        end="\n</ifm|tool_calls>",
    ),
    ToolFormat(
        names=("glm45", "ling3", "poolside_v1"),
        marks=("<tool_call>", "<arg_key>", "\\n<arg_key>"),
        begin="<tool_call>",
        shape=TaggedValues(
            after_name="\n",
            key="<arg_key>",
            value="</arg_key>\n<arg_value>",
            value_end="</arg_value>\n",
            end="</tool_call>",
        ),
        again="\n",
    ),
    ToolFormat(
        names=("glm47", "ling3", "poolside_v1"),
        marks=("<tool_call>", "<arg_key>"),
        begin="<tool_call>",
        shape=TaggedValues(
            key="<arg_key>", value="</arg_key><arg_value>", value_end="</arg_value>", end="</tool_call>"
        ),
        again="",
    ),
    ToolFormat(
        names=("mimo",),
        marks=("<tool_call><function=",),
        begin="<tool_call>",
        shape=TaggedValues(
            begin="<function=",
            after_name=">",
            key="<parameter=",
            value=">",
            value_end="</parameter>",
            end="</function>",
        ),
        end="</tool_call>",
        again="",
    ),
    ToolFormat(
        names=("qwen3_coder", "qwen3_xml", "step3p5"),
        marks=("<tool_call>", "<function="),
        begin="<tool_call>",
        opening="\n",
        shape=TaggedValues(
            begin="<function=",
            after_name=">\n",
            key="<parameter=",
            value=">\n",
            value_end="\n</parameter>\n",
            end="</function>",
        ),
        end="\n</tool_call>",
        again="\n",
    ),
    ToolFormat(
        names=("minicpm5",),
        marks=("<function name=", "<param name="),
        begin='<function name="',
        shape=TaggedValues(after_name='">', key='<param name="', value='">', value_end="</param>", end="</function>"),
        again="\n",
    ),
)
