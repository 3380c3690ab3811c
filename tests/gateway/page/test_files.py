"""The page's files are small and complete, and refer only to each other and to this server."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pagoda_gateway.page import files

FILES = files.load()
FILE_LINES = 400
NAMED = re.compile(r"""(?:src|href)="([^"#]+)"|from "\./([^"]+)\"""")
SINKS = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|\.srcdoc|setHTML|createContextual"
)


def text(path: str) -> str:
    return FILES[path].body.decode()


def test_paths_are_known_before_the_files_are_read() -> None:
    assert set(FILES) == files.PATHS
    assert {"/", "/page/main.js", "/page/base.css"} <= files.PATHS


@pytest.mark.parametrize("path", sorted(FILES))
def test_a_file_is_to_be_read_at_once_and_makes_no_markup_of_texts(path: str) -> None:
    assert len(text(path).splitlines()) <= FILE_LINES
    assert not SINKS.search(text(path))


@pytest.mark.parametrize("path", sorted(FILES))
def test_what_a_file_names_is_there(path: str) -> None:
    named = {(place or f"page/{module}").removeprefix("/") for place, module in NAMED.findall(text(path))}
    assert {f"/{name}" for name in named} <= files.PATHS


def test_every_file_is_named_by_another() -> None:
    everything = "".join(map(text, FILES))
    assert {Path(path).name for path in FILES if path != "/"} <= set(re.findall(r"[\w.]+", everything))


@pytest.mark.parametrize("path", sorted(FILES))
def test_nothing_is_named_that_lies_elsewhere(path: str) -> None:
    elsewhere = re.findall(r"(?:https?:)?//[a-z][\w.-]+", re.sub(r"(?m)(^|\s)//.*$", "", text(path)))
    assert set(elsewhere) <= {"http://www.w3.org"}  # an XML namespace
