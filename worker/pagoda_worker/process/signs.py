"""Files whose age says how a worker is, for whoever cannot ask a process without a port.

`alive_file` is touched while the process works, whether or not an engine core knows it: starting it anew would help
nothing that the engine core lacks. `ready_file` is touched at every acknowledged beat. Neither says anything before the
model is loaded, so what an earlier life left is removed first.
"""

from __future__ import annotations

import logging
from pathlib import Path

log = logging.getLogger(__name__)


class Signs:
    """Each may be empty: there is no such file then."""

    def __init__(self, alive_file: str = "", ready_file: str = "") -> None:
        self._files = {"alive_file": alive_file, "ready_file": ready_file}
        self._told = False

    def clear(self) -> None:
        """Raises ValueError for a file that cannot be made."""
        for option, path in self._files.items():
            if path:
                try:
                    Path(path).touch()
                    Path(path).unlink()
                except OSError as error:
                    raise ValueError(f"{option}: {error}") from error

    def alive(self) -> None:
        self._touch("alive_file")

    def ready(self) -> None:
        self._touch("ready_file")

    def _touch(self, option: str) -> None:
        if not (path := self._files[option]):
            return
        try:
            Path(path).touch()
        except OSError as error:
            if not self._told:
                log.warning("%s cannot be touched: %s", option, error)
            self._told = True
