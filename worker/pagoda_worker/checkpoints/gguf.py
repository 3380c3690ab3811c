"""A GGUF file as a checkpoint: its tensors with the names and row order of the published model.

Converters rename tensors, interleave the rows of Llama's queries and keys, add one to Gemma's norms, and put the
experts of a layer into one tensor. All of this is undone here, exactly, so no other code needs to know of GGUF.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from pagoda_proto.model_files.files import is_gguf
from pagoda_proto.model_files.gguf import BadGguf, Gguf, GgufTensor, read_gguf
from pagoda_proto.model_files.gguf_config import EMBEDDING, OUTPUT, is_tied
from pagoda_proto.model_files.gguf_families import family_of
from pagoda_proto.model_files.gguf_keys import FREQUENCIES, LONG, SHORT, Keys
from pagoda_worker.checkpoints.blocks import BLOCKS
from pagoda_worker.checkpoints.checkpoint import Checkpoint, CheckpointError, Progress, digest_of, open_checkpoint
from pagoda_worker.checkpoints.fingerprint import Entry

Undo = Callable[[torch.Tensor], torch.Tensor]

TOP = {
    EMBEDDING: "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
    "output_norm.bias": "model.norm.bias", OUTPUT: "lm_head.weight",
}  # fmt: skip
CONFIGURING = {FREQUENCIES, LONG, SHORT}  # read as part of config.json
PARTS = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "ffn_gate_inp": "mlp.gate",
}  # fmt: skip
EXPERTS = {
    "ffn_gate_exps": "mlp.experts.{}.gate_proj", "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}  # fmt: skip
FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
SHARED_GATE, SINKS, FAVOUR = "ffn_gate_inp_shexp", "attn_sinks", "exp_probs_b"
SHARED = {
    "ffn_gate_shexp": "mlp.shared_expert{}.gate_proj", "ffn_up_shexp": "mlp.shared_expert{}.up_proj",
    "ffn_down_shexp": "mlp.shared_expert{}.down_proj",
}  # fmt: skip
BEHIND_DENSE = {
    **{one: name.format("s") for one, name in SHARED.items()}, FAVOUR: "mlp.gate.e_score_correction_bias",
    **{f"nextn.{part}": f"nextn.{part}" for part in ("eh_proj", "embed_tokens", "enorm", "hnorm")},
    **{f"nextn.shared_head_{part}": f"nextn.shared_head_{part}" for part in ("head", "norm")},
}  # fmt: skip
OF_HEADS = {"attn_k_b": "self_attn.k_b_proj", "attn_v_b": "self_attn.v_b_proj"}  # per-head matrices in one tensor
OF_FAMILY: Mapping[str, Mapping[str, str]] = {
    "gemma2": FOUR_NORMS, "gemma3": FOUR_NORMS, "olmo2": FOUR_NORMS, "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "gpt-oss": {"post_attention_norm": "post_attention_layernorm", SINKS: "self_attn.sinks"},
    "qwen2moe": {SHARED_GATE: "mlp.shared_expert_gate", **{one: name.format("") for one, name in SHARED.items()}},
    "glm4": {
        "post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm",
        "ffn_up": "mlp.gate_up_proj",
    },
    "glm4moe": {"post_attention_norm": "post_attention_layernorm", **BEHIND_DENSE},
    "deepseek2": {
        "attn_q_a": "self_attn.q_a_proj", "attn_q_a_norm": "self_attn.q_a_layernorm", "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_kv_b": "self_attn.kv_b_proj", **OF_HEADS, **BEHIND_DENSE,
    },
    "starcoder2": {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
}  # fmt: skip
BARE = {SINKS: "weight", FAVOUR: "bias"}  # suffixes that converters add to names without one
LLAMA_HEADS = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
INTERLEAVED = dict.fromkeys(("llama", "granite", "granitemoe", "smollm3"), LLAMA_HEADS)
ONE_ADDED = ("gemma", "gemma2", "gemma3")
MOST_ENTRIES = 2**18  # experts of one tensor become entries of their own, and a header can claim millions
_LAYER = re.compile(r"blk\.(0|[1-9][0-9]{0,4})\.((?:nextn\.)?[a-z_]+)\.(weight|bias)")


def open_weights(path: Path, progress: Progress | None = None) -> Checkpoint:
    """The checkpoint of a model: a directory with safetensors files, or a GGUF file. Raises CheckpointError."""
    return open_gguf(path, progress) if is_gguf(path) else open_checkpoint(path, progress)


def open_gguf(path: Path, progress: Progress | None = None) -> Checkpoint:
    """Read the header of a GGUF file, and enough of the tensors to identify them.

    Raises:
        CheckpointError: it is malformed, or its architecture is unknown.
    """
    try:
        gguf = read_gguf(path)
        family = family_of(gguf)
        entries, undone = _entries(gguf, family)
        return Checkpoint(path, entries, digest_of(path, entries), progress, undone)
    except BadGguf as error:
        raise CheckpointError(path, [str(error).removeprefix(f"{path.name}: ")]) from error


def _entries(gguf: Gguf, family: str) -> tuple[dict[str, Entry], dict[str, Undo]]:
    entries: dict[str, Entry] = {}
    undone: dict[str, Undo] = {}
    undo_of = _undoing(gguf, family)
    for stored, tensor in gguf.tensors.items():
        if stored in CONFIGURING:
            continue
        if tensor.kind in BLOCKS and (len(tensor.shape) == 1 or stored.endswith(".bias")):
            raise gguf.bad(f"tensor {stored!r} is a vector or bias of a quantised type, which no converter writes")
        many = tensor.shape[0] if len(tensor.shape) == 3 or stored.endswith("_exps.bias") else 1
        if len(entries) + many > MOST_ENTRIES:
            raise gguf.bad(f"tensor {stored!r} has {many} matrices, which exceeds the limit of {MOST_ENTRIES} in all")
        for name, entry in _published(gguf, family, stored, tensor):
            if name in entries:
                raise gguf.bad(f"tensor {stored!r} maps to {name!r}, as another tensor does")
            entries[name] = entry
            undo = undo_of(stored)
            if undo is not None:
                undone[name] = undo
    if OUTPUT not in gguf.tensors and EMBEDDING in gguf.tensors and not is_tied(gguf):
        entries[TOP[OUTPUT]] = entries[TOP[EMBEDDING]]
    return entries, undone


def _published(gguf: Gguf, family: str, stored: str, tensor: GgufTensor) -> Iterator[tuple[str, Entry]]:
    """The name (for experts: names) that a tensor has in other checkpoints."""
    if stored in TOP:
        yield TOP[stored], _entry(tensor)
        return
    match = _LAYER.fullmatch(stored)
    layer, part, kind = match.groups() if match else ("", "", "")
    dimensions = len(tensor.shape)
    if part in EXPERTS and dimensions == (3 if kind == "weight" else 2):
        size = (tensor.end - tensor.begin) // tensor.shape[0]
        for expert in range(tensor.shape[0]):
            begin = tensor.begin + expert * size
            name = f"model.layers.{layer}.{EXPERTS[part].format(expert)}.{kind}"
            yield name, Entry(tensor.file, tensor.kind, tensor.shape[1:], begin, begin + size)
        return
    known = {**PARTS, **OF_FAMILY.get(family, {})}
    if part not in known or kind != BARE.get(part, kind):
        raise gguf.bad(f"tensor {stored!r} is not a known tensor of architecture {family!r}")
    entry = _entry(tensor)
    if part in OF_HEADS and dimensions == 3:
        entry = replace(entry, shape=(entry.shape[0] * entry.shape[1], entry.shape[2]))
    elif part == SHARED_GATE and dimensions == 1:  # a one-row matrix, which converters write as a vector
        entry = replace(entry, shape=(1, *entry.shape))
    yield f"model.layers.{layer}.{known[part]}{'' if part in BARE else f'.{kind}'}", entry


def _entry(tensor: GgufTensor) -> Entry:
    return Entry(tensor.file, tensor.kind, tensor.shape, tensor.begin, tensor.end)


def _undoing(gguf: Gguf, family: str) -> Callable[[str], Undo | None]:
    """The conversion to undo for a tensor, by its name in the file."""
    keys = Keys(gguf, family)
    most = keys.whole("attention.head_count")
    heads = {part: keys.whole(key, most) for part, key in INTERLEAVED.get(family, {}).items()}

    def undo_of(stored: str) -> Undo | None:
        part = stored.rsplit(".", 2)[-2] if stored.count(".") >= 2 else ""
        if part in heads:
            return lambda rows: _apart(rows, heads[part])
        if family in ONE_ADDED and stored.endswith("norm.weight"):
            return lambda weight: weight - 1
        return None

    return undo_of


def _apart(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """rows [N, ..] with the two halves of each head's dimensions interleaved -> first half, second half."""
    paired = rows.view(heads, -1, 2, *rows.shape[1:])
    return paired.transpose(1, 2).reshape(rows.shape)
