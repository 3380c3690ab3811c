"""What adapters of a model may change: matrices they add to, and tensors they may replace."""

from __future__ import annotations

from collections.abc import Container, Mapping, Set
from dataclasses import dataclass, replace
from typing import NamedTuple

from pagoda_worker.checkpoints.spec import DecoderSpec, expected_tensors, linear_layers, matrices_of_all, whole_tensors

PREFIX = "base_model.model."
SIDES = ("lora_A.weight", "lora_B.weight"), ("lora_embedding_A", "lora_embedding_B")


@dataclass(frozen=True)
class Module:
    """A matrix that may have an adapter: its checkpoint name, outputs and inputs; the inputs of an `embedding` are
    tokens."""

    name: str
    outputs: int
    inputs: int
    embedding: bool = False

    def tensors(self, own: str) -> tuple[str, str]:
        """The names of A and B, given the file's name for the matrix."""
        first, second = SIDES[self.embedding]
        return f"{PREFIX}{own}.{first}", f"{PREFIX}{own}.{second}"


class Whole(NamedTuple):
    """A tensor of the checkpoint; tensors of one `unit` must be replaced together."""

    name: str
    shape: tuple[int, ...]
    unit: str


class Places(NamedTuple):
    """By each name that checkpoints of the family use; `spellings`: the modules' names, by checkpoint. `closed`: other
    matrices, such as routers."""

    modules: Mapping[str, Module]
    whole: Mapping[str, Whole]
    spellings: tuple[Set[str], ...]
    closed: Container[str] = ()
    tied: frozenset[str] = frozenset()  # embedding and output matrix, if they are one


def places_of(spec: DecoderSpec, adapted: Container[str]) -> Places:
    """`adapted`: the matrices that can have an adapter."""
    modules: dict[str, Module] = {}
    whole: dict[str, Whole] = {}
    closed: set[str] = set()
    spellings: list[Set[str]] = []
    for names in (spec.names, *spec.spellings):
        spelt = replace(spec, names=names)
        found = dict(zip(_modules(spelt), _modules(spec).values(), strict=True))
        found = {own: module for own, module in found.items() if module.embedding or module.name in adapted}
        modules = found | modules
        spellings.append(found.keys())
        for own, tensor in zip(_whole(spelt), _whole(spec).values(), strict=True):
            whole.setdefault(own, tensor)
        closed |= _all_matrices(spelt) - set(modules)
    ends = {spec.names.head, spec.names.top(spec.names.embed)} if spec.tied else ()
    return Places(modules, whole, tuple(spellings), closed, frozenset(ends))


def _modules(spec: DecoderSpec) -> dict[str, Module]:
    """By the spec's own names, in an order that does not depend on them."""
    head, embed = spec.names.head, spec.names.top(spec.names.embed)
    shapes = linear_layers(spec) | {head: (spec.vocab_size, spec.hidden_size)}
    found = {name: Module(name, *shapes[name]) for name in (*matrices_of_all(spec), head)}
    return found | {embed: Module(embed, spec.hidden_size, spec.vocab_size, embedding=True)}


def _all_matrices(spec: DecoderSpec) -> set[str]:
    """The matrices: tensors with two dimensions."""
    shapes = expected_tensors(spec).items()
    return {name.removesuffix(".weight") for name, shape in shapes if len(shape) == 2 and name.endswith(".weight")}


def _whole(spec: DecoderSpec) -> dict[str, Whole]:
    """Likewise. The norms of queries and keys are one operation, so they are replaced together."""
    names = spec.names
    pairs = {names.in_layer(index, names.key_norm): names.in_layer(index, names.query_norm)
             for index in range(spec.num_layers)}  # fmt: skip

    def unit(name: str) -> str:
        module = name.rpartition(".")[0]
        return pairs.get(module, module)

    return {name: Whole(name, shape, unit(name)) for name, shape in whole_tensors(spec).items()}
