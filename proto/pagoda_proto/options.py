"""How a configuration field carries its own documentation: flags, environment, YAML and docs all read it from here."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def option(default: Any, help: str) -> Any:
    """A dataclass field with a default and one line of help."""
    return field(default=default, metadata={"help": help})
