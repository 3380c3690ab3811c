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
        "names that clients use, as several values or separated by commas; logs and metrics use the first. "
        "Empty: the directory's name",
        several=True,
    )
    engine: str = option(
        "", "engine core address: unix:/path or host:port; separate several with commas", required=True
    )
    keys_dir: str = option("", "keys for links between hosts, as written by `pagoda keygen`")
    host: str = option("127.0.0.1", "HTTP address to listen on")
    port: int = option(8000, "HTTP port; 0 picks a free one", most=65535)
    api_key: str = option(
        "", "API keys that clients may present, comma-separated; `pagoda keys` creates more while serving", secret=True
    )
    admin_api_key: str = option(
        "", "the same for admins, who may also create and revoke keys, and read /metrics and all usage", secret=True
    )
    auth: str = option(
        Auth.AUTO,
        "who must present an API key: auto (everybody once a key exists, here or in the store), keys "
        "(everybody always), none (nobody)",
        words=Auth.WORDS,
    )
    key_requests_per_minute: int = option(
        0, "requests per minute, at this gateway, of an API key without a limit of its own; 0: unlimited"
    )
    key_tokens_per_minute: int = option(0, "the same for tokens, prompt and output together")
    key_concurrent_requests: int = option(0, "the same for concurrent requests")
    allowed_origins: str = option(
        "", "origins whose web pages may call this API (CORS), such as https://chat.example, comma-separated; or *"
    )
    page: bool = option(True, "serve a web page at / with a chat and a view of the stack")
    max_body_bytes: int = option(10 * 1024 * 1024, "maximum size of a request body", least=1)
    max_file_bytes: int = option(200 * 1024 * 1024, "maximum size of a file uploaded to /v1/files", least=1, most=2**40)
    max_files_bytes: int = option(
        2 * 1024**3,
        "maximum size of all files of one API key; of all files if there are no keys",
        least=1,
        most=2**50,
    )
    max_batch_requests: int = option(32, "batch lines processed at once", least=1)
    max_upload_bytes_per_second: int = option(
        16 * 1024 * 1024,
        "upload rate per client address; the first 64 KiB of each body are not counted",
        least=64 * 1024,
    )
    max_headers: int = option(64, "maximum number of request headers", least=1)
    max_header_bytes: int = option(16 * 1024, "maximum size of all request headers together", least=1)
    header_timeout_s: float = option(10.0, "time within which a request's headers must be complete", least=0.1)
    body_timeout_s: float = option(30.0, "time within which a request's body must be complete", least=0.1)
    keep_alive_s: float = option(30.0, "time after which an idle connection is closed", least=0.1)
    max_connections: int = option(2048, "maximum number of open connections", least=1)
    max_connections_per_client: int = option(512, "the same per client address", least=1)
    forwarded_allow_ips: str = option(
        "127.0.0.1,::1", "proxies whose X-Forwarded-For is trusted: addresses and CIDR blocks, comma-separated"
    )
    text_threads: int = option(2, "threads that parse, render and tokenise longer texts", least=1, most=256)
    max_waiting_texts: int = option(256, "maximum number of texts waiting for such a thread", least=1)
    max_waiting_texts_per_client: int = option(64, "the same per client address", least=1)
    max_held_bytes: int = option(
        128 * 1024 * 1024,
        "memory for large bodies and prompt log-probabilities of all requests together",
        least=1,
        most=2**53,
    )
    max_tokenize_chars: int = option(
        512 * 1024,
        "longest text to tokenise or count without generating; takes some 160 bytes of memory a character",
        least=1,
    )
    max_prompt_logprob_values: int = option(
        262_144, "most prompt log-probabilities of one request: prompts x tokens x (1 + prompt_logprobs)", least=1
    )
    max_logprob_values: int = option(
        1_048_576,
        "most log-probabilities of one answer that is not streamed: prompts x n x max_tokens x (1 + logprobs)",
        least=1,
    )
    min_priority: int = option(
        0,
        "lowest `priority` that a request may ask for; lower values run earlier",
        least=MIN_PRIORITY,
        most=MAX_PRIORITY,
    )
    max_prompts: int = option(128, "most prompts in one completion request", least=1)
    max_inputs: int = option(2048, "most texts in one request for embeddings or scores", least=1)
    max_messages: int = option(2048, "most messages in one chat request", least=1)
    max_tools: int = option(256, "most tools in one chat request", least=1)
    keep_responses_s: float = option(
        30 * 86_400.0, "how long responses are kept; no longer than the store lives", least=0.1, most=1e9
    )
    max_responses: int = option(
        10_000, "most responses kept per API key, or in all if there are no keys; beyond that the oldest are deleted",
        least=1, most=100_000,
    )  # fmt: skip
    max_responses_bytes: int = option(64 * 1024 * 1024, "most bytes of these responses together", least=1, most=2**50)
    max_background_responses: int = option(256, "background responses running at once", least=1)
    keep_tickets_s: float = option(
        times.TICKET_KEPT_S,
        "how long a request with an Idempotency-Key can be resumed, or its answer repeated",
        least=0.1,
        most=1e9,
    )
    ticket_grace_s: float = option(
        times.TICKET_GRACE_S,
        "how long such a request continues after its client has disconnected, while fewer than "
        "max_background_responses run; 0: not at all",
        most=86_400.0,
    )
    max_tickets: int = option(
        10_000, "most requests with an Idempotency-Key kept per API key, or in all if there are no keys; beyond that"
        " the oldest are deleted", least=1, most=100_000,
    )  # fmt: skip
    max_tickets_bytes: int = option(
        64 * 1024 * 1024, "most bytes of these requests together, answers included", least=1, most=2**50
    )
    keep_transcripts: int = option(
        0,
        "finished requests kept per API key, or in all if there are no keys, for `pagoda replay`: prompt, "
        "parameters and answer, for 30 days at most; 0: none",
        most=100_000,
    )
    slow_client_timeout_s: float = option(
        60.0, "time without reading after which a client's stream is ended", least=0.1
    )
    resume_wait_s: float = option(times.RESUME_WAIT_S, "how long open streams wait for a lost engine core to come back")
    ping_interval_s: float = option(10.0, "send an SSE comment after a stream has been silent for this long; 0: never")
    drain_timeout_s: float = option(times.GATEWAY_DRAINS_S, "after SIGTERM, how long open requests may take to finish")
    lame_duck_s: float = option(0.0, "after SIGTERM, how long to keep accepting requests while reporting unready")
    store: str = option(
        "",
        "where files, batches, API keys and usage are kept: sqlite:///path, or redis://host:port, rediss:// "
        "or unix:// (Redis or Valkey, which several gateways can share); empty: `serve` keeps them until it "
        "ends, a gateway in memory",
        secret=True,  # it may hold a password
    )
    chat_template: str = option("", "file with a chat template to use instead of the model's own")
    task: str = option(
        AUTO,
        "what the model is for: generate, embed, classify (also for reranking); auto: decided from the model's files",
        words=(AUTO, *KINDS),
    )
    lora_modules: str = option(
        "",
        'LoRA adapters (PEFT format) to serve beside the model: name=directory, or {"name": .., "path": ..}; '
        "as several values or separated by commas",
        several=True,
    )
    lora_dir: str = option("", "directory from which adapters may be loaded while serving; empty: none")
    lora_loading: bool = option(
        False,
        "let clients (admins, if there are keys) load and unload adapters of lora_dir with "
        "/v1/load_lora_adapter and /v1/unload_lora_adapter",
    )
    lora_resolver: bool = option(
        False,
        "treat an unknown model name as a directory in lora_dir, and load that adapter on demand",
    )
    max_lora_names: int = option(256, "most adapters that have a name at once", least=1, most=65536)
    max_lora_bytes: int = option(1024**3, "maximum size of an adapter's file", least=1, most=2**36)
    tool_call_parser: str = option(
        "", f"how the model writes tool calls, if not as its chat template shows: {', '.join(TOOL_FORMAT_NAMES)}"
    )
    reasoning_parser: str = option(
        "", f"how reasoning is marked, if not as the model's chat template shows: {', '.join(REASONING_FORMAT_NAMES)}"
    )
    log_requests: bool = option(True, "log one line for each request that ends or is refused: ids and numbers, no text")
    startup_message: bool = option(False, "print the URL and example calls when ready")

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
