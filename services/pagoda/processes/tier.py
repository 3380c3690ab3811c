"""How the process of one tier begins: limit of open files, settings, tie to its parent, log, status pipe."""

from __future__ import annotations

import argparse

from pagoda.processes import logs
from pagoda.processes.garbage import put_off_collections
from pagoda.processes.process import StatusPipe, allow_files, die_with_parent
from pagoda.settings.flags import given_flags
from pagoda.settings.options import ChildConfig, CommonConfig
from pagoda.settings.resolving import Settings, resolve


def begin(command: str, arguments: argparse.Namespace) -> tuple[Settings, StatusPipe]:
    """The settings of this process and the pipe for its reports.

    Raises:
        ConfigError: the settings are invalid.
    """
    put_off_collections()
    allow_files()
    settings = resolve(command, given_flags(arguments, command))
    child, common = settings.build(ChildConfig), settings.build(CommonConfig)
    die_with_parent(child.parent_pid)
    worker = settings.given.get("worker_id")
    logs.setup((worker and worker.value) or command, common.log_level, common.log_json)
    return settings, StatusPipe(child.status_fd)
