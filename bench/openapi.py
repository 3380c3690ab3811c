"""Sends cases that our OpenAPI document allows, and cases that it does not, to every operation: none may end in a 5xx.

    pip install schemathesis
    pagoda serve --admin-api-key sk-only-for-this-run &
    python bench/openapi.py http://127.0.0.1:8000 --key sk-only-for-this-run --cases 600

schemathesis makes the cases, about half of them valid; outputs are limited to a few tokens. Prints how many cases had
which status; the exit status is 0 if none was a server error, and every error had its API's shape.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

MAX_TOKENS = 4
LENGTHS = {
    "/v1/chat/completions": "max_tokens",
    "/v1/completions": "max_tokens",
    "/v1/messages": "max_tokens",
    "/v1/responses": "max_output_tokens",
}
MAY_BE_UNREADY = {"/health/ready", "/health/startup", "/health"}


def shortened(path: str, body: Any, model: str) -> Any:
    """The body, asking for few tokens, and mostly for the model that is served."""
    field = LENGTHS.get(path)
    if field is None or not isinstance(body, dict):
        return body
    body = {**body}
    for name in (field, "max_completion_tokens", "min_tokens"):
        value = body.get(name)
        if (name == field and name not in body) or (type(value) is int and value > MAX_TOKENS):
            body[name] = MAX_TOKENS
    if isinstance(body.get("model"), str) and len(body["model"]) % 4:
        body["model"] = model
    return body


def fault_of(path: str, answer: requests.Response) -> str | None:
    """What is wrong with an answer, whatever the request."""
    if answer.status_code >= 500 and path not in MAY_BE_UNREADY:
        return f"{answer.status_code}: {answer.text[:200]}"
    if answer.status_code >= 400:
        try:
            error = answer.json()["error"]
        except (ValueError, KeyError, TypeError):
            return f"{answer.status_code} in no shape of an error: {answer.text[:200]!r}"
        known = {"message", "type"} if path.startswith("/v1/messages") else {"message", "type", "param", "code"}
        if answer.request.method != "HEAD" and set(error) != known:
            return f"an error has the fields {sorted(error)}"
    return None


class Fuzz:
    def __init__(self, url: str, key: str) -> None:
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.session = requests.Session()
        self.model = self.session.get(f"{url}/v1/models", headers=self.headers, timeout=60).json()["data"][0]["id"]
        self.schema = schemathesis.openapi.from_url(f"{url}/openapi.json", headers=self.headers)
        self.faults: list[str] = []

    def ask(self, operation: Any, mode: GenerationMode, cases: int, seed: int) -> Counter[int]:
        """Send `cases` cases of one kind to one operation; returns how many answers had which status."""
        seen: Counter[int] = Counter()

        @seeded(seed)
        @settings(
            max_examples=cases,
            phases=[Phase.generate],
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def each(case: Any) -> None:
            case.body = shortened(operation.path, case.body, self.model)
            answer = case.call(headers=self.headers, session=self.session, timeout=120)
            seen[answer.status_code] += 1
            if fault := fault_of(operation.path, answer):
                self.faults.append(f"{operation.label}: {fault} to {json.dumps(case.body, default=str)[:1000]}")
                print(self.faults[-1], flush=True)

        each()
        return seen

    def run(self, only: list[str], cases: int, seed: int) -> Counter[int]:
        total: Counter[int] = Counter()
        for found in self.schema.get_all_operations():
            operation = found.ok()
            if only and operation.path not in only:
                continue
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                try:
                    seen = self.ask(operation, mode, cases // 2, seed)
                except Unsatisfiable:
                    print(f"{operation.label:44}{mode.value:10}has no such cases", flush=True)
                    continue
                total += seen
                print(f"{operation.label:44}{mode.value:10}{dict(sorted(seen.items()))}", flush=True)
        return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("url")
    parser.add_argument("--key", default="", help="of an admin")
    parser.add_argument("--cases", type=int, default=600, help="of each operation, half of them valid")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=[], help="paths")
    arguments = parser.parse_args()
    fuzz = Fuzz(arguments.url, arguments.key)
    total = fuzz.run(arguments.only, arguments.cases, arguments.seed)
    print(f"{sum(total.values())} cases: {dict(sorted(total.items()))}; {len(fuzz.faults)} faults")
    return 1 if fuzz.faults else 0


if __name__ == "__main__":
    sys.exit(main())
