"""A file whose age shows that a process is healthy, if it has no port to query. It needs no key and no other process.

A file left by an earlier life is deleted at once, so that it cannot vouch for this one. It must be empty: any other
file belongs to someone else.
"""

from __future__ import annotations

import logging
from pathlib import Path

log = logging.getLogger(__name__)


class SignFile:
    """For any thread; an empty path means no file.

    Raises:
        ValueError: the file cannot be created, or something else is there; the message names the option.
    """

    def __init__(self, option: str, path: str) -> None:
        self._option = option
        self._path = Path(path) if path else None
        self._told = False
        if self._path is not None:
            try:
                self._path.touch()
                if not self._path.is_file() or self._path.stat().st_size:
                    raise ValueError(f"{option}: {path} exists and is not an empty file")
                self._path.unlink()
            except OSError as error:
                raise ValueError(f"{option}: {error}") from error

    def touch(self) -> None:
        """Touch the file. A failure is only logged, once."""
        if self._path is None:
            return
        try:
            self._path.touch()
        except OSError as error:
            if not self._told:
                log.warning("%s cannot be touched: %s", self._option, error)
            self._told = True
