"""use_beam_search over HTTP: many requests of one token each, one answer, one ending."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.fakes import make_delta
from tests.gateway.fakes_engine import NUM_CACHED, Batch, Gateway, make_gateway

from pagoda_gateway.api.schemas import CompletionRequest
from pagoda_gateway.clients import NOBODY
from pagoda_gateway.dialects.completions import completion_job
from pagoda_gateway.engine.whole_request import WholeRequest
from pagoda_gateway.generation.beams import BeamSearch, Candidates
from pagoda_gateway.generation.requests import BYTES_PER_TOKEN, held_bytes
from pagoda_gateway.routes.body import parse_body
from pagoda_proto.errors import ErrorCode, PagodaError
from pagoda_proto.records import Begun, FinishReason, RequestRecord, Usage
from pagoda_proto.steps import TopLogprobs

PATHS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 5},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5},
}
BEAMS: dict[str, Any] = {"use_beam_search": True, "n": 3}


def candidates(token_ids: list[int], count: int, end: int) -> Candidates:
    """Of a language where what comes next depends on the last token, and any third word may be the last."""
    last = token_ids[-1]
    found = [(10 + (last * 7 + k * 3) % 40, -0.3 * k - 0.01 * (last % 5)) for k in range(count)]
    return [*found[: count - 1], (end, -0.5)] if last % 3 == 0 else found


def one_token(gateway: Gateway) -> Any:
    (end, *_) = gateway.text.eos_token_ids

    def script(record: RequestRecord) -> list[Batch]:
        params = record.task.params
        assert (params.n, params.max_tokens, params.temperature) == (1, 1, 0.0)
        found = sorted(candidates(record.prompt_token_ids, params.logprobs or 0, end), key=lambda one: -one[1])
        entry = TopLogprobs(found[0][1], 1, [token for token, _ in found], [logprob for _, logprob in found])
        delta = make_delta(
            0, [found[0][0]], request_id=record.request_id, logprobs=[entry], finish_reason=FinishReason.LENGTH
        )
        delta.result.begun = Begun(model_fingerprint="f", numerics_id="any", cached_prompt_tokens=NUM_CACHED)
        delta.usage = Usage(prompt_tokens=1, cached_prompt_tokens=NUM_CACHED, output_tokens=1)
        return [[delta]]

    return script


def searching(root: Path) -> Gateway:
    gateway = make_gateway(root)
    gateway.engine.script = one_token(gateway)
    return gateway


async def post(gateway: Gateway, path: str, status: int = 200, **fields: Any) -> Any:
    response = await gateway.client.post(path, json=PATHS[path] | BEAMS | fields)
    assert response.status_code == status, response.text
    return response.json()


def told(gateway: Gateway) -> list[WholeRequest]:
    """What metrics and log know: of no step anything."""
    assert gateway.engine.num_counted == 0
    return gateway.engine.whole


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("penalty", [None, 0.0, 2.0])
async def test_the_best_sequences_are_the_choices(tmp_path: Path, path: str, penalty: float | None) -> None:
    gateway = searching(tmp_path)
    answer = await post(gateway, path, length_penalty=penalty, return_token_ids=True)
    prompt = gateway.engine.generations[0].record.prompt_token_ids
    (end, *_) = gateway.text.eos_token_ids
    search = BeamSearch(3, 1.0 if penalty is None else penalty, frozenset(gateway.text.eos_token_ids), 5)
    while not search.done:
        search.take([candidates([*prompt, *beam.token_ids], search.num_candidates, end) for beam in search.running])
    assert [choice["token_ids"] for choice in answer["choices"]] == [list(one.beam.token_ids) for one in search.best]
    reasons = ["stop" if one.at_end else "length" for one in search.best]
    assert [choice["finish_reason"] for choice in answer["choices"]] == reasons
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    assert answer["usage"]["completion_tokens"] == sum(len(one.beam.token_ids) for one in search.best)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == NUM_CACHED
    ids = [generation.record.request_id for generation in gateway.engine.generations]
    assert len(set(ids)) == len(ids)
    assert all(generation.closed.is_set() for generation in gateway.engine.generations)
    (whole,) = told(gateway)
    assert whole.outcome is (FinishReason.STOP if set(reasons) == {"stop"} else FinishReason.LENGTH)
    assert whole.usage.output_tokens == answer["usage"]["completion_tokens"]


async def test_several_prompts_are_searched_at_once(tmp_path: Path) -> None:
    answer = await post(searching(tmp_path), "/v1/completions", prompt=["hello", "world"], ignore_eos=True, n=2)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}


@pytest.mark.parametrize("after", [0, 1, 4])
async def test_a_step_that_fails_ends_the_search_and_all_of_its_steps(tmp_path: Path, after: int) -> None:
    gateway = searching(tmp_path)
    plays = gateway.engine.script

    def script(record: RequestRecord) -> Any:
        if len(gateway.engine.generations) == after:
            raise PagodaError(ErrorCode.OVERLOADED, "no")
        return plays(record)

    gateway.engine.script = script
    assert (await post(gateway, "/v1/completions", 503))["error"]["code"] == "overloaded"
    assert [(one.outcome, one.code) for one in told(gateway)] == [(FinishReason.ERROR, ErrorCode.OVERLOADED)]
    assert all(generation.closed.is_set() for generation in gateway.engine.generations)


async def test_a_client_that_leaves_ends_the_search(tmp_path: Path) -> None:
    gateway = searching(tmp_path)
    plays, forever, all_beams_run = gateway.engine.script, asyncio.Event(), asyncio.Event()

    def script(record: RequestRecord) -> Any:
        if len(gateway.engine.generations) == 3:
            all_beams_run.set()
        return [forever] if gateway.engine.generations else plays(record)

    gateway.engine.script = script
    asking = asyncio.create_task(gateway.client.post("/v1/completions", json=PATHS["/v1/completions"] | BEAMS))
    await all_beams_run.wait()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert len(gateway.engine.generations) == 4
    assert [one.outcome for one in told(gateway)] == [FinishReason.ABORT]
    assert all(generation.closed.is_set() for generation in gateway.engine.generations)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"n": 11}, "at most 10 beams"),
        ({"stream": True}, "stream does not go"),
        ({"stop": "x"}, "stop does not go"),
        ({"temperature": 0.5}, "temperature does not go"),
        ({"top_p": 0.5}, "top_p does not go"),
        ({"guided_regex": "a"}, "guided_regex does not go"),
        ({"prompt_logprobs": 1}, "prompt_logprobs does not go"),
        ({"prompt_logprobs": 0}, "prompt_logprobs does not go"),
        ({"logprobs": 0}, "logprobs does not go"),
        ({"presence_penalty": 1.0}, "presence_penalty does not go"),
        ({"best_of": 4}, "best_of does not go"),
        ({"use_beam_search": False, "length_penalty": 1.0}, "length_penalty needs use_beam_search"),
        ({"length_penalty": 11}, "length_penalty"),
    ],
)
async def test_what_a_search_does_not_look_at_is_refused(tmp_path: Path, fields: dict[str, Any], says: str) -> None:
    error = (await post(searching(tmp_path), "/v1/completions", 400, **fields))["error"]
    assert says in error["message"]


@pytest.mark.parametrize("field", ["thinking_budget", "thinking_token_budget"])
async def test_thoughts_of_beams_have_no_budget(tmp_path: Path, field: str) -> None:
    error = (await post(searching(tmp_path), "/v1/chat/completions", 400, **{field: 0}))["error"]
    assert f"{field} does not go" in error["message"]


async def test_values_that_say_nothing_are_taken(tmp_path: Path) -> None:
    await post(
        searching(tmp_path), "/v1/chat/completions", temperature=0, top_p=1, top_k=-1, presence_penalty=0, seed=3,
        stream=False, stop=[], logprobs=False, echo=False, min_p=0, min_tokens=0, frequency_penalty=0.0,
    )  # fmt: skip


async def test_sec_16_the_prompts_of_beams_are_counted_as_held(tmp_path: Path) -> None:
    context = make_gateway(tmp_path).context
    fields = {"prompt": [[72] * 100] * 100, "n": 10}
    sampled, searched = [
        await completion_job(context, parse_body(CompletionRequest, fields | {"use_beam_search": beams}), NOBODY)
        for beams in (False, True)
    ]
    assert held_bytes(searched) - held_bytes(sampled) == 100 * 100 * 10 * BYTES_PER_TOKEN
