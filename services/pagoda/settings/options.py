"""The options that belong to no tier: those of `pagoda serve` itself, of a process's log, and of a supervised child."""

from __future__ import annotations

from dataclasses import dataclass

from pagoda_proto.options import check, option

LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, kw_only=True)
class CommonConfig:
    config: str = option("", "YAML file with options, keyed by their names")
    log_level: str = option("info", "least severe messages to log: debug, info, warning or error", words=LOG_LEVELS)
    log_json: bool = option(False, "log one JSON object per line")

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    workers: int = option(
        1,
        "worker processes to start; they share this machine's cores, and each takes a GPU of its own",
        least=1,
        most=64,
    )
    data_dir: str = option("", "directory for run-time files (sockets); empty: the user's runtime directory")

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True)
class ModelSourceConfig:
    revision: str = option("", "branch, tag or commit of a hub model; empty: the default branch")


@dataclass(frozen=True, kw_only=True)
class ChildConfig:
    """Set by the supervisor, not by people."""

    status_fd: int = option(-1, "file descriptor for status events, one JSON object per line; -1: none", least=-1)
    parent_pid: int = option(0, "exit when this parent process is gone; 0: never")
    listen_fd: int = option(
        -1, "bound socket for the gateway to listen on, instead of host and port; -1: none", least=-1
    )

    def __post_init__(self) -> None:
        check(self)
