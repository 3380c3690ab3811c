"""The gateway's options. One field is one option: flag, environment variable and YAML key derive from it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pagoda_gateway.clients import KEY_CHARS, TrustedProxies, is_key
from pagoda_gateway.keys.gate import Auth
from pagoda_gateway.store.opening import store_problem
from pagoda_gateway.text.reasoning import REASONING_FORMAT_NAMES
from pagoda_gateway.text.tool_formats.choosing import TOOL_FORMAT_NAMES
from pagoda_proto import times
from pagoda_proto.adapters.identity import read_lora_modules
from pagoda_proto.errors import Problem
from pagoda_proto.options import check, option
from pagoda_proto.params import MAX_PRIORITY, MIN_PRIORITY
from pagoda_proto.pooling.kinds import AUTO, KINDS

LEAST_PING_S = 0.1
ORIGIN = re.compile(r"https?://([a-z0-9.-]+|\[[0-9a-f:]+\])(:[0-9]{1,5})?")


@dataclass(frozen=True, kw_only=True)
class GatewayConfig:
    model: str = option("", "model directory with tokenizer and config files, or GGUF file")
    served_model_name: str = option(
        "",
        "names clients use, several with commas between, or as several values; logs and metrics have the first. When"
        " empty, the directory's name",
        several=True,
    )
    engine: str = option("", "engine core address: unix:/path or host:port; several with commas between", required=True)
    keys_dir: str = option("", "keys for links that leave the host, as `pagoda keygen` writes them")
    host: str = option("127.0.0.1", "HTTP address to listen on")
    port: int = option(8000, "HTTP port; 0 picks a free one", most=65535)
    api_key: str = option(
        "", "keys, comma-separated, of which clients may show one; others are made by `pagoda keys`", secret=True
    )
    admin_api_key: str = option(
        "", "the same, but they may also make and revoke keys, and see /metrics and everybody's usage", secret=True
    )
    auth: str = option(
        Auth.AUTO,
        "who must show an API key: auto, everybody as soon as there is one, here or in the store; keys, everybody"
        " always; none, nobody ever",
        words=Auth.WORDS,
    )
    key_requests_per_minute: int = option(
        0, "most requests a minute, at this gateway, of each API key that has no such limit of its own; 0: any number"
    )
    key_tokens_per_minute: int = option(0, "the same for tokens, of prompts and of output")
    key_concurrent_requests: int = option(0, "the same for requests open at once")
    allowed_origins: str = option(
        "", "web pages that may ask here (CORS): origins such as https://chat.example, comma-separated, or *"
    )
    page: bool = option(True, "a chat and a view of the stack for browsers, at /")
    max_body_bytes: int = option(10 * 1024 * 1024, "largest request body", least=1)
    max_file_bytes: int = option(200 * 1024 * 1024, "largest file that is taken by /v1/files", least=1, most=2**40)
    max_files_bytes: int = option(
        2 * 1024**3,
        "most bytes of all files of an API key together; of everybody where there is none",
        least=1,
        most=2**50,
    )
    max_batch_requests: int = option(32, "most lines of batches that are answered at once", least=1)
    max_upload_bytes_per_second: int = option(
        16 * 1024 * 1024,
        "most bytes of bodies read from one address in a second; the first 64 KiB of each are not counted",
        least=64 * 1024,
    )
    max_headers: int = option(64, "most request headers", least=1)
    max_header_bytes: int = option(16 * 1024, "most bytes of request headers together", least=1)
    header_timeout_s: float = option(10.0, "a request's headers must be complete after this long", least=0.1)
    body_timeout_s: float = option(30.0, "a request's body must be complete after this long", least=0.1)
    keep_alive_s: float = option(30.0, "an idle connection is closed after this long", least=0.1)
    max_connections: int = option(2048, "most connections at once", least=1)
    max_connections_per_client: int = option(512, "most connections at once from one address", least=1)
    forwarded_allow_ips: str = option(
        "127.0.0.1,::1", "proxies whose X-Forwarded-For names the client: addresses and CIDR blocks, comma-separated"
    )
    text_threads: int = option(2, "threads that parse, render and tokenise what is not short", least=1, most=256)
    max_waiting_texts: int = option(256, "most texts waiting for a thread", least=1)
    max_waiting_texts_per_client: int = option(64, "most of them from one address", least=1)
    max_held_bytes: int = option(
        128 * 1024 * 1024, "most bytes of large bodies and prompt log-probabilities at once", least=1, most=2**53
    )
    max_tokenize_chars: int = option(
        512 * 1024,
        "longest text that is only tokenised or counted; reading it takes some 160 bytes a character",
        least=1,
    )
    max_prompt_logprob_values: int = option(
        262_144, "most prompt log-probabilities of one request: prompts x tokens x (1 + prompt_logprobs)", least=1
    )
    max_logprob_values: int = option(
        1_048_576,
        "most log-probabilities of one answer that is no stream: prompts x n x max_tokens x (1 + logprobs)",
        least=1,
    )
    min_priority: int = option(
        0, "lowest `priority` a request may ask for; lower runs earlier", least=MIN_PRIORITY, most=MAX_PRIORITY
    )
    max_prompts: int = option(128, "most prompts in one completion request", least=1)
    max_inputs: int = option(2048, "most texts in one request for embeddings or scores", least=1)
    max_messages: int = option(2048, "most messages in one chat request", least=1)
    max_tools: int = option(256, "most tools in one chat request", least=1)
    keep_responses_s: float = option(
        30 * 86_400.0, "how long responses are kept, as far as the store keeps anything", least=0.1, most=1e9
    )
    max_responses: int = option(
        10_000, "most responses that are kept of an API key; of everybody where there is none. Beyond that the oldest"
        " are forgotten", least=1, most=100_000,
    )  # fmt: skip
    max_responses_bytes: int = option(
        64 * 1024 * 1024, "most bytes of what is kept of them together", least=1, most=2**50
    )
    max_background_responses: int = option(256, "most responses that run in the background at once", least=1)
    keep_tickets_s: float = option(
        times.TICKET_KEPT_S,
        "how long a request with an Idempotency-Key may be asked again: resumed, or its answer repeated",
        least=0.1,
        most=1e9,
    )
    ticket_grace_s: float = option(
        times.TICKET_GRACE_S,
        "how long such a request goes on when its client has left, while fewer run here than max_background_responses;"
        " 0: not at all",
        most=86_400.0,
    )
    max_tickets: int = option(
        10_000, "most requests with an Idempotency-Key that are kept of an API key; of everybody where there is none."
        " Beyond that the oldest are forgotten", least=1, most=100_000,
    )  # fmt: skip
    max_tickets_bytes: int = option(
        64 * 1024 * 1024, "most bytes of what is kept of them together, answers included", least=1, most=2**50
    )
    keep_transcripts: int = option(
        0,
        "most finished requests of an API key, of everybody where there is none, of which prompt, parameters and answer"
        " are kept for `pagoda replay`, for 30 days at most; 0: none",
        most=100_000,
    )
    slow_client_timeout_s: float = option(60.0, "a stream whose client reads nothing for this long is ended", least=0.1)
    resume_wait_s: float = option(times.RESUME_WAIT_S, "how long open streams wait for a lost engine core to come back")
    ping_interval_s: float = option(10.0, "an SSE comment is sent when a stream was silent for this long; 0: never")
    drain_timeout_s: float = option(times.GATEWAY_DRAINS_S, "after SIGTERM, how long open requests may finish")
    lame_duck_s: float = option(0.0, "after SIGTERM, how long to go on accepting while already unready")
    store: str = option(
        "",
        "where files, batches, API keys and usage are kept: sqlite:///path, redis://host:port (Redis or Valkey; several"
        " gateways may share it), rediss:// or unix://; when empty, `serve` keeps them until it ends and a gateway in"
        " its memory",
        secret=True,  # it may hold a password
    )
    chat_template: str = option("", "file with a chat template to use instead of the model's own")
    task: str = option(
        AUTO,
        "what the model is for: generate, embed, classify (also to rerank); auto goes by the model's files",
        words=(AUTO, *KINDS),
    )
    lora_modules: str = option(
        "",
        'adapters (LoRA, as PEFT saves them) to serve beside the model: name=directory, or {"name": .., "path": ..}; '
        "several with commas between, or as several values",
        several=True,
    )
    lora_dir: str = option("", "directory below which adapters may lie that are loaded while serving; empty: nowhere")
    lora_loading: bool = option(
        False, "let clients (with keys: admins) load adapters of lora_dir by /v1/load_lora_adapter, and unload them"
    )
    lora_resolver: bool = option(
        False,
        "take a model name that is not known for that of a directory in lora_dir, and load it when it is asked for",
    )
    max_lora_names: int = option(256, "most adapters that have a name at once", least=1, most=65536)
    max_lora_bytes: int = option(1024**3, "largest file of an adapter", least=1, most=2**36)
    tool_call_parser: str = option(
        "", f"how the model writes tool calls, if not as its chat template shows: {', '.join(TOOL_FORMAT_NAMES)}"
    )
    reasoning_parser: str = option(
        "", f"how thoughts are marked, if not as the model's chat template shows: {', '.join(REASONING_FORMAT_NAMES)}"
    )
    log_requests: bool = option(
        True, "one line of log per request that has ended or was refused: ids and numbers, no text"
    )
    startup_message: bool = option(False, "print the URL and example calls once ready")

    def __post_init__(self) -> None:
        check(self, self._further_problems())

    @property
    def model_names(self) -> tuple[str, ...]:
        """At least one."""
        given = (name.strip() for name in self.served_model_name.split(","))
        return tuple(dict.fromkeys(filter(None, given))) or (Path(self.model).resolve().name,)

    def _further_problems(self) -> Iterator[Problem]:
        if 0 < self.ping_interval_s < LEAST_PING_S:
            rule = f"ping_interval_s must be 0 or at least {LEAST_PING_S}"
            yield Problem("ping_interval_s", f"{rule}, got {self.ping_interval_s}")
        yield from self._key_problems()
        yield from self._adapter_problems()
        for name, known in (("tool_call_parser", TOOL_FORMAT_NAMES), ("reasoning_parser", REASONING_FORMAT_NAMES)):
            if getattr(self, name) not in ("", *known):
                yield Problem(name, f"{name}: must be one of {', '.join(known)}, got {getattr(self, name)[:64]!a}")
        for origin in filter(None, self.allowed_origins.split(",")):
            if origin != "*" and not ORIGIN.fullmatch(origin):
                rule = "an origin is * or scheme://host or scheme://host:port in lower case, without a path"
                yield Problem("allowed_origins", f"allowed_origins: {rule}, got {origin!a}")
        if problem := store_problem(self.store):
            yield Problem("store", f"store {problem}")
        try:
            TrustedProxies(self.forwarded_allow_ips)
        except ValueError as error:
            yield Problem("forwarded_allow_ips", f"forwarded_allow_ips: {error}")

    def _adapter_problems(self) -> Iterator[Problem]:
        try:
            read_lora_modules(self.lora_modules)
        except ValueError as error:
            yield Problem("lora_modules", str(error))
        for name in ("lora_loading", "lora_resolver"):
            if getattr(self, name) and not self.lora_dir:
                yield Problem(name, f"{name} needs a lora_dir, outside of which nothing is loaded")

    def _key_problems(self) -> Iterator[Problem]:
        for name, keys in (("api_key", self.api_key), ("admin_api_key", self.admin_api_key)):
            if keys and not all(map(is_key, keys.split(","))):
                rule = f"{name}: a key must have {KEY_CHARS[0]} to {KEY_CHARS[1]} visible characters of ASCII, no comma"
                yield Problem(name, rule)
            if keys and self.auth == Auth.NONE:
                yield Problem("auth", f"auth {Auth.NONE!r} does not go with {name}: nobody would be asked for it")
        both = set(self.api_key.split(",")) & set(self.admin_api_key.split(",")) - {""}
        if both:
            yield Problem("admin_api_key", "admin_api_key: a key is in api_key too; it can be of one role only")
