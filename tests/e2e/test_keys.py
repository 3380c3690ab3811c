"""Keys as an operator and their holders meet them: `pagoda serve`, `pagoda keys` beside it, and OpenAI's client."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tests.e2e.stack import Stack, running_stack

from pagoda_proto import times

pytestmark = pytest.mark.e2e
ASK: Any = {"model": "pagoda-demo", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8}
PATIENCE_S = 120.0


class Keyed:
    """A stack and the store it shares with `pagoda keys`."""

    def __init__(self, stack: Stack, store: str) -> None:
        self.stack = stack
        self._store = store

    def keys(self, *words: str) -> str:
        command = [sys.executable, "-m", "pagoda.cli", "keys", *words]
        done = subprocess.run(
            command, env=os.environ | {"PAGODA_STORE": self._store}, capture_output=True, text=True, timeout=PATIENCE_S
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def client(self, key: str) -> openai.OpenAI:
        return self.stack.client(api_key=key, timeout=PATIENCE_S)

    def get(self, key: str, path: str) -> httpx.Response:
        return self.stack.get(path, headers={"authorization": f"Bearer {key}"}, timeout=PATIENCE_S)


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    root: Path = tmp_path_factory.mktemp("keyed")
    store = f"sqlite://{root}/store.db"
    with running_stack(root, "--store", store) as stack:
        yield Keyed(stack, store)


def until_refused(ask: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            ask()
        except openai.AuthenticationError:
            return
        time.sleep(times.KEY_FRESH_S / 10)
    pytest.fail("the key was good for ever")


def test_keys_from_the_first_to_the_last(keyed: Keyed) -> None:
    open_to_all = keyed.client("none")
    assert open_to_all.chat.completions.create(**ASK).usage
    admin = keyed.keys("create", "boss", "--role", "admin")
    until_refused(open_to_all.models.list)

    limited = keyed.client(keyed.keys("create", "Ann", "--requests-per-minute", "3", "--model", "pagoda-demo"))
    elsewhere = keyed.client(keyed.keys("create", "Bob", "--model", "another"))
    answers = [limited.chat.completions.with_raw_response.create(**ASK) for _ in range(2)]
    stream = limited.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True})
    usages = [*(answer.parse().usage for answer in answers), [*stream][-1].usage]
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["2", "1"]
    with pytest.raises(openai.RateLimitError) as refused:
        limited.chat.completions.create(**ASK)
    assert 0 < float(refused.value.response.headers["retry-after-ms"]) <= 20_000
    with pytest.raises(openai.NotFoundError) as missing:
        elsewhere.chat.completions.create(**ASK)
    assert missing.value.code == "model_not_found"
    assert elsewhere.models.list().data == []
    with pytest.raises(openai.PermissionDeniedError):
        elsewhere.get("/admin/keys", cast_to=httpx.Response)
    assert keyed.get(admin, "/metrics").status_code == 200

    (row,) = [one for one in keyed.get(admin, "/v1/usage").json()["data"] if one["key_id"] not in (None, "")]
    assert row["requests"] == 3
    assert row["prompt_tokens"] == sum(usage.prompt_tokens for usage in usages if usage)
    assert row["output_tokens"] == sum(usage.completion_tokens for usage in usages if usage)

    known = {key["name"]: key["id"] for key in keyed.get(admin, "/v1/admin/keys").json()["data"]}
    keyed.keys("revoke", known["Bob"])
    until_refused(elsewhere.models.list)
