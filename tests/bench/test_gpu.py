"""bench/gpu.py without a GPU: every section from start to end in its own process, and sections that are slow or
fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from bench.device import correctness
from bench.device.hardware import LAUNCH_GAP_US, Activity, Host, activity_of
from bench.device.job import Job, Steady, prompts, serve
from bench.device.models import SHAPES, load, runner_of, shapes, spec_of, weight_bytes
from bench.device.report import MET, MISSED, Line, attempt, heard, table
from tests.bench.steady import outputs_of
from tests.worker.fakes_accelerator import FakeAccelerator
from tests.worker.fakes_model import BOMB, fake_runner

from bench import gpu

SCRIPT = Path(__file__).parents[2] / "bench/gpu.py"


def run(tmp_path: Path, *words: str) -> tuple[dict[str, Any], str]:
    out = tmp_path / "gpu.json"
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--smoke", "--json", str(out), *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # more threads would only spin beside other processes
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert out.exists(), done.stderr[-3000:]
    return json.loads(out.read_text()), done.stdout


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(2700)
def test_every_section_runs_and_says_what_it_found(tmp_path: Path) -> None:
    found, told = run(tmp_path)
    assert list(found["sections"]) == list(gpu.SECTIONS)
    for name, section in found["sections"].items():
        assert section["lines"], (name, section)
        assert f"-- {name}: {section['state']}" in told
        missing = [line["note"] for line in section["lines"] if line["value"] is None]
        assert all("record no steps" in note for note in missing), (name, missing)
        assert section["state"] == ("failed" if missing else "finished"), (name, section)
    lines = {line["what"]: line for section in found["sections"].values() for line in section["lines"]}
    assert lines["greedy tokens, launched decode steps"]["verdict"] == MET
    assert lines["kernel tests"]["verdict"] == MET
    for what in ("decode attention 8B, 1 x 64", "prefill attention 8B, 1 x 48", "decode step 0.6B, 1 rows, launched"):
        assert lines[what]["share"] > 0  # its size depends on the machine's speed
    assert lines["decode step OLMoE, 1 rows, recorded"]["share"] > 0
    assert lines["decode step OLMoE, 2 rows, without / with adapters"]["value"] > 0
    assert lines["Pagoda / transformers"]["value"] > 0
    assert found["versions"]["torch"] == version("torch")


@pytest.mark.e2e
def test_sections_without_time_are_ended_and_say_so(tmp_path: Path) -> None:
    found, told = run(tmp_path, "--sections", "tokens,served", "--minutes", "0.02")
    assert list(found["sections"]) == ["ceilings", "tokens", "served"]
    for name, section in found["sections"].items():
        assert (section["state"], section["lines"]) in (("failed", []), ("not run", [])), section
        assert section["reason"].startswith(("out of its", "no time was left"))
        assert f"-- {name}: {section['state']}" in told
    assert found["sections"]["ceilings"]["state"] == "failed"


def test_words_that_make_no_sense_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words, told in ((["--sections", "decode,nothing"], "nothing"), (["--device", "cpu"], "--smoke")):
        with pytest.raises(SystemExit):
            gpu.parse(words)
        assert told in capsys.readouterr().err


def line(**changes: Any) -> Line:
    return Line(**({"what": "a", "value": 8.0, "unit": "GB/s"} | changes))


@pytest.mark.parametrize(
    ("one", "share", "verdict"),
    [
        (line(), None, ""),
        (line(ceiling=10.0), 0.8, ""),
        (line(ceiling=10.0, bar=8.0), 0.8, MET),
        (line(ceiling=10.0, bar=8.1), 0.8, MISSED),
        (line(bar=16.0), 0.5, MISSED),
        (line(unit="ms", ceiling=2.0, bar=8.0), 0.25, MET),
        (line(unit="ms", ceiling=2.0, bar=7.9), 0.25, MISSED),
        (line(unit="s", bar=10.0), 0.8, MET),
        (line(unit="mismatches", value=0.0, bar=0.0), None, MET),
        (line(unit="mismatches", value=1.0, bar=0.0), None, MISSED),
        (line(value=None, ceiling=10.0, bar=8.0), None, ""),
    ],
)
def test_a_figure_is_held_against_its_ceiling_and_its_bar(one: Line, share: float | None, verdict: str) -> None:
    assert (one.share, one.verdict) == (share, verdict)


def test_one_that_fails_costs_no_other_its_turn(capsys: pytest.CaptureFixture[str]) -> None:
    def measure(number: int) -> Iterator[Line]:
        yield line(what=f"before {number}")
        raise ValueError("none of that\nand more")

    for number in (1, 2):
        attempt(f"all {number}", measure, number)
    told = capsys.readouterr()
    assert "Traceback" in told.err
    lines = [one for text in told.out.splitlines() if (one := heard(text)) is not None]
    assert [one.what for one in lines] == ["before 1", "all 1", "before 2", "all 2"]
    assert lines[1].value is None
    assert lines[1].note == "ValueError: none of that"
    data = {"state": "failed", "reason": "for a reason", "seconds": 3.4, "lines": [one.as_data() for one in lines]}
    text = table({"decode": data})
    assert "-- decode: failed in 3 s, for a reason" in text
    assert "none of that" in text


def test_a_device_is_busy_but_for_pauses_in_which_it_waits_for_the_host() -> None:
    gap = LAUNCH_GAP_US
    spans = [(0.0, 10.0), (5.0, 20.0), (20 + gap, 30 + gap), (130 + gap, 150 + gap - 10)]
    whole = 140 + gap
    assert activity_of(reversed(spans)) == pytest.approx(Activity(1 - 100 / whole, 1 - (100 + gap) / whole, 4))
    assert activity_of([]) == Activity(0.0, 0.0, 0)


def test_shapes_are_those_they_are_named_after() -> None:
    billions = {name: weight_bytes(spec_of(SHAPES[name])) / 2e9 for name in ("0.6B", "1B", "8B")}
    assert billions == pytest.approx({"0.6B": 0.596, "1B": 1.236, "8B": 7.505}, rel=1e-3)


def test_made_up_weights_are_the_same_for_every_back_end_and_answer_alike_in_any_company() -> None:
    fields, answers = shapes(smoke=True)["small"], []
    for kernels in ("torch", "reference"):
        loaded, config, weights = load(
            Host(), fields, kernels=kernels, dtype="float32", num_blocks=40, block_size=16, max_rows=4
        )
        assert weights.seconds > 0
        runner = runner_of(Host(), loaded, config)
        given = prompts(3, 20, fields["vocab_size"])
        together, _ = serve(runner, given, 5)
        assert together == [serve(runner, [prompt], 5)[0][0] for prompt in given]
        answers.append(together)
    assert answers[0] == answers[1]


def test_one_wrong_token_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Later tokens are checked given the tokens before them, so only one is reported."""
    job = Job(Host(), True, "torch", 16, 0.0, 0.0, time.monotonic() + 100)
    seen: list[list[float]] = []
    for wrong in (False, True):

        def answer(*arguments: Any, wrong: bool = wrong) -> tuple[list[list[int]], float]:
            runner, given, count, steps = arguments
            if not wrong:
                return serve(runner, given, count, steps)
            outputs = [serve(runner, [prompt], 3, steps)[0][0] for prompt in given]
            outputs[1][2] = (outputs[1][2] + 1) % 512
            longer = [prompt + output for prompt, output in zip(given, outputs, strict=True)]
            rest, took = serve(runner, longer, count - 3, steps)
            return [output + more for output, more in zip(outputs, rest, strict=True)], took

        monkeypatch.setattr(correctness, "serve", answer)
        correctness.tokens(job)
        lines = [one for text in capsys.readouterr().out.splitlines() if (one := heard(text)) is not None]
        seen.append([one.value for one in lines if one.value is not None])
    assert seen == [[0.0], [1.0]]


@pytest.mark.parametrize("accelerated", [False, True])
def test_steady_rows_go_on_as_they_would_be_served(accelerated: bool) -> None:
    given = [[5, 6, 7], list(range(30, 50)), [9]]
    expected, _ = serve(fake_runner(), given, 20)
    runner = fake_runner(accelerator=FakeAccelerator() if accelerated else None)
    outputs, steady = outputs_of(runner, given, 20)
    assert outputs == expected
    assert steady.launch_s > 0


def test_a_job_that_goes_wrong_is_no_figure() -> None:
    with pytest.raises(RuntimeError, match="request"):
        serve(fake_runner(), [[5, 6], [7, BOMB]], 4)
    with pytest.raises(RuntimeError, match="step 1 is lost"):
        Steady(fake_runner(), [[5, BOMB]]).run(3)
