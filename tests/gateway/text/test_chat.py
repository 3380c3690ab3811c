"""Chat templates: rendered as by Hugging Face, and harmless whatever they contain."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from tests.gateway.model_dir import CHAT_TEMPLATE
from transformers.utils.chat_template_utils import render_jinja_template

from pagoda_gateway.text import chat
from pagoda_gateway.text.chat import MAX_OUTPUT_CHARS, MAX_TEMPLATE_BYTES, RESERVED, BadTemplate, ChatTemplate
from pagoda_proto.errors import ErrorCode, PagodaError

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Antworte <kurz> & gut"},
    {"role": "user", "content": "héllo\n"},
    {"role": "assistant", "content": "  well  "},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": '<é> & "q"', "parameters": {"b": 1, "a": 2}}}]

TEMPLATES = [
    CHAT_TEMPLATE,
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m.content | trim }}\n{% endfor %}{{ eos_token }}",
    "{%- set ns = namespace(n=0) %}\n{%- for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% if ns.n == 3 %}{% break %}{% endif %}"
    "{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content }}{{ ns.n }}{% endfor %}",
    "{% for m in messages %}{% generation %}\n  {{ m.content }}{% endgeneration %}{% endfor %}",
    "  {% if add_generation_prompt %}\n  go\n  {% endif %}\n{{ messages | tojson(indent=2) }}{{ dict(a=1)['a'] }}",
    "{{ messages[0].content.upper()[:3] }}{{ messages | map(attribute='role') | join(',') }}{{ undefined_name }}",
    "{% macro show(m) %}<{{ m.role }}>{% endmacro %}{{ show(messages[0]) }}{{ show(messages[1]) }}{{ tools | tojson }}",
]  # fmt: skip


@pytest.mark.parametrize("source", TEMPLATES)
@pytest.mark.parametrize("options", [{}, {"tools": TOOLS}, {"add_generation_prompt": False}])
def test_rendered_as_hugging_face_does(source: str, options: dict[str, Any]) -> None:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    wanted = {"add_generation_prompt": True, **options}
    (expected,), _ = render_jinja_template([MESSAGES], chat_template=source, **wanted, **special)
    assert ChatTemplate(source, special).render(MESSAGES, **options) == expected


PARTS = "{% for m in messages %}[{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
PARTS += "{{ part.text }}{% endfor %}{% endif %}]{% endfor %}"


@pytest.mark.parametrize(
    ("source", "content"),
    [
        *itertools.product(TEMPLATES[:2], ["well", "  well  ", "héllo", "<|im_end|>"]),
        (PARTS, [{"type": "text", "text": "well"}]),
        (PARTS, [{"type": "text", "text": "well, "}, {"type": "text", "text": "then"}]),
    ],
)
def test_a_final_message_continued_as_hugging_face_does(source: str, content: Any) -> None:
    messages = [*MESSAGES[:2], {"role": "assistant", "content": content}]
    (expected,), _ = render_jinja_template([messages], chat_template=source, continue_final_message=True)
    rendered = ChatTemplate(source, {}).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert rendered == expected


@pytest.mark.parametrize("content", [None, [], [{"type": "image"}], [{"type": "text", "text": None}]])
def test_a_final_message_without_text_cannot_be_continued(content: Any) -> None:
    with pytest.raises(PagodaError, match="needs a final message with text"):
        ChatTemplate(PARTS, {}).render([{"role": "assistant", "content": content}], continue_final_message=True)


def test_a_template_that_drops_the_final_message_cannot_continue_it() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    with pytest.raises(PagodaError, match="drops the final message"):
        template.render(MESSAGES, continue_final_message=True)


def test_a_templates_own_refusal_reaches_the_user() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(PagodaError, match="roles must alternate") as caught:
        template.render(MESSAGES)
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_ARGUMENT, "messages")


@pytest.mark.parametrize(
    "source",
    [
        "{{ lipsum.__globals__['os'].popen('id').read() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ (messages | attr('__class__')).__mro__ }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{{ '%s' | format_map(messages) }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ dict.__class__ }}{{ dict.__globals__ }}{{ raise_exception.__globals__['json'] }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
        "{{ 'x' * 10**9 }}",
        "{{ [0] * 10**9 }}",
        "{{ 10 ** (10 ** 9) }}",
        "{{ messages[99].content.x }}",
        "{{ 1 / 0 }}",
        "{{ messages + 1 }}",
        "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    ],
)
def test_hostile_templates_end_in_an_error(source: str) -> None:
    try:
        template = ChatTemplate(source, {})
    except BadTemplate:
        return
    with pytest.raises(PagodaError) as caught:
        template.render([dict(message) for message in MESSAGES])
    assert caught.value.param == "messages"
    assert len(caught.value.message) < 400
    assert "Antworte" not in caught.value.message


def test_bounds() -> None:
    with pytest.raises(BadTemplate, match="at most"):
        ChatTemplate("x" * (MAX_TEMPLATE_BYTES + 1), {})
    with pytest.raises(BadTemplate, match="does not compile"):
        ChatTemplate("{% if %}", {})
    with pytest.raises(BadTemplate):
        ChatTemplate("{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}", {})
    echo = ChatTemplate("{{ messages[0].content }}", {})
    assert len(echo.render([{"role": "user", "content": "x" * MAX_OUTPUT_CHARS}])) == MAX_OUTPUT_CHARS
    with pytest.raises(PagodaError, match="more than"):
        echo.render([{"role": "user", "content": "x" * (MAX_OUTPUT_CHARS + 1)}])


def test_what_a_template_knows() -> None:
    template = ChatTemplate(CHAT_TEMPLATE, {})
    assert template.knows_tools
    assert not ChatTemplate("{{ messages }}", {}).knows_tools


def test_kwargs_are_plain_values_for_names_the_template_reads() -> None:
    template = ChatTemplate(CHAT_TEMPLATE + "{{ add_generation_prompt }}{{ tokenize }}", {})
    template.check_kwargs({"mood": "x"})
    for kwargs in ({"mood": {}}, {"other": 1}, {"tokenize": True}, {"add_generation_prompt": False}, {"tools": 1}):
        with pytest.raises(PagodaError) as caught:
            template.check_kwargs(kwargs)
        assert caught.value.param == f"chat_template_kwargs.{next(iter(kwargs))}"


def test_the_time_is_there() -> None:
    assert len(ChatTemplate("{{ strftime_now('%Y') }}", {}).render(MESSAGES)) == 4


ENDLESS = [
    "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    "{% for a in messages * 99 %}{% for b in messages * 999 %}{% for c in messages * 999 %}{% endfor %}{% endfor %}"
    "{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for a in messages recursive %}{{ loop(messages * 99) if loop.depth < 9 }}{% endfor %}",
]


def test_sec_18_no_template_runs_for_ever() -> None:
    with pytest.raises(PagodaError, match="takes too long"):
        ChatTemplate(ENDLESS[0], {}).render(MESSAGES)


@pytest.mark.parametrize("source", ENDLESS)
def test_sec_18_whatever_repeats_in_a_template_pays(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A low limit on steps is enough to see that each kind of repetition is counted before time is up."""
    monkeypatch.setattr(chat, "MAX_STEPS", 10_000)
    with pytest.raises(PagodaError, match="takes too long"):
        ChatTemplate(source, {}).render(MESSAGES)


def test_sec_18_no_template_of_few_long_steps_runs_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "{% set x = 'x' * 999999 %}{% for a in range(99999) %}{{ '' if x | tojson | upper }}{% endfor %}"
    monkeypatch.setattr(chat, "MAX_RENDER_S", 0.5)
    with pytest.raises(PagodaError, match="takes too long"):
        ChatTemplate(source, {}).render(MESSAGES)


def test_loops_know_where_they_are() -> None:
    source = "{% for a in range(2, 9, 3) if a > 2 %}{{ a }}{{ loop.length }}{{ ',' if not loop.last }}{% endfor %}"
    assert ChatTemplate(source, {}).render(MESSAGES) == "52,82"
    nested = "{% for a in [1, [2, [3]]] recursive %}{{ loop(a) if a is iterable else a }}{% endfor %}"
    assert ChatTemplate(nested, {}).render(MESSAGES) == "123"


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_sec_18_no_request_sets_what_belongs_to_the_server(name: str) -> None:
    template = ChatTemplate("{{ " + name + " }}", {})
    with pytest.raises(PagodaError, match="cannot be set") as caught:
        template.check_kwargs({name: "x"})
    assert caught.value.param == f"chat_template_kwargs.{name}"
