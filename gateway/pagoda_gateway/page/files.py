"""The page's files: a fixed set, read once. A path is looked up among them and never becomes a file name."""

from __future__ import annotations

import hashlib
from importlib import resources
from typing import NamedTuple

INDEX = "index.html"
PLACE = "/page/"  # of all files but the index
_MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


class PageFile(NamedTuple):
    body: bytes
    media_type: str
    etag: str


def path_of(name: str) -> str:
    return "/" if name == INDEX else PLACE + name


def _names() -> list[str]:
    return [entry.name for entry in resources.files(__package__).iterdir() if _suffix(entry.name) in _MEDIA_TYPES]


def _suffix(name: str) -> str:
    return name[name.rfind(".") :]


PATHS = frozenset(map(path_of, _names()))


def load() -> dict[str, PageFile]:
    """Return all files by path."""
    place = resources.files(__package__)
    return {path_of(name): _read((place / name).read_bytes(), name) for name in _names()}


def _read(body: bytes, name: str) -> PageFile:
    return PageFile(body, _MEDIA_TYPES[_suffix(name)], f'"{hashlib.sha256(body).hexdigest()[:32]}"')
