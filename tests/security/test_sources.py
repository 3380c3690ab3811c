"""What no source of ours may say, read from the syntax tree of every file."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.test_house_rules import PACKAGES, dotted, imported, name, python_files

EVERYWHERE = (*PACKAGES, "bench", "demo", "tests")
SHIPPED = (
    *PACKAGES,
    "bench",
)  # tests make pickles for parsers to refuse, demo/train.py reads back what it wrote itself

# Modules and functions that make objects, and with them code, out of bytes.
UNPICKLERS = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "jsonpickle", "joblib"}
UNPICKLING_CALLS = {"torch.load", "yaml.unsafe_load", "yaml.full_load", "pandas.read_pickle"}
YAML_LOADS = {"yaml.load", "yaml.load_all"}
# What makes code out of text.
CODE_MAKERS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "code.interact"}
STARTS_PROCESSES = {"subprocess", "multiprocessing", "pty"}
# The tiers see requests; only composition, the building of kernels and the checking of grammars start processes.
MAY_START_PROCESSES = (
    "services/pagoda/",
    "worker/pagoda_worker/kernels/cpu/build.py",
    "engine_core/pagoda_engine_core/grammars/checker.py",
)
REMOTE_CODE = "trust_remote_code"


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def nodes(*places: str) -> Iterator[tuple[Path, ast.AST]]:
    for path in python_files(*places):
        for node in ast.walk(tree(path)):
            yield path, node


def found(where: Iterator[tuple[Path, ast.AST]], bad: Callable[[ast.AST], bool]) -> list[str]:
    return [f"{name(path)}:{getattr(node, 'lineno', 0)}" for path, node in where if bad(node)]


def imports(node: ast.AST, modules: set[str]) -> bool:
    return any(module.split(".")[0] in modules for module in imported(node))


def calls(node: ast.AST, functions: set[str]) -> bool:
    return isinstance(node, ast.Call) and dotted(node.func) in functions


def says(node: ast.AST, keyword: str, value: object) -> bool:
    """Is this an argument of that name which is not the given constant?"""
    given = node.value if isinstance(node, ast.keyword) and node.arg == keyword else None
    return given is not None and not (isinstance(given, ast.Constant) and given.value is value)


def unpickles(node: ast.AST) -> bool:
    return imports(node, UNPICKLERS) or calls(node, UNPICKLING_CALLS) or says(node, "allow_pickle", False)


def loads_yaml_unsafely(source: ast.AST) -> bool:
    """Is there a call whose loader is not a class made here of yaml.SafeLoader?"""
    classes = [node for node in ast.walk(source) if isinstance(node, ast.ClassDef)]
    safe = {one.name for one in classes if [dotted(base) for base in one.bases] == ["yaml.SafeLoader"]}
    loads = [node for node in ast.walk(source) if isinstance(node, ast.Call) and dotted(node.func) in YAML_LOADS]
    return any(len(load.args) < 2 or dotted(load.args[1]) not in safe for load in loads)


def test_sec_01_nothing_is_unpickled() -> None:
    assert not found(nodes(*SHIPPED), unpickles)


def test_sec_01_yaml_is_read_by_safe_loaders() -> None:
    assert not [name(path) for path in python_files(*EVERYWHERE) if loads_yaml_unsafely(tree(path))]


def test_sec_05_no_text_becomes_code() -> None:
    assert not found(nodes(*PACKAGES), lambda node: calls(node, CODE_MAKERS))


def test_sec_05_the_tiers_start_no_process() -> None:
    elsewhere = ((path, node) for path, node in nodes(*PACKAGES) if not name(path).startswith(MAY_START_PROCESSES))
    assert not found(elsewhere, lambda node: imports(node, STARTS_PROCESSES) or calls(node, {"os.fork", "os.execv"}))


def test_sec_05_no_command_is_given_to_a_shell() -> None:
    assert not found(nodes(*EVERYWHERE), lambda node: says(node, "shell", False))


def test_sec_26_no_code_comes_with_a_model() -> None:
    assert not found(nodes(*EVERYWHERE), lambda node: says(node, REMOTE_CODE, False))


def test_sec_27_no_check_of_the_product_is_an_assertion() -> None:
    assert not found(nodes(*PACKAGES), lambda node: isinstance(node, ast.Assert))


@pytest.mark.parametrize(
    ("source", "check"),
    [
        ("import pickle", unpickles),
        ("from pickle import loads", unpickles),
        ("import torch\ntorch.load(path, weights_only=True)", unpickles),
        ("numpy.load(path, allow_pickle=flag)", unpickles),
        ("yaml.full_load(text)", unpickles),
        ("yaml.load(text)", loads_yaml_unsafely),
        ("yaml.load(text, yaml.Loader)", loads_yaml_unsafely),
        ("f(trust_remote_code=option)", lambda node: says(node, REMOTE_CODE, False)),
        ("exec(text)", lambda node: calls(node, CODE_MAKERS)),
    ],
)
def test_what_is_looked_for_is_found(source: str, check: Callable[[ast.AST], bool]) -> None:
    assert any(map(check, ast.walk(ast.parse(source))))
