"""The option `kernels`: a back end, with exceptions by operation family."""

from __future__ import annotations

import pytest

from pagoda_worker.config import WorkerConfig
from pagoda_worker.kernel_choice import FAMILIES, KernelChoice, parse_choice
from pagoda_worker.kernels.ops import Ops


def test_a_back_end_alone_and_with_exceptions() -> None:
    assert parse_choice("auto") == KernelChoice("auto", {})
    assert parse_choice("native,attention=torch,linear=reference") == KernelChoice(
        "native", {"attention": "torch", "linear": "reference"}
    )
    assert parse_choice("auto,attention=flash") == KernelChoice("auto", {"attention": "flash"})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "fast",
        "native,",
        "native,attention",
        "native,attention=",
        "native,softmax=torch",
        "auto,linear=auto",
        "flash",
        "triton,linear=flash",
    ],
)
def test_anything_else_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="kernels"):
        parse_choice(text)
    with pytest.raises(ValueError, match="kernels"):
        WorkerConfig(kernels=text)


def test_no_family_twice() -> None:
    with pytest.raises(ValueError, match="linear=reference"):
        parse_choice("native,linear=torch,linear=reference")


def test_every_operation_belongs_to_one_family() -> None:
    operations = {name for name in vars(Ops) if not name.startswith("_") and callable(getattr(Ops, name))}
    assert sorted(operations - {"record"}) == sorted(name for names in FAMILIES.values() for name in names)
