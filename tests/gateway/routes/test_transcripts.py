"""A transcript is visible only to its own key; anyone who may use the model can have one recomputed, after checks."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from tests.gateway.fakes_engine import Batch, play
from tests.gateway.keys.whole_app import App, running_app

from pagoda_gateway.api.answer_schemas import TranscriptShown
from pagoda_gateway.generation.transcripts import MAX_TRANSCRIPT_BYTES, Transcript, differences, read_transcript
from pagoda_gateway.routes.transcripts import _read
from pagoda_proto.errors import ErrorCode, PagodaError
from pagoda_proto.records import RequestRecord

AGAIN = "/v1/requests/replay"
ASK: dict[str, Any] = {"prompt": ["ab", "c"], "n": 2, "logprobs": 2, "max_tokens": 5, "stop": ["never"], "seed": 3}
TOKENS = [70, 71, 72]


async def kept(client: httpx.AsyncClient, **ask: Any) -> Transcript:
    answer = await client.post("/v1/completions", json=ASK | ask)
    assert answer.status_code == 200, answer.text
    name = answer.json()["id"] if not ask.get("stream") else ask["request_id"]
    found = await client.get(f"/v1/requests/{name}/transcript")
    assert found.status_code == 200, found.text
    TranscriptShown.model_validate_json(found.content)
    return read_transcript(found.content)


async def again(client: httpx.AsyncClient, transcript: Transcript) -> httpx.Response:
    headers = {"content-type": "application/json"}
    return await client.post(AGAIN, content=msgspec.json.encode(transcript), headers=headers)


async def with_keys(app: App) -> tuple[httpx.AsyncClient, httpx.AsyncClient]:
    return (await app.new_key())[1], (await app.new_key())[1]


async def test_what_was_asked_and_answered_is_its_own_keys(tmp_path: Path) -> None:
    async with running_app(tmp_path, play(TOKENS), keep_transcripts=10) as app:
        mine, yours = await with_keys(app)
        transcript = await kept(mine)
        assert [[choice.token_ids for choice in part.choices] for part in transcript.parts] == [[TOKENS] * 2] * 2
        assert {part.model_fingerprint for part in transcript.parts} == {"fp-tiny"}
        assert all(len(choice.logprobs or ()) == 3 for part in transcript.parts for choice in part.choices)
        for client, name in ((yours, transcript.id), (mine, "cmpl-none"), (app.admin, transcript.id)):
            assert (await client.get(f"/v1/requests/{name}/transcript")).status_code == 404


async def test_it_is_computed_again_and_the_same(tmp_path: Path) -> None:
    async with running_app(tmp_path, play(TOKENS), keep_transcripts=10) as app:
        mine, yours = await with_keys(app)
        transcript = await kept(mine)
        answer = await again(yours, transcript)
        assert answer.status_code == 200, answer.text
        TranscriptShown.model_validate_json(answer.content)
        now = read_transcript(answer.content)
        assert list(differences(transcript, now)) == []
        first, then = ([each.record.task for each in app.gateway.engine.generations[i:][:2]] for i in (0, 2))
        assert first == then
        app.gateway.engine.script = play([70, 71, 73])
        [*found] = differences(transcript, read_transcript((await again(yours, transcript)).content))
        assert [difference[:3] for difference in found] == [(p, c, 2) for p in (0, 1) for c in (0, 1)]


async def test_a_stream_and_one_with_a_ticket_are_kept_too(tmp_path: Path) -> None:
    async with running_app(tmp_path, play(TOKENS), keep_transcripts=10) as app:
        mine, _ = await with_keys(app)
        for headers in ({}, {"idempotency-key": "k"}):
            answer = await mine.post("/v1/completions", json=ASK | {"stream": True}, headers=headers)
            name = msgspec.json.decode(answer.text.split("\n")[1 if headers else 0].removeprefix("data: "))["id"]
            assert (await mine.get(f"/v1/requests/{name}/transcript")).status_code == 200


async def test_nothing_is_kept_unless_it_is_asked_for(tmp_path: Path) -> None:
    async with running_app(tmp_path, play(TOKENS)) as app:
        answer = await app.admin.post("/v1/completions", json=ASK)
        missing = await app.admin.get(f"/v1/requests/{answer.json()['id']}/transcript")
        assert missing.status_code == 404
        assert "--keep-transcripts" in missing.json()["error"]["message"]
        assert (await app.gateway.context.store.page("transcripts", "", limit=1)).records == []


@pytest.mark.parametrize(
    ("change", "status", "word"),
    [
        ({"format": 9}, 400, "format"),
        ({"adapter": "0" * 64}, 404, "adapter"),
        ({"parts": []}, 400, "parts"),
        ({"more": 1}, 400, "more"),
        ({"how": {"functions": [{"name": f"f{i}"} for i in range(257)]}}, 400, "at most 256"),
    ],
)
async def test_what_cannot_be_computed_is_refused(
    tmp_path: Path, change: dict[str, Any], status: int, word: str
) -> None:
    async with running_app(tmp_path, play(TOKENS), keep_transcripts=10, max_prompts=3) as app:
        transcript = msgspec.to_builtins(await kept(app.admin)) | change
        answer = await app.admin.post(AGAIN, json=transcript)
        assert answer.status_code == status, answer.text
        assert word in answer.json()["error"]["message"]


async def test_what_it_asks_for_is_checked_as_a_request_is(tmp_path: Path) -> None:
    async with running_app(tmp_path, play(TOKENS), keep_transcripts=10, max_prompts=2) as app:
        transcript = msgspec.to_builtins(await kept(app.admin))
        part = transcript["parts"][0]
        long = {**part, "record": {**part["record"], "prompt_token_ids": [1] * 10_000}}
        other = {**part["record"]["task"], "params": {**part["record"]["task"]["params"], "temperature": 0.5}}
        unlike = {**part, "record": {**part["record"], "task": other}}
        for parts, word in (([long], "10000"), ([part] * 3, "at most 2"), ([part, unlike], "same parameters")):
            answer = await app.admin.post(AGAIN, json=transcript | {"parts": parts})
            assert answer.status_code == 400, answer.text
            assert word in answer.json()["error"]["message"]
        headers = {"content-type": "application/json"}
        much = await app.admin.post(AGAIN, content=b" " * (MAX_TRANSCRIPT_BYTES + 1), headers=headers)
        assert much.status_code == 413
        assert (await app.admin.post(AGAIN, content=b"{}")).status_code == 415


async def test_a_grammar_that_is_refused_is_named(tmp_path: Path) -> None:
    def refuse(record: RequestRecord) -> list[Batch]:
        raise PagodaError(ErrorCode.INVALID_ARGUMENT, "this cannot be used", "grammar")

    async with running_app(tmp_path, play(TOKENS), keep_transcripts=10) as app:
        transcript = await kept(app.admin)
        app.gateway.engine.script = refuse
        answer = await again(app.admin, transcript)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "grammar")


async def test_it_takes_no_longer_than_its_client_said(tmp_path: Path) -> None:
    async with running_app(tmp_path, play(TOKENS), keep_transcripts=10) as app:
        transcript = msgspec.to_builtins(await kept(app.admin))
        app.gateway.engine.script = lambda record: [asyncio.Event()]
        for text, status in (("50", 504), ("0", 400)):
            answer = await app.admin.post(AGAIN, json=transcript, headers={"request-timeout-ms": text})
            assert answer.status_code == status, answer.text
        assert app.gateway.engine.generations[-1].closed.is_set()


async def test_what_was_answered_is_not_held_while_it_is_computed(tmp_path: Path) -> None:
    async with running_app(tmp_path, play(TOKENS), keep_transcripts=10) as app:
        transcript = await kept(app.admin, prompt="ab", n=1)
        read = _read(msgspec.json.encode(transcript))
        assert [part.record for part in read.parts] == [part.record for part in transcript.parts]
        assert not any(part.choices or part.prompt_logprobs for part in read.parts)
