"""The load generator against a small server: what it sends, what it counts, what it reports."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
from tests.services.sse_server import SseServer, serving

from pagoda.bench.load import LoadClient, LoadResult, Plan, Sent, run_load
from pagoda.bench.processes import ProcessWatch, family, usage
from pagoda.bench.report import distribution_ms, percentile, render, summarise
from pagoda.bench.workload import BodyMaker, WorkloadRow, WorkloadShape, arrivals, make_rows, read_rows, write_rows
from pagoda.cli import main
from pagoda.tools.http_stream import HttpAnswer, Target
from pagoda.tools.timing import Timing

SHAPE = WorkloadShape(num_requests=6, input_len=10, output_len=4, prefix_len=6, num_prefixes=2)


def body_maker(**changes: Any) -> BodyMaker:
    fields: dict[str, Any] = {
        "model": "m", "chat": False, "seed": 0, "salt": "", "token_ids": range(100, 250),
        "temperature": 0.0, "ignore_eos": True, "extra": {},
    }  # fmt: skip
    return BodyMaker(**fields | changes)


async def load(server: SseServer, plan: Plan, **changes: Any) -> LoadResult:
    client = LoadClient(Target(server.url), body_maker(**changes), timeout_s=120.0)
    result = await run_load(client, plan)
    client.close()
    return result


def closed(rows: list[WorkloadRow], concurrency: int = 2) -> Plan:
    return Plan(rows, concurrency, None, None)


async def test_a_closed_loop_sends_every_row_once_and_keeps_its_connections() -> None:
    rows = make_rows(SHAPE, seed=1)
    async with serving(SseServer()) as server:
        result = await load(server, closed(rows))
    report = summarise(result, exact_prompts=True, limits_ms={})
    assert [one.index for one in result.sent] == list(range(6))
    assert report["completed"] == 6
    assert report["errors"] == {}
    assert (report["prompt_tokens"], report["output_tokens"]) == (60, 24)
    assert report["wrong_output_length"] == report["wrong_prompt_length"] == 0
    assert report["itl_ms"]["count"] == 6 * 3
    assert server.connections == report["peak_in_flight"] == 2


async def test_resumable_requests_have_keys_of_their_own_and_others_none() -> None:
    rows = make_rows(SHAPE, seed=1)
    for resumable in (True, False):
        async with serving(SseServer()) as server:
            client = LoadClient(Target(server.url), body_maker(), timeout_s=120.0, resumable=resumable)
            await run_load(client, closed(rows))
            client.close()
        keys = {
            line for head in server.headers for line in head.split(b"\r\n") if line.startswith(b"Idempotency-Key: ")
        }
        assert len(keys) == (6 if resumable else 0)


async def test_prompts_are_token_ids_of_the_length_asked_for_with_shared_prefixes() -> None:
    rows = make_rows(SHAPE, seed=1)
    async with serving(SseServer()) as server:
        await load(server, closed(rows, concurrency=1))
    prompts = [body["prompt"] for body in server.bodies]
    assert all(len(prompt) == 10 and all(100 <= token < 250 for token in prompt) for prompt in prompts)
    by_prefix = {row.prefix_id: {tuple(p[:6]) for r, p in zip(rows, prompts, strict=True) if r == row} for row in rows}
    assert all(len(prefixes) == 1 for prefixes in by_prefix.values())
    assert len({tuple(prompt[6:]) for prompt in prompts}) == 6
    assert server.bodies[0]["ignore_eos"] is True


async def test_chat_sends_words_and_understands_deltas() -> None:
    async with serving(SseServer()) as server:
        result = await load(
            server, closed([WorkloadRow(prompt_tokens=3, output_tokens=5)]), chat=True, ignore_eos=False
        )
    (body,) = server.bodies
    assert len(body["messages"][0]["content"].split()) == 3
    assert "ignore_eos" not in body
    assert result.sent[0].timing.output_tokens == 5
    assert len(result.sent[0].timing.gaps) == 4


async def test_extra_fields_reach_the_server() -> None:
    async with serving(SseServer()) as server:
        await load(server, closed([WorkloadRow(1, 1, seed=7, temperature=0.5)]), extra={"top_k": 3})
    (body,) = server.bodies
    assert (body["top_k"], body["seed"], body["temperature"]) == (3, 7, 0.5)


async def test_a_failed_request_is_counted_and_the_others_go_on() -> None:
    async with serving(SseServer(failures=[503])) as server:
        result = await load(server, closed([WorkloadRow(1, 1), WorkloadRow(1, 1), WorkloadRow(1, 1)], concurrency=1))
    report = summarise(result, exact_prompts=False, limits_ms={})
    assert report["completed"] == 2
    assert report["errors"] == {'http 503: {"error": "no"}': 1}


async def test_a_stream_without_its_end_mark_is_an_error() -> None:
    async with serving(SseServer(omit_done=True)) as server:
        result = await load(server, closed([WorkloadRow(1, 1)]))
    assert result.sent[0].timing.error == "the stream ended without [DONE]"


async def test_a_server_that_closes_after_each_answer_is_connected_to_anew() -> None:
    async with serving(SseServer(close_after_answer=True)) as server:
        result = await load(server, closed([WorkloadRow(1, 1)] * 4, concurrency=1))
    assert [one.timing.error for one in result.sent] == [None] * 4
    assert server.connections == 4


async def test_an_open_loop_starts_requests_at_their_times() -> None:
    rows = [WorkloadRow(1, 1)] * 3
    async with serving(SseServer()) as server:
        result = await load(server, Plan(rows, 1, [0.0, 0.02, 0.04], None))
    starts = [one.timing.started for one in result.sent]
    assert starts[1] - starts[0] >= 0.015
    assert len(result.late_starts_s) == 3


async def test_nothing_is_started_after_the_duration() -> None:
    async with serving(SseServer()) as server:
        result = await load(server, Plan([WorkloadRow(1, 1)] * 3, 1, [0.0, 0.01, 99.0], 1.0))
    assert len(result.sent) == 2


def test_arrivals_have_the_rate_asked_for() -> None:
    rows = [WorkloadRow(1, 1)] * 2001
    poisson, even = arrivals(rows, 10.0, 1.0, seed=3), arrivals(rows, 10.0, 0.0, seed=3)
    assert poisson[-1] == pytest.approx(200, rel=0.1)
    assert even[-1] == pytest.approx(200)
    assert poisson == sorted(poisson)
    assert arrivals(rows[:1], 10.0, 1.0, seed=3) == [0.0]


def test_rows_survive_a_file(tmp_path: Path) -> None:
    rows = make_rows(
        WorkloadShape(num_requests=20, input_len=30, output_len=9, input_spread=9.0, output_spread=3.0), seed=5
    )
    write_rows(rows, tmp_path / "w.jsonl")
    assert read_rows(tmp_path / "w.jsonl") == rows
    assert len({row.prompt_tokens for row in rows}) > 3


def test_a_bad_row_is_refused_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text('{"prompt_tokens": 1, "output_tokens": 1}\n\n{"prompt_tokens": 1, "out": 1}\n')
    with pytest.raises(ValueError, match=r"line 3: .*out"):
        read_rows(path)


def test_percentiles_are_interpolated() -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.5
    assert percentile([7.0], 0.99) == 7.0
    assert distribution_ms([]) is None
    values = distribution_ms([0.001 * i for i in range(101)])
    assert values is not None
    assert (values["p50"], values["p90"], values["max"]) == pytest.approx((50, 90, 100))


def timing(first: float, last: float, ended: float, tokens: int) -> Timing:
    return Timing(started=0.0, first=first, last=last, ended=ended, output_tokens=tokens, gaps=[last - first])


def test_limits_count_the_requests_that_keep_all_of_them() -> None:
    quick, slow = timing(0.1, 0.5, 0.5, 5), timing(0.1, 2.1, 2.1, 5)
    sent = [Sent(i, WorkloadRow(1, 5), one) for i, one in enumerate((quick, slow))]
    result = LoadResult(sent, wall_s=2.0, client_cpu_s=0.1, peak_in_flight=1, late_starts_s=[])
    report = summarise(result, exact_prompts=True, limits_ms={"ttft": 150, "tpot": 150})
    assert (report["goodput_requests_per_s"], report["share_within_limits"]) == (0.5, 0.5)
    assert "goodput 0.50 requests/s, 50%" in render(report)


def test_a_stream_whose_events_never_have_text_is_timed_by_them() -> None:
    one = Timing(started=0.0)
    for now in (1.0, 1.5, 2.5):
        one.on_event(now, b'{"choices": [{"text": ""}]}')
    one.on_event(3.0, b"[DONE]")
    one.finish(HttpAnswer(200, b""))
    assert (one.first, one.last, one.gaps, one.output_tokens) == (1.0, 2.5, [0.5, 1.0], 3)


def test_an_error_event_is_an_error() -> None:
    one = Timing()
    one.on_event(1.0, b'{"error": {"message": "lost"}}')
    one.finish(HttpAnswer(200, b""))
    assert one.error is not None
    assert "lost" in one.error


async def test_processes_are_watched_with_their_descendants() -> None:
    process = await asyncio.create_subprocess_exec("sleep", "60")
    try:
        assert {os.getpid(), process.pid} <= set(family([os.getpid()]))
        watch = ProcessWatch([os.getpid()], descendants=True)
        watch.start()
        rows = {row["pid"]: row for row in watch.report()}
    finally:
        process.kill()
        await process.wait()
    assert rows[os.getpid()]["rss_mib"] > 1
    assert rows[process.pid]["name"].startswith("sleep")
    with pytest.raises(OSError):
        usage(process.pid)


async def test_the_command_writes_report_and_dump(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report_file, dump = tmp_path / "report.json", tmp_path / "dump.jsonl"
    words = ["--num-requests", "4", "--input-len", "5", "--output-len", "3", "--json", str(report_file)]
    async with serving(SseServer()) as server:
        more = ["--base-url", server.url, "--dump", str(dump), "--pids", str(os.getpid()), "--api-key", "secret"]
        code = await asyncio.to_thread(main, ["bench", "serve", *words, *more])
    report = json.loads(report_file.read_text())
    assert code == 0
    assert report["model"] == "first-model"
    assert report["output_tokens"] == 12
    assert "secret" not in report_file.read_text()
    assert [json.loads(line)["output_tokens"] for line in dump.read_text().splitlines()] == [3] * 4
    assert "output tokens/s" in capsys.readouterr().out
    assert b"Authorization: Bearer secret" in server.headers[0]


async def test_complete_prints_the_answer_and_its_pace(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(SseServer()) as server:
        code = await asyncio.to_thread(main, ["complete", "hello", "--base-url", server.url, "--max-tokens", "2"])
    printed = capsys.readouterr()
    assert (code, printed.out) == (0, "word word \n")
    assert "first token after" in printed.err
    assert server.bodies[0]["prompt"] == "hello"


async def test_chat_keeps_the_conversation(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["one", "/what", "two", "/clear", "three", "/quit", "never"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    async with serving(SseServer()) as server:
        code = await asyncio.to_thread(main, ["chat", "--base-url", server.url, "--system", "be brief"])
    assert code == 0
    roles = [[message["role"] for message in body["messages"]] for body in server.bodies]
    assert roles == [["system", "user"], ["system", "user", "assistant", "user"], ["user"]]
    assert capsys.readouterr().out == "word word word \n" * 3
