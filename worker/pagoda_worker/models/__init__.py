"""Architectures with a native implementation, each with the function that reads its config.json, loaded when needed.

To add one: a function `read(ConfigReader) -> DecoderSpec` in `families/`, a line here, and the defaults that its files
leave out in `defaults`. What a spec cannot express needs a decoder of its own or runs through `fallback`.
"""

from __future__ import annotations

_READERS = {
    "LlamaForCausalLM": "llama:read_llama",
    "MistralForCausalLM": "llama:read_mistral",
    "Qwen2ForCausalLM": "qwen:read_qwen2",
    "Qwen3ForCausalLM": "qwen:read_qwen3",
    "GemmaForCausalLM": "gemma:read_gemma",
    "Gemma2ForCausalLM": "gemma:read_gemma2",
    "Gemma3ForCausalLM": "gemma:read_gemma3",
    "Gemma3TextModel": "gemma:read_gemma3_text",
    "Phi3ForCausalLM": "phi:read_phi3",
    "Olmo2ForCausalLM": "olmo:read_olmo2",
    "Olmo3ForCausalLM": "olmo:read_olmo3",
    "GraniteForCausalLM": "granite:read_granite",
    "SmolLM3ForCausalLM": "unturned:read_smollm3",
    "GlmForCausalLM": "glm:read_glm",
    "Glm4ForCausalLM": "glm:read_glm4",
    "Starcoder2ForCausalLM": "starcoder:read_starcoder2",
    "StableLmForCausalLM": "stablelm:read_stablelm",
    "CohereForCausalLM": "cohere:read_cohere",
    "Cohere2ForCausalLM": "cohere:read_cohere2",
    "GPTNeoXForCausalLM": "gpt:read_gpt_neox",
    "GPT2LMHeadModel": "gpt:read_gpt2",
    "OPTForCausalLM": "gpt:read_opt",
    "FalconForCausalLM": "gpt:read_falcon",
    "MixtralForCausalLM": "moe:read_mixtral",
    "Qwen2MoeForCausalLM": "moe:read_qwen2_moe",
    "Qwen3MoeForCausalLM": "moe:read_qwen3_moe",
    "OlmoeForCausalLM": "moe:read_olmoe",
    "GraniteMoeForCausalLM": "granite:read_granite_moe",
    "GraniteMoeSharedForCausalLM": "granite:read_granite_moe_shared",
    "GraniteMoeHybridForCausalLM": "granite:read_granite_hybrid",
    "GptOssForCausalLM": "moe:read_gpt_oss",
    "Llama4ForCausalLM": "unturned:read_llama4",
    "Llama4ForConditionalGeneration": "unturned:read_llama4_with_images",
    "Glm4MoeForCausalLM": "glm:read_glm4_moe",
    "Glm4MoeLiteForCausalLM": "deepseek:read_deepseek_v3",
    "DeepseekV2ForCausalLM": "deepseek:read_deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek:read_deepseek_v3",
}
ARCHITECTURES = {name: f"pagoda_worker.models.families.{reader}" for name, reader in _READERS.items()}
