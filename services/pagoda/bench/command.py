"""`pagoda bench serve | throughput | latency | startup | kernels`: implements `serve`, and dispatches to the others."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from pagoda.bench import kernels, latency, offline, startup
from pagoda.bench.load import LoadClient, LoadResult, Plan, Sent, run_load
from pagoda.bench.processes import ProcessWatch
from pagoda.bench.report import render, summarise
from pagoda.bench.workload import BodyMaker, WorkloadRow, WorkloadShape, arrivals, make_rows, read_rows, write_rows
from pagoda.processes.process import fast_loop
from pagoda.settings.numbers import number, seed, whole, wholes
from pagoda.tools.asking import add_target_arguments, first_model, problem_of
from pagoda.tools.http_stream import HttpError, Target

OTHERS: dict[str, tuple[Any, str]] = {
    "throughput": (offline, "offline throughput of a model"),
    "latency": (latency, "offline latency of a model, one batch at a time: first token and each later one"),
    "startup": (startup, "time from `pagoda serve` to ready and to the first token, with its parts"),
    "kernels": (kernels, "every CPU kernel against the limits of this machine"),
}
LIMIT_NAMES = ("ttft", "tpot", "e2e")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    serve = actions.add_parser("serve", help="load a running OpenAI-compatible server", allow_abbrev=False)
    _add_server_arguments(serve)
    _add_workload_arguments(serve)
    _add_pace_arguments(serve)
    _add_output_arguments(serve)
    for name, (module, text) in OTHERS.items():
        module.add_arguments(actions.add_parser(name, help=text, description=text, allow_abbrev=False))


def main(arguments: argparse.Namespace) -> int:
    if arguments.action in OTHERS:
        code: int = OTHERS[arguments.action][0].main(arguments)
        return code
    try:
        with asyncio.Runner(loop_factory=fast_loop()) as runner:
            report = runner.run(_run(arguments, _rows(arguments)))
    except (HttpError, ValueError, OSError) as error:
        raise problem_of(error) from error
    print(render(report))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report, indent=1), encoding="utf-8")
    return 1 if report["errors"] else 0


def _add_server_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    add_target_arguments(group)
    group.add_argument("--endpoint", choices=("completions", "chat"), default="completions", help="[%(default)s]")
    group.add_argument("--timeout-s", type=number(), default=600.0, help="limit for one request [%(default)s]")
    group.add_argument("--resumable", action="store_true", help="give every request an Idempotency-Key of its own")


def _add_workload_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("workload")
    group.add_argument("--workload", type=Path, help="JSON-lines file of rows, instead of making them up")
    group.add_argument("--write-workload", type=Path, help="write the rows used to this file")
    group.add_argument("--num-requests", type=whole(1), default=100, help="[%(default)s]")
    group.add_argument("--input-len", type=whole(1), default=128, help="prompt tokens [%(default)s]")
    group.add_argument("--output-len", type=whole(1), default=64, help="output tokens [%(default)s]")
    group.add_argument("--input-spread", type=number(), default=0.0, help="standard deviation of the prompt length")
    group.add_argument("--output-spread", type=number(), default=0.0, help="standard deviation of the output length")
    group.add_argument("--prefix-len", type=whole(), default=0, help="shared tokens at the start of prompts")
    group.add_argument("--num-prefixes", type=whole(1), default=1, help="number of shared prefixes [%(default)s]")
    group.add_argument("--token-ids", type=_id_range, default=range(100, 250), help="LOW:HIGH to draw prompts from")
    group.add_argument("--temperature", type=number(), default=0.0, help="[%(default)s]")
    group.add_argument("--honour-eos", action="store_true", help="let the model end an answer early")
    group.add_argument("--extra-body", type=_json_object, default={}, help="JSON object merged into every request")
    group.add_argument("--seed", type=seed(), default=0, help="seed of the workload [%(default)s]")
    group.add_argument("--salt", default="", help="changes all prompts, so that no earlier run has cached them")


def _add_pace_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("pace")
    group.add_argument("--concurrency", type=whole(1), default=8, help="requests in flight (closed loop) [%(default)s]")
    group.add_argument("--rate", type=number(1e-6), help="requests per second (open loop)")
    group.add_argument(
        "--burstiness", type=number(), default=1.0, help="1: Poisson, more: smoother, 0: even [%(default)s]"
    )
    group.add_argument("--replay", action="store_true", help="open loop at the rows' own times")
    group.add_argument("--speed", type=number(1e-6), default=1.0, help="speed of a replay [%(default)s]")
    group.add_argument("--duration-s", type=number(), help="start no new request after this long")
    group.add_argument("--warmup", type=whole(), default=2, help="requests before the measurement [%(default)s]")


def _add_output_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument(
        "--limits", type=_limits, default={}, help="ttft=MS,tpot=MS,e2e=MS: report the share within them"
    )
    group.add_argument("--pids", type=wholes, default=(), help="ids of server processes to watch, N,N,..")
    group.add_argument("--descendants", action="store_true", help="also watch their child processes")
    group.add_argument("--json", help="write the report to this file")
    group.add_argument("--dump", help="write one JSON line per request to this file")


def _rows(arguments: argparse.Namespace) -> list[WorkloadRow]:
    if arguments.workload is not None:
        rows = read_rows(arguments.workload)
    else:
        rows = make_rows(msgspec.convert(vars(arguments), WorkloadShape), arguments.seed)
    if not rows:
        raise ValueError("the workload has no requests")
    if arguments.write_workload is not None:
        write_rows(rows, arguments.write_workload)
    return rows


def _starts(arguments: argparse.Namespace, rows: list[WorkloadRow]) -> list[float] | None:
    if arguments.replay:
        return [row.at / arguments.speed for row in rows]
    if arguments.rate:
        return arrivals(rows, arguments.rate, arguments.burstiness, arguments.seed)
    return None


async def _run(arguments: argparse.Namespace, rows: list[WorkloadRow]) -> dict[str, Any]:
    target = Target(arguments.base_url, arguments.api_key)
    model = arguments.model or await first_model(target, arguments.timeout_s)
    bodies = BodyMaker(
        model=model,
        chat=arguments.endpoint == "chat",
        seed=arguments.seed,
        salt=arguments.salt,
        token_ids=arguments.token_ids,
        temperature=arguments.temperature,
        ignore_eos=not arguments.honour_eos,
        extra=arguments.extra_body,
    )
    client = LoadClient(target, bodies, arguments.timeout_s, arguments.resumable)
    await _warm_up(client, rows, arguments.warmup)
    watch = ProcessWatch(arguments.pids, arguments.descendants)
    watch.start()
    plan = Plan(rows, arguments.concurrency, _starts(arguments, rows), arguments.duration_s)
    result = await run_load(client, plan)
    processes = watch.report()
    client.close()
    report = summarise(result, exact_prompts=not bodies.chat, limits_ms=arguments.limits)
    report |= {"model": model, "processes": processes, "arguments": _plain(arguments)}
    if arguments.dump:
        await asyncio.to_thread(_dump, result, Path(arguments.dump))
    return report


async def _warm_up(client: LoadClient, rows: list[WorkloadRow], count: int) -> None:
    for index in range(count):
        sent = await client.send(-1 - index, rows[index % len(rows)])
        if sent.timing.error is not None:
            print(f"warm-up: {sent.timing.error}", file=sys.stderr)


def _plain(arguments: argparse.Namespace) -> dict[str, Any]:
    hidden = {"api_key", "command", "action"}
    return {name: _text(value) for name, value in vars(arguments).items() if name not in hidden}


def _text(value: Any) -> Any:
    return str(value) if isinstance(value, Path | range) else value


def _dump(result: LoadResult, path: Path) -> None:
    begin = min((one.timing.started for one in result.sent), default=0.0)
    path.write_text("".join(json.dumps(_line(one, begin)) + "\n" for one in result.sent), encoding="utf-8")


def _line(one: Sent, begin: float) -> dict[str, Any]:
    timing = one.timing
    return {
        "index": one.index,
        "start_s": timing.started - begin,
        "ttft_s": None if timing.first is None else timing.first - timing.started,
        "e2e_s": timing.ended - timing.started,
        "prompt_tokens": timing.prompt_tokens,
        "output_tokens": timing.output_tokens,
        "finish_reason": timing.finish_reason,
        "error": timing.error,
    }


def _id_range(text: str) -> range:
    low, _, high = text.partition(":")
    ids = range(whole()(low), whole()(high))
    if not ids:
        raise argparse.ArgumentTypeError(f"must be LOW:HIGH with LOW below HIGH, got {text!r}")
    return ids


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}")
    return value


def _limits(text: str) -> dict[str, float]:
    limits = {name: number()(value) for name, _, value in (part.partition("=") for part in text.split(","))}
    if unknown := set(limits) - set(LIMIT_NAMES):
        raise argparse.ArgumentTypeError(
            f"limits must be of {', '.join(LIMIT_NAMES)}, got {', '.join(sorted(unknown))}"
        )
    return limits
