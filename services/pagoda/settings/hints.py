"""A name we do not have is answered: with the one that was meant, with ours for what others call so, or with a no.

Other servers' names are those of vLLM, SGLang, TGI and llama.cpp, without dashes.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping

_ONE_DEVICE = "a model runs on one device here; workers starts several whole copies of it"
_NO_COOKIES = "pages of --allowed-origins may use every method and header; there are no cookies to allow"
_ADAPTERS = "lora_modules or lora_dir says which adapters there are"
_TLS = "TLS for clients is a proxy's work; between tiers see `pagoda keygen`"
_TOKENIZER = "the tokenizer is the one in the model's directory"
_AUTOMATIC = "is not needed: it is always so"

# Ours, for what others call so; `test_hints` holds every name on the right to the settings tree.
RENAMED: Mapping[str, str] = {
    "max_num_seqs": "max_rows", "max_running_requests": "max_rows", "parallel": "max_rows",
    "max_concurrent_requests": "max_rows", "max_num_batched_tokens": "max_tokens_per_step",
    "max_batch_prefill_tokens": "max_tokens_per_step", "long_prefill_token_threshold": "chunk_size",
    "chunked_prefill_size": "chunk_size", "enable_prefix_caching": "prefix_cache",
    "disable_radix_cache": "prefix_cache", "max_seq_len": "max_model_len", "context_length": "max_model_len",
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
    "quantize": "quantization", "hostname": "host",
}  # fmt: skip

# What is not here, and what to do instead.
ABSENT: Mapping[str, str] = {
    "tensor_parallel_size": _ONE_DEVICE, "tp_size": _ONE_DEVICE, "tp": _ONE_DEVICE, "num_shard": _ONE_DEVICE,
    "pipeline_parallel_size": _ONE_DEVICE, "enable_expert_parallel": _ONE_DEVICE, "tensor_split": _ONE_DEVICE,
    "tokenizer": _TOKENIZER, "tokenizer_path": _TOKENIZER, "tokenizer_mode": _TOKENIZER,
    "trust_remote_code": "code that comes with a checkpoint is never run",
    "load_format": "is seen from the files: safetensors or GGUF",
    "download_dir": "set HF_HOME to say where models are kept",
    "hf_token": "set HF_TOKEN in the environment",
    "seed": "a request has its own seed, drawn for it if it brings none",
    "ssl_keyfile": _TLS, "ssl_certfile": _TLS,
    "enable_lora": _ADAPTERS, "max_cpu_loras": "adapters are kept where they are used, max_loras of them",
    "cpu_offload_gb": "weights are not offloaded",
    "enable_chunked_prefill": _AUTOMATIC, "enable_auto_tool_choice": _AUTOMATIC, "jinja": _AUTOMATIC,
    "continuous_batching": _AUTOMATIC,
    "enable_deterministic_inference": "on a CPU it is always so, on a GPU not yet",
    "api_server_count": "`serve` starts one gateway, and `pagoda gateway` further ones",
    "allow_credentials": _NO_COOKIES, "allowed_methods": _NO_COOKIES, "allowed_headers": _NO_COOKIES,
}  # fmt: skip


def hint(name: str, ours: Iterable[str], spell: Callable[[str], str] = str) -> str:
    """What to add to "unknown NAME": begins with "; ", or is empty. `spell` writes a name the way it was asked for."""
    plain = name.lstrip("-").replace("-", "_").lower()
    known = list(ours)
    for candidate in (plain, plain.removeprefix("no_")):
        if RENAMED.get(candidate) in known:
            return f"; here it is {spell(RENAMED[candidate])}"
        if candidate in ABSENT:
            return f"; {ABSENT[candidate]}"
    near = [one for one in difflib.get_close_matches(plain, known, n=2) if spell(one) != name]
    return f"; did you mean {spell(near[0])}?" if near else ""
