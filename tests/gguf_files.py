"""GGUF files for tests: arbitrary headers, and the bundled model as a converter would write it."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

DEMO = Path(__file__).parent.parent / "services/pagoda/demo_model"
STRING, ARRAY = 8, 9
# Value type -> its number in the file.
NUMBERS = {"uint32": 4, "int32": 5, "float32": 6, "bool": 7, "uint64": 10, "float64": 12}
PACKED = {4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 12: "d"}
KINDS = {"F32": 0, "F16": 1, "BF16": 30, "Q8_0": 8, "Q4_0": 2, "Q4_1": 3, "Q4_K": 12, "MXFP4": 39}


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def _kind(value: Any) -> int:
    if isinstance(value, bool):
        return NUMBERS["bool"]
    if isinstance(value, float):
        return NUMBERS["float32"]
    return STRING if isinstance(value, str) else NUMBERS["int32" if value < 0 else "uint32"]


def _bare(kind: int, value: Any) -> bytes:
    return text(value) if kind == STRING else struct.pack(f"<{PACKED[kind]}", value)


def pair(key: str, value: Any) -> bytes:
    """A key and its value. Integers in arrays are int32, as converters write token types."""
    if not isinstance(value, list):
        return text(key) + struct.pack("<I", _kind(value)) + _bare(_kind(value), value)
    kind = _kind(value[0]) if value else STRING
    kind = NUMBERS["int32"] if kind == NUMBERS["uint32"] else kind
    head = text(key) + struct.pack("<IIQ", ARRAY, kind, len(value))
    return head + b"".join(_bare(kind, one) for one in value)


@dataclass(frozen=True)
class Stored:
    """`shape` as in torch; `kind` is a number or a name of KINDS. `offset` None: right after the previous tensor."""

    data: bytes
    shape: Sequence[int]
    kind: int | str = "F32"
    offset: int | None = None


@dataclass
class GgufFile:
    pairs: dict[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Stored] = field(default_factory=dict)
    version: int = 3
    magic: bytes = b"GGUF"
    alignment: int = 32

    def encoded(self) -> bytes:
        head = self.magic + struct.pack("<IQQ", self.version, len(self.tensors), len(self.pairs))
        head += b"".join(pair(key, value) for key, value in self.pairs.items())
        data = b""
        for name, tensor in self.tensors.items():
            kind = KINDS[tensor.kind] if isinstance(tensor.kind, str) else tensor.kind
            offset = len(data) if tensor.offset is None else tensor.offset
            head += text(name) + struct.pack("<I", len(tensor.shape))
            head += struct.pack(f"<{len(tensor.shape)}Q", *reversed(tensor.shape)) + struct.pack("<IQ", kind, offset)
            data += tensor.data + bytes(-len(tensor.data) % self.alignment)
        return head + bytes(-len(head) % self.alignment) + data

    def write(self, path: Path) -> Path:
        path.write_bytes(self.encoded())
        return path


def stored(tensor: torch.Tensor, kind: str = "F32") -> Stored:
    """A tensor encoded as `kind`; vectors stay F32, as converters leave them."""
    kind = kind if tensor.dim() > 1 else "F32"
    return Stored(ENCODED[kind](tensor.float()), tuple(tensor.shape), kind)


def _blocks(tensor: torch.Tensor) -> np.ndarray:
    return tensor.reshape(-1, 32).numpy()


def _q8_0(tensor: torch.Tensor) -> bytes:
    values = _blocks(tensor)
    scales = (np.abs(values).max(-1, keepdims=True) / 127).astype(np.float16)
    divisors = np.where(scales == 0, 1, scales).astype(np.float32)
    levels = np.rint(values / divisors).clip(-128, 127).astype(np.int8)
    return np.concatenate([scales.view(np.uint8), levels.view(np.uint8)], -1).tobytes()


def _q4_0(tensor: torch.Tensor) -> bytes:
    values = _blocks(tensor)
    extremes = np.take_along_axis(values, np.abs(values).argmax(-1, keepdims=True), -1)
    scales = (extremes / -8).astype(np.float16)
    divisors = np.where(scales == 0, 1, scales).astype(np.float32)
    levels = (np.rint(values / divisors) + 8).clip(0, 15).astype(np.uint8)
    return np.concatenate([scales.view(np.uint8), levels[:, :16] | levels[:, 16:] << 4], -1).tobytes()


def _with_minima(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The least scales that reach all values [.., 32] from the lowest, and the lowest, which is not positive."""
    lowest = values.min(-1).clip(max=0)
    return (values.max(-1) - lowest) / 15, lowest


def _levels(values: np.ndarray, scales: np.ndarray, minima: np.ndarray) -> np.ndarray:
    divisors = np.where(scales == 0, 1, scales)[..., None]
    return np.rint((values - minima[..., None]) / divisors).clip(0, 15).astype(np.uint8)


def _q4_1(tensor: torch.Tensor) -> bytes:
    values = _blocks(tensor)
    head = np.stack(_with_minima(values), -1).astype(np.float16)
    levels = _levels(values, *head.astype(np.float32).T)
    return np.concatenate([head.view(np.uint8), levels[:, :16] | levels[:, 16:] << 4], -1).tobytes()


def _q4_k(tensor: torch.Tensor) -> bytes:
    values = tensor.reshape(-1, 8, 32).numpy()
    wanted = np.stack(_with_minima(values), 1) * np.float32([1, -1])[:, None]  # [B, 2, 8]
    head = (wanted.max(-1) / 63).astype(np.float16)
    steps = head.astype(np.float32)[..., None]
    sixths = np.rint(wanted / np.where(steps == 0, 1, steps)).clip(0, 63).astype(np.uint8)
    levels = _levels(values, sixths[:, 0] * steps[:, 0], -(sixths[:, 1] * steps[:, 1]))
    low, high = sixths[..., :4], sixths[..., 4:]
    firsts = low | high >> 4 << 6
    lasts = high[:, 0] & 15 | (high[:, 1] & 15) << 4
    packed = (levels[:, 0::2] | levels[:, 1::2] << 4).reshape(-1, 128)
    return np.concatenate([head.view(np.uint8), firsts.reshape(-1, 8), lasts, packed], -1).tobytes()


ENCODED: Mapping[str, Callable[[torch.Tensor], bytes]] = {
    "F32": lambda tensor: tensor.contiguous().numpy().tobytes(),
    "F16": lambda tensor: tensor.half().contiguous().numpy().tobytes(),
    "BF16": lambda tensor: tensor.bfloat16().contiguous().view(torch.int16).numpy().tobytes(),
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
}

NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "self_attn.qkv_proj": "attn_qkv", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.gate_up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp", "block_sparse_moe.gate": "ffn_gate_inp",
}  # fmt: skip


def gguf_name(name: str, others: Mapping[str, str]) -> str:
    """A converter's name for a tensor; `others` take precedence over NAMES."""
    known, (stem, _, kind) = NAMES | others, name.rpartition(".")
    if stem in known:
        return f"{known[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{known[part]}.{kind}"


def interleaved(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """The rows of a query or key matrix in the order that Llama's converters write."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


@cache
def demo_tensors(kind: str = "F32") -> Mapping[str, Stored]:
    heads, found = {"q_proj": 4, "k_proj": 2}, {}
    for name, tensor in load_file(DEMO / "model.safetensors").items():
        part = name.split(".")[-2]
        rows = interleaved(tensor, heads[part]) if part in heads else tensor
        found[gguf_name(name, {})] = stored(rows, kind)
    return MappingProxyType(found)


def demo_pairs(whole_tokenizer: bool = True) -> dict[str, Any]:
    """The metadata of the bundled model. No GGUF tokenizer type fits its tokenizer, so the whole file is embedded."""
    definition = json.loads((DEMO / "tokenizer.json").read_text())
    config = json.loads((DEMO / "tokenizer_config.json").read_text())
    tokens = {i: token for token, i in definition["model"]["vocab"].items()}
    kinds = dict.fromkeys(tokens, 1)
    for added in definition["added_tokens"]:
        tokens[added["id"]], kinds[added["id"]] = added["content"], 3 if added["special"] else 4
    pairs = {
        "general.architecture": "llama", "general.name": "demo", "llama.context_length": 2048,
        "llama.embedding_length": 256, "llama.block_count": 5, "llama.feed_forward_length": 768,
        "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2, "llama.attention.key_length": 64,
        "llama.attention.value_length": 64, "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": 64, "llama.rope.freq_base": 10000.0, "llama.vocab_size": 512,
        "general.sampling.temp": 0.0, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": [tokens[i] for i in range(512)],
        "tokenizer.ggml.token_type": [kinds[i] for i in range(512)],
        "tokenizer.ggml.merges": [], "tokenizer.ggml.eos_token_id": 511, "tokenizer.ggml.padding_token_id": 509,
        "tokenizer.ggml.add_bos_token": False, "tokenizer.chat_template": config["chat_template"],
    }  # fmt: skip
    whole = {"tokenizer.huggingface.json": json.dumps(definition)} if whole_tokenizer else {}
    return pairs | whole


def write_demo(path: Path, kind: str = "F32") -> Path:
    """Write the bundled model with its matrices encoded as `kind`."""
    return GgufFile(demo_pairs(), demo_tensors(kind)).write(path)
