"""The page at / as somebody uses it: a real browser on a real stack that asks for keys."""

from __future__ import annotations

import ast
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect
from tests.e2e.browser import NARROW, PATIENCE_MS, Tab, blank_page, executable, open_tab, opened, running_browser
from tests.e2e.stack import Stack, running_stack

pytestmark = pytest.mark.e2e
MODEL = "demo"
KEY, OTHER_KEY = "sk-page-0123456789", "sk-page-9876543210"
LONG = {"extra": json.dumps({"ignore_eos": True}), "max_tokens": "1500"}
CAPITAL = "What is the capital of France?"
EVIL = '<img src=x onerror="window.evil=1"><script>window.evil=1</script>[a](javascript:evil()) **b**'
expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    options = ("--served-model-name", MODEL, "--api-key", f"{KEY},{OTHER_KEY}")
    with running_stack(tmp_path_factory.mktemp("page"), *options) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with running_browser() as running:
        yield running


@pytest.fixture(scope="module")
def page(browser: Browser) -> Iterator[Page]:
    with blank_page(browser, KEY) as blank:
        yield blank


@pytest.fixture
def tab(stack: Stack, page: Page) -> Iterator[Tab]:
    with opened(page, stack.url) as tab:
        tab.set(temperature="0")
        yield tab


def test_a_page_knows_nothing_of_who_was_there_before(stack: Stack, page: Page) -> None:
    with opened(page, stack.url) as before:
        before.answer_with({"content": "made up"})
        before.page.emulate_media(color_scheme="dark")
        before.set(system="Be brief.", temperature="0.5")
        before.ask("Hello!")
        assert before.conversations()
        before.page.unroute_all()
        before.send("Count from 1 to 60.")
        expect(before.answer.locator(".prose")).not_to_be_empty()  # and the page is left in mid-stream
    with opened(page, stack.url) as after:
        assert after.conversations() == []
        assert after.page.locator("[name=system]").input_value() == ""
        assert after.page.evaluate("[{...localStorage}, {...sessionStorage}]")[1] == {"pagoda.key": KEY}
        assert not after.page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
        assert "Paris" in after.ask(CAPITAL)


def test_without_a_browser_the_tests_fail_and_say_what_to_do() -> None:
    with pytest.raises(RuntimeError, match="make browser"):
        executable("/nowhere/chrome", names=("no-such-browser",))


def told(stack: Stack, path: str, key: str = KEY) -> Any:
    return stack.get(path, headers={"authorization": f"Bearer {key}"}).json()


def test_an_answer_is_shown_while_it_comes(tab: Tab) -> None:
    tab.page.evaluate("""() => {
        window.seen = new Set();
        const look = () => {
            const busy = document.querySelector(".message.busy .prose");
            if (busy) window.seen.add(busy.textContent.length);
        };
        new MutationObserver(look).observe(document.getElementById("messages"), { childList: true, subtree: true });
    }""")
    tab.set(extra=LONG["extra"], max_tokens="300")
    text = tab.ask("Count from 1 to 60.")
    assert "58, 59, 60" in text
    assert tab.page.evaluate("window.seen.size") > 2
    figures = tab.answer.locator(".figures").inner_text()
    assert re.search(r"first token after [\d.]+ (ms|s|µs) · [\d.,]+ tokens/s · \d+ in.*, 300 out · cut off", figures)


def test_stop_keeps_what_was_said_and_frees_the_request(tab: Tab, stack: Stack) -> None:
    tab.set(**LONG)
    tab.send("Count from 1 to 60.")
    expect(tab.answer.locator(".prose")).to_have_text(re.compile("1, 2, 3"))
    tab.page.get_by_role("button", name="Stop").click()
    expect(tab.answer.locator(".figures")).to_contain_text("stopped")
    assert "1, 2, 3" in tab.answer.locator(".prose").inner_text()
    stack.wait_until(lambda: told(stack, "/load")["server_load"] == 0)
    assert told(stack, "/stack")["requests"][0]["end"] == "abort"
    expect(tab.page.locator("#draft")).to_be_focused()


def test_again_edited_and_deleted(tab: Tab) -> None:
    assert "Paris" in tab.ask(CAPITAL)
    tab.do("Regenerate", tab.answer)
    expect(tab.answer.locator(".prose")).to_contain_text("Paris")
    expect(tab.answers).to_have_count(1)
    user = tab.page.locator(".message.user")
    tab.do("Edit", user)
    user.locator("textarea").fill("What is 2 + 3?")
    user.get_by_role("button", name="Send again").click()
    expect(tab.answer.locator(".prose")).to_contain_text("5")
    expect(user).to_contain_text("What is 2 + 3?")
    tab.do("Edit", tab.answer)
    tab.answer.locator("textarea").fill("It is *six*.")
    tab.answer.get_by_role("button", name="Save").click()
    expect(tab.answer.locator("em")).to_have_text("six")
    tab.do("Delete", tab.answer)
    expect(tab.answers).to_have_count(0)
    ((message,),) = [conversation["messages"] for conversation in tab.conversations()]
    assert message["content"] == "What is 2 + 3?"


def test_conversations_and_settings_stay_and_can_be_cleared(tab: Tab) -> None:
    tab.set(system="Be brief.", temperature="0.5")
    tab.ask(CAPITAL)
    tab.page.get_by_role("button", name="New conversation").click()
    tab.ask("What is 17 + 25?")
    tab.page.reload()
    expect(tab.page.locator(".conversation")).to_have_count(2)
    expect(tab.page.locator("[name=system]")).to_have_value("Be brief.")
    tab.page.locator(".conversation", has_text=CAPITAL).click()
    expect(tab.page.locator(".message.user")).to_have_text(re.compile(re.escape(CAPITAL)))
    stored = tab.page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}])")
    local, session = json.loads(stored)
    assert KEY not in json.dumps(local)
    assert session == {"pagoda.key": KEY}
    tab.page.get_by_role("button", name="Clear all").click()
    tab.page.get_by_role("button", name="Delete all").click()
    expect(tab.page.locator(".conversation")).to_have_count(0)
    assert tab.conversations() == []


def test_the_request_is_what_was_set(tab: Tab) -> None:
    bodies: list[dict[str, Any]] = []

    def note(route: Route) -> None:
        bodies.append(route.request.post_data_json)
        route.continue_()

    tab.page.route("**/v1/chat/completions", note)
    tab.set(system="Be brief.", temperature="0.25", top_p="0.9", top_k="7", min_p="0.1", max_tokens="5", seed="11")
    tab.set(
        presence_penalty="0.5", frequency_penalty="-0.5", repetition_penalty="1.1", stop="END\n\\n\\n", logprobs=True
    )
    tab.ask("Hello!")
    assert bodies == [{
        "model": MODEL, "stream": True, "stream_options": {"include_usage": True}, "temperature": 0.25, "top_p": 0.9,
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello!"}],
        "top_k": 7, "min_p": 0.1, "max_tokens": 5, "seed": 11, "presence_penalty": 0.5, "frequency_penalty": -0.5,
        "repetition_penalty": 1.1, "stop": ["END", "\n\n"], "logprobs": True, "top_logprobs": 5,
    }]  # fmt: skip


def test_an_answer_has_the_form_of_its_schema(tab: Tab) -> None:
    tab.set(format="json_schema")
    tab.set(schema='{"type": "object",')
    expect(tab.page.locator("#schema-problem")).to_contain_text("This is not JSON")
    tab.send("Hello!")
    expect(tab.page.locator("#schema")).to_be_focused()
    assert tab.answers.count() == 0
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99}}, "required": ["n"]}
    tab.set(schema=json.dumps(schema))
    expect(tab.page.locator("#schema-problem")).to_have_count(0)
    answer = json.loads(tab.ask("Hello!"))
    assert isinstance(answer["n"], int)


def test_probabilities_are_under_the_pointer_and_the_arrow_keys(tab: Tab) -> None:
    tab.set(logprobs=True, top_logprobs="3")
    tab.ask("Reverse the word tower.")
    tokens = tab.answer.get_by_role("option")
    detail = tab.answer.locator(".token-detail")
    expect(detail).to_be_hidden()
    tokens.first.hover()
    expect(detail.locator("tr")).to_have_count(3)
    expect(detail.locator(".chosen")).to_contain_text("%")
    first = detail.inner_text()
    tokens.first.focus()
    tab.page.keyboard.press("ArrowRight")
    expect(tokens.nth(1)).to_be_focused()
    assert detail.inner_text() != first
    tab.page.keyboard.press("Escape")
    expect(detail).to_be_hidden()
    tab.do("Text", tab.answer)
    expect(tab.answer.locator(".prose")).to_have_text("rewot")


def test_calls_of_tools_are_shown_and_answered(tab: Tab) -> None:
    tab.set(use_tools=True)
    tab.ask("What is the weather in Paris?")
    expect(tab.answer.locator(".call code").first).to_have_text("get_weather")
    assert json.loads(tab.answer.locator(".call pre").inner_text()) == {"city": "Paris"}
    tab.page.get_by_label("Result of get_weather").fill('{"weather": "sunny"}')
    tab.page.get_by_role("button", name="Send results").click()
    expect(tab.answers).to_have_count(2)
    expect(tab.answer.locator(".figures")).to_contain_text("out")
    (conversation,) = tab.conversations()
    assert [message["role"] for message in conversation["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert "error" not in conversation["messages"][-1]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_is_folded_and_not_given_back(tab: Tab, name: str) -> None:
    tab.answer_with({name: "Let me "}, {name: "think."}, {"content": "Four."})
    tab.ask("2 + 2?")
    reasoning = tab.answer.locator("details")
    expect(reasoning.get_by_text("Let me think.")).to_be_hidden()
    reasoning.locator("summary").click()
    expect(reasoning.get_by_text("Let me think.")).to_be_visible()
    tab.do("Copy", tab.answer)
    tab.page.get_by_role("button", name="Code").last.click()
    assert "think" not in tab.page.locator("#code-text").inner_text()


def code_of(tab: Tab, language: str) -> str:
    """The code of the last answer, as copied to the clipboard."""
    tab.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    tab.do("Code", tab.answer)
    tab.page.get_by_role("button", name=language, exact=True).click()
    tab.page.locator("#said").evaluate("node => (node.textContent = '')")
    tab.page.locator("#code-copy").click()
    expect(tab.page.locator("#said")).to_have_text("Copied")  # the button says so for a moment only
    code = str(tab.page.evaluate("navigator.clipboard.readText()"))
    tab.page.get_by_role("button", name="Close").click()
    assert KEY not in code
    return code


def test_code_that_was_copied_runs_and_says_the_same(tab: Tab) -> None:
    tab.set(top_k="1", stop="'\"\\\\")
    said = tab.ask('What\'s the "capital" of France? \N{PAGODA}\n' + CAPITAL)
    assert said
    environment = os.environ | {"PAGODA_API_KEY": KEY}
    run = {"env": environment, "capture_output": True, "text": True, "timeout": 120, "check": True}
    streamed = subprocess.run(["bash", "-c", code_of(tab, "curl")], **run).stdout
    chunks = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"]) == said
    assert subprocess.run([sys.executable, "-c", code_of(tab, "Python")], **run).stdout == said
    script = code_of(tab, "JavaScript")
    process = f"{{ env: {{ PAGODA_API_KEY: '{KEY}' }}, stdout: {{ write: (text) => (out += text) }} }}"
    written = tab.page.evaluate(f"async () => {{ let out = ''; const process = {process};\n{script}\nreturn out; }}")
    assert written == said


def test_the_stack_is_shown_as_it_is(tab: Tab, stack: Stack, browser: Browser) -> None:
    tab.ask(CAPITAL)
    (conversation,) = tab.conversations()
    request_id = conversation["messages"][-1]["request"].removeprefix("chatcmpl-")
    tab.page.get_by_role("link", name="Stack", exact=True).click()
    workers = tab.page.get_by_role("region", name="Workers")
    expect(workers.locator("tbody tr")).to_have_count(1)
    expect(workers).to_contain_text(re.compile("worker-0.*ready.*demo.*cpu", re.DOTALL))
    rows = tab.page.get_by_role("region", name="Last requests").locator("tbody tr")
    expect(rows.first.locator("code")).to_have_attribute("title", request_id)
    expect(rows.first).to_contain_text(re.compile("prefill: .*decode: ", re.DOTALL))
    expect(tab.page.locator(".chart polyline")).to_have_count(2)
    with open_tab(browser, stack.url, OTHER_KEY) as other:
        other.page.get_by_role("link", name="Stack", exact=True).click()
        expect(other.page.get_by_text("None has ended here yet.")).to_be_visible()
        expect(other.page.get_by_role("region", name="Workers").locator("tbody tr")).to_have_count(1)


def test_what_was_known_last_is_said_to_be_that(tab: Tab) -> None:
    tab.page.get_by_role("link", name="Stack", exact=True).click()
    workers = tab.page.get_by_role("region", name="Workers")
    expect(workers).to_be_visible()
    tab.page.route("**/stack", lambda route: route.abort())
    expect(tab.page.get_by_role("alert")).to_contain_text("The server cannot be reached")
    expect(tab.page.get_by_text("What follows is what was known last.")).to_be_visible()
    expect(workers).to_be_visible()
    tab.page.unroute("**/stack")
    expect(tab.page.get_by_role("alert")).to_have_count(0)


def test_a_key_is_asked_for_and_used(stack: Stack, browser: Browser) -> None:
    with open_tab(browser, stack.url) as tab:
        tab.send("Hello!")
        error = tab.answer.get_by_role("alert")
        expect(error).to_contain_text("show one API key")
        expect(error).to_contain_text("status 401 · invalid_api_key")
        error.get_by_role("button", name="Give an API key").click()
        tab.page.keyboard.type("no-such-key-here")
        tab.page.keyboard.press("Enter")
        tab.page.get_by_role("button", name="Try again").click()
        expect(tab.answer.get_by_role("alert")).to_contain_text("the API key is not one of this server's")
        tab.page.get_by_role("button", name="API key", exact=True).click()
        tab.page.get_by_label("Key", exact=True).fill(KEY)
        tab.page.get_by_role("button", name="Use this key").click()
        expect(tab.page.locator("#model")).to_have_value(MODEL)
        assert tab.ask("Hello!")


def test_errors_are_shown_as_the_server_says_them(tab: Tab, stack: Stack) -> None:
    tab.set(temperature="700")
    tab.send("Hello!")
    body = {"model": MODEL, "temperature": 700, "messages": [{"role": "user", "content": "Hello!"}]}
    headers = {"authorization": f"Bearer {KEY}"}
    error = stack.post("/v1/chat/completions", json=body, headers=headers).json()["error"]
    shown = tab.answer.get_by_role("alert")
    expect(shown.locator(".error-message")).to_have_text(error["message"])
    expect(shown.locator(".error-facts")).to_have_text(f"status 400 · {error['code']} · field temperature")
    tab.set(temperature="0")
    shown.get_by_role("button", name="Try again").click()
    expect(tab.answer.locator(".prose")).not_to_be_empty()


def test_a_stream_that_breaks_says_so_and_keeps_what_came(tab: Tab) -> None:
    tab.answer_with({"content": "The capital"}, error={"message": "worker lost <b>", "code": "stream_interrupted"})
    tab.send(CAPITAL)
    expect(tab.answer.get_by_role("alert")).to_contain_text("worker lost <b>")
    expect(tab.answer.locator(".prose")).to_have_text("The capital")
    tab.page.unroute("**/v1/chat/completions")
    tab.page.route("**/v1/chat/completions", lambda route: route.abort())
    tab.page.get_by_role("button", name="Try again").click()
    expect(tab.answer.get_by_role("alert")).to_contain_text("The server cannot be reached")


def test_what_models_and_servers_say_stays_text(tab: Tab) -> None:
    tab.answer_with(
        {"reasoning": EVIL, "content": f"{EVIL}\n\n```{EVIL}\n{EVIL}\n```\n\n| {EVIL} |\n|---|\n| {EVIL} |\n"},
        {"tool_calls": [{"index": 0, "id": EVIL, "function": {"name": EVIL, "arguments": EVIL}}]},
    )
    models = {"data": [{"id": EVIL}]}
    tab.page.route("**/v1/models", lambda route: route.fulfill(json=models))
    stack = told_to_be_evil(httpx.get(f"{tab.url}/stack", headers={"x-api-key": KEY}, timeout=120).json())
    tab.page.route("**/stack", lambda route: route.fulfill(json=stack))
    tab.page.reload()
    expect(tab.page.locator("#model")).to_have_value(EVIL)
    tab.ask(EVIL)
    tab.page.get_by_role("link", name="Stack", exact=True).click()
    expect(tab.page.get_by_role("region", name="Workers")).to_contain_text(EVIL)
    made = tab.page.locator("#messages, #stack, #conversations").locator("img, script, iframe, a")
    assert made.count() == 0
    assert tab.page.evaluate("window.evil") is None


def told_to_be_evil(stack: dict[str, Any]) -> dict[str, Any]:
    """The stack's report with EVIL in place of every string but states."""

    def evil(value: Any, name: str = "") -> Any:
        if isinstance(value, dict):
            return {key: evil(each, key) for key, each in value.items()}
        if isinstance(value, list):
            return [evil(each) for each in value]
        return EVIL if isinstance(value, str) and name != "state" else value

    return evil(stack)  # type: ignore[no-any-return]


def test_the_policy_is_in_force_and_its_breach_is_seen(tab: Tab) -> None:
    script = "document.body.append(Object.assign(document.createElement('script'), { textContent: 'window.evil = 1' }))"
    with tab.page.expect_console_message(lambda said: "Content Security Policy" in said.text):
        tab.page.evaluate(script)
    assert tab.page.evaluate("window.evil") is None
    assert len(tab.wrongs) == 1
    tab.wrongs.clear()


PIECES = (
    "*",
    "**",
    "`",
    "```",
    "~~",
    "\n",
    "\n\n",
    "| a |",
    "|---|",
    "> ",
    "- ",
    "1. ",
    "# ",
    "word",
    " ",
    "<b>",
    "&amp;",
    "_",
)


def test_markdown_loses_no_word_and_makes_only_what_it_knows(tab: Tab) -> None:
    rng = random.Random(7)
    texts = ["".join(rng.choices(PIECES, k=rng.randint(1, 40))) for _ in range(400)] + [EVIL, "`" * 2000, "**" * 2000]
    script = """markdown.js: ({ markdown }, texts) => texts.map((text) => {
        const place = document.createElement("div");
        place.append(...markdown(text));
        const nodes = [...place.querySelectorAll("*")];
        const names = nodes.flatMap((node) => node.getAttributeNames());
        return { tags: nodes.map((node) => node.tagName), names, text: place.textContent };
    })"""
    known = "P H3 H4 H5 H6 UL OL LI BLOCKQUOTE HR PRE CODE FIGURE FIGCAPTION SPAN BUTTON STRONG EM DEL DIV TABLE"
    known += " THEAD TBODY TR TH TD"
    for text, made in zip(texts, tab.run(script, texts), strict=True):
        assert set(made["tags"]) <= set(known.split()), text
        assert set(made["names"]) <= {"class", "type", "tabindex", "role", "aria-label", "scope", "start"}, text
        assert made["text"].count("word") == text.count("word"), text
        assert made["text"].count("<b>") == text.count("<b>"), text


def test_values_are_written_as_python_reads_them(tab: Tab) -> None:
    values = [None, True, {"a": [1, 2.5, "x'\"\\\n\u2028\N{PAGODA}", {}, []], "b": {"c": False}}, [[], [None]]]
    written = tab.run("request.js: ({ inPython }, values) => values.map((value) => inPython(value))", values)
    assert [ast.literal_eval(text) for text in written] == values


def test_rates_begin_anew_with_another_engine_core(tab: Tab) -> None:
    script = """rates.js: ({ Rates }, reports) => {
        const rates = new Rates();
        for (const [engine_id, at_s, output_tokens] of reports)
            rates.add({ load: { engine_id }, report: at_s === null ? null : {
                at_s, totals: { output_tokens, prompt_tokens: 0, cached_prompt_tokens: 0 } } });
        return rates.series("output");
    }"""
    reports = [
        ["a", 1, 0],
        ["a", 2, 50],
        ["a", 2, 50],
        ["b", 3, 10],
        ["b", 5, 30],
        ["b", None, 0],
        ["b", 9, 90],
        ["b", 10, 91],
    ]
    assert tab.run(script, reports) == [50, 10, 1]


def test_light_and_dark(tab: Tab) -> None:
    def ground() -> int:
        color = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, re.findall(r"\d+", color)[:3]))

    tab.page.emulate_media(color_scheme="dark")
    assert ground() < 200
    tab.page.emulate_media(color_scheme="light")
    assert ground() > 600
    toggle = tab.page.locator("#theme")
    toggle.click()
    toggle.click()
    expect(toggle).to_have_attribute("aria-label", "Theme: dark")
    assert ground() < 200
    tab.page.reload()
    assert ground() < 200


def filled(tab: Tab) -> Iterator[str]:
    """Put the page into each state that people see, one after the other; yields the states' names."""
    yield "empty"
    tab.answer_with({"reasoning": "Hm."}, {"content": "# A\n\n**b** `c`\n\n```py\nx\n```\n\n| a |\n|---|\n| 1 |"}, {
        "tool_calls": [{"index": 0, "id": "c1", "function": {"name": "f", "arguments": "{}"}}]})  # fmt: skip
    tab.ask("Hello!")
    yield "calls"
    tab.page.unroute("**/v1/chat/completions")
    tab.page.locator("#new").click()
    tab.set(logprobs=True)
    tab.ask(CAPITAL)
    tab.answer.get_by_role("option").nth(1).focus()
    yield "tokens"
    tab.set(logprobs=False, temperature="700", format="json_schema", use_tools=True)
    tab.set(schema="{")
    tab.set(schema="{}", tools="[")
    tab.send("Hello!")
    yield "a setting that is none"
    tab.set(use_tools=False)
    tab.ask("Hello!")
    yield "error"
    tab.do("Edit", tab.page.locator(".message.user").last)
    yield "editing"
    for name in ("#key", "#code", "#clear"):
        tab.page.locator(name).click()
        yield f"dialog of {name}"
        tab.page.keyboard.press("Escape")
    tab.page.get_by_role("link", name="Stack", exact=True).click()
    expect(tab.page.get_by_role("region", name="Last requests")).to_be_visible()
    yield "stack"


def test_nobody_is_kept_out(tab: Tab) -> None:
    found = {}
    for state in filled(tab):
        tab.page.emulate_media(color_scheme="dark", reduced_motion="reduce")
        found[state] = tab.barriers()
        tab.page.emulate_media(color_scheme="light", reduced_motion="reduce")
        found[state] += tab.barriers(runOnly=["color-contrast"])  # no other rule depends on the scheme
    assert {state: barriers for state, barriers in found.items() if barriers} == {}
    assert len(found) == 10


def test_a_telephone_is_wide_enough(stack: Stack, browser: Browser) -> None:
    def overflow(tab: Tab) -> Any:
        return tab.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")

    with open_tab(browser, stack.url, KEY, viewport=NARROW, has_touch=True, is_mobile=True) as tab:
        parameters: Locator = tab.page.get_by_role("button", name="Parameters")
        expect(tab.page.locator("#settings")).to_be_hidden()
        parameters.click()
        tab.set(temperature="0")
        assert overflow(tab) == 0
        tab.page.keyboard.press("Escape")
        expect(tab.page.locator("#settings")).to_be_hidden()
        expect(parameters).to_be_focused()
        tab.ask("x" * 200 + CAPITAL)
        assert overflow(tab) == 0
        assert tab.barriers() == []
        tab.page.get_by_role("button", name="Conversations").click()
        expect(tab.page.locator(".conversation")).to_be_visible()
        tab.page.locator(".conversation").click()
        tab.page.get_by_role("link", name="Stack", exact=True).click()
        expect(tab.page.get_by_role("region", name="Workers")).to_be_visible()
        assert overflow(tab) == 0
        assert tab.barriers() == []
