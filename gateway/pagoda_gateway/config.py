"""What a gateway can be told. One field is one option: flag, environment variable and YAML key derive from it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields

from pagoda_proto import times
from pagoda_proto.options import option

_POSITIVE = ("max_body_bytes", "max_headers", "max_header_bytes", "max_connections", "max_prompts", "max_messages")

_MAY_BE_ZERO = ("resume_wait_s", "ping_interval_s", "drain_timeout_s", "lame_duck_s")  # of the times: at once, or never


@dataclass(frozen=True, kw_only=True)
class GatewayConfig:
    model: str = option("", "model directory: tokenizer and config files")
    served_model_name: str = option("", "name clients use; the directory's name when empty")
    engine: str = option("", "engine core address: unix:/path or host:port")
    keys_dir: str = option("", "keys for links that leave the host, as `pagoda keygen` writes them")
    host: str = option("127.0.0.1", "HTTP address to listen on")
    port: int = option(8000, "HTTP port; 0 picks a free one")
    max_body_bytes: int = option(10 * 1024 * 1024, "largest request body")
    max_headers: int = option(64, "most request headers")
    max_header_bytes: int = option(16 * 1024, "most bytes of request headers together")
    header_timeout_s: float = option(10.0, "a request's headers must be complete after this long")
    body_timeout_s: float = option(30.0, "a request's body must be complete after this long")
    keep_alive_s: float = option(30.0, "an idle connection is closed after this long")
    max_connections: int = option(2048, "most connections at once")
    max_connections_per_client: int = option(512, "most connections at once from one address")
    max_prompts: int = option(128, "most prompts in one completion request")
    max_messages: int = option(2048, "most messages in one chat request")
    max_tools: int = option(256, "most tools in one chat request")
    slow_client_timeout_s: float = option(60.0, "a stream whose client reads nothing for this long is ended")
    resume_wait_s: float = option(times.RESUME_WAIT_S, "how long open streams wait for a lost engine core to come back")
    ping_interval_s: float = option(10.0, "an SSE comment is sent when a stream was silent for this long; 0: never")
    drain_timeout_s: float = option(30.0, "after SIGTERM, how long open requests may finish")
    lame_duck_s: float = option(0.0, "after SIGTERM, how long to go on accepting while already unready")
    chat_template: str = option("", "file with a chat template to use instead of the model's own")
    log_requests: bool = option(True, "one line of log per ended request: ids and numbers, no text")
    startup_message: bool = option(False, "print the URL and example calls once ready")

    def __post_init__(self) -> None:
        problems = []
        if not 0 <= self.port <= 65535:
            problems.append(f"port must be between 0 and 65535, got {self.port}")
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                problems.append(f"{name} must be at least 1, got {getattr(self, name)}")
        problems += self._time_problems()
        if problems:
            raise ValueError("; ".join(problems))

    def _time_problems(self) -> Iterator[str]:
        """Every field in seconds is one: a number, with an end, not before now."""
        for name in (field.name for field in fields(self) if field.name.endswith("_s")):
            seconds = getattr(self, name)
            if not math.isfinite(seconds) or seconds < 0:
                yield f"{name} must be a finite number of seconds, not negative, got {seconds:g}"
            elif not seconds and name not in _MAY_BE_ZERO:
                yield f"{name} must be more than 0 seconds, got {seconds:g}"
