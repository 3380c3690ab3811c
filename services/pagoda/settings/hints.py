"""Hints for unknown option names: the name that was probably meant, our name for another server's, or a refusal.

Other servers are vLLM, SGLang, TGI and llama.cpp; their names are written with underscores. `no_` before a name turns a
switch off.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

_ONE_DEVICE = "a model runs on one device; workers starts several whole copies of it"
_NO_COOKIES = "pages of --allowed-origins may use every method and header, and cookies are not used"
_ADAPTERS = "set lora_modules or lora_dir instead"
_TLS = "use a proxy for TLS to clients, and `pagoda keygen` for keys between tiers"
_TOKENIZER = "the tokenizer in the model's directory is used"
_AUTOMATIC = "this is always on"
_FORMS = "structured outputs always use llguidance"
_MODEL_SAYS = "this is read from the model's config.json"
_DEFAULTS = "defaults of requests come from the model's generation_config.json"
_TEXT_ALONE = "only text input is supported"
_BLOCKS_MOVE = "blocks move only between a worker and its host's memory, see swap_space_gib"
NO = "no_"
LIKENESS = 0.72
"""Least similarity of a name and the one that was probably meant, see `difflib`."""

# Other servers' names and ours; `test_hints` checks every name on the right against the settings tree.
RENAMED: Mapping[str, str] = {
    "max_num_seqs": "max_rows", "max_running_requests": "max_rows", "parallel": "max_rows",
    "max_concurrent_requests": "max_rows", "max_num_batched_tokens": "max_tokens_per_step",
    "max_batch_prefill_tokens": "max_tokens_per_step", "long_prefill_token_threshold": "chunk_size",
    "chunked_prefill_size": "chunk_size", "enable_prefix_caching": "prefix_cache",
    "disable_radix_cache": "no_prefix_cache", "max_seq_len": "max_model_len", "context_length": "max_model_len",
    "ctx_size": "max_model_len", "max_total_tokens": "max_model_len", "mem_fraction_static": "gpu_memory_utilization",
    "cuda_memory_fraction": "gpu_memory_utilization", "swap_space": "swap_space_gib",
    "num_gpu_blocks_override": "num_blocks", "disable_hybrid_kv_cache_manager": "kv_retention",
    "page_size": "block_size", "disable_cuda_graph": "enforce_eager",
    "data_parallel_size": "workers", "scheduling_policy": "policy",
    "schedule_policy": "policy", "speculative_config": "speculation", "speculative_algorithm": "speculation",
    "speculative_model": "draft_model", "speculative_draft_model_path": "draft_model", "model_draft": "draft_model",
    "num_speculative_tokens": "max_drafts", "speculative_num_draft_tokens": "max_drafts", "draft_max": "max_drafts",
    "max_num_queued_reqs": "max_queued_requests",
    "max_num_queued_tokens": "max_queued_tokens", "shutdown_timeout": "drain_timeout_s",
    "uvicorn_log_level": "log_level", "model_path": "model", "model_id": "model", "hf_repo": "model",
    "alias": "served_model_name", "cors_allow_origins": "allowed_origins", "attention_backend": "kernels",
    "n_threads": "threads",
    "kv_cache_memory_bytes": "kv_cache_gib", "cache_type_k": "kv_cache_dtype", "n_gpu_layers": "device",
    "quantize": "quantization", "hostname": "host", "q": "quantization", "dp": "workers",
    "enable_log_requests": "log_requests", "disable_log_requests": "no_log_requests",
    "disable_uvicorn_access_log": "no_log_requests", "runner": "task", "convert": "task",
    "enable_reasoning": "reasoning_parser", "async_scheduling": "max_steps_in_flight",
    "num_scheduler_steps": "max_steps_in_flight",
}  # fmt: skip

# Options that do not exist here, and what to do instead.
ABSENT: Mapping[str, str] = {
    "tensor_parallel_size": _ONE_DEVICE, "tp_size": _ONE_DEVICE, "tp": _ONE_DEVICE, "num_shard": _ONE_DEVICE,
    "pp": _ONE_DEVICE, "distributed_executor_backend": _ONE_DEVICE, "all2all_backend": _ONE_DEVICE,
    "fully_sharded_loras": _ONE_DEVICE,
    "pipeline_parallel_size": _ONE_DEVICE, "enable_expert_parallel": _ONE_DEVICE, "tensor_split": _ONE_DEVICE,
    "tokenizer": _TOKENIZER, "tokenizer_path": _TOKENIZER, "tokenizer_mode": _TOKENIZER,
    "trust_remote_code": "code that comes with a checkpoint is never run",
    "load_format": "the format is detected from the files: safetensors or GGUF",
    "download_dir": "set HF_HOME to say where models are kept",
    "hf_token": "set HF_TOKEN in the environment",
    "seed": "each request has its own seed, drawn at random if it sets none",
    "ssl_keyfile": _TLS, "ssl_certfile": _TLS, "ssl_ca_certs": _TLS,
    "generation_config": _DEFAULTS, "override_generation_config": _DEFAULTS,
    "hf_overrides": _MODEL_SAYS, "rope_scaling": _MODEL_SAYS, "rope_theta": _MODEL_SAYS,
    "disable_sliding_window": _MODEL_SAYS,
    "limit_mm_per_prompt": _TEXT_ALONE, "mm_processor_kwargs": _TEXT_ALONE,
    "kv_transfer_config": _BLOCKS_MOVE, "kv_offloading_size": _BLOCKS_MOVE,
    "guided_decoding_backend": _FORMS, "structured_outputs_config": _FORMS,
    "logprobs_mode": "logprobs are the model's own, before temperature and truncation",
    "compilation_config": "nothing is compiled at startup; enforce_eager turns off recorded GPU graphs",
    "max_seq_len_to_capture": "recorded GPU graphs do not depend on sequence length",
    "disable_log_stats": "the log has no statistics, /metrics has them",
    "otlp_traces_endpoint": "there are no traces; the log and /metrics show what a request waited for",
    "enable_sleep_mode": "workers do not sleep; stop and start them instead",
    "middleware": "external code is not loaded",
    "uds": "a gateway listens only on host and port",
    "root_path": "let a proxy in front strip the prefix",
    "calculate_kv_scales": "kv_cache_dtype int8 computes its scales for each key and value",
    "skip_tokenizer_init": "the tokenizer is always loaded; a prompt may still be token ids",
    "max_log_len": "the text of requests is never logged",
    "enable_force_include_usage": "clients ask for usage with stream_options.include_usage",
    "default_chat_template_kwargs": "set chat_template_kwargs in each request",
    "enable_lora": _ADAPTERS, "max_cpu_loras": "adapters are kept only on the device, max_loras of them",
    "cpu_offload_gb": "weights are not offloaded",
    "enable_chunked_prefill": _AUTOMATIC, "enable_auto_tool_choice": _AUTOMATIC, "jinja": _AUTOMATIC,
    "continuous_batching": _AUTOMATIC, "enable_prompt_tokens_details": _AUTOMATIC,
    "enable_deterministic_inference": "this is always on with a CPU, and not yet available on a GPU",
    "api_server_count": "`pagoda serve` starts one gateway, `pagoda gateway` starts further ones",
    "allow_credentials": _NO_COOKIES, "allowed_methods": _NO_COOKIES, "allowed_headers": _NO_COOKIES,
}  # fmt: skip


def hint(
    name: str,
    ours: Iterable[str],
    spell: Callable[[str], str] = str,
    elsewhere: Callable[[str], str] = lambda name: "",
) -> str:
    """What to append to "unknown NAME": begins with "; ", or is empty.

    `ours` are the names that exist, for switches also with `no_` before. `spell` writes a name in the form in which it
    was given; `elsewhere` returns which other commands have an option of this name, "" for none.
    """
    plain = name.lstrip("-").replace("-", "_").lower()
    known = list(ours)
    renamed = RENAMED.get(plain) or _opposite(RENAMED.get(plain.removeprefix(NO), ""))
    for one in _senses(renamed):
        if one in known:
            return f"; here it is {spell(one)}"
        if elsewhere(one):
            return f"; here it is {spell(one)}, of {elsewhere(one)}"
    absent = ABSENT.get(plain) or ABSENT.get(plain.removeprefix(NO))
    if absent:
        return f"; {absent}"
    for one in _senses(plain):
        if one in known and spell(one) != name:
            return f"; did you mean {spell(one)}?"
        if one not in known and elsewhere(one):
            return f"; it is an option of {elsewhere(one)}"
    near = [one for one in difflib.get_close_matches(plain, known, n=2, cutoff=LIKENESS) if spell(one) != name]
    return f"; did you mean {spell(near[0])}?" if near else ""


def _senses(name: str) -> list[str]:
    """A name, and the name without `no_`: only switches have the former."""
    return list(dict.fromkeys(filter(None, (name, name.removeprefix(NO)))))


def names_of(options: Mapping[str, Any]) -> list[str]:
    """The names of options that have a `type`, those of switches also with `no_` before."""
    return [*options, *(NO + name for name, one in options.items() if one.type is bool)]


def as_key(name: str, write: Callable[[str], str] = str) -> str:
    """A name as environment and file spell it, which have no `no_`."""
    return f"{write(name.removeprefix(NO))} with the opposite value" if name.startswith(NO) else write(name)


def _opposite(name: str) -> str:
    if not name:
        return ""
    return name.removeprefix(NO) if name.startswith(NO) else NO + name
