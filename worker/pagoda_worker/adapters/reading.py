"""From an adapter's files to what it adds to each matrix; names and shapes are judged by the header alone.

The bytes whose digest is taken are those that tensors are made of, so nobody can change a file in between.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from pagoda_proto.adapters.files import WEIGHTS, AdapterError, open_weights, read_config
from pagoda_proto.adapters.identity import digest_of
from pagoda_worker.adapters.peft import PeftConfig, read_peft
from pagoda_worker.checkpoints.checkpoint import DTYPES, LOADABLE, CheckpointError, entries_of
from pagoda_worker.checkpoints.fingerprint import Entry
from pagoda_worker.checkpoints.spec import DecoderSpec, linear_layers, matrices_of_all
from pagoda_worker.models.linear import Factors

PREFIX = "base_model.model."
SIDES = ("lora_A", "lora_B")
EXPERTS = ".experts."  # in the names of their tensors
NAMES_SHOWN = 8
MAX_HEADER_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class Limits:
    rank: int
    num_bytes: int


@dataclass(frozen=True)
class Module:
    """A matrix that may have an adapter: what the checkpoint calls it, its outputs and inputs."""

    name: str
    outputs: int
    inputs: int


def modules_of(spec: DecoderSpec, adapted: Iterable[str]) -> dict[str, Module]:
    """By each name that the family's checkpoints have for it. `adapted`: those of them that can have an adapter."""
    able, shapes = set(adapted), linear_layers(spec)
    found: dict[str, Module] = {}
    for names in (spec.names, *spec.spellings):
        spelt = matrices_of_all(replace(spec, names=names))
        for own, name in zip(spelt, matrices_of_all(spec), strict=True):
            if name in able:
                found.setdefault(own, Module(name, *shapes[name]))
    return found


def read_adapter(
    path: Path, digest: str, modules: Mapping[str, Module], limits: Limits, dtype: torch.dtype
) -> dict[str, Factors]:
    """What an adapter adds, by the names of `Module`.

    Raises:
        AdapterError: it is not one for this model, not as it is served here, or not the one of that digest.
    """
    config = read_config(path)
    peft = read_peft(config)
    with open_weights(path, limits.num_bytes) as file:
        content = bytearray(file.read(limits.num_bytes + 1))
    if len(content) > limits.num_bytes:
        raise AdapterError(f"{WEIGHTS} has grown to more than {limits.num_bytes} bytes")
    try:
        entries = entries_of(path / WEIGHTS, content, MAX_HEADER_BYTES)
    except CheckpointError as error:
        raise AdapterError(f"{WEIGHTS}: {'; '.join(error.problems)}") from error
    pairs = _judged(entries, peft, modules, limits)
    if digest_of(config, hashlib.sha256(content).digest()) != digest:
        raise AdapterError("the files have changed since this adapter was loaded by its name")
    return {
        module.name: Factors(_tensor(content, a, dtype), _tensor(content, b, dtype), peft.scale(own))
        for own, (module, (a, b)) in pairs.items()
    }


Pairs = dict[str, tuple[Module, tuple[Entry, Entry]]]


def _judged(entries: Mapping[str, Entry], peft: PeftConfig, modules: Mapping[str, Module], limits: Limits) -> Pairs:
    """The entries of both sides, by module. Raises AdapterError with all that is wrong."""
    wanted = {own for own in modules if peft.targets(own)}
    sides = {f"{PREFIX}{own}.{side}.weight": own for own in wanted for side in SIDES}
    present = {own for tensor, own in sides.items() if tensor in entries}
    unknown = set(entries) - set(sides)
    experts = {tensor for tensor in unknown if EXPERTS in tensor}
    problems = _listing("experts take no adapters here", experts) + _listing("unknown tensors", unknown - experts)
    expected = {tensor for tensor, own in sides.items() if own in present}
    problems += _listing("missing tensors", expected - set(entries))
    if not present:
        problems.append("none of its tensors is for a matrix of this model")
    if not problems:
        problems = [line for own in sorted(present) for line in _shape_problems(own, entries, peft, modules, limits)]
    if problems:
        raise AdapterError("; ".join(problems[:NAMES_SHOWN]))
    return {own: (modules[own], (entries[_tensor_name(own, 0)], entries[_tensor_name(own, 1)])) for own in present}


def _shape_problems(
    own: str, entries: Mapping[str, Entry], peft: PeftConfig, modules: Mapping[str, Module], limits: Limits
) -> list[str]:
    rank, module, found = peft.rank(own), modules[own], []
    if rank > limits.rank:
        return [f"{own} has rank {rank}, more than the {limits.rank} of max_lora_rank"]
    for side, shape in enumerate(((rank, module.inputs), (module.outputs, rank))):
        entry = entries[_tensor_name(own, side)]
        if entry.shape != shape:
            found.append(f"{_tensor_name(own, side)} has shape {list(entry.shape)}, expected {list(shape)}")
        elif entry.dtype not in LOADABLE:
            found.append(f"{_tensor_name(own, side)} is {entry.dtype}, expected {' or '.join(LOADABLE)}")
    return found


def _tensor_name(own: str, side: int) -> str:
    return f"{PREFIX}{own}.{SIDES[side]}.weight"


def _tensor(content: bytearray, entry: Entry, dtype: torch.dtype) -> torch.Tensor:
    raw = torch.frombuffer(content, dtype=torch.uint8, count=entry.num_bytes, offset=entry.begin).clone()
    return raw.view(DTYPES[entry.dtype]).view(entry.shape).to(dtype)


def _listing(what: str, names: Iterable[str]) -> list[str]:
    several = sorted(names)
    more = f" and {len(several) - NAMES_SHOWN} more" if len(several) > NAMES_SHOWN else ""
    return [f"{what}: {', '.join(name[:200] for name in several[:NAMES_SHOWN])}{more}"] if several else []
