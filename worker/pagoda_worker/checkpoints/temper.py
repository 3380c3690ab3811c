"""Sharpens attention of layers without positions as rows grow (arXiv 2501.19399): a factor on later queries."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Temper:
    """A query is multiplied by 1 + `weight` * ln(1 + n), where n whole spans of tokens end at or before it."""

    span: float
    weight: float


def temper_table(shape: Temper, max_positions: int, device: torch.device) -> torch.Tensor:
    """The factors of all positions [max_positions, 1, 1] float32; a table for the same reason as rotary angles."""
    spans = torch.floor((torch.arange(max_positions, dtype=torch.float32) + 1.0) / shape.span)
    return (torch.log1p(spans) * shape.weight + 1.0).to(device).view(-1, 1, 1)
