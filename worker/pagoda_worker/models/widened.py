"""Runs other people's code in float32, whatever dtype its weights have."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

SHORT = (torch.bfloat16, torch.float16)


class Widened(TorchFunctionMode):
    """A mode in which everything is computed in float32: 16-bit operands are widened as they are used.

    Weights are widened one operation at a time, so a model takes hardly any extra memory.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") == "__get__":  # an attribute of a tensor, such as its dtype
            return _wide(func(*args, **(kwargs or {})), of_tensors=False)
        return func(*tree_map(_wide, args), **tree_map(_wide, kwargs or {}))


def _wide(value: Any, of_tensors: bool = True) -> Any:
    if isinstance(value, torch.dtype):
        return torch.float32 if value in SHORT else value
    return value.float() if of_tensors and isinstance(value, torch.Tensor) and value.dtype in SHORT else value
