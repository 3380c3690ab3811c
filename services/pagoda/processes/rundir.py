"""The private directory for a run's sockets: mode 0700, short enough for a socket path, removed after a crash.

A run holds a lock on its directory for as long as it lives; a directory whose lock is free belongs to a run that died.
The lock file gets its name only once the lock is held.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pagoda.settings.problems import ConfigError
from pagoda.settings.resolving import environment_value

PREFIX = "pagoda-"
LONGEST = 107 - len("/pagoda-12345678/work-63.sock")  # a Unix socket's path has at most 107 bytes


@contextlib.contextmanager
def runtime_dir(data_dir: str) -> Iterator[Path]:
    """A fresh directory, removed afterwards.

    Args:
        data_dir: Where the operator wants run-time files; "" takes XDG_RUNTIME_DIR or the temporary directory.

    Raises:
        ConfigError: the directory cannot be used.
    """
    base = base_directory(data_dir)
    try:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        _sweep(base)
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
    except OSError as error:
        raise ConfigError([f"data_dir: cannot create a runtime directory in {base}: {error}"]) from error
    lock = os.open(path / "lock.new", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.rename(path / "lock.new", path / "lock")
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def base_directory(data_dir: str) -> Path:
    """Where `runtime_dir` makes its directory. Raises ConfigError if no socket can be there."""
    if data_dir:
        base = Path(data_dir).expanduser().absolute()
        if problem := _problem(str(base)):
            raise ConfigError([f"data_dir {problem}"])
        return base
    runtime = environment_value("XDG_RUNTIME_DIR")
    usable = runtime and not _problem(runtime) and os.access(runtime, os.W_OK | os.X_OK)
    return Path(runtime if usable else tempfile.gettempdir())


def _problem(base: str) -> str:
    """Why no socket can be in this directory; "" if one can."""
    if len(os.fsencode(base)) > LONGEST:
        return f"must be shorter: {base} leaves no room for a socket's name (107 bytes)"
    return f"must not contain a comma, which separates addresses: {base}" if "," in base else ""


def _sweep(base: Path) -> None:
    for path in base.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            lock = os.open(path / "lock", os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
