"""`pagoda ping TARGET`: the health check of containers and probes; exit status 0 means healthy.

http://HOST:PORT/PATH        answers 200
unix:PATH, grpc://HOST:PORT  gRPC health says SERVING of the service "live": the engine core's loop comes round, with or
                             without workers (readiness is the gateway's); of a server that has none, of the server
grpcs://HOST:PORT            the same under mutual TLS with the keys of --keys-dir
file:PATH                    was touched within --max-age-s
"""

from __future__ import annotations

import argparse
import sys
import time
import urllib.request
from http.client import HTTPException
from pathlib import Path

from pagoda.settings.numbers import number
from pagoda_proto.health.services import LIVE
from pagoda_proto.keys import TLS_SERVER_NAME, KeyFileError, load_tls


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="TARGET", help="http://.., unix:PATH, grpc://.., grpcs://.. or file:PATH")
    parser.add_argument("--keys-dir", default="", help="directory of keys for grpcs://")
    parser.add_argument("--max-age-s", type=number(), default=10.0, help="greatest age of a file [%(default)s]")
    parser.add_argument("--timeout-s", type=number(), default=3.0, help="[%(default)s]")


def main(arguments: argparse.Namespace) -> int:
    given = {name: getattr(arguments, name) for name in ("keys_dir", "max_age_s", "timeout_s")}
    problem = ping(arguments.target, **given)
    if problem is not None:
        print(problem, file=sys.stderr)
    return 0 if problem is None else 1


def ping(target: str, *, keys_dir: str = "", max_age_s: float = 10.0, timeout_s: float = 3.0) -> str | None:
    """Return None when the target is healthy, otherwise why not."""
    scheme, _, rest = target.partition(":")
    if scheme in ("http", "https"):
        return _ping_http(target, timeout_s)
    if scheme == "file":
        return _ping_file(Path(rest), max_age_s)
    if scheme in ("unix", "grpc", "grpcs"):
        return _ping_grpc(target, keys_dir, timeout_s)
    return f"cannot ping {target!r}: use http://, unix:, grpc://, grpcs:// or file:"


def _ping_http(url: str, timeout_s: float) -> str | None:
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as response:
            return None if response.status == 200 else f"{url} answers {response.status}"
    except (OSError, HTTPException) as error:
        return f"{url}: {error}"


def _ping_file(path: Path, max_age_s: float) -> str | None:
    try:
        age_s = time.time() - path.stat().st_mtime
    except OSError as error:
        return f"{path}: {error.strerror}"
    return None if age_s <= max_age_s else f"{path} was touched {age_s:.0f} s ago"


def _ping_grpc(target: str, keys_dir: str, timeout_s: float) -> str | None:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    if target.startswith("grpcs://"):
        try:
            keys = load_tls(keys_dir)
        except KeyFileError as error:
            return f"keys_dir: {error}"
        credentials = grpc.ssl_channel_credentials(keys.ca, keys.private_key, keys.certificate)
        options = [("grpc.ssl_target_name_override", TLS_SERVER_NAME)]
        channel = grpc.secure_channel(target.removeprefix("grpcs://"), credentials, options)
    else:
        channel = grpc.insecure_channel(target.removeprefix("grpc://"))
    with channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        for service in (LIVE, ""):
            try:
                answer = check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
            except grpc.RpcError as error:
                if service and error.code() is grpc.StatusCode.NOT_FOUND:
                    continue
                return f"{target}: {error.code().name}"
            state = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
            return None if state == "SERVING" else f"{target}: {service or 'the server'} is {state}"
    return f"{target}: has no health service"
