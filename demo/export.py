"""Writes the trained model in the layout that transformers and model servers read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from demo.model import TinyLlama, rope_tables
from demo.schema import Example
from demo.tokenizer import END_OF_TEXT, IM_END, export_tokenizer, render_prompt


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def export_model(model: TinyLlama, tokenizer: Tokenizer, out: Path) -> None:
    """config.json, generation_config.json, bf16 weights, tokenizer and chat template."""
    out.mkdir(parents=True, exist_ok=True)
    vocabulary = tokenizer.get_vocab()
    end_of_text, im_end = vocabulary[END_OF_TEXT], vocabulary[IM_END]
    _write_json(out / "config.json", model.config.to_hf(end_of_text, im_end, end_of_text))
    generation = {
        "bos_token_id": end_of_text,
        "eos_token_id": [im_end, end_of_text],
        "pad_token_id": end_of_text,
        "do_sample": False,
    }
    _write_json(out / "generation_config.json", generation)
    # Tied: the embedding is stored once, lm_head is left out.
    weights = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, str(out / "model.safetensors"), metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # it is written readable by its owner only
    export_tokenizer(tokenizer, out, model.config.max_positions)


def verify_export(model: TinyLlama, out: Path, example: Example) -> float:
    """Largest logit difference between this code and transformers on the exported weights."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(out)
    prompt = tokenizer.apply_chat_template(
        example.messages, tools=example.tools or None, tokenize=False, add_generation_prompt=True
    )
    if prompt != render_prompt(example):
        raise ValueError("transformers renders the chat template differently")
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
    length = ids.shape[1]
    rounded = TinyLlama(model.config)
    rounded.load_state_dict({k: v.bfloat16().float() for k, v in model.state_dict().items()})
    mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
    with torch.no_grad():
        ours = rounded(ids, mask, *rope_tables(model.config, length))
        theirs = loaded(ids).logits
    return float((ours - theirs).abs().max())
