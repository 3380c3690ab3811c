"""docs/security.md names every requirement once, and tests that exist."""

from __future__ import annotations

import ast
import fnmatch
import functools
import re

import pytest
from tests.test_house_rules import ROOT, python_files

NUMBER = 32
ROWS = re.findall(r"^\| (SEC-\d\d) \| (.*) \| (.*) \| (.*) \|$", (ROOT / "docs/security.md").read_text(), re.M)


@functools.cache
def known() -> set[str]:
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in python_files("tests"))
    functions = (
        node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return {function.name for function in functions if function.name.startswith("test_")}


def test_every_requirement_has_its_row() -> None:
    assert [row[0] for row in ROWS] == [f"SEC-{number:02}" for number in range(1, NUMBER + 1)]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_row_names_tests_that_exist_or_says_why_not(row: tuple[str, str, str, str]) -> None:
    _, holds, _, named = row
    patterns = re.findall(r"`(test_\w+\*?)`", named)
    assert patterns or holds.startswith("Not yet: ")
    missing = [pattern for pattern in patterns if not fnmatch.filter(known(), pattern)]
    assert not missing


def test_every_test_with_a_number_belongs_to_a_row() -> None:
    numbers = {f"SEC-{match[1]}" for name in known() if (match := re.match(r"test_sec_(\d\d)_", name))}
    assert numbers <= {row[0] for row in ROWS}
