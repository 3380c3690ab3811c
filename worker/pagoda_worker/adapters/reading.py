"""From an adapter's files to its additions and replacement tensors, checked by the header alone.

The digest is taken of the same bytes that the tensors are made from, so the file cannot be swapped in between.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pagoda_proto.adapters.files import WEIGHTS, AdapterError, AdapterGone, open_weights, read_config
from pagoda_proto.adapters.identity import digest_of
from pagoda_worker.adapters.peft import PeftConfig, read_peft
from pagoda_worker.adapters.places import PREFIX, Places
from pagoda_worker.checkpoints.checkpoint import DTYPES, LOADABLE, CheckpointError, entries_of
from pagoda_worker.checkpoints.fingerprint import Entry
from pagoda_worker.models.linear import AdapterTensors, Factors

EXPERTS = ".experts."  # in the names of their tensors
LORA = ".lora_"
CHOICE = "target_modules, with exclude_modules, layers_to_transform and layers_pattern,"
BASE = ".base_layer."  # in a module that the file both replaces and adds to
NAMES_SHOWN = 8
MAX_HEADER_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class Limits:
    rank: int
    num_bytes: int


class Found(NamedTuple):
    """What a header lists: A and B by the file's name for their matrix, and replacements by the model's tensor name."""

    pairs: dict[str, tuple[Entry, Entry]]
    whole: dict[str, Entry]


def read_adapter(path: Path, digest: str, places: Places, limits: Limits, dtype: torch.dtype) -> AdapterTensors:
    """What an adapter adds and replaces, by the checkpoint's names.

    Raises:
        AdapterError: it is not for this model, or not supported here.
        AdapterGone: it is not there, or does not have that digest.
    """
    config, content = _content(path, digest, limits)
    peft = read_peft(config)
    try:
        entries = entries_of(path / WEIGHTS, content, MAX_HEADER_BYTES)
    except CheckpointError as error:
        raise AdapterError(f"{WEIGHTS}: {'; '.join(error.problems)}") from error
    found = _judged(entries, peft, places, limits)
    factors = {
        places.modules[own].name: Factors(_tensor(content, a, dtype), _tensor(content, b, dtype), peft.scale(own))
        for own, (a, b) in found.pairs.items()
    }
    return AdapterTensors(factors, {name: _tensor(content, entry, dtype) for name, entry in found.whole.items()})


def _content(path: Path, digest: str, limits: Limits) -> tuple[dict[str, Any], bytearray]:
    """The content of both files. It had this digest when it was named, so it could be read then."""
    try:
        config = read_config(path)
        with open_weights(path, limits.num_bytes) as file:
            content = bytearray(file.read(limits.num_bytes + 1))
    except AdapterError as error:
        raise AdapterGone(f"the files cannot be read: {error}") from error
    if digest_of(config, hashlib.sha256(content).digest()) != digest:
        raise AdapterGone("the files have changed since this adapter was loaded under its name")
    return config, content


def _judged(entries: Mapping[str, Entry], peft: PeftConfig, places: Places, limits: Limits) -> Found:
    """Raises AdapterError listing everything that is wrong."""
    targeted = _targeted(peft, places)
    wanted = {own: module.tensors(own) for own, module in places.modules.items() if own in targeted}
    present = [own for own, sides in wanted.items() if any(side in entries for side in sides)]
    expected = {tensor for own in present for tensor in wanted[own]}
    brought = {tensor: own for tensor in entries if (own := _own_name(tensor)) in places.whole}
    problems = _unknown_problems(set(entries) - expected - set(brought), targeted, places)
    problems += _listing("missing tensors", expected - set(entries))
    left_out = _left_out(set(present), targeted, peft, places)
    problems += _listing(f"target_modules: {WEIGHTS} has no tensors for", left_out)
    problems += _whole_problems(set(brought.values()), peft, places)
    problems += _tying_problems({*present, *(own.rpartition(".")[0] for own in brought.values())}, peft, places)
    problems += _twice_problems("tensors", {tensor: places.whole[own].name for tensor, own in brought.items()})
    problems += _twice_problems("matrices", {own: places.modules[own].name for own in present})
    if not present and not brought:
        problems.append("none of its tensors belongs to a matrix of this model")
    if not problems:
        problems = [line for own in sorted(present) for line in _rank_problems(own, entries, peft, places, limits)]
        shapes = {tensor: places.whole[own].shape for tensor, own in brought.items()}
        problems += [line for tensor, shape in shapes.items() for line in _shape_problems(tensor, entries, shape)]
    if problems:
        raise AdapterError("; ".join(problems[:NAMES_SHOWN]))
    pairs = {own: (entries[wanted[own][0]], entries[wanted[own][1]]) for own in present}
    return Found(pairs, {places.whole[own].name: entries[tensor] for tensor, own in brought.items()})


def _targeted(peft: PeftConfig, places: Places) -> set[str]:
    """Modules that may have A and B. Of two ends that must stay the same, PEFT names only the embedding."""
    found = {
        own for own, module in places.modules.items() if peft.targets(own) and not (module.embedding and peft.linear)
    }
    return found | places.tied if peft.tying and places.tied & found else found


def _left_out(present: set[str], targeted: set[str], peft: PeftConfig, places: Places) -> set[str]:
    """Modules without A and B, though PEFT writes all that it targets. Of several spellings, the file's is the one that
    fits it best."""
    there = {places.modules[own].name for own in present}
    absent = {own for own in targeted if places.modules[own].name not in there and not peft.replaces(own)}
    return absent & min(places.spellings, key=lambda one: (-len(present & one), len(absent & one)))


def _twice_problems(what: str, meant: Mapping[str, str]) -> list[str]:
    """Names that mean the same: checkpoints of a family may use several spellings."""
    times = Counter(meant.values())
    return _listing(f"duplicate {what}", [name for name, one in meant.items() if times[one] > 1])


def _own_name(tensor: str) -> str:
    """The checkpoint's name for it; "" if it is not an adapter's tensor."""
    return tensor.removeprefix(PREFIX).replace(BASE, ".") if tensor.startswith(PREFIX) else ""


def _unknown_problems(unknown: set[str], targeted: set[str], places: Places) -> list[str]:
    experts = {tensor for tensor in unknown if EXPERTS in tensor}
    modules = {tensor for tensor in unknown - experts if _own_name(tensor) and LORA not in tensor}
    closed = {tensor for tensor in unknown - experts if _own_name(tensor).partition(LORA)[0] in places.closed} - modules
    problems = _listing("adapters for experts are not supported", experts)
    problems += _listing("adapters for these modules are not supported", closed)
    problems += _listing("only norms, embeddings and output matrices can be replaced whole, not these", modules)
    unknown = unknown - experts - modules - closed
    left_out = places.modules.keys() - targeted
    others = {tensor for tensor in unknown if _own_name(tensor).partition(LORA)[0] in left_out}
    problems += _listing(f"unknown tensors, as {CHOICE} leaves out their modules", others)
    return problems + _listing("unknown tensors", unknown - others)


def _whole_problems(brought: set[str], peft: PeftConfig, places: Places) -> list[str]:
    """Tensors missing from the modules to be replaced. `brought` are tensors."""
    modules = {own.rpartition(".")[0] for own in brought}
    replaced = {places.whole[own].name.rpartition(".")[0] for own in brought}
    units = {places.whole[own].unit for own in brought}
    names = {places.whole[own].name for own in brought}
    missing = {one.name for one in places.whole.values() if one.unit in units} - names
    apart = {name for name in missing if name.rpartition(".")[0] not in replaced}
    saved = {name for name in peft.saved if not any(module.endswith(name) for module in modules)}
    return [
        *_listing("missing tensors", missing - apart),
        *_listing("missing tensors, as norms of queries and keys can only be replaced together", apart),
        *_listing(f"modules_to_save: {WEIGHTS} has no tensors for", saved),
    ]


def _tying_problems(touched: set[str], peft: PeftConfig, places: Places) -> list[str]:
    """If a model uses one matrix for both ends, each end gets only what the file has under that end's own name."""
    if not peft.tying or len(places.tied & touched) != 1:
        return []
    return [f"ensure_weight_tying: {WEIGHTS} must have tensors for each of {' and '.join(sorted(places.tied))}"]


def _rank_problems(
    own: str, entries: Mapping[str, Entry], peft: PeftConfig, places: Places, limits: Limits
) -> list[str]:
    rank, module = peft.rank(_source_of(own, peft, places)), places.modules[own]
    if rank > limits.rank:
        return [f"{own} has rank {rank}, more than max_lora_rank={limits.rank}"]
    shapes = zip(module.tensors(own), ((rank, module.inputs), (module.outputs, rank)), strict=True)
    return [line for tensor, shape in shapes for line in _shape_problems(tensor, entries, shape)]


def _source_of(own: str, peft: PeftConfig, places: Places) -> str:
    """Where the numbers of an end that must stay tied come from: PEFT gives the head those of the embedding, but scales
    each by its own name."""
    ends = places.tied if peft.tying and own in places.tied else {own}
    return next((end for end in ends if places.modules[end].embedding), own)


def _shape_problems(tensor: str, entries: Mapping[str, Entry], shape: tuple[int, ...]) -> list[str]:
    entry = entries[tensor]
    if entry.shape != shape:
        return [f"{tensor} has shape {list(entry.shape)}, expected {list(shape)}"]
    return [] if entry.dtype in LOADABLE else [f"{tensor} is {entry.dtype}, expected {' or '.join(LOADABLE)}"]


def _tensor(content: bytearray, entry: Entry, dtype: torch.dtype) -> torch.Tensor:
    raw = torch.frombuffer(content, dtype=torch.uint8, count=entry.num_bytes, offset=entry.begin).clone()
    return raw.view(DTYPES[entry.dtype]).view(entry.shape).to(dtype)


def _listing(what: str, names: Iterable[str]) -> list[str]:
    several = sorted(names)
    more = f" and {len(several) - NAMES_SHOWN} more" if len(several) > NAMES_SHOWN else ""
    return [f"{what}: {', '.join(name[:200] for name in several[:NAMES_SHOWN])}{more}"] if several else []
