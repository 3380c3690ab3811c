"""`pagoda version`: the versions of the program and of its main dependencies."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform

PACKAGES = ("torch", "transformers", "tokenizers", "grpcio", "pyzmq", "msgspec", "fastapi", "uvicorn")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`version` takes no arguments."""


def main(arguments: argparse.Namespace) -> int:
    print(f"pagoda {version_of('pagoda-serve')}")
    print(f"python {platform.python_version()}, {platform.platform()}")
    for package in PACKAGES:
        print(f"{package} {version_of(package)}")
    return 0


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
