"""What our source files must not contain, checked in the syntax tree of every file where the words occur."""

from __future__ import annotations

import ast
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from tests.test_house_rules import PACKAGES, dotted, imported, name, nodes, python_files, source
from tests.test_house_rules import trees_are_dropped as trees_are_dropped

EVERYWHERE = (*PACKAGES, "bench", "demo", "tests")
SHIPPED = (
    *PACKAGES,
    "bench",
)  # tests make pickles for parsers to refuse, demo/train.py reads back what it wrote itself

# Modules and functions that create objects from bytes, and so can run code.
UNPICKLERS = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "jsonpickle", "joblib"}
UNPICKLING_CALLS = {"torch.load", "yaml.unsafe_load", "yaml.full_load", "pandas.read_pickle"}
YAML_LOADS = {"yaml.load", "yaml.load_all"}
# Functions that run text as code.
CODE_MAKERS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "code.interact"}
STARTS_PROCESSES = {"subprocess", "multiprocessing", "pty"}
# Tiers handle requests, so only composition, building kernels and checking grammars may start processes.
MAY_START_PROCESSES = (
    "services/pagoda/",
    "worker/pagoda_worker/kernels/cpu/build.py",
    "engine_core/pagoda_engine_core/grammars/checker.py",
    "engine_core/pagoda_engine_core/grammars/program.py",
)
REMOTE_CODE = "trust_remote_code"


def may_say(text: str, words: Iterable[str]) -> bool:
    """Python normalises identifiers to NFKC: if that form has none of the words, no identifier is one of them."""
    plain = text if text.isascii() else unicodedata.normalize("NFKC", text)
    return any(word in plain for word in words)


def that_may_say(words: Iterable[str], *places: str) -> Iterator[tuple[Path, ast.AST]]:
    """All nodes of files that contain one of `words`: few do, and the others need not be parsed."""
    for path in python_files(*places):
        if may_say(source(path), words):
            for node in nodes(path):
                yield path, node


def last(functions: set[str]) -> set[str]:
    """The last part of each name: every call must contain it, however it is written."""
    return {function.rpartition(".")[2] for function in functions}


def found(where: Iterator[tuple[Path, ast.AST]], bad: Callable[[ast.AST], bool]) -> list[str]:
    return [f"{name(path)}:{getattr(node, 'lineno', 0)}" for path, node in where if bad(node)]


def imports(node: ast.AST, modules: set[str]) -> bool:
    return any(module.split(".")[0] in modules for module in imported(node))


def calls(node: ast.AST, functions: set[str]) -> bool:
    return isinstance(node, ast.Call) and dotted(node.func) in functions


def says(node: ast.AST, keyword: str, value: object) -> bool:
    """Is this an argument of that name with a value other than the given constant?"""
    given = node.value if isinstance(node, ast.keyword) and node.arg == keyword else None
    return given is not None and not (isinstance(given, ast.Constant) and given.value is value)


def unpickles(node: ast.AST) -> bool:
    return imports(node, UNPICKLERS) or calls(node, UNPICKLING_CALLS) or says(node, "allow_pickle", False)


def loads_yaml_unsafely(module: ast.AST) -> bool:
    """Is there a call whose loader is not a class that this module derives from yaml.SafeLoader?"""
    classes = [node for node in ast.walk(module) if isinstance(node, ast.ClassDef)]
    safe = {one.name for one in classes if [dotted(base) for base in one.bases] == ["yaml.SafeLoader"]}
    loads = [node for node in ast.walk(module) if isinstance(node, ast.Call) and dotted(node.func) in YAML_LOADS]
    return any(len(load.args) < 2 or dotted(load.args[1]) not in safe for load in loads)


def test_sec_01_nothing_is_unpickled() -> None:
    words = {"allow_pickle", *UNPICKLERS, *last(UNPICKLING_CALLS)}
    assert not found(that_may_say(words, *SHIPPED), unpickles)


def test_sec_01_yaml_is_read_by_safe_loaders() -> None:
    modules = ((path, node) for path, node in that_may_say(["yaml"], *EVERYWHERE) if isinstance(node, ast.Module))
    assert not found(modules, loads_yaml_unsafely)


def test_sec_05_no_text_becomes_code() -> None:
    assert not found(that_may_say(last(CODE_MAKERS), *PACKAGES), lambda node: calls(node, CODE_MAKERS))


def test_sec_05_the_tiers_start_no_process() -> None:
    forks = {"os.fork", "os.execv"}
    all_nodes = that_may_say(STARTS_PROCESSES | last(forks), *PACKAGES)
    elsewhere = ((path, node) for path, node in all_nodes if not name(path).startswith(MAY_START_PROCESSES))
    assert not found(elsewhere, lambda node: imports(node, STARTS_PROCESSES) or calls(node, forks))


def test_sec_05_no_command_is_given_to_a_shell() -> None:
    assert not found(that_may_say(["shell"], *EVERYWHERE), lambda node: says(node, "shell", False))


def test_sec_26_no_code_comes_with_a_model() -> None:
    assert not found(that_may_say([REMOTE_CODE], *EVERYWHERE), lambda node: says(node, REMOTE_CODE, False))


def test_sec_27_no_check_of_the_product_is_an_assertion() -> None:
    assert not found(that_may_say(["assert"], *PACKAGES), lambda node: isinstance(node, ast.Assert))


@pytest.mark.parametrize(
    ("text", "check"),
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
def test_what_is_looked_for_is_found(text: str, check: Callable[[ast.AST], bool]) -> None:
    assert any(map(check, ast.walk(ast.parse(text))))


@pytest.mark.parametrize("text", ["os . system(text)", "ｏｓ.ｓｙｓｔｅｍ(text)", "os.\\\n  system(text)"])
def test_the_words_of_a_call_are_seen_however_it_is_written(text: str) -> None:
    assert any(calls(node, CODE_MAKERS) for node in ast.walk(ast.parse(text)))
    assert may_say(text, last(CODE_MAKERS))
    assert not may_say(text, ["popen"])
