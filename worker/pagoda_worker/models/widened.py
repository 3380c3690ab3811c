"""Somebody else's code computed in float32, whatever its weights are kept in."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

SHORT = (torch.bfloat16, torch.float16)


class Widened(TorchFunctionMode):
    """Whatever is computed meanwhile is computed in float32: 16-bit operands are widened as they are used.

    Weights are widened one operation at a time, so a model takes hardly more memory than it does anyway.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") == "__get__":  # an attribute of a tensor, its dtype among them
            return _wide(func(*args, **(kwargs or {})), of_tensors=False)
        return func(*tree_map(_wide, args), **tree_map(_wide, kwargs or {}))


def _wide(value: Any, of_tensors: bool = True) -> Any:
    if isinstance(value, torch.dtype):
        return torch.float32 if value in SHORT else value
    return value.float() if of_tensors and isinstance(value, torch.Tensor) and value.dtype in SHORT else value
