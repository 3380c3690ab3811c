"""Common to all methods: a layout names a packing for each linear layer, a packing names and reads its tensors."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from pagoda_worker.checkpoints.checkpoint import Wanted
from pagoda_worker.checkpoints.config_reader import UnsupportedConfig
from pagoda_worker.kernels.quantized import Format, QuantizedWeight, Weight

WORD_BITS = 32


@dataclass(frozen=True)
class Stored:
    """A checkpoint's tensors of one linear layer. `shape`: [outputs N, inputs K] of its matrix."""

    linear: str
    shape: tuple[int, int]
    names: Container[str]
    take: Callable[[str], torch.Tensor]  # name -> the tensor as stored

    def __contains__(self, suffix: str) -> bool:
        return f"{self.linear}.{suffix}" in self.names

    def __getitem__(self, suffix: str) -> torch.Tensor:
        return self.take(f"{self.linear}.{suffix}")


class Packing(Protocol):
    """How the matrix of a linear layer is stored."""

    @property
    def form(self) -> Format:
        """Of what `read` returns."""

    def tensors(self, linear: str, shape: tuple[int, int]) -> dict[str, Wanted]:
        """Suffix -> what the header of that tensor must say, for a matrix [N, K].

        Raises:
            UnsupportedConfig: a matrix of this shape cannot be packed like this.
        """

    def faults(self, stored: Stored) -> list[str]:
        """Contradictions between the small tensors and the headers, which are known to be right.

        Raises:
            UnsupportedConfig: they ask for something unsupported.
        """

    def read(self, stored: Stored) -> Weight:
        """In float32, if it is widened. Headers and faults have been checked before."""


class StackPacking(Protocol):
    """How tensors with the matrices of all experts of a layer are stored, [experts E, outputs N, inputs K]."""

    @property
    def form(self) -> Format:
        """Of what `read` returns."""

    def tensors(self, name: str, shape: tuple[int, int, int]) -> dict[str, Wanted]:
        """The tensors stored instead, with the required headers. Raises as `Packing.tensors` does."""

    def read(self, name: str, take: Callable[[str], torch.Tensor]) -> Iterator[QuantizedWeight]:
        """Expert by expert; `take` gives a tensor as stored."""


@dataclass(frozen=True)
class Layout:
    """One method's description of a checkpoint."""

    method: str
    packing_of: Callable[[str], Packing | None]  # of a linear layer by name; None: it is stored plain
    stacks: StackPacking | None = None


def num_groups(where: str, shape: tuple[int, int], group: int) -> int:
    """Raises UnsupportedConfig if the groups do not divide the inputs evenly."""
    if not group:
        return 1
    if shape[1] % group:
        raise UnsupportedConfig(f"{where}: group_size={group} does not divide the {shape[1]} inputs")
    return shape[1] // group


def unpacked(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Words [R, C] int32 with 32 / `bits` levels each, lowest bits first -> the first levels [R, count] uint8."""
    whole = words.flatten().view(torch.uint8).view(len(words), -1)
    if bits == 4:
        whole = torch.stack((whole & 0xF, whole >> 4), -1).flatten(1)
    return whole[:, :count].contiguous()


def zeros_or_none(zeros: torch.Tensor, bits: int) -> torch.Tensor | None:
    """None if all are the middle level, which then costs neither memory nor arithmetic."""
    return None if bool((zeros == 1 << bits - 1).all()) else zeros.contiguous()
