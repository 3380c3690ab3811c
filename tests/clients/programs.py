"""Uses a server only through LangChain, LlamaIndex and LiteLLM, as programs do: `python programs.py URL`.

Runs in an environment with only these libraries (`make test-clients`). Every printed line is something that worked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

MODEL, KEY = "demo", "none"
SUM = "What is 2 + 3?"
Program = Callable[[str], Iterator[tuple[str, Any]]]


def langchain_openai(url: str) -> Iterator[tuple[str, Any]]:
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel

    @tool
    def add(a: int, b: int) -> int:
        """Adds."""
        return a + b

    class City(BaseModel):
        name: str
        people: int

    for responses in (False, True):
        api = "responses" if responses else "chat"
        model = ChatOpenAI(
            model=MODEL, base_url=f"{url}/v1", api_key=KEY, temperature=0, use_responses_api=responses, max_retries=0
        )
        yield f"{api}, whole", "5" in str(model.invoke(SUM).content)
        yield f"{api}, streamed", "5" in "".join(str(chunk.content) for chunk in model.stream(SUM))
        (call,) = model.bind_tools([add], tool_choice="required").invoke("add 2 and 3").tool_calls
        yield f"{api}, tools", call["name"] == "add" and set(call["args"]) == {"a", "b"}
        found = model.with_structured_output(City, method="json_schema").invoke("Paris")
        yield f"{api}, a schema", isinstance(found, City)


def langchain_anthropic(url: str) -> Iterator[tuple[str, Any]]:
    from langchain_anthropic import ChatAnthropic
    from langchain_core.tools import tool

    @tool
    def add(a: int, b: int) -> int:
        """Adds."""
        return a + b

    model = ChatAnthropic(model=MODEL, base_url=url, api_key=KEY, max_tokens=64, temperature=0, max_retries=0)
    yield "whole", "5" in str(model.invoke(SUM).content)
    yield "streamed", "5" in "".join(str(chunk.content) for chunk in model.stream(SUM))
    yield "tools", model.bind_tools([add], tool_choice="any").invoke("add 2 and 3").tool_calls[0]["name"] == "add"


def llama_index(url: str) -> Iterator[tuple[str, Any]]:
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    def add(a: int, b: int) -> int:
        """Adds."""
        return a + b

    model = OpenAILike(
        model=MODEL,
        api_base=f"{url}/v1",
        api_key=KEY,
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=2048,
        temperature=0,
        max_retries=0,
    )
    yield "whole", "5" in str(model.complete(SUM))
    yield "streamed", "5" in "".join(chunk.delta or "" for chunk in model.stream_complete(SUM))
    answer = model.chat_with_tools([FunctionTool.from_defaults(fn=add)], user_msg="add 2 and 3", tool_required=True)
    yield "tools", model.get_tool_calls_from_response(answer)[0].tool_name == "add"


def lite_llm(url: str) -> Iterator[tuple[str, Any]]:
    import litellm

    turns = [{"role": "user", "content": SUM}]
    options: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": KEY, "temperature": 0}
    yield "whole", "5" in litellm.completion(messages=turns, **options).choices[0].message.content
    chunks = litellm.completion(messages=turns, stream=True, **options)
    yield "streamed", "5" in "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    yield "responses", "5" in litellm.responses(input=SUM, **options).output[0].content[0].text
    anthropic: dict[str, Any] = {"model": f"anthropic/{MODEL}", "api_base": url, "api_key": KEY, "max_tokens": 64}
    yield "Anthropic's messages", "5" in litellm.completion(messages=turns, **anthropic).choices[0].message.content
    plain = options | {"model": f"text-completion-openai/{MODEL}"}
    yield "plain completions", litellm.text_completion(prompt="The capital of", max_tokens=4, **plain).choices[0].text


PROGRAMS: tuple[Program, ...] = (langchain_openai, langchain_anthropic, llama_index, lite_llm)


def main() -> int:
    failed = 0
    for program in PROGRAMS:
        for what, worked in program(sys.argv[1]):
            failed += not worked
            print(f"{program.__name__}: {what}: {'works' if worked else 'FAILED'}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
