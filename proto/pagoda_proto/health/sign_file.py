"""A file whose age says that a process is well, where there is no port to ask at. It needs no key and no other process.

It says nothing of this life before it is first touched, so what an earlier one left goes at once. That was empty: what
is not is somebody else's.
"""

from __future__ import annotations

import logging
from pathlib import Path

log = logging.getLogger(__name__)


class SignFile:
    """For any thread; an empty path is none.

    Raises:
        ValueError: it cannot be made, or is something else; the message names the option that it is of.
    """

    def __init__(self, option: str, path: str) -> None:
        self._option = option
        self._path = Path(path) if path else None
        self._told = False
        if self._path is not None:
            try:
                self._path.touch()
                if not self._path.is_file() or self._path.stat().st_size:
                    raise ValueError(f"{option}: {path} is there, and is no empty file")
                self._path.unlink()
            except OSError as error:
                raise ValueError(f"{option}: {error}") from error

    def touch(self) -> None:
        """Nothing ends over a file that cannot be: it is told once."""
        if self._path is None:
            return
        try:
            self._path.touch()
        except OSError as error:
            if not self._told:
                log.warning("%s cannot be touched: %s", self._option, error)
            self._told = True
