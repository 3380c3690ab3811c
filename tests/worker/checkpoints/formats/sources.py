"""Sources of weights other than checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from pagoda_worker.checkpoints.source import Weight


@dataclass(frozen=True)
class PlainSource:
    """Every tensor by name, none quantised."""

    take: Callable[[str], torch.Tensor]

    def tensor(self, name: str) -> torch.Tensor:
        return self.take(name)

    def exact(self, name: str) -> torch.Tensor:
        return self.take(name).float()

    def linear(self, name: str) -> Weight:
        return self.take(f"{name}.weight")

    def widened(self, name: str) -> torch.Tensor:
        return self.take(f"{name}.weight")

    def experts(self, name: str) -> Iterator[Weight]:
        return iter(self.take(name))

    def tied(self, embedding: torch.Tensor) -> Weight:
        return embedding


@dataclass(frozen=True)
class WeightSource:
    """Plain tensors by name, and matrices by the name of their layer."""

    tensors: Mapping[str, torch.Tensor]
    weights: Mapping[str, Weight]

    def tensor(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def exact(self, name: str) -> torch.Tensor:
        return self.tensors[name].float()

    def linear(self, name: str) -> Weight:
        return self.weights[name]

    def widened(self, name: str) -> torch.Tensor:
        return self.tensors[f"{name}.weight"]

    def experts(self, name: str) -> Iterator[Weight]:
        return iter(self.tensors[name])

    def tied(self, embedding: torch.Tensor) -> Weight:
        return self.weights.get("lm_head", embedding)
