"""Triton's interpreter, mended where it differs from every device: called once, before any kernel runs.

Triton 3.6 and 3.7 are known, and what is mended is the same in both but for the first of these. A further version is
judged by test_interpreter.py before pyproject.toml admits it.

- A size-1 array is no index for newer numpy: loop bounds are taken out of it, as 3.7 does by itself.
- It cuts float32 off to bfloat16 where devices round to nearest even.
- Its products of bfloat16 matrices multiply the bit patterns, and in any product the order of a row's sums depends on
  where in the matrix the row stands: here every row is a product of its own.
- It prepares the whole language anew for every call of a device function, which takes most of its time: once per
  launch is enough.
- Of the rest, most went into checks for overflow whose results nobody reads, and into making equal types anew for every
  value.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
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

    patch_lang = interpreter._patch_lang
    both = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})

    def call(self: Any, *args: Any, **options: Any) -> Any:
        return self.rewrite()(*args, **options)

    interpreter._patch_lang = lambda fn: patch_lang(both)
    interpreter.InterpretedFunction.__call__ = call
    builder.cast_impl, builder.create_dot = cast_impl, create_dot
    interpreter._patch_lang_tensor = patch_lang_tensor
    _save_time()


def _save_time() -> None:
    running, numpy_dtype = interpreter.interpreter_builder, interpreter._get_np_dtype
    running.options = replace(running.options, sanitize_overflow=False)  # it asserts only where `debug` is set
    numpy_dtypes: dict[str, np.dtype] = {}

    def get_np_dtype(dtype: Any) -> np.dtype:
        scalar = dtype.scalar
        if scalar.name not in numpy_dtypes:
            numpy_dtypes[scalar.name] = numpy_dtype(scalar)
        return numpy_dtypes[scalar.name]

    interpreter._get_np_dtype = get_np_dtype
    _remember_types(tl.core.block_type, tl.tensor)


def _remember_types(block_type: Any, tensor: Any) -> None:
    """Equal types share their attributes, and what every tensor of the type says of its shape; nobody changes them."""
    make, make_tensor = block_type.__init__, tensor.__init__
    known: dict[Any, dict[str, Any]] = {}
    shapes: dict[Any, Any] = {}
    scalar = tensor(None, tl.int32)

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(getattr(size, "value", size) for size in shape)
        if (attributes := known.get((element_ty.name, sizes))) is None:
            make(self, element_ty, shape)
            self.shape = shapes.setdefault(sizes, self.shape)
            example = object.__new__(tensor)
            make_tensor(example, None, self)
            self.of_tensors = example.numel, example.shape
            attributes = known[element_ty.name, sizes] = vars(self)
        vars(self).update(attributes)

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.of_tensors if type.is_block() else (scalar.numel, scalar.shape)

    block_type.__init__, tensor.__init__ = init, init_tensor
    broadcast = TritonSemantic.broadcast_impl_value

    def broadcast_impl_value(self: Any, left: Any, right: Any) -> Any:
        same = left.type.is_block() and right.type.is_block() and left.type.shape is right.type.shape
        return (left, right) if same else broadcast(self, left, right)

    TritonSemantic.broadcast_impl_value = broadcast_impl_value
