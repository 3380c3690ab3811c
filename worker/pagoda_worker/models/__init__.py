"""Architectures with a native implementation: what config.json says -> the function that reads it, loaded when needed.

To add one: a function `read(ConfigReader) -> DecoderSpec` and a line here. What a spec cannot say needs a decoder of
its own or runs through `fallback`.
"""

from __future__ import annotations

ARCHITECTURES = {
    "LlamaForCausalLM": "pagoda_worker.models.llama:read_llama",
    "MistralForCausalLM": "pagoda_worker.models.llama:read_mistral",
    "Qwen2ForCausalLM": "pagoda_worker.models.qwen:read_qwen2",
    "Qwen3ForCausalLM": "pagoda_worker.models.qwen:read_qwen3",
    "Gemma2ForCausalLM": "pagoda_worker.models.gemma:read_gemma2",
    "Gemma3ForCausalLM": "pagoda_worker.models.gemma:read_gemma3",
}
