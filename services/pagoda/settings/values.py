"""Converts what the user wrote into an option's value."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from pagoda_proto.options import TYPE_NAMES

_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}
_WHOLE = re.compile(r"[+-]?[0-9]{1,100}")


def convert(value: Any, type_: Any) -> Any:
    """Convert a value to the option's type: parses text from flags and environment; anything else must already fit.

    Raises:
        ValueError: it does not fit; the message states rule and value.
    """
    if isinstance(value, str) and type_ is bool:
        value = {**dict.fromkeys(_TRUE, True), **dict.fromkeys(_FALSE, False)}.get(value.lower(), value)
    if isinstance(value, str) and type_ is int and _WHOLE.fullmatch(value):
        return int(value)  # of any size; the option's rule checks whether it is too large
    try:
        return msgspec.convert(value, type_, strict=not isinstance(value, str))
    except msgspec.ValidationError:
        raise ValueError(f"must be {TYPE_NAMES.get(type_, str(type_))}, got {value!r:.100}") from None
