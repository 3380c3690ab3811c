"""Does once what Triton's interpreter repeats for every value: the same numbers and types in less time.

- The language is patched at the first launch and stays so: nothing else in the process uses it.
- Equal types share their attributes. A type equals itself without a comparison of its parts.
- The conversion of two operands depends on their types alone, or on a number's value: it is decided once per pair.
  Operands are not broadcast to the result's shape, since numpy does this itself.
- Most of the remaining time went into overflow checks whose results nobody reads, and into nested calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from numbers import Number
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def save_time() -> None:
    running, numpy_dtype = interpreter.interpreter_builder, interpreter._get_np_dtype
    running.options = replace(running.options, sanitize_overflow=False)  # it asserts only where `debug` is set
    numpy_dtypes: dict[str, np.dtype] = {}

    def get_np_dtype(dtype: Any) -> np.dtype:
        scalar = dtype.scalar
        if scalar.name not in numpy_dtypes:
            numpy_dtypes[scalar.name] = numpy_dtype(scalar)
        return numpy_dtypes[scalar.name]

    interpreter._get_np_dtype = get_np_dtype
    _prepare_once()
    _call_directly()
    _remember_types(tl.core.block_type, tl.tensor)
    _compare_by_identity()
    _make_handles()
    _decide_once()


def _prepare_once() -> None:
    patch_lang, prepared = interpreter._patch_lang, list[Any]()
    both = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})

    def once(fn: Any) -> Any:
        if not prepared:
            prepared.append(patch_lang(both))
        return SimpleNamespace(restore=lambda: None)

    def call(self: Any, *args: Any, **options: Any) -> Any:
        return self.rewrite()(*args, **options)

    interpreter._patch_lang = once
    interpreter.InterpretedFunction.__call__ = call


def _call_directly() -> None:
    """Call a function of the language without the check that it is called from a kernel."""
    semantic = interpreter.interpreter_semantic

    def patch_attr(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        inner: Callable[..., Any] = getattr(member, "__wrapped__", member)

        def direct(*args: Any, **options: Any) -> Any:
            options["_semantic"] = semantic
            return inner(*args, **options)

        scope.set_attr(owner, name, direct)

    interpreter._patch_attr = patch_attr


def _remember_types(block_type: Any, tensor: Any) -> None:
    """Let equal types share their attributes and the shape attributes of their tensors; nothing modifies them."""
    make, make_tensor = block_type.__init__, tensor.__init__
    known: dict[Any, dict[str, Any]] = {}
    shapes: dict[Any, Any] = {}
    scalar = tensor(None, tl.int32)

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([getattr(size, "value", size) for size in shape])
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


def _compare_by_identity() -> None:
    unwrap = tl.core._unwrap_if_constexpr
    bare = frozenset({tl.tensor, tl.dtype, tl.block_type, tl.pointer_type, int, float, bool, str})
    tl.core._unwrap_if_constexpr = lambda value: value if value.__class__ in bare else unwrap(value)
    for kind in (tl.dtype, tl.block_type, tl.pointer_type):

        def equal(self: Any, other: Any, by_parts: Any = kind.__eq__) -> bool:
            return self is other or by_parts(self, other)

        kind.__eq__ = equal


def _make_handles() -> None:
    handle = interpreter.TensorHandle
    check = handle.__post_init__

    def init(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if data.itemsize > 1:  # smaller ones have no type to check
            check(self)

    handle.__init__ = init


def _decide_once() -> None:
    """Cache how two operands are converted; see `TritonSemantic.binary_op_type_checking_impl`."""
    decide, tensor = TritonSemantic.binary_op_type_checking_impl, tl.tensor
    known: dict[Any, tuple[Any, Any]] = {}

    def kind(operand: Any) -> Any:
        return operand.type.name if operand.__class__ is tensor else (operand.__class__, operand)

    def decided(self: Any, left: Any, right: Any, *how: bool) -> tuple[Any, Any]:
        key = kind(left), kind(right), how
        if (become := known.get(key)) is None:
            if any(not isinstance(one, (tensor, Number)) for one in (left, right)):
                found: tuple[Any, Any] = decide(self, left, right, *how)
                return found
            pairs = zip((left, right), decide(self, left, right, *how), strict=True)
            first, second = (_way(self, before, after.type) for before, after in pairs)
            become = known[key] = first, second
        return become[0](left), become[1](right)

    TritonSemantic.binary_op_type_checking_impl = decided


def _way(semantic: Any, before: Any, after: Any) -> Callable[[Any], Any]:
    """A function that converts an operand to type `after`, except for the shape of its data."""
    tensor, scalar = semantic.tensor, after.scalar
    if not isinstance(before, tensor):
        constant = tensor(semantic.scalar_constant(before, scalar).handle, after)
        return lambda operand: constant
    if before.type == after:
        return lambda operand: operand
    if before.type.scalar == scalar:
        return lambda operand: tensor(operand.handle, after)
    return lambda operand: tensor(semantic.cast(operand, scalar).handle, after)
