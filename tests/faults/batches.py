"""Run a batch on a stack whose processes are all killed, again and again; each time it restarts on the same store."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import openai
from tests.e2e.stack import Stack, running_stack
from tests.faults.stack import NAME, kill
from tests.faults.streams import Report

URL = "/v1/completions"
ASKED = 8  # number of different requests; each line repeats one of them
END_S = 1800.0
LONG = {"ignore_eos": True}
ENDED = ("completed", "failed", "expired", "cancelled")


def request(number: int) -> dict[str, Any]:
    prompt = f"What is {number} + {number}?"
    return {"model": "demo", "prompt": prompt, "max_tokens": 24, "seed": number}


def kill_everything_under_a_batch(directory: Path, *, lines: int = 1000, kills: int = 10) -> Report:
    """Kill every process whenever another share of the lines is answered. Every line must be answered exactly once,
    with the answer that the same request gets outside a batch."""
    report, batch_id, oracle, done = Report(f"{kills} kills of everything, {lines} lines"), "", list[str](), 0
    options = (*NAME, "--store", f"sqlite://{directory}/store.db", "--max-batch-requests", "8")
    for life in range(kills + 1):
        place = directory / str(life)
        place.mkdir()
        with running_stack(place, *options) as stack, stack.client(timeout=240) as client:
            if not batch_id:
                oracle = [_answer(client, i) for i in range(ASKED)]
                batch_id = _submitted(client, lines)
            least = lines if life == kills else done + (lines - done) // (kills + 1 - life) // 2
            done = _until(client, batch_id, least)
            if life < kills:
                _kill_all(stack)
            else:
                _judge(report, client, batch_id, oracle, lines)
    return report


def _answer(client: openai.OpenAI, number: int) -> str:
    return client.completions.create(**{**request(number), "extra_body": LONG}).choices[0].text


def _submitted(client: openai.OpenAI, lines: int) -> str:
    rows = [
        {"custom_id": f"{i}", "method": "POST", "url": URL, "body": request(i % ASKED) | LONG} for i in range(lines)
    ]
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    file = client.files.create(file=("lines.jsonl", content), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=URL, completion_window="24h").id


def _until(client: openai.OpenAI, batch_id: str, least: int) -> int:
    """Wait until `least` lines are answered, or the batch has ended; return the number of answered lines."""
    deadline = time.monotonic() + END_S
    while time.monotonic() < deadline:
        batch = client.batches.retrieve(batch_id)
        counts = batch.request_counts
        done = 0 if counts is None else counts.completed + counts.failed
        if batch.status in ENDED or (counts is not None and least <= done < counts.total):
            return done
        time.sleep(0.05)
    raise TimeoutError(f"{batch_id} has not come to {least} lines")


def _kill_all(stack: Stack) -> None:
    """Kill the supervisor first, so that it restarts nothing."""
    kill(stack.family())


def _judge(report: Report, client: openai.OpenAI, batch_id: str, oracle: list[str], lines: int) -> None:
    batch = client.batches.retrieve(batch_id)
    assert batch.output_file_id is not None, batch
    rows = [json.loads(row) for row in client.files.content(batch.output_file_id).text.splitlines()]
    for row in rows:
        text = row["response"]["body"]["choices"][0]["text"]
        kind = "identical" if text == oracle[int(row["custom_id"]) % ASKED] else "different"
        report.kinds[kind] += 1
        if kind == "different":
            report.problems.append(f"line {row['custom_id']} says {text!r}")
    seen = Counter(row["custom_id"] for row in rows)
    report.problems += [f"line {i} is there {seen[str(i)]} times" for i in range(lines) if seen[str(i)] != 1]
    if batch.status != "completed" or len(rows) != lines:
        report.problems.append(f"the batch is {batch.status} with {len(rows)} lines: {batch.request_counts}")
