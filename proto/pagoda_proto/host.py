"""Which machine this is, as far as process ids are concerned: a pid means the same process only under one host id."""

from __future__ import annotations

import os
from pathlib import Path


def host_id() -> str:
    """The kernel's boot id and this process's pid namespace; "" where the system has neither (no Linux, no /proc)."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        pid_namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return ""
    return f"{boot_id}:{pid_namespace}"
