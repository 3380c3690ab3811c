"""use_beam_search over HTTP: one request whose choices are the sequences found."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.fakes import make_delta
from tests.gateway.fakes_engine import NUM_CACHED, Batch, Gateway, make_gateway, play
from tests.gateway.model_dir import write_model_dir

from pagoda_proto.params import SamplingParams
from pagoda_proto.records import Begun, FinishReason, RequestRecord, Usage

PATHS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 5},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5},
}
BEAMS: dict[str, Any] = {"use_beam_search": True, "n": 3}
FOUND = [[72, 105], [72, 105, 33, 10, 72], [105]]


def finds(gateway: Gateway) -> Any:
    """Returns all sequences at once, the first of which ends with an end of sequence."""
    (end, *_) = gateway.text.eos_token_ids

    def script(record: RequestRecord) -> list[Batch]:
        deltas = [
            make_delta(0, tokens, request_id=record.request_id, choice=index, finish_reason=FinishReason.LENGTH)
            for index, tokens in enumerate(FOUND[: record.task.params.n])
        ]
        deltas[0].tokens.token_ids = [*FOUND[0], end]
        deltas[0].tokens.stop_token_id, deltas[0].finish_reason = end, FinishReason.STOP
        deltas[0].tokens.begun = Begun(model_fingerprint="f", numerics_id="any", cached_prompt_tokens=NUM_CACHED)
        num_tokens = sum(len(delta.tokens.token_ids) for delta in deltas)
        deltas[-1].usage = Usage(prompt_tokens=3, cached_prompt_tokens=NUM_CACHED, output_tokens=num_tokens)
        return [deltas]

    return script


def searching(root: Path) -> Gateway:
    gateway = make_gateway(root)
    gateway.engine.script = finds(gateway)
    return gateway


async def post(gateway: Gateway, path: str, status: int = 200, **fields: Any) -> Any:
    response = await gateway.client.post(path, json=PATHS[path] | BEAMS | fields)
    assert response.status_code == status, response.text
    return response.json()


@pytest.mark.parametrize("path", PATHS)
async def test_the_sequences_found_are_the_choices_of_one_request(tmp_path: Path, path: str) -> None:
    gateway = searching(tmp_path)
    answer = await post(gateway, path, return_token_ids=True)
    (end, *_) = gateway.text.eos_token_ids
    assert [choice["token_ids"] for choice in answer["choices"]] == [[*FOUND[0], end], *FOUND[1:]]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop", "length", "length"]
    assert answer["usage"]["completion_tokens"] == 9
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == NUM_CACHED
    assert gateway.engine.num_counted == 1
    assert gateway.engine.record.task.params == SamplingParams(n=3, use_beam_search=True, max_tokens=5)


@pytest.mark.parametrize("penalty", [None, 0.0, -10.0])
async def test_a_record_says_how_to_search(tmp_path: Path, penalty: float | None) -> None:
    gateway = searching(tmp_path)
    await post(gateway, "/v1/completions", length_penalty=penalty, ignore_eos=True, stop_token_ids=[7], n=2)
    expected = SamplingParams(
        n=2, use_beam_search=True, length_penalty=1.0 if penalty is None else penalty, max_tokens=5, ignore_eos=True,
        stop_token_ids=(7,),
    )  # fmt: skip
    assert gateway.engine.record.task.params == expected


async def test_what_the_author_recommends_for_sampling_is_not_for_a_search(tmp_path: Path) -> None:
    model_dir = write_model_dir(tmp_path, generation_config={"temperature": 0.6, "top_p": 0.9})
    gateway = Gateway(model_dir, play([]))
    gateway.engine.script = finds(gateway)
    assert gateway.text.sampling_defaults
    await post(gateway, "/v1/chat/completions")
    assert gateway.engine.record.task.params == SamplingParams(n=3, use_beam_search=True, max_tokens=5)


async def test_several_prompts_are_searched_at_once(tmp_path: Path) -> None:
    answer = await post(searching(tmp_path), "/v1/completions", prompt=["hello", "world"], n=2)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]


async def test_a_client_that_leaves_ends_the_search(tmp_path: Path) -> None:
    gateway, forever = make_gateway(tmp_path), asyncio.Event()
    gateway.engine.script = lambda record: [forever, *play([1])(record)]
    asking = asyncio.create_task(gateway.client.post("/v1/completions", json=PATHS["/v1/completions"] | BEAMS))
    await gateway.engine.submitted.wait()
    (generation,) = gateway.engine.generations
    await generation.waiting.wait()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert generation.closed.is_set()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"n": 17}, "n: must be between 1 and 16"),
        ({"n": 16, "stop_token_ids": [7, 8, 9, 10, 11]}, "at most 20 together"),
        ({"stream": True}, "stream cannot be combined"),
        ({"stop": "x"}, "stop: cannot be combined"),
        ({"temperature": 0.5}, "temperature: must be 0 or 1"),
        ({"top_p": 0.5}, "top_p: cannot be combined"),
        ({"guided_regex": "a"}, "guided_regex: cannot be combined"),
        ({"prompt_logprobs": 1}, "prompt_logprobs: cannot be combined"),
        ({"prompt_logprobs": 0}, "prompt_logprobs: cannot be combined"),
        ({"logprobs": 0}, "logprobs cannot be combined"),
        ({"presence_penalty": 1.0}, "presence_penalty: cannot be combined"),
        ({"best_of": 4}, "best_of cannot be combined"),
        ({"use_beam_search": False, "length_penalty": 1.0}, "length_penalty needs use_beam_search"),
        ({"length_penalty": 11}, "length_penalty: must be between -10 and 10"),
    ],
)
async def test_what_a_search_does_not_look_at_is_refused(tmp_path: Path, fields: dict[str, Any], says: str) -> None:
    error = (await post(searching(tmp_path), "/v1/completions", 400, **fields))["error"]
    assert says in error["message"]


@pytest.mark.parametrize("field", ["thinking_budget", "thinking_token_budget"])
async def test_thoughts_of_beams_have_no_budget(tmp_path: Path, field: str) -> None:
    error = (await post(searching(tmp_path), "/v1/chat/completions", 400, **{field: 0}))["error"]
    assert f"{field} cannot be combined" in error["message"]


async def test_values_that_say_nothing_are_taken(tmp_path: Path) -> None:
    await post(
        searching(tmp_path), "/v1/chat/completions", temperature=0, top_p=1, top_k=-1, presence_penalty=0, seed=3,
        stream=False, stop=[], logprobs=False, echo=False, min_p=0, min_tokens=0, frequency_penalty=0.0,
    )  # fmt: skip
