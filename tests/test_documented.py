"""Documents refer only to what exists; those about faults list every number once, with tests that exist."""

from __future__ import annotations

import ast
import fnmatch
import functools
import re
from pathlib import Path

import pytest
from tests.test_house_rules import PACKAGES, ROOT, name, python_files

PLACES = ("bench", "demo", "deploy", "docs", "services", "tests")
SOURCES = ("py", "h", "cpp", "proto")
OTHERS_FILES = {"convert_hf_to_gguf.py"}  # llama.cpp's
DOCUMENTS = [*ROOT.glob("*.md"), *(path for place in PLACES for path in (ROOT / place).rglob("*.md"))]
NUMBERS = {
    "docs/security.md": [f"SEC-{number:02}" for number in range(1, 34)],
    "docs/reliability.md": [f"F{number:02}" for number in range(1, 71)],
}


@functools.cache
def headings(document: Path) -> set[str]:
    """The anchors of a document's headings."""
    lines = re.findall(r"^#+ (.*)$", document.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_links_lead_somewhere(document: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", document.read_text(encoding="utf-8")):
        path, _, heading = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), link
        assert not heading or heading in headings(target), link


@functools.cache
def source_files() -> list[str]:
    found = (path for place in (*PACKAGES, *PLACES) for kind in SOURCES for path in (ROOT / place).rglob(f"*.{kind}"))
    return [f"/{name(path)}" for path in found]


@pytest.mark.parametrize("document", DOCUMENTS, ids=name)
def test_files_of_code_that_are_named_are_there(document: Path) -> None:
    """A file is named by its path or the end of it; `...` may stand for the directories in between."""
    told = re.findall(r"`([^`\n]+)`", document.read_text(encoding="utf-8"))
    named = {path for words in told for path in re.findall(rf"[\w./-]+\.(?:{'|'.join(SOURCES)})\b", words)}
    missing = [path for path in named - OTHERS_FILES if not _is_there(path)]
    assert not missing


def _is_there(path: str) -> bool:
    return bool(fnmatch.filter(source_files(), f"*/{path.replace('...', '*')}"))


def rows(document: str) -> list[tuple[str, str, str, str]]:
    """The table's rows: number, two text columns, and the column that names tests."""
    return re.findall(r"^\| ((?:SEC-|F)\d\d) \| (.*) \| (.*) \| ?(.*) ?\|$", (ROOT / document).read_text(), re.M)


@functools.cache
def known() -> set[str]:
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in python_files("tests"))
    functions = (
        node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return {function.name for function in functions if function.name.startswith("test_")}


@pytest.mark.parametrize("document", NUMBERS)
def test_every_number_has_its_row(document: str) -> None:
    assert [row[0] for row in rows(document)] == NUMBERS[document]


@pytest.mark.parametrize("row", [row for document in NUMBERS for row in rows(document)], ids=lambda row: row[0])
def test_a_row_names_tests_that_exist_or_says_why_not(row: tuple[str, str, str, str]) -> None:
    patterns = re.findall(r"`(test_\w+\*?)`", row[3])
    assert patterns or any(words.startswith("Not yet: ") for words in row[1:3])
    missing = [pattern for pattern in patterns if not fnmatch.filter(known(), pattern)]
    assert not missing


def test_every_test_with_a_number_belongs_to_a_row() -> None:
    numbers = {f"SEC-{match[1]}" for name in known() if (match := re.match(r"test_sec_(\d\d)_", name))}
    assert numbers <= set(NUMBERS["docs/security.md"])
