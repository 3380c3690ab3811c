"""`pagoda bench latency`: what is timed, and the whole command on the demo model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.fakes import make_delta

from pagoda.bench.latency import BatchTimes, Stopwatch, run_batch, summarise, table
from pagoda.cli import main
from pagoda_proto.errors import ErrorCode, PagodaError
from pagoda_proto.params import SamplingParams


def test_the_times_of_a_batch() -> None:
    times = BatchTimes.of(10.0, [[11.0, 11.5, 12.5], [12.0, 12.25, 14.0]])
    assert (times.first, times.total) == (2.0, 4.0)
    assert times.gaps == [0.5, 1.0, 0.25, 1.75]


def test_rates_and_distributions() -> None:
    batches = [BatchTimes(0.5, 1.5, [0.5, 0.5]), BatchTimes(1.0, 2.0, [0.25, 0.75])]
    report = summarise(batches, batch_size=2, input_len=30, output_len=3)
    assert report["prompt_tokens_per_s"] == 2 * 2 * 30 / 1.5
    assert report["output_tokens_per_s"] == 2 * 2 * 2 / 2.0
    assert report["first_token_ms"]["mean"] == 750
    assert (report["per_token_ms"]["max"], report["gap_ms"]["max"], report["gap_ms"]["count"]) == (500, 750, 4)


def test_one_token_has_no_time_after_the_first() -> None:
    report = summarise([BatchTimes(0.5, 0.5, [])], batch_size=1, input_len=8, output_len=1)
    assert report["output_tokens_per_s"] is report["per_token_ms"] is report["gap_ms"] is None
    assert table(report).row_count == 2


@pytest.mark.parametrize(
    ("fail", "message"),
    [
        (lambda sink: sink.deltas([make_delta(error_code=ErrorCode.INTERNAL, error_message="broken")]), "broken"),
        (lambda sink: sink.migrate("r", 0, "gone"), "gone"),
        (lambda sink: sink.rejected("r", 0, PagodaError(ErrorCode.OVERLOADED, "full"), 1.0), "full"),
    ],
)
def test_a_failed_request_ends_the_measurement(fail: Callable[[Stopwatch], None], message: str) -> None:
    """Nothing more comes of it, so there is nothing to wait for."""

    class Engine:
        def submit(self, record: object, sink: Stopwatch) -> None:
            fail(sink)

        def step(self) -> None:
            pytest.fail("it waits for the tokens of a request that has failed")

    opened = SimpleNamespace(record=SimpleNamespace(request_id="r"))
    local: Any = SimpleNamespace(engine=Engine(), open=lambda prompt, params, adapter: opened)
    with pytest.raises(PagodaError, match=message):
        run_batch(local, [[1]], SamplingParams())


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.json"
    words = ["--batch-size", "3", "--input-len", "20", "--output-len", "4", "--iterations", "2", "--warmup", "1"]
    assert main(["bench", "latency", *words, "--num-blocks", "64", "--max-model-len", "64", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert (report["batch_size"], report["iterations"], report["total_ms"]["count"]) == (3, 2, 2)
    assert report["gap_ms"]["count"] == 2 * 3 * 3
    assert 0 < report["first_token_ms"]["max"] < report["total_ms"]["max"]
    printed = capsys.readouterr().out
    assert "2 batches of 3, 20 tokens in and 4 out" in printed
    assert "each token after" in printed


def test_a_request_that_does_not_fit_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--input-len", "60", "--output-len", "30", "--num-blocks", "64", "--max-model-len", "64"]
    assert main(["bench", "latency", *words]) == 2
    assert "64" in capsys.readouterr().err
