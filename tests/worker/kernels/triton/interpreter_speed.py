"""What Triton's interpreter does again for every value, done once: the same numbers of the same types in less time.

- The language is prepared for the first launch and stays so: nothing else in the process uses it.
- Equal types share their attributes. A type is itself without being compared by parts.
- What two operands become depends on their types alone, or on a number's value: it is decided once for each pair. They
  are not spread to the shape that their result has, as numpy does so by itself.
- So is what an operator does with its operands then, and what a cast goes through: see `_learnt` and `_cast_directly`.
- Of the rest, most went into checks for overflow whose results nobody reads, and into calls of calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from numbers import Number
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

OPERATORS = frozenset(
    f"__{name}__"
    for name in ("add", "radd", "sub", "rsub", "mul", "rmul", "lt", "le", "gt", "ge", "eq", "ne", "and", "or", "xor")
)
Decision = tuple[Any, Any, tuple[Any, Any]]  # two operands, and how each becomes what is computed with
decisions: list[Decision] = []
# Of an operand: is it the left one, and what has to become of it, if anything; or, of a number, None and its handle.
Source = tuple[bool | None, Any]


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
    _cast_directly()


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
    """Of a function of the language, what is behind the check that it was called in a kernel."""
    semantic = interpreter.interpreter_semantic

    def patch_attr(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        inner: Callable[..., Any] = getattr(member, "__wrapped__", member)

        def direct(*args: Any, **options: Any) -> Any:
            options["_semantic"] = semantic
            return inner(*args, **options)

        scope.set_attr(owner, name, _remembered(direct) if owner is tl.tensor and name in OPERATORS else direct)

    interpreter._patch_attr = patch_attr


def _remember_types(block_type: Any, tensor: Any) -> None:
    """Equal types share their attributes, and what every tensor of the type says of its shape; nobody changes them."""
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
        if data.itemsize > 1:  # of less there is no type
            check(self)

    handle.__init__ = init


def _decide_once() -> None:
    """What becomes of two operands; see `TritonSemantic.binary_op_type_checking_impl`."""
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
        decisions[:] = [*decisions[-1:], (left, right, become)]
        return become[0](left), become[1](right)

    TritonSemantic.binary_op_type_checking_impl = decided


def _way(semantic: Any, before: Any, after: Any) -> Callable[[Any], Any]:
    """How an operand becomes one of the type `after`, but for the shape of its data."""
    tensor, scalar = semantic.tensor, after.scalar
    if not isinstance(before, tensor):
        constant = tensor(semantic.scalar_constant(before, scalar).handle, after)
        return lambda operand: constant
    if before.type == after:
        return lambda operand: operand
    if before.type.scalar == scalar:
        return lambda operand: tensor(operand.handle, after)
    return lambda operand: tensor(semantic.cast(operand, scalar).handle, after)


@contextmanager
def _heard(*names: str) -> Iterator[list[tuple[str, tuple[Any, ...], Any]]]:
    """What the builder's functions are asked meanwhile: name, operands, result."""
    builder: Any = interpreter.InterpreterBuilder
    plain, found = {name: getattr(builder, name) for name in names}, list[tuple[str, tuple[Any, ...], Any]]()

    def heard(name: str) -> Callable[..., Any]:
        def asked(self: Any, *operands: Any) -> Any:
            result = plain[name](self, *operands)
            found.append((name, operands, result))
            return result

        return asked

    for name in names:
        setattr(builder, name, heard(name))
    try:
        yield found
    finally:
        for name in names:
            setattr(builder, name, plain[name])


def _cast_directly() -> None:
    """A cast that asked for one conversion asks for it at once when types are the same again."""
    cast, tensor, builder = TritonSemantic.cast, tl.tensor, interpreter.interpreter_builder
    known: dict[tuple[str, str], Any] = {}  # to the type that it becomes; True: it is of that type; None: there is more

    def directly(self: Any, value: Any, target: Any, rounding: Any = None) -> Any:
        key = value.type.name, target.scalar.name
        if rounding is None and (becomes := known.get(key)) is not None:
            if becomes is True:
                return value
            return tensor(builder.cast_impl(value.handle, becomes), becomes)
        if rounding is not None or key in known:
            return cast(self, value, target, rounding)
        with _heard("cast_impl", "binary_op", "create_fp_to_fp") as found:
            result = cast(self, value, target)
        alone = len(found) == 1 and found[0][0] == "cast_impl" and result.handle is found[0][2]
        known[key] = True if result is value else result.type if alone else None
        return result

    TritonSemantic.cast = directly


def _remembered(operator: Callable[..., Any]) -> Callable[..., Any]:
    """The operator, which asks for its way once for each pair of types, or of a type and a number."""
    tensor, numbers, unknown = tl.tensor, (int, float), object()
    known: dict[Any, Any] = {}

    def operate(left: Any, right: Any, **options: Any) -> Any:
        kind = right.__class__
        if kind is tensor:
            key: Any = left.type.name, right.type.name
        elif kind in numbers:
            key = left.type.name, kind, right
        else:
            return operator(left, right, **options)
        if left is right:  # which of the two an operand is, the others of their types have to say
            return operator(left, right, **options)
        if (way := known.get(key, unknown)) is unknown:
            result, known[key] = _learnt(operator, left, right)
            return result
        return operator(left, right, **options) if way is None else way(left, right)

    return operate


def _learnt(operator: Callable[..., Any], left: Any, right: Any) -> tuple[Any, Any]:
    """The result, and how to come to it without asking; None unless that gives the same."""
    decisions.clear()
    with _heard("binary_op", "create_addptr") as found:
        result = operator(left, right)
    if len(found) != 1 or len(decisions) != 1 or found[0][2] is not result.handle:
        return result, None
    (name, operands, _), (first, second, ways) = found[0], decisions[0]
    sources = list[Source]()
    for one, way, operand in zip((first, second), ways, operands[:2], strict=True):
        if one is left or (one is right and isinstance(right, tl.tensor)):
            sources.append((one is left, None if one.handle.data is operand.data else way))
        elif isinstance(right, tl.tensor):
            return result, None
        else:
            sources.append((None, operand))  # of the number
    way = _way_of(_on_data(name, operands), sources[0], sources[1], result.type)
    again = way(left, right)
    alike = again.handle.data.dtype == result.handle.data.dtype and again.handle.dtype == result.handle.dtype
    same = alike and again.handle.data.tobytes() == result.handle.data.tobytes()
    return result, way if same else None


def _on_data(name: str, operands: tuple[Any, ...]) -> Callable[[Any, Any], Any]:
    """As `binary_op` and `create_addptr` of the interpreter compute it."""
    if name == "create_addptr":
        width = np.uint64(max(1, operands[0].get_element_ty().primitive_bitwidth // 8))
        return lambda places, offsets: places + width * offsets.astype(np.uint64)
    compute, scalar = operands[2], operands[0].dtype.scalar
    if (size := max(1, scalar.primitive_bitwidth // 8)) >= 8:
        return compute  # type: ignore[no-any-return]
    dtype = interpreter._get_np_dtype(scalar)

    def computed(left: Any, right: Any) -> Any:
        output = compute(left, right)
        return output if output.itemsize <= size else output.astype(dtype)

    return computed


def _way_of(compute: Any, first: Source, second: Source, becomes: Any) -> Callable[[Any, Any], Any]:
    """What is made has the first operand's type, as with `binary_op` and `create_addptr`."""
    new, tensor, handle = object.__new__, tl.tensor, interpreter.TensorHandle
    (of_left, become), (other_of_left, become_other) = first, second

    def way(left: Any, right: Any) -> Any:
        if of_left is None:
            one = become
        else:
            given = left if of_left else right
            one = given.handle if become is None else become(given).handle
        if other_of_left is None:
            other = become_other
        else:
            given = left if other_of_left else right
            other = given.handle if become_other is None else become_other(given).handle
        made = new(handle)
        made.data, made.dtype, made.attr = compute(one.data, other.data), one.dtype, {}
        return tensor(made, becomes)

    return way
