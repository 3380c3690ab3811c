"""POST /v1/completions against a scripted engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.gateway.fakes_engine import MODEL, Batch, Gateway, breaking, failing, make_gateway, play, saying
from tests.gateway.model_dir import byte_fallback_tokenizer, write_model_dir
from tests.gateway.routes.test_chat import sdk

from pagoda_proto.errors import ErrorCode
from pagoda_proto.records import RequestRecord

PATH = "/v1/completions"


async def post(gateway: Gateway, **fields: Any) -> dict[str, Any]:
    response = await gateway.client.post(PATH, json={"model": MODEL, "prompt": "hello"} | fields)
    assert response.status_code == 200, response.text
    return response.json()


async def chunks(gateway: Gateway, **fields: Any) -> list[Any]:
    response = await gateway.client.post(PATH, json={"prompt": "hello", "stream": True} | fields)
    assert response.status_code == 200, response.text
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data: ")]
    return [event if event == "[DONE]" else json.loads(event) for event in events]


async def refusal(gateway: Gateway, status: int = 400, **fields: Any) -> dict[str, Any]:
    response = await gateway.client.post(PATH, json={"model": MODEL, "prompt": "hello"} | fields)
    assert response.status_code == status, response.text
    return response.json()["error"]


async def test_an_answer_has_openais_shape(tmp_path: Path) -> None:
    gateway = saying(tmp_path, " world")
    answer = await post(gateway)
    record = gateway.engine.record
    assert (answer["id"], answer["object"]) == ("cmpl-" + record.request_id, "text_completion")
    assert answer["choices"] == [
        {"index": 0, "text": " world", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert answer["usage"]["total_tokens"] == len(record.prompt_token_ids) + 1
    assert record.task.params.max_tokens == 16


@pytest.mark.parametrize("stream", [False, True])
async def test_every_kind_of_prompt_and_their_order(tmp_path: Path, stream: bool) -> None:
    gateway = saying(tmp_path, "ab", "c")
    a, b = gateway.ids("one"), gateway.ids("two")
    for prompt, expected in (("one", [a]), (["one", "two"], [a, b]), (a, [a]), ([a, b], [a, b])):
        gateway.engine.generations.clear()
        if stream:
            texts = [""] * (2 * len(expected))
            for event in (await chunks(gateway, prompt=prompt, n=2))[:-1]:
                for choice in event["choices"]:
                    texts[choice["index"]] += choice["text"]
        else:
            answer = await post(gateway, prompt=prompt, n=2)
            assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(expected)))
            texts = [choice["text"] for choice in answer["choices"]]
            assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))
        assert texts == ["ab", "c"] * len(expected)
        assert [g.record.prompt_token_ids for g in gateway.engine.generations] == expected


async def test_prompts_get_seeds_of_their_own_unless_given(tmp_path: Path) -> None:
    gateway = saying(tmp_path, "x")
    await post(gateway, prompt=["a", "b"])
    await post(gateway, prompt=["a", "b"], seed=7)
    seeds = [generation.record.task.seed for generation in gateway.engine.generations]
    assert seeds[0] != seeds[1]
    assert seeds[2:] == [7, 7]


async def test_logprobs(tmp_path: Path) -> None:
    gateway = saying(tmp_path, "a🙂b")
    logprobs = (await post(gateway, logprobs=1))["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "bytes:\\xf0", "bytes:\\x9f", "bytes:\\x99", "bytes:\\x82", "b"]
    assert logprobs["text_offset"] == [0, 1, 1, 1, 1, 2]
    (token_id,) = gateway.ids("a")
    assert logprobs["token_logprobs"][0] == -token_id / 1000
    assert logprobs["top_logprobs"][0] == {"a": -token_id / 1000}
    events = (await chunks(gateway, logprobs=1))[:-1]
    for name, values in logprobs.items():
        assert [value for event in events for value in event["choices"][0]["logprobs"][name]] == values


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_with_logprobs_covers_the_prompt(tmp_path: Path, stream: bool) -> None:
    gateway = saying(tmp_path, " world")
    if stream:
        events = (await chunks(gateway, echo=True, logprobs=0))[:-1]
        assert "".join(event["choices"][0]["text"] for event in events) == "hello world"
        logprobs = events[0]["choices"][0]["logprobs"]
    else:
        (choice,) = (await post(gateway, echo=True, logprobs=0))["choices"]
        assert choice["text"] == "hello world"
        logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["hello", " world"]
    assert logprobs["text_offset"] == [0, 5]
    assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
    assert gateway.engine.record.task.params.prompt_logprobs == 0


async def test_offsets_count_the_echo_as_it_is_shown(tmp_path: Path) -> None:
    """With such a tokenizer, the first piece starts with a space that the text does not have."""
    template = {"chat_template": None, "eos_token": "</s>", "bos_token": "<s>", "add_bos_token": True}
    root = write_model_dir(tmp_path / "m", tokenizer=byte_fallback_tokenizer(), tokenizer_config=template)
    gateway = Gateway(root, play([]))
    ids = gateway.ids(" he")
    gateway.engine.script = play(ids)
    for prompt in ("hello</s> he", "he"):
        (choice,) = (await post(gateway, prompt=prompt, echo=True, logprobs=0))["choices"]
        assert choice["text"].startswith(prompt)
        logprobs = choice["logprobs"]
        assert logprobs["text_offset"][0] == 0
        assert logprobs["text_offset"][-len(ids)] == len(prompt)
        shown = gateway.engine.generations[-1].record.prompt_token_ids
        assert logprobs["text_offset"][1] == 0  # the first token, <s>, is not shown
        for i in range(1, len(shown) - 1):
            piece = logprobs["tokens"][i].removeprefix("bytes:")
            start, end = logprobs["text_offset"][i : i + 2]
            assert prompt[start:end].strip() == piece.strip()


async def test_echo_alone_asks_about_the_prompt_only(tmp_path: Path) -> None:
    gateway = saying(tmp_path, " world")
    answer = await post(gateway, prompt=gateway.ids("the world"), echo=True, logprobs=2, max_tokens=0)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("the world", "length")
    assert len(choice["logprobs"]["tokens"]) == len(gateway.ids("the world"))
    assert answer["usage"]["completion_tokens"] == 0
    assert (await refusal(gateway, max_tokens=0))["param"] == "max_tokens"


async def test_prompt_logprobs_and_token_ids(tmp_path: Path) -> None:
    gateway = saying(tmp_path, "x")
    (choice,) = (await post(gateway, prompt="hello world", prompt_logprobs=2, return_token_ids=True))["choices"]
    assert choice["prompt_token_ids"] == gateway.ids("hello world")
    assert choice["token_ids"] == gateway.ids("x")
    first, second = choice["prompt_logprobs"]
    assert first is None
    world = choice["prompt_token_ids"][1]
    assert second[str(world)] == {"logprob": -world / 1000, "rank": 1, "decoded_token": " world"}
    assert second[str(world + 1)]["rank"] == 2


async def test_best_of_picks_the_likeliest_on_average(tmp_path: Path) -> None:
    gateway = make_gateway(tmp_path)
    # In the fake, lower ids are more likely.
    gateway.engine.script = play([50, 50], [10], [30, 20, 10])
    answer = await post(gateway, best_of=3, n=2)
    texts = [gateway.text.decode([10]), gateway.text.decode([30, 20, 10])]
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == list(enumerate(texts))
    assert answer["choices"][0]["logprobs"] is None
    assert answer["usage"]["completion_tokens"] == 6
    assert gateway.engine.record.task.params.n == 3


async def test_a_stream_ends_with_usage_on_request(tmp_path: Path) -> None:
    events = await chunks(saying(tmp_path, "abc"), stream_options={"include_usage": True})
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"] == []
    assert events[-2]["usage"]["completion_tokens"] == 3
    assert [event["choices"][0]["finish_reason"] for event in events[:-2]] == [None, None, "length"]


async def test_one_of_many_prompts_that_fails_ends_them_all(tmp_path: Path) -> None:
    gateway = make_gateway(tmp_path)
    good, bad = play(gateway.ids("ab")), breaking(code=ErrorCode.NUMERICAL_ERROR)

    def script(record: RequestRecord) -> Any:
        return (bad if record.prompt_token_ids == gateway.ids("two") else good)(record)

    gateway.engine.script = script
    assert (await refusal(gateway, 500, prompt=["one", "two", "one"]))["code"] == "numerical_error"
    assert all(generation.closed.is_set() for generation in gateway.engine.generations)


async def test_one_of_many_prompts_that_is_refused_stops_the_others(tmp_path: Path) -> None:
    gateway = make_gateway(tmp_path)
    good, bad = play(gateway.ids("ab")), failing(ErrorCode.OVERLOADED)

    def script(record: RequestRecord) -> Any:
        return (bad if record.prompt_token_ids == gateway.ids("two") else good)(record)

    gateway.engine.script = script
    assert (await refusal(gateway, 503, prompt=["one", "two"]))["code"] == "overloaded"
    assert [generation.closed.is_set() for generation in gateway.engine.generations] == [True]


async def test_stop_strings_of_many_prompts(tmp_path: Path) -> None:
    gateway = saying(tmp_path, "a.b", "c")
    answer = await post(gateway, prompt=["one", "two"], n=2, stop=".", include_stop_str_in_output=True)
    assert [choice["text"] for choice in answer["choices"]] == ["a.", "c"] * 2
    assert [choice["stop_reason"] for choice in answer["choices"]] == [".", None] * 2
    assert [generation.aborted for generation in gateway.engine.generations] == [[0], [0]]


async def test_deltas_may_come_in_any_interleaving_of_choices(tmp_path: Path) -> None:
    gateway = make_gateway(tmp_path)
    scripted = play(gateway.ids("abc"), gateway.ids("xyz"))

    def script(record: RequestRecord) -> list[Batch]:
        """Gives choice 1 completely before choice 0, whose last delta ends the request."""
        deltas = [delta for batch in scripted(record) if isinstance(batch, list) for delta in batch]
        usage, deltas[-1].usage = deltas[-1].usage, None
        ordered = sorted(deltas, key=lambda delta: -delta.choice)
        ordered[-1].usage = usage
        return [[delta] for delta in ordered]

    gateway.engine.script = script
    answer = await post(gateway, n=2)
    assert [choice["text"] for choice in answer["choices"]] == ["abc", "xyz"]


async def test_prompts_may_be_cut_to_their_ends(tmp_path: Path) -> None:
    gateway = saying(tmp_path, "x")
    ids = gateway.ids("ab" * 400)
    for prompt in ("ab" * 400, ids, [ids, ids[:3]]):
        answer = await post(gateway, prompt=prompt, truncate_prompt_tokens=4, echo=True, max_tokens=1)
        assert gateway.engine.generations[-1].record.prompt_token_ids in (ids[-4:], ids[:3])
        assert answer["choices"][0]["text"] == gateway.text.decode(ids[-4:]) + "x"
    await post(gateway, prompt=ids, truncate_prompt_tokens=-1, max_tokens=6)
    assert gateway.engine.generations[-1].record.prompt_token_ids == ids[-250:]


@pytest.mark.parametrize("num", [257, 250, 5000])
async def test_token_ids_that_do_not_fit_are_told_as_texts_are(tmp_path: Path, num: int) -> None:
    error = await refusal(saying(tmp_path, "x"), prompt=[1] * num, max_tokens=7)
    assert error["code"] == "context_length_exceeded"
    assert error["message"] == (
        f"This model's maximum context length is 256 tokens. However, you requested {num + 7} tokens "
        f"({num} in the prompt, 7 in the completion). Please reduce the length of the prompt or completion."
    )


async def test_a_request_with_a_name_of_its_own(tmp_path: Path) -> None:
    gateway = saying(tmp_path, "x")
    assert (await post(gateway, prompt=["a", "b"], request_id="mine"))["id"] == "cmpl-mine"
    names = [generation.record.request_id for generation in gateway.engine.generations]
    assert len(set(names)) == 2
    assert {name.rpartition(".")[2] for name in names} == {"mine"}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["x", 1]}, "prompt[1]"),
    ({"prompt": [-1]}, "prompt[0]"),
    ({"prompt": [2**31]}, "prompt[0]"),
    ({"prompt": [2**63]}, "prompt[0]"),
    ({"prompt": [5000]}, "prompt"),
    ({"prompt": [True]}, "prompt[0]"),
    ({"prompt": ["x"] * 4}, "prompt"),
    ({"suffix": "x"}, "suffix"),
    ({"best_of": 17}, "best_of"),
    ({"best_of": 20}, "best_of"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"max_tokens": 10**9}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
    ({"bad_words": ["x"] * 65}, "bad_words"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=[f"{param}-{i}" for i, (_, param) in enumerate(REFUSED)])
async def test_what_cannot_be_done_is_refused_by_name(tmp_path: Path, fields: dict[str, Any], param: str) -> None:
    gateway = saying(tmp_path, "x", max_prompts=3)
    error = await refusal(gateway, **fields)
    assert error["param"] == param
    assert gateway.engine.generations == []


@pytest.mark.parametrize("fields", [{"best_of": 1, "n": 2}, {"best_of": 3, "stream": True}])
async def test_fields_that_contradict_each_other_are_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    assert "best_of" in (await refusal(saying(tmp_path, "x"), **fields))["message"]


async def test_official_client(tmp_path: Path) -> None:
    client = sdk(saying(tmp_path, " world"))
    answer = await client.completions.create(model=MODEL, prompt=["hello", "hello"], logprobs=1, echo=True)
    assert [choice.text for choice in answer.choices] == ["hello world"] * 2
    stream = await client.completions.create(model=MODEL, prompt="hello", stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == " world"
    models = await client.models.list()
    assert [model.id for model in models.data] == [MODEL]
    assert (await client.models.retrieve(MODEL)).owned_by == "pagoda"
