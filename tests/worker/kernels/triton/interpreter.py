"""Patches Triton's interpreter where it differs from every device; called once, before any kernel runs.

Known versions are Triton 3.6 and 3.7; both need the same patches, except that 3.7 does not need the first.
test_interpreter.py must pass with a further version before pyproject.toml admits it.

- Newer numpy accepts no size-1 array as an index: the patch extracts loop bounds from it, as 3.7 itself does.
- It truncates float32 to bfloat16 where devices round to nearest even.
- It multiplies bfloat16 matrices as bit patterns, and in any product a row's order of summation depends on the row's
  place in the matrix: the patch computes every row as a product of its own.
- It is slow; see interpreter_speed.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from tests.worker.kernels.triton.interpreter_speed import save_time
from triton.runtime import interpreter


def _to_bfloat16(values: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)


def _from_bfloat16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def mend() -> None:
    builder: Any = interpreter.InterpreterBuilder
    if getattr(builder, "mended", False):
        return
    builder.mended = True
    handle, cast = interpreter.TensorHandle, builder.cast_impl
    patch_tensor = interpreter._patch_lang_tensor

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        source, target = src.dtype.scalar, dst_type.scalar
        if source == tl.float32 and target == tl.bfloat16:
            return handle(_to_bfloat16(src.data), target)
        if source == tl.bfloat16 and target == tl.float32:
            return handle(_from_bfloat16(src.data), target)
        return cast(self, src, dst_type)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        left, right = (_from_bfloat16(x.data) if x.dtype.scalar == tl.bfloat16 else x.data for x in (a, b))
        rows = np.matmul(left.astype(d.data.dtype)[:, None, :], right.astype(d.data.dtype))[:, 0]
        return handle(rows + d.data, d.dtype.scalar)

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    builder.cast_impl, builder.create_dot = cast_impl, create_dot
    interpreter._patch_lang_tensor = patch_lang_tensor
    save_time()
