"""config.json of small models as published: each has fields beyond those of its family.

Bookkeeping fields are kept, since a reader may stumble over them.
"""

from __future__ import annotations

from typing import Any

_TRAINING: dict[str, Any] = {
    "attention_dropout": 0.0, "initializer_range": 0.02, "torch_dtype": "bfloat16", "transformers_version": "4.45.0",
    "use_cache": True, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def _sizes(hidden: int, middle: int, layers: int, heads: tuple[int, int], vocab: int, positions: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden, "intermediate_size": middle, "num_hidden_layers": layers,
        "num_attention_heads": heads[0], "num_key_value_heads": heads[1], "vocab_size": vocab,
        "max_position_embeddings": positions,
    }  # fmt: skip


def _llama(sizes: dict[str, Any], **rest: Any) -> dict[str, Any]:
    family = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "attention_bias": False,
        "mlp_bias": False, "pretraining_tp": 1, "rms_norm_eps": 1e-5, "rope_scaling": None,
        "tie_word_embeddings": False,
    }  # fmt: skip
    return _TRAINING | family | sizes | rest


def _llama3(sizes: dict[str, Any], factor: float, **rest: Any) -> dict[str, Any]:
    scaling = {
        "factor": factor, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }  # fmt: skip
    return _llama(sizes, rope_scaling=scaling, rope_theta=500000.0, eos_token_id=[128001, 128008, 128009], **rest)


def _smol(sizes: dict[str, Any], theta: float, **rest: Any) -> dict[str, Any]:
    nanotron = {"is_llama_config": True, "rope_interleaved": False, "tie_word_embeddings": True, "rope_theta": theta}
    return _llama(sizes, **nanotron, **rest)


def _mistral(**rest: Any) -> dict[str, Any]:
    family = {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }  # fmt: skip
    return _TRAINING | family | _sizes(4096, 14336, 32, (32, 8), 32000, 32768) | rest


def _qwen(number: int, sizes: dict[str, Any], *, tied: bool, **rest: Any) -> dict[str, Any]:
    family = {
        "architectures": [f"Qwen{number}ForCausalLM"], "model_type": f"qwen{number}", "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "sliding_window": None, "use_sliding_window": False,
        "max_window_layers": sizes["num_hidden_layers"], "tie_word_embeddings": tied,
    }  # fmt: skip
    return _TRAINING | family | sizes | rest


def _qwen3(sizes: dict[str, Any], *, tied: bool) -> dict[str, Any]:
    return _qwen(3, sizes, tied=tied, attention_bias=False, head_dim=128, rope_scaling=None)


_GEMMA: dict[str, Any] = {
    **_TRAINING, "attention_bias": False, "cache_implementation": "hybrid", "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6,
}  # fmt: skip
_CACHES = {"kv_cache_dtype": {"fp16": "float16", "q4f16": "float16"}}

PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama-3.2-1B": _llama3(
        _sizes(2048, 8192, 16, (32, 8), 128256, 131072), 32.0, head_dim=64, tie_word_embeddings=True
    ),
    "Llama-3.2-3B": _llama3(
        _sizes(3072, 8192, 28, (24, 8), 128256, 131072), 32.0, head_dim=128, tie_word_embeddings=True
    ),
    "Llama-3.1-8B": _llama3(_sizes(4096, 14336, 32, (32, 8), 128256, 131072), 8.0),
    "Llama-2-7b": _llama(_sizes(4096, 11008, 32, (32, 32), 32000, 4096), torch_dtype="float16"),
    "TinyLlama-1.1B-Chat-v1.0": _llama(_sizes(2048, 5632, 22, (32, 4), 32000, 2048), rope_theta=10000.0),
    "SmolLM-135M": _smol(_sizes(576, 1536, 30, (9, 3), 49152, 2048), 10000.0),
    "SmolLM2-135M-Instruct": _smol(
        _sizes(576, 1536, 30, (9, 3), 49152, 8192), 100000, pad_token_id=2, **{"transformers.js_config": _CACHES}
    ),
    "SmolLM2-360M": _smol(_sizes(960, 2560, 32, (15, 5), 49152, 8192), 100000),
    "SmolLM2-1.7B-Instruct": _smol(
        _sizes(2048, 8192, 24, (32, 32), 49152, 8192), 130000, **{"transformers.js_config": _CACHES}
    ),
    "Mistral-7B-v0.1": _mistral(rope_theta=10000.0, sliding_window=4096),
    "Mistral-7B-Instruct-v0.3": _mistral(vocab_size=32768, rope_theta=1000000.0, sliding_window=None),
    "Qwen2-0.5B": _qwen(
        2, _sizes(896, 4864, 24, (14, 2), 151936, 131072), tied=True, sliding_window=131072, max_window_layers=24
    ),
    "Qwen2.5-0.5B-Instruct": _qwen(
        2, _sizes(896, 4864, 24, (14, 2), 151936, 32768), tied=True, sliding_window=32768, max_window_layers=21
    ),
    "Qwen2.5-1.5B": _qwen(2, _sizes(1536, 8960, 28, (12, 2), 151936, 131072), tied=True, use_mrope=False),
    "Qwen2.5-3B": _qwen(2, _sizes(2048, 11008, 36, (16, 2), 151936, 32768), tied=True, sliding_window=32768),
    "Qwen2.5-7B-Instruct": _qwen(2, _sizes(3584, 18944, 28, (28, 4), 152064, 32768), tied=False, sliding_window=131072),
    "Qwen3-0.6B": _qwen3(_sizes(1024, 3072, 28, (16, 8), 151936, 40960), tied=True),
    "Qwen3-1.7B": _qwen3(_sizes(2048, 6144, 28, (16, 8), 151936, 40960), tied=True),
    "Qwen3-4B": _qwen3(_sizes(2560, 9728, 36, (32, 8), 151936, 40960), tied=True),
    "Qwen3-8B": _qwen3(_sizes(4096, 12288, 36, (32, 8), 151936, 40960), tied=False),
    "gemma-2-2b": _GEMMA | _sizes(2304, 9216, 26, (8, 4), 256000, 8192) | {
        "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "hidden_act": "gelu_pytorch_tanh",
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "rope_theta": 10000.0, "sliding_window": 4096,
    },
    "gemma-3-1b-it": _GEMMA | _sizes(1152, 6912, 26, (4, 1), 262144, 32768) | {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "attn_logit_softcapping": None,
        "final_logit_softcapping": None, "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": 512, "sliding_window_pattern": 6,
    },
}  # fmt: skip

MILLIONS = {
    "Llama-3.2-1B": 1236, "Llama-3.2-3B": 3213, "Llama-3.1-8B": 8030, "Llama-2-7b": 6738,
    "TinyLlama-1.1B-Chat-v1.0": 1100, "SmolLM-135M": 135, "SmolLM2-135M-Instruct": 135, "SmolLM2-360M": 362,
    "SmolLM2-1.7B-Instruct": 1711, "Mistral-7B-v0.1": 7242, "Mistral-7B-Instruct-v0.3": 7248, "Qwen2-0.5B": 494,
    "Qwen2.5-0.5B-Instruct": 494, "Qwen2.5-1.5B": 1544, "Qwen2.5-3B": 3086, "Qwen2.5-7B-Instruct": 7616,
    "Qwen3-0.6B": 596, "Qwen3-1.7B": 1721, "Qwen3-4B": 4022, "Qwen3-8B": 8191, "gemma-2-2b": 2614,
    "gemma-3-1b-it": 1000,
}  # fmt: skip

_LAYER_NORM = {"layer_norm_eps": 1e-5, "hidden_act": "gelu", "tie_word_embeddings": False}


def _other(architecture: str, sizes: dict[str, Any], **rest: Any) -> dict[str, Any]:
    return _TRAINING | {"architectures": [architecture], "model_type": "another"} | sizes | rest


def _rms(architecture: str, sizes: dict[str, Any], **rest: Any) -> dict[str, Any]:
    family = {"hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False}
    return _other(architecture, sizes, **family | rest)


_EXPERTS = {"output_router_logits": False, "router_aux_loss_coef": 0.001, "num_experts_per_tok": 8}
_GRANITE = {
    "attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0,
    "attention_bias": False, "tie_word_embeddings": True, "rope_scaling": None, "rope_theta": 5000000.0,
}  # fmt: skip
_QWEN_EXPERTS = {
    **_EXPERTS, "decoder_sparse_step": 1, "mlp_only_layers": [], "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    "use_sliding_window": False,
}  # fmt: skip


def _llama4(**experts: Any) -> dict[str, Any]:
    """As published, images and all; the counts are those of the text model."""
    scaling = {
        "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    }  # fmt: skip
    text = {
        **_sizes(5120, 8192, 48, (40, 8), 202048, 1048576), "attention_bias": False, "attention_chunk_size": 8192,
        "attn_temperature_tuning": 4, "for_llm_compressor": False, "head_dim": 128, "hidden_act": "silu",
        "intermediate_size_mlp": 16384, "model_type": "llama4_text", "no_rope_layers": [], "rms_norm_eps": 1e-5,
        "rope_scaling": scaling, "rope_theta": 500000.0, "router_jitter_noise": 0.0, "use_qk_norm": True, **_EXPERTS,
        "num_experts_per_tok": 1,
    }  # fmt: skip
    return {
        "architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "tie_word_embeddings": False,
        "boi_token_index": 200080, "eoi_token_index": 200081, "image_token_index": 200092,
        "text_config": text | experts, "vision_config": {"hidden_size": 1408, "model_type": "llama4_vision_model"},
    }  # fmt: skip


_LATENT = {
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "ep_size": 1,
    "moe_layer_freq": 1, "aux_loss_alpha": 0.001, "seq_aux": True, "attention_bias": False, "pretraining_tp": 1,
}  # fmt: skip
_DEEP_YARN = {
    "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "type": "yarn",
    "original_max_position_embeddings": 4096,
}  # fmt: skip

# Families other than Llama's, with millions of parameters.
OTHERS: dict[str, tuple[dict[str, Any], int]] = {
    "Phi-3-mini-4k-instruct": (
        _rms("Phi3ForCausalLM", _sizes(3072, 8192, 32, (32, 32), 32064, 4096), sliding_window=2047, resid_pdrop=0.0,
             embd_pdrop=0.0, original_max_position_embeddings=4096, rope_scaling=None, attention_bias=False), 3821
    ),
    "OLMo-2-0425-1B": (
        _rms("Olmo2ForCausalLM", _sizes(2048, 8192, 16, (16, 16), 100352, 4096), rms_norm_eps=1e-6,
             attention_bias=False, rope_scaling=None, rope_theta=500000), 1485
    ),
    "granite-3.1-2b-instruct": (
        _rms("GraniteForCausalLM", _sizes(2048, 8192, 40, (32, 8), 49155, 131072), mlp_bias=False, **_GRANITE), 2534
    ),
    "granite-3.1-1b-a400m-instruct": (
        _rms("GraniteMoeForCausalLM", _sizes(1024, 512, 24, (16, 8), 49155, 131072), num_local_experts=32,
             **_EXPERTS | _GRANITE), 1335
    ),
    "granite-4.0-micro": (
        _rms("GraniteMoeHybridForCausalLM", _sizes(2560, 8192, 40, (40, 8), 100352, 131072),
             shared_intermediate_size=8192, layer_types=["attention"] * 40, position_embedding_type="rope",
             num_local_experts=0, mamba_n_heads=128, mamba_d_head=64, mamba_d_state=256, mamba_expand=2,
             init_method="mup", normalization_function="rmsnorm",
             **_EXPERTS | _GRANITE | {"num_experts_per_tok": 0, "logits_scaling": 10.0}), 3403
    ),
    "SmolLM3-3B": (
        _rms("SmolLM3ForCausalLM", _sizes(2048, 11008, 36, (16, 4), 128256, 65536), no_rope_layer_interval=4,
             no_rope_layers=[1, 1, 1, 0] * 9, use_sliding_window=False, sliding_window=None, rope_theta=5000000.0,
             pretraining_tp=2, max_window_layers=28,
             attention_bias=False, mlp_bias=False, layer_types=["full_attention"] * 36, tie_word_embeddings=True), 3075
    ),
    "GLM-4-9B-0414": (
        _rms("Glm4ForCausalLM", _sizes(4096, 13696, 40, (32, 2), 151552, 32768), head_dim=128, attention_bias=True,
             partial_rotary_factor=0.5), 9400
    ),
    "c4ai-command-r-v01": (
        _other("CohereForCausalLM", _sizes(8192, 22528, 40, (64, 64), 256000, 8192), hidden_act="silu",
               attention_bias=False, layer_norm_eps=1e-5, logit_scale=0.0625, rope_theta=8000000.0,
               model_max_length=131072), 34981
    ),
    "c4ai-command-r7b-12-2024": (
        _other("Cohere2ForCausalLM", _sizes(4096, 14336, 32, (32, 8), 256000, 132096), head_dim=128, hidden_act="silu",
               attention_bias=False, layer_norm_eps=1e-5, logit_scale=0.25, rope_theta=50000, rope_scaling=None,
               rotary_pct=1.0, sliding_window=4096, sliding_window_pattern=4, layer_switch=4,
               order_of_interleaved_layers="local_attn_first", position_embedding_type="rope_gptj",
               cache_implementation="hybrid", use_embedding_sharing=True, use_gated_activation=True,
               use_parallel_block=True, use_parallel_embedding=True), 8028
    ),
    "starcoder2-3b": (
        _other("Starcoder2ForCausalLM", _sizes(3072, 12288, 30, (24, 2), 49152, 16384), use_bias=True,
               hidden_act="gelu_pytorch_tanh", norm_epsilon=1e-5, norm_type="layer_norm", mlp_type="default",
               sliding_window=4096, residual_dropout=0.1, embedding_dropout=0.1, rope_theta=999999.4420358813), 3030
    ),
    "pythia-160m": (
        _other("GPTNeoXForCausalLM", _sizes(768, 3072, 12, (12, 12), 50304, 2048) | {"num_key_value_heads": None},
               rotary_emb_base=10000, rotary_pct=0.25, use_parallel_residual=True, **_LAYER_NORM), 162
    ),
    "gpt2": (
        _other("GPT2LMHeadModel", {}, activation_function="gelu_new", attn_pdrop=0.1, layer_norm_epsilon=1e-5,
               n_ctx=1024, n_embd=768, n_head=12, n_layer=12, n_positions=1024, vocab_size=50257,
               summary_type="cls_index",
               summary_use_proj=True, summary_first_dropout=0.1, task_specific_params={"text-generation": {}}), 124
    ),
    "opt-125m": (
        _other("OPTForCausalLM", {}, activation_function="relu", do_layer_norm_before=True, ffn_dim=3072,
               hidden_size=768, max_position_embeddings=2048, num_attention_heads=12, num_hidden_layers=12,
               vocab_size=50272,
               word_embed_proj_dim=768, _remove_final_layer_norm=False, layerdrop=0.0, init_std=0.02,
               prefix="</s>"), 125
    ),
    "falcon-7b": (
        _other("FalconForCausalLM", {}, alibi=False, bias=False, hidden_size=4544, layer_norm_epsilon=1e-5,
               max_position_embeddings=2048, multi_query=True, new_decoder_architecture=False, num_attention_heads=71,
               num_hidden_layers=32, parallel_attn=True, vocab_size=65024), 6922
    ),
    "Mixtral-8x7B-v0.1": (
        _rms("MixtralForCausalLM", _sizes(4096, 14336, 32, (32, 8), 32000, 32768), num_local_experts=8,
             rope_theta=1000000.0, sliding_window=None, **_EXPERTS | {"num_experts_per_tok": 2}), 46703
    ),
    "Qwen1.5-MoE-A2.7B": (
        _rms("Qwen2MoeForCausalLM", _sizes(2048, 5632, 24, (16, 16), 151936, 8192), moe_intermediate_size=1408,
             shared_expert_intermediate_size=5632, num_experts=60, norm_topk_prob=False, sliding_window=32768,
             max_window_layers=21, **_QWEN_EXPERTS | {"num_experts_per_tok": 4}), 14316
    ),
    "Qwen3-30B-A3B": (
        _rms("Qwen3MoeForCausalLM", _sizes(2048, 6144, 48, (32, 4), 151936, 40960), head_dim=128, num_experts=128,
             moe_intermediate_size=768, norm_topk_prob=True, max_window_layers=48, attention_bias=False,
             rope_scaling=None, sliding_window=None, **_QWEN_EXPERTS), 30532
    ),
    "gpt-oss-20b": (
        _rms("GptOssForCausalLM", _sizes(2880, 2880, 24, (64, 8), 201088, 131072), head_dim=64, num_local_experts=32,
             sliding_window=128, initial_context_length=4096, experts_per_token=4, swiglu_limit=7.0,
             attention_bias=True, layer_types=["sliding_attention", "full_attention"] * 12, rope_theta=150000,
             rope_scaling={"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn", "truncate": False,
                           "original_max_position_embeddings": 4096}, **_EXPERTS | {"num_experts_per_tok": 4}), 20915
    ),
    "Llama-4-Scout-17B-16E": (_llama4(num_local_experts=16, interleave_moe_layer_step=1), 107770),
    "Llama-4-Maverick-17B-128E": (
        _llama4(num_local_experts=128, interleave_moe_layer_step=2, use_qk_norm=False), 400712
    ),
    "GLM-4.5-Air": (
        _rms("Glm4MoeForCausalLM", _sizes(4096, 10944, 46, (96, 8), 151552, 131072), head_dim=128, use_qk_norm=False,
             attention_bias=True, partial_rotary_factor=0.5, rope_scaling=None, rope_theta=1000000,
             moe_intermediate_size=1408, n_routed_experts=128, n_shared_experts=1, n_group=1, topk_group=1,
             norm_topk_prob=True, routed_scaling_factor=1.0, first_k_dense_replace=1, num_nextn_predict_layers=1,
             **_EXPERTS), 106852
    ),
    "GLM-4.7-Flash": (
        _rms("Glm4MoeLiteForCausalLM", _sizes(2048, 10240, 47, (20, 20), 154880, 202752), **_LATENT | {
                 "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256, "rope_theta": 1000000},
             partial_rotary_factor=1.0, rope_scaling=None, moe_intermediate_size=1536, n_routed_experts=64,
             n_shared_experts=1, n_group=1, topk_group=1, topk_method="noaux_tc", norm_topk_prob=True,
             routed_scaling_factor=1.8, first_k_dense_replace=1, num_nextn_predict_layers=1,
             **_EXPERTS | {"num_experts_per_tok": 4}), 29943
    ),
    "DeepSeek-V2-Lite": (
        _rms("DeepseekV2ForCausalLM", _sizes(2048, 10944, 27, (16, 16), 102400, 163840), **_LATENT, q_lora_rank=None,
             n_routed_experts=64, n_shared_experts=2, moe_intermediate_size=1408, first_k_dense_replace=1, n_group=1,
             topk_group=1, topk_method="greedy", scoring_func="softmax", norm_topk_prob=False, rms_norm_eps=1e-6,
             routed_scaling_factor=1.0, rope_scaling=_DEEP_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
             **_EXPERTS | {"num_experts_per_tok": 6}), 15706
    ),
    "DeepSeek-V3": (
        _rms("DeepseekV3ForCausalLM", _sizes(7168, 18432, 61, (128, 128), 129280, 163840), **_LATENT, q_lora_rank=1536,
             n_routed_experts=256, n_shared_experts=1, moe_intermediate_size=2048, first_k_dense_replace=3, n_group=8,
             topk_group=4, topk_method="noaux_tc", scoring_func="sigmoid", norm_topk_prob=True, rms_norm_eps=1e-6,
             routed_scaling_factor=2.5, num_nextn_predict_layers=1, rope_scaling=_DEEP_YARN, **_EXPERTS), 671026
    ),
    "OLMoE-1B-7B-0924": (
        _rms("OlmoeForCausalLM", _sizes(2048, 1024, 16, (16, 16), 50304, 4096), num_experts=64, norm_topk_prob=False,
             clip_qkv=None, attention_bias=False, rope_scaling=None, **_EXPERTS), 6919
    ),
}  # fmt: skip
