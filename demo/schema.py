"""Shared types of the data generators, and the held-out rule."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
Tool = dict[str, Any]

HELD_OUT_SHARE = 16  # one key in this many is kept for evaluation


@dataclass(frozen=True)
class Exchange:
    """One or more turns that belong together; the last one is the assistant's.

    `key` identifies the content for the train/held-out split. It is empty where the space
    is too small to hold anything out (a capital that was never seen cannot be known).
    """

    task: str
    key: str
    turns: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()


@dataclass(frozen=True)
class Example:
    """A conversation, and the assistant turn that should follow it."""

    messages: list[Message]
    answer: Message
    task: str
    tools: list[Tool] = field(default_factory=list)


def is_held_out(key: str) -> bool:
    """Whether content with this key is for evaluation only (same answer on every machine)."""
    if not key:
        return False
    return hashlib.sha256(key.encode()).digest()[0] % HELD_OUT_SHARE == 0


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}
