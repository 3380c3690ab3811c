"""The stack as a user meets it: one command, the official client, real processes."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import openai
import psutil
import pytest
from tests.e2e.stack import Stack, alive, remaining, running_stack
from tests.worker.adapters.files import DEMO, adapter_of

from pagoda.cli import main
from pagoda.processes.exit_codes import EXIT_CONFIG, EXIT_CRASH, EXIT_OK
from pagoda_proto.adapters.files import CONFIG, identify

pytestmark = pytest.mark.e2e
MODEL, ADAPTED = "demo", "adapted"
SAMPLED = {"prompt": "hello", "n": 2, "temperature": 0.9, "logprobs": 2, "max_tokens": 40, "seed": 3}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return adapter_of(DEMO, tmp_path_factory.mktemp("adapters") / ADAPTED, size=0.08)[0]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, adapter: Path) -> Iterator[Stack]:
    options = ("--served-model-name", MODEL, "--keep-transcripts=10", "--lora-modules", f"{ADAPTED}={adapter}")
    with running_stack(tmp_path_factory.mktemp("stack"), *options) as running:
        yield running


def test_chat_answers_a_sum(stack: Stack) -> None:
    answer = stack.client().chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "What is 2 + 3?"}], temperature=0
    )
    assert "5" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_stream_equals_whole(stack: Stack) -> None:
    request = {"model": MODEL, "messages": [{"role": "user", "content": "Hello!"}], "seed": 7, "temperature": 0.8}
    whole = stack.client().chat.completions.create(**request)
    request |= {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(stack.client().chat.completions.create(**request))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )


def test_prefix_cache_is_reported(stack: Stack) -> None:
    prompt = list(range(40, 90)) * 3
    request = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0}
    first = stack.client().completions.create(**request)
    second = stack.client().completions.create(**request)
    assert second.choices[0].text == first.choices[0].text
    assert second.usage.prompt_tokens_details.cached_tokens >= 128


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"n": 0}, "n"),
        ({"suffix": "x"}, "suffix"),
        ({"no_such_field": 1}, "no_such_field"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"max_tokens": 10**9}, "max_tokens"),
    ],
)
def test_a_bad_field_is_a_400_that_names_it(stack: Stack, body: dict, param: str) -> None:
    answer = stack.post("/v1/completions", json={"model": MODEL, "prompt": "hi", **body})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_64_streams_all_complete(stack: Stack) -> None:
    async def one(client: openai.AsyncOpenAI, index: int) -> int:
        stream = await client.completions.create(
            model=MODEL,
            prompt=[(index * 7 + k) % 200 + 30 for k in range(20 + index)],
            max_tokens=40,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        usage, reason = None, None
        async for chunk in stream:
            usage = chunk.usage or usage
            if chunk.choices and chunk.choices[0].finish_reason:
                reason = chunk.choices[0].finish_reason
        assert reason == "length"
        return usage.completion_tokens

    async def all_of_them() -> list[int]:
        async with stack.async_client() as client:
            return await asyncio.gather(*(one(client, index) for index in range(64)))

    assert asyncio.run(all_of_them()) == [40] * 64
    stack.wait_until(lambda: stack.stats().blocks_used == 0)


def test_a_client_that_leaves_frees_its_blocks(stack: Stack) -> None:
    stream = stack.client().completions.create(
        model=MODEL, prompt="hello", max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    assert stack.stats().blocks_used > 0
    stream.close()
    stack.wait_until(lambda: stack.stats().blocks_used == 0)


def test_stop_strings_and_n(stack: Stack) -> None:
    request = {"model": MODEL, "prompt": "abc", "max_tokens": 40, "n": 3, "seed": 3, "temperature": 1.5}
    whole = stack.client().completions.create(**request, extra_body={"ignore_eos": True})
    assert sorted(choice.index for choice in whole.choices) == [0, 1, 2]
    assert len({choice.text for choice in whole.choices}) > 1
    text = whole.choices[1].text
    stop = text[len(text) // 2 :][:2]
    stopped = stack.client().completions.create(**request, stop=[stop], extra_body={"ignore_eos": True})
    assert stopped.choices[1].text == text[: text.index(stop)]
    assert stopped.choices[1].finish_reason == "stop"


class Kept:
    """A finished request's transcript, which a test may change before it is replayed."""

    def __init__(self, stack: Stack, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        request = {"model": model, **SAMPLED, "extra_body": {"ignore_eos": True}}
        self.answer = stack.client().completions.create(**request)
        self.transcript = stack.get(f"/v1/requests/{self.answer.id}/transcript").json()
        self._file = tmp_path / "t.json"
        self._capsys = capsys

    def replayed(self, *options: str) -> tuple[int, str]:
        """The exit code of `pagoda replay`, and what it prints."""
        self._file.write_text(json.dumps(self.transcript))
        code = main(["replay", str(self._file), *options])
        told = self._capsys.readouterr()
        return code, told.out + told.err


def test_a_finished_request_is_computed_again_bit_for_bit(
    stack: Stack, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = Kept(stack, MODEL, tmp_path, capsys)
    assert kept.replayed() == (EXIT_OK, f"bit-equal: {kept.answer.id}, 80 tokens\n")
    assert kept.replayed("--url", stack.url)[0] == EXIT_OK
    [part] = kept.transcript["parts"]
    part["choices"][1]["token_ids"][7] ^= 1
    code, told = kept.replayed()
    assert code == EXIT_CRASH
    assert "choice 1, token 7: it was" in told
    part["model_fingerprint"] = "others"
    code, told = kept.replayed()
    assert code == EXIT_CONFIG
    assert "model_fingerprint: it was made with 'others'" in told
    assert kept.replayed("--url", stack.url)[0] == EXIT_CONFIG
    assert kept.replayed("--url", stack.url, "--force")[0] == EXIT_CRASH


def test_a_request_with_an_adapter_is_computed_again_with_the_adapter_of_the_same_content_or_not_at_all(
    stack: Stack, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its name and its place may be others."""
    kept, moved = Kept(stack, ADAPTED, tmp_path, capsys), tmp_path / "moved"
    plain = stack.client().completions.create(model=MODEL, **SAMPLED, extra_body={"ignore_eos": True})
    assert [choice.text for choice in kept.answer.choices] != [choice.text for choice in plain.choices]
    bit_equal = EXIT_OK, f"bit-equal: {kept.answer.id}, 80 tokens\n"
    shutil.copytree(adapter, moved)
    assert kept.replayed("--lora-modules", f"other={moved}") == bit_equal
    assert kept.replayed("--url", stack.url) == bit_equal
    digest = kept.transcript["adapter"]
    why = f"it was made with an adapter of digest {digest}; lora_modules has"
    code, told = kept.replayed()
    assert code == EXIT_CONFIG
    assert f"{why} none" in told
    (moved / CONFIG).write_text(json.dumps(json.loads((moved / CONFIG).read_text()) | {"lora_alpha": 17}))
    code, told = kept.replayed("--lora-modules", f"{ADAPTED}={moved}", "--force")
    assert code == EXIT_CONFIG
    assert f"{why} {ADAPTED!r} of digest {identify(moved, 2**30).digest}" in told
    kept.transcript["adapter"] = identify(moved, 2**30).digest
    code, told = kept.replayed("--url", stack.url)
    assert code == EXIT_CONFIG
    assert f"an adapter of digest {kept.transcript['adapter'][:16]}.. is not served here" in told


PATHS = ["/health", "/health/live", "/health/ready", "/health/startup", "/version", "/metrics", "/docs"]


@pytest.mark.parametrize("path", PATHS)
def test_operations_endpoints_answer(stack: Stack, path: str) -> None:
    assert stack.get(path).status_code == 200


def test_sec_02_a_tower_listens_on_its_http_port_and_on_nothing_else(stack: Stack) -> None:
    listening = {
        (connection.laddr.ip, connection.laddr.port)
        for process in stack.family()
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening == {("127.0.0.1", stack.port)}
    [engine] = stack.engine_sockets()
    assert stat.S_IMODE(engine.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL], ids=lambda s: s.name)
def test_nothing_is_left_after_the_supervisor_ends(tmp_path: Path, signum: signal.Signals) -> None:
    """`running_stack` checks the same for SIGTERM with every stack of these tests."""
    with running_stack(tmp_path) as stack:
        family = stack.family()
        assert len(family) == 7  # three tiers, each with its template
        assert [one.num_threads() for one in family if "template" in one.cmdline()[0]] == [1, 1, 1]  # so they can fork
        stack.process.send_signal(signum)
        stack.process.wait(120)
        assert alive(remaining(family, 60)) == []
        if signum is not signal.SIGKILL:
            assert stack.process.returncode == 0, stack.tail()


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM], ids=lambda s: s.name)
def test_a_gateway_comes_back_on_its_port(stack: Stack, signum: signal.Signals) -> None:
    """After a kill, new clients wait; a gateway that drains refuses new clients until the next one listens."""
    [gateway] = stack.children("gateway")
    gateway.send_signal(signum)
    gateway.wait(120)
    if signum is signal.SIGKILL:
        assert stack.get("/v1/models").status_code == 200
    stack.wait_until(stack.ready)
    assert stack.client().models.list().data
    assert stack.children("gateway") != [gateway]


def test_a_gateway_that_leaves_refuses_who_comes_and_ends_what_runs(stack: Stack) -> None:
    """The worker is suspended meanwhile, so that the gateway has a request to wait for."""
    [gateway], [worker] = stack.children("gateway"), stack.children("worker")
    request = {"model": MODEL, "prompt": list(range(40, 90)), "max_tokens": 300, "stream": True, "temperature": 0}
    stream = stack.client().completions.create(**request, extra_body={"ignore_eos": True})
    chunks = [next(stream)]
    worker.suspend()
    try:
        gateway.terminate()
        stack.wait_until(lambda: refused(stack.port), 30)
        assert gateway.is_running()
    finally:
        worker.resume()
    chunks += stream
    assert chunks[-1].choices[0].finish_reason == "length"
    stack.wait_until(stack.ready)


def refused(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=60).close()
    except ConnectionRefusedError:
        return True
    return False
