"""What a gateway can be told. One field is one option: flag, environment variable and YAML key derive from it."""

from __future__ import annotations

from dataclasses import dataclass

from pagoda_gateway.clients import TrustedProxies
from pagoda_proto.options import option

_POSITIVE = (
    "max_body_bytes", "max_headers", "max_header_bytes", "max_connections", "max_connections_per_client", "max_prompts",
    "max_messages", "max_tools", "text_threads", "max_waiting_texts", "max_waiting_texts_per_client", "max_held_bytes",
    "max_tokenize_chars", "max_prompt_logprob_values", "max_logprob_values",
)  # fmt: skip


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
    forwarded_allow_ips: str = option(
        "127.0.0.1,::1", "proxies whose X-Forwarded-For names the client: addresses and CIDR blocks, comma-separated"
    )
    text_threads: int = option(2, "threads that parse, render and tokenise what is not short")
    max_waiting_texts: int = option(256, "most texts waiting for a thread")
    max_waiting_texts_per_client: int = option(64, "most of them from one address")
    max_held_bytes: int = option(128 * 1024 * 1024, "most bytes of large bodies and prompt log-probabilities at once")
    max_tokenize_chars: int = option(1024 * 1024, "longest text that /tokenize takes")
    max_prompt_logprob_values: int = option(
        262_144, "most prompt log-probabilities of one request: prompts x tokens x (1 + prompt_logprobs)"
    )
    max_logprob_values: int = option(
        1_048_576, "most log-probabilities of one answer that is no stream: prompts x n x max_tokens x (1 + logprobs)"
    )
    min_priority: int = option(0, "lowest `priority` a request may ask for; lower runs earlier")
    max_prompts: int = option(128, "most prompts in one completion request")
    max_messages: int = option(2048, "most messages in one chat request")
    max_tools: int = option(256, "most tools in one chat request")
    slow_client_timeout_s: float = option(60.0, "a stream whose client reads nothing for this long is ended")
    resume_wait_s: float = option(10.0, "how long open streams wait for a lost engine core to come back")
    ping_interval_s: float = option(10.0, "an SSE comment is sent when a stream was silent for this long")
    drain_timeout_s: float = option(30.0, "after SIGTERM, how long open requests may finish")
    lame_duck_s: float = option(0.0, "after SIGTERM, how long to go on accepting while already unready")
    chat_template: str = option("", "file with a chat template to use instead of the model's own")
    startup_message: bool = option(False, "print the URL and example calls once ready")

    def __post_init__(self) -> None:
        problems = []
        if not 0 <= self.port <= 65535:
            problems.append(f"port must be between 0 and 65535, got {self.port}")
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                problems.append(f"{name} must be at least 1, got {getattr(self, name)}")
        try:
            TrustedProxies(self.forwarded_allow_ips)
        except ValueError as error:
            problems.append(f"forwarded_allow_ips: {error}")
        if problems:
            raise ValueError("; ".join(problems))
