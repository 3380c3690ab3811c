"""The workload of a load test: rows of (prompt length, output length, shared prefix, start time), generated or from a
file."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec

WORDS = (
    "time", "river", "house", "light", "paper", "stone", "music", "garden",
    "window", "letter", "mountain", "bread", "silver", "winter", "answer", "road",
)  # fmt: skip


class WorkloadRow(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One request to send. `at` is its start in seconds for a replay; `prompt` replaces the generated prompt."""

    prompt_tokens: int
    output_tokens: int
    prefix_tokens: int = 0
    prefix_id: int = 0
    at: float = 0.0
    temperature: float | None = None
    seed: int | None = None
    prompt: str | list[int] | None = None


class WorkloadShape(msgspec.Struct, frozen=True, kw_only=True):
    """How to generate rows. The spreads are standard deviations of normal distributions."""

    num_requests: int
    input_len: int
    output_len: int
    input_spread: float = 0.0
    output_spread: float = 0.0
    prefix_len: int = 0
    num_prefixes: int = 1


def make_rows(shape: WorkloadShape, seed: int) -> list[WorkloadRow]:
    """Generate rows of this shape; the same for the same seed."""
    rng = random.Random(seed)

    def length(mean: int, spread: float, least: int) -> int:
        return max(least, round(rng.gauss(mean, spread)) if spread else mean)

    return [
        WorkloadRow(
            prompt_tokens=length(shape.input_len, shape.input_spread, shape.prefix_len + 1),
            output_tokens=length(shape.output_len, shape.output_spread, 1),
            prefix_tokens=shape.prefix_len,
            prefix_id=rng.randrange(shape.num_prefixes),
        )
        for _ in range(shape.num_requests)
    ]


def read_rows(path: Path) -> list[WorkloadRow]:
    """Read rows from a JSON-lines file. Raises ValueError, naming the invalid line."""
    decoder = msgspec.json.Decoder(WorkloadRow)
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if line.strip():
            try:
                rows.append(decoder.decode(line))
            except msgspec.DecodeError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
    return rows


def write_rows(rows: list[WorkloadRow], path: Path) -> None:
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))


def arrivals(rows: list[WorkloadRow], rate: float, burstiness: float, seed: int) -> list[float]:
    """Start times in seconds, `rate` a second on average, with gamma-distributed gaps: 1 is Poisson, 0 even spacing."""
    rng = random.Random(seed)
    times = [0.0]
    for _ in rows[1:]:
        gap = rng.gammavariate(burstiness, 1 / (rate * burstiness)) if burstiness else 1 / rate
        times.append(times[-1] + gap)
    return times[: len(rows)]


def plain_ids(vocab_size: int) -> range:
    """Token ids to draw prompts from, without the first ones, which are special in most vocabularies."""
    return range(min(100, vocab_size // 2), vocab_size)


class BodyMaker(msgspec.Struct, kw_only=True):
    """Turns rows into request bodies. Prompts are token ids on /v1/completions, so their lengths are exact."""

    token_ids: range
    model: str = ""
    chat: bool = False
    seed: int = 0
    salt: str = ""
    temperature: float = 0.0
    ignore_eos: bool = True
    extra: dict[str, Any] = {}

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, index: int, row: WorkloadRow) -> bytes:
        """The JSON body of the row at `index`."""
        fields: dict[str, Any] = {
            "model": self.model,
            "max_tokens": row.output_tokens,
            "temperature": self.temperature if row.temperature is None else row.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            fields["ignore_eos"] = True
        if row.seed is not None:
            fields["seed"] = row.seed
        prompt = self._prompt(index, row) if row.prompt is None else row.prompt
        fields |= {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        return msgspec.json.encode(fields | self.extra)

    def _prompt(self, index: int, row: WorkloadRow) -> str | list[int]:
        if not self.chat:
            return self.token_ids_of(index, row)
        return " ".join(rng.choice(WORDS) for rng, count in self._parts(index, row) for _ in range(count))

    def token_ids_of(self, index: int, row: WorkloadRow) -> list[int]:
        """The prompt of the row at `index`: its shared prefix, then tokens of its own."""
        return [rng.choice(self.token_ids) for rng, count in self._parts(index, row) for _ in range(count)]

    def _parts(self, index: int, row: WorkloadRow) -> list[tuple[random.Random, int]]:
        shared = min(row.prefix_tokens, row.prompt_tokens - 1)
        prefix_rng = random.Random(f"prefix {self.seed} {self.salt} {row.prefix_id}")
        own_rng = random.Random(f"own {self.seed} {self.salt} {index}")
        return [(prefix_rng, shared), (own_rng, row.prompt_tokens - shared)]
