"""Operands reach the library by name, and a recording's buffers share memory only if their lifetimes do not overlap."""

from __future__ import annotations

import ctypes
import re

import pytest
import torch

from pagoda_worker.kernels.cpu.build import SOURCE
from pagoda_worker.kernels.cpu.operations import KINDS, STRUCTS, LayerCache, Linear, Operation, RmsNorm, program_of
from pagoda_worker.kernels.cpu.program import Recording


def fields_in_cpp(name: str) -> list[str]:
    """The field names of a struct of program.h, in order."""
    body = re.sub(r"//.*", "", (SOURCE / "program.h").read_text()).partition(f"struct {name} {{")[2].partition("}")[0]
    declarations = [part.split(",") for part in body.split(";") if part.strip()]
    return [name.split()[-1].lstrip("*") for names in declarations for name in names]


def test_a_layer_cache_is_the_same_in_both_languages() -> None:
    assert list(LayerCache._fields) == fields_in_cpp("LayerCache")


@pytest.mark.parametrize("kind", KINDS)
def test_both_languages_have_the_same_operands_in_the_same_order(kind: type[Operation]) -> None:
    assert list(kind._fields) == fields_in_cpp(f"{kind.__name__}Op")


def test_kinds_are_in_the_order_of_the_enumeration() -> None:
    listed = re.search(r"enum Kind : int32_t \{ (.*) \};", (SOURCE / "program.h").read_text())
    assert listed is not None
    names = [name.replace("_", "") for name in listed[1].lower().split(", ")]
    assert names == [kind.__name__.lower() for kind in KINDS]


def test_an_operand_is_found_by_its_name() -> None:
    x, weight, y = torch.zeros(16).bfloat16(), torch.ones(16), torch.zeros(16).bfloat16()
    (op,) = program_of([[RmsNorm(x=x, residual=None, sum=None, weight=weight, y=y, dim=16, eps=0.5)]])
    found = op.operands.RmsNorm
    assert [found.x, found.residual, found.weight, found.y] == [x.data_ptr(), None, weight.data_ptr(), y.data_ptr()]
    assert (op.kind, op.joined, found.dim, found.eps) == (KINDS.index(RmsNorm), 0, 16, 0.5)
    assert ctypes.sizeof(op.operands) == max(map(ctypes.sizeof, STRUCTS.values()))


def norm(tape: Recording, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    y = tape.buffer(4, 16, torch.bfloat16)
    tape.take(RmsNorm(x=x, residual=residual, sum=None, weight=torch.ones(16), y=y, dim=16, eps=1e-6))
    return y


def linear(tape: Recording, x: torch.Tensor) -> torch.Tensor:
    y = tape.buffer(4, 16, torch.bfloat16)
    panels = torch.zeros(1)
    operation = Linear(x=x, panels=panels, y=y, bias=None, n=16, k=16, activation=0, out_f32=0, form=(16, 16, 0, 0))
    tape.take(operation)
    return y


def address(memory: dict[int, torch.Tensor], buffer: torch.Tensor) -> int:
    return memory[buffer.untyped_storage()._cdata].data_ptr()


def test_memory_is_used_again_after_the_last_operation_that_names_it() -> None:
    tape, x = Recording(4), torch.zeros(4, 16).bfloat16()
    buffers = [norm(tape, x)]
    for _ in range(3):
        buffers.append(norm(tape, buffers[-1]))
    memory = tape.laid_out(buffers[-1:])
    first, second, third, fourth = (address(memory, buffer) for buffer in buffers)
    assert first == third != second == fourth


def test_a_buffer_that_is_read_later_keeps_its_memory_also_by_a_view() -> None:
    tape, x = Recording(4), torch.zeros(4, 16).bfloat16()
    carried = norm(tape, x)
    view = carried.view(4, 2, 8)
    others = [norm(tape, x), norm(tape, x)]
    norm(tape, x, residual=view)
    memory = tape.laid_out([])
    assert address(memory, view) == address(memory, carried)
    assert address(memory, carried) not in [address(memory, other) for other in others]


def test_a_linear_layer_is_joined_to_the_norm_of_its_inputs_alone() -> None:
    tape, x = Recording(4), torch.zeros(4, 16).bfloat16()
    y = norm(tape, x)
    linear(tape, linear(tape, y))
    linear(tape, y)
    norm(tape, x)
    assert [[type(one).__name__ for one in stage] for stage in tape.stages] == [
        ["RmsNorm", "Linear"],
        ["Linear"],
        ["Linear"],
        ["RmsNorm"],
    ]
    assert [op.joined for op in program_of(tape.stages, lambda one: 0)] == [0, 1, 0, 0, 0]


def test_what_is_done_as_one_shares_no_memory() -> None:
    """One thread may write the layer's result while another is still normalising its inputs."""
    tape, x = Recording(4), torch.zeros(4, 16).bfloat16()
    first = norm(tape, x)
    second = norm(tape, first)  # the last operation that reads it
    memory = tape.laid_out([linear(tape, second)])
    assert (
        len({address(memory, buffer) for buffer in (first, second)} | {memory[key].data_ptr() for key in memory}) == 3
    )


def test_results_keep_theirs_to_the_end() -> None:
    tape, x = Recording(4), torch.zeros(4, 16).bfloat16()
    buffers = [norm(tape, x) for _ in range(4)]
    memory = tape.laid_out([buffers[0], buffers[2]])
    first, unused, third, last = (address(memory, buffer) for buffer in buffers)
    assert first not in (unused, third, last)
    assert third == unused != last
