"""Sends malformed, odd and hostile bodies to every endpoint that takes one, beside a streaming chat.

    pagoda serve --admin-api-key sk-only-for-this-run > log 2>&1 &
    python bench/malformed.py http://127.0.0.1:8000 --key sk-only-for-this-run --log log

No answer may be a 5xx, every error must have its API's shape, and the log must contain no traceback. Prints the chat's
gaps between tokens without and with this load: at the 99th percentile they may be 50 ms longer. The exit status is 0 if
all of this holds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx

MAX_LATER_MS = 50.0
JSON = "application/json"
FORM = "multipart/form-data; boundary=b"


class Case(NamedTuple):
    name: str
    path: str
    data: bytes
    content_type: str = JSON


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
MESSAGE = CHAT | {"model": "demo"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "hi", "max_tokens": 4},
    "/v1/messages": MESSAGE,
    "/v1/messages/count_tokens": {"model": "demo", "messages": CHAT["messages"]},
    "/v1/responses": {"input": "hi", "max_output_tokens": 16},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1]},
    "/v1/batches": {"input_file_id": "file-x", "endpoint": "/v1/completions", "completion_window": "24h"},
    "/v1/admin/keys": {"name": "n"},
}

# Texts that are not strict JSON, or barely.
TEXTS: dict[str, bytes] = {
    "nothing": b"",
    "half": b'{"prompt": ',
    "a list": b"[]",
    "null": b"null",
    "a text": b'"x"',
    "two objects": b"{}{}",
    "a trailing comma": b'{"prompt": "x",}',
    "comments": b'{/* */"prompt": "x"}',
    "single quotes": b"{'prompt': 'x'}",
    "a byte order mark": b'\xef\xbb\xbf{"prompt": "x"}',
    "UTF-16": '{"prompt": "x"}'.encode("utf-16"),
    "invalid UTF-8": b'{"prompt": "\xff\xc0\x80"}',
    "encoded surrogates": b'{"prompt": "\xed\xa0\x80"}',
    "a lone surrogate": b'{"prompt": "\\ud800", "messages": [{"role": "user", "content": "\\udfff"}], "max_tokens": 1}',
    "surrogates the wrong way": b'{"prompt": "\\udc00\\ud800"}',
    "NUL": b'{"prompt": "a\\u0000b", "max_tokens": 1}',
    "a raw NUL": b'{"prompt": "\x00"}',
    "1e400": b'{"prompt": "x", "temperature": 1e400}',
    "1e-400": b'{"prompt": "x", "temperature": 1e-400, "max_tokens": 1}',
    "-0": b'{"prompt": "x", "max_tokens": -0, "temperature": -0.0}',
    "NaN": b'{"prompt": "x", "temperature": NaN}',
    "-Infinity": b'{"prompt": "x", "temperature": -Infinity}',
    "01": b'{"prompt": "x", "max_tokens": 01}',
    "an integer of 128 digits": b'{"prompt": "x", "max_tokens": ' + b"9" * 128 + b"}",
    "an integer of a million digits": b'{"prompt": "x", "max_tokens": ' + b"9" * 1_000_000 + b"}",
    "a fraction of a million digits": b'{"prompt": "x", "temperature": 0.' + b"1" * 1_000_000 + b"}",
    "a key twice": b'{"prompt": "x", "prompt": "y"}',
    "a key twice, deep": b'{"messages": [{"role": "user", "role": "system", "content": "x"}]}',
    "a key of a megabyte": b'{"' + b"k" * 2**20 + b'": 1}',
    "10,000 keys": json.dumps({str(i): i for i in range(10_000)}).encode(),
    "depth 63": b'{"tools": ' + b"[" * 62 + b"]" * 62 + b"}",
    "depth 10,000": b'{"tools": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    "a million brackets": b"[" * 1_000_000,
    "a million quotes": b'"' * 1_000_000,
    "a million spaces": b" " * 1_000_000 + b"{}",
    "a million values": b'{"stop": [' + b"1," * 1_000_000 + b"1]}",
}

ODD: dict[str, Any] = {
    "null": None, "true": True, "-1": -1, "2**63": 2**63, "10**100": 10**100, "0.1": 0.1, "1e308": 1e308,
    "an empty text": "", "an empty list": [], "an empty object": {}, "NUL": "\0", "a tag": "<|im_start|>system",
    "combining": "a" + "\u0301" * 5000, "right to left": "\u202e" * 500, "noncharacters": "\uffff\U0010ffff",
    "lists in lists": [[[[[[]]]]]], "10,000 texts": ["x"] * 10_000, "10,000 objects": [{}] * 10_000,
    "a text of 300 KB": "x" * 300_000, "words of 300 KB": "the fox " * 37_500,
}  # fmt: skip


def doubling(levels: int, keyword: str = "anyOf") -> dict[str, Any]:
    """Each level refers twice to the next, which makes 2**levels when expanded."""
    defs = {f"d{i}": {keyword: [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(levels)}
    return {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/d0"}},
        "$defs": defs | {f"d{levels}": {"type": "null"}},
    }


def nested(levels: int, make: Any) -> Any:
    found: Any = {"type": "integer"}
    for _ in range(levels):
        found = make(found)
    return {"type": "object", "properties": {"a": found}, "required": ["a"]}


def of(**fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": fields}, "required": ["a"]}


SCHEMAS: dict[str, Any] = {
    "20 levels of anyOf of two": doubling(20),
    "20 levels of allOf of two": doubling(20, "allOf"),
    "20 levels of oneOf of two": doubling(20, "oneOf"),
    "anyOf in anyOf": nested(50, lambda inner: {"anyOf": [inner, {}]}),
    "allOf in allOf": nested(50, lambda inner: {"allOf": [inner, {"type": "integer"}]}),
    "allOf of anyOf": of(allOf=[{"anyOf": [{"required": [f"k{i}{j}"]} for j in range(12)]} for i in range(12)]),
    "10,000 alternatives": of(enum=[f"value {i}" for i in range(10_000)]),
    "a const of 100 KB": of(const="x" * 100_000),
    "a million items": of(type="array", minItems=1_000_000, maxItems=1_000_000),
    "more at least than at most": of(type="array", minItems=10, maxItems=2),
    "items of items": nested(8, lambda inner: {"type": "array", "minItems": 50, "maxItems": 60, "items": inner}),
    "a million characters": of(type="string", minLength=1_000_000, maxLength=2_000_000),
    "negative lengths": of(type="string", minLength=-5, maxLength=-1),
    "lengths that are none": of(type="string", minLength=1.5, maxLength="x"),
    "a range of nothing": of(type="integer", minimum=5, maximum=4),
    "a range of 10**100": of(type="integer", minimum=-(10**100), maximum=10**100),
    "multiples": of(type="integer", multipleOf=1e-300, minimum=0, maximum=1),
    "a reference to itself": {"$ref": "#"},
    "a ring of references": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    "a reference to nowhere": of(**{"$ref": "#/$defs/none"}),
    "a reference elsewhere": of(**{"$ref": "http://127.0.0.1:1/schema.json"}),
    "a file": of(**{"$ref": "file:///etc/passwd"}),
    "a tree": {"type": "object", "properties": {"l": {"$ref": "#"}, "r": {"$ref": "#"}}, "required": ["l", "r"]},
    "property names": {"type": "object", "propertyNames": {"pattern": "^(a+)+$"}},
    "pattern properties": {"type": "object", "patternProperties": {f"^(a{{1,{i}}})+$": {} for i in range(1, 60)}},
    "2000 properties": {"type": "object", "properties": {f"k{i}": {} for i in range(2000)}},
    "2000 required": {"type": "object", "required": [f"k{i}" for i in range(2000)]},
    "not": of(**{"not": {"not": {"not": {}}}}),
    "if then else": of(**{"if": {"type": "string"}, "then": {"minLength": 3}, "else": False}),
    "dependent": {"type": "object", "dependentSchemas": {"a": {"$ref": "#"}}, "dependentRequired": {"a": ["a"]}},
    "false": of(allOf=[False]),
    "types that are none": {"type": ["object", "wizard", 1, None]},
    "properties that are none": {"type": "object", "properties": [1], "required": "a", "$defs": 3},
    "nothing of the kind": {"schema": [1]},
}

REGEXES: dict[str, str] = {
    "stars in stars": "(a*)*" * 200,
    "counts in counts": "((((a{1,100}){1,100}){1,100}){1,100}){1,100}",
    "a count of a billion": "a{1000000000}",
    "a count of 100,000": "(ab|cd){100000}",
    "alternatives": "|".join(f"(x{i}y*)+" for i in range(300)),
    "classes": r"[\p{L}\p{N}]{0,1000}\w{0,1000}",
    "look around": "(?=a)(?!b)(?<=c)x",
    "back references": r"(a)\1{100}",
    "brackets": "(" * 2000,
    "balanced brackets": "(" * 1000 + "a" + ")" * 1000,
    "an end of its own": "a$b^",
    "many dots": ".*" * 1000 + "x",
    "none": "[^\\s\\S]",
    "a bad range": "[z-a]{3,1}",
    "not": "(?i)" + "ß" * 1000,
}

GRAMMARS: dict[str, str] = {
    "left recursion": "start: start start | start | ",
    "a ring": "start: a\na: b\nb: a",
    "doubling": "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(60)) + '\nr60: "x"',
    "doubling terminals": "start: T0\n" + "\n".join(f"T{i}: T{i + 1} T{i + 1}" for i in range(30)) + '\nT30: "x"',
    "undefined": "start: nothing",
    "no start": 'a: "x"',
    "twice": 'start: "a"\nstart: "b"',
    "a billion": 'start: "a"{1000000000}',
    "a billion of terminals": 'start: T\nT: "a"{1000000000}',
    "brackets": "start: " + "(" * 5000,
    "intersections": "start: T\nT: " + " & ".join(f"/(.|\\n)*{i}(.|\\n)*/" for i in range(60)),
    "complements": "start: T\nT: ~(~(~(/(a|b)*a(a|b){40}/)))",
    "imports": "%import common.WORD\nstart: WORD",
    "a JSON schema that is none": "start: %json { ",
    "a JSON schema that doubles": "start: %json " + json.dumps(doubling(20)),
    "special tokens": "start: <|im_end|> <|nothing|>",
    "100 KB of rules": "start: r0\n" + "\n".join(f'r{i}: "{i}" | r{i + 1}' for i in range(4000)) + '\nr4000: "x"',
    "NUL": 'start: "\\u0000\0"',
}


def function(schema: Any, strict: bool) -> dict[str, Any]:
    return {"name": "f", "parameters": schema, "strict": strict}


def texts() -> Iterator[Case]:
    for path in BODIES:
        for name, data in TEXTS.items():
            yield Case(name, path, data)
        for kind in ("", "text/plain", "application/json; charset=utf-16", "application/json; charset"):
            yield Case(f"content type {kind!r}", path, b"{}", kind)


def odd_fields() -> Iterator[Case]:
    """Every field of a plain body, and some others, with every odd value."""
    for path, body in BODIES.items():
        for field in [*body, "model", "stop", "logit_bias", "metadata", "no_such_field"]:
            for name, value in ODD.items():
                if not (field in ("prompt", "input") and isinstance(value, str)):
                    yield Case(f"{field}: {name}", path, json.dumps(body | {field: value}).encode())
        for name in ("a text of 300 KB", "words of 300 KB", "combining", "noncharacters", "NUL"):
            turns = {"messages": [{"role": "user", "content": ODD[name]}]}
            for other in (turns, {"prompt": ODD[name]}, {"input": ODD[name]}):
                if next(iter(other)) in body:
                    yield Case(f"content: {name}", path, json.dumps(body | other).encode())


def schemas() -> Iterator[Case]:
    for name, schema in SCHEMAS.items():
        form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
        flat = {"format": {"type": "json_schema", "name": "s", "schema": schema}}
        for path in ("/v1/chat/completions", "/v1/completions"):
            yield Case(f"schema: {name}", path, json.dumps(BODIES[path] | {"response_format": form}).encode())
        yield Case(f"schema: {name}", "/v1/responses", json.dumps(BODIES["/v1/responses"] | {"text": flat}).encode())
        for strict in (False, True):
            made, what = function(schema, strict), f"tool, strict {strict}: {name}"
            chat = {"tools": [{"type": "function", "function": made}]}
            yield Case(what, "/v1/chat/completions", json.dumps(CHAT | chat).encode())
            response = {"tools": [{"type": "function", **made}]}
            yield Case(what, "/v1/responses", json.dumps(BODIES["/v1/responses"] | response).encode())
            tools = {"tools": [{"name": "f", "input_schema": {"type": "object"} | schema}]}
            for path in ("/v1/messages", "/v1/messages/count_tokens"):
                yield Case(what, path, json.dumps(BODIES[path] | tools).encode())


def grammars() -> Iterator[Case]:
    for field, found in (("regex", REGEXES), ("grammar", GRAMMARS)):
        for name, text in found.items():
            for path in ("/v1/chat/completions", "/v1/completions"):
                asked = BODIES[path] | {"structured_outputs": {field: text}}
                yield Case(f"{field}: {name}", path, json.dumps(asked).encode())
            made = function(of(type="string", pattern=text), True)
            chat = CHAT | {"tools": [{"type": "function", "function": made}]}
            yield Case(f"pattern: {name}", "/v1/chat/completions", json.dumps(chat).encode())


def part(name: str, data: bytes, head: str = "") -> bytes:
    return f'--b\r\nContent-Disposition: form-data; name="{name}"{head}\r\n\r\n'.encode() + data + b"\r\n"


def uploads() -> Iterator[Case]:
    purpose, file = part("purpose", b"batch"), part("file", b"{}\n", '; filename="a.jsonl"')
    forms = {
        "nothing": b"", "no end": purpose + file, "no file": purpose + b"--b--\r\n", "no purpose": file + b"--b--\r\n",
        "an empty file": purpose + part("file", b"", '; filename="a"') + b"--b--\r\n",
        "two files": purpose + file + file + b"--b--\r\n", "a purpose twice": purpose + purpose + file + b"--b--\r\n",
        "a field of a megabyte": part("purpose", b"x" * 2**20) + file + b"--b--\r\n",
        "10,000 fields": b"".join(part(f"f{i}", b"") for i in range(10_000)) + b"--b--\r\n",
        "a name of 100 KB": part("n" * 100_000, b"") + b"--b--\r\n",
        "a name with a path": purpose + part("file", b"{}", '; filename="../../etc/passwd\\0"') + b"--b--\r\n",
        "odd bytes": b"--b\r\n\xff\x00: \x01\r\n\r\n\r\n--b--", "no head": b"--b\r\n\r\nx\r\n--b--\r\n",
        "invalid UTF-8": part("purpose", b"\xff\xfe") + file + b"--b--\r\n",
    }  # fmt: skip
    for name, data in forms.items():
        yield Case(f"form: {name}", "/v1/files", data, FORM)
    for kind in (
        JSON,
        "multipart/form-data",
        "multipart/form-data; boundary=",
        "multipart/form-data; boundary=" + "x" * 999,
    ):
        yield Case(f"form as {kind[:60]!r}", "/v1/files", purpose + file + b"--b--\r\n", kind)


KINDS = {"texts": texts, "fields": odd_fields, "schemas": schemas, "grammars": grammars, "uploads": uploads}


def fault_of(case: Case, status: int, content: bytes) -> str | None:
    """What is wrong with an answer, whatever the request."""
    if status < 400:
        return None
    if status >= 500:
        return f"{status} {content[:200]!r}"
    try:
        answer = json.loads(content)
        fields = set(answer["error"])
    except (ValueError, KeyError, TypeError):
        return f"{status} in no shape of an error: {content[:200]!r}"
    anthropic = case.path.startswith("/v1/messages")
    right = {"type", "message"} if anthropic else {"message", "type", "param", "code"}
    outer = {"type", "error", "request_id"} if anthropic else {"error"}
    return None if fields == right and set(answer) == outer else f"an error in another API's shape: {answer}"


class Bystander:
    """Runs one chat after the other, and measures the gaps between tokens."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self.gaps_ms: list[float] = []

    async def run(self) -> None:
        body = CHAT | {"max_tokens": 200, "stream": True, "ignore_eos": True}
        while True:
            last = None
            async with self._client.stream("POST", "/v1/chat/completions", json=body) as answer:
                answer.raise_for_status()
                async for line in answer.aiter_lines():
                    now = time.perf_counter()
                    if last is not None and line.startswith("data: "):
                        self.gaps_ms.append(1e3 * (now - last))
                    last = now if line.startswith("data: ") else last

    def taken(self) -> list[float]:
        found, self.gaps_ms = sorted(self.gaps_ms), []
        return found or [0.0]


async def ask(client: httpx.AsyncClient, case: Case, headers: dict[str, str]) -> tuple[int, str | None]:
    """The status, and what is wrong with the answer. Retries while the server says that it has no room."""
    while True:
        head = headers | {"content-type": case.content_type, "x-forwarded-for": "10.66.66.66"}
        answer = await client.post(case.path, content=case.data, headers=head)
        if not (answer.headers.get("x-should-retry") == "true" and answer.status_code in (429, 503, 529)):
            return answer.status_code, fault_of(case, answer.status_code, answer.content)
        await asyncio.sleep(0.2)


async def measure(
    url: str, key: str, seconds: float, cases: list[Case], at_once: int
) -> tuple[list[float], list[float], Counter[int], list[str]]:
    """Gaps without and with the load, statuses, faults."""
    seen: Counter[int] = Counter()
    faults: list[str] = []
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=120) as client:
        bystander = Bystander(client)
        streaming = asyncio.create_task(bystander.run())
        await asyncio.sleep(seconds)
        without = bystander.taken()
        waiting = iter(cases)

        async def work() -> None:
            for case in waiting:
                status, fault = await ask(client, case, headers)
                seen[status] += 1
                if fault:
                    faults.append(f"{case.path}, {case.name}: {fault}")
                    print(faults[-1], flush=True)

        await asyncio.gather(*(work() for _ in range(at_once)))
        if streaming.done():
            streaming.result()
        streaming.cancel()
        await asyncio.gather(streaming, return_exceptions=True)
        return without, bystander.taken(), seen, faults


def p99(values: list[float]) -> float:
    return values[min(len(values) - 1, int(0.99 * len(values)))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("url")
    parser.add_argument("--key", default="", help="of an admin")
    parser.add_argument("--log", type=Path, help="what the server says")
    parser.add_argument("--seconds", type=float, default=10.0, help="of the chat alone")
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--only", nargs="*", choices=list(KINDS), default=list(KINDS))
    arguments = parser.parse_args()
    cases = [case for kind in arguments.only for case in KINDS[kind]()]
    without, beside, seen, faults = asyncio.run(
        measure(arguments.url, arguments.key, arguments.seconds, cases, arguments.at_once)
    )
    traces = arguments.log.read_text().count("Traceback") if arguments.log else 0
    print(
        f"{sum(seen.values())} bodies: {dict(sorted(seen.items()))}; {len(faults)} faults, {traces} traces in the log"
    )
    for name, gaps in (("without", without), ("beside", beside)):
        said = [f"p50 {gaps[len(gaps) // 2]:.0f} ms", f"p99 {p99(gaps):.0f} ms", f"worst {gaps[-1]:.0f} ms"]
        print(f"gaps {name:8}{len(gaps):7}  {'  '.join(said)}")
    later = p99(beside) - p99(without)
    print(f"at p99 a token came {later:.0f} ms later than without; at most {MAX_LATER_MS:.0f} ms are allowed")
    return 0 if not faults and not traces and later <= MAX_LATER_MS else 1


if __name__ == "__main__":
    sys.exit(main())
