"""The one logging setup of every process: to standard error, plain or as one JSON object per line."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time

# Their info messages are noise to an operator.
QUIET = ("uvicorn", "httpx", "httpx2", "httpcore", "urllib3", "filelock", "asyncio")


# The logger's name for lines that no logger of ours wrote.
OUTPUT = "output"


class JsonFormatter(logging.Formatter):
    def __init__(self, process_name: str) -> None:
        super().__init__()
        self.process_name = process_name

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self.process_name,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


def as_entry(process_name: str, line: str) -> str:
    """A line of a process's plain output as one JSON object; a line that is one already stays as it is."""
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(json.loads(line), dict):
            return line
    record = logging.LogRecord(OUTPUT, logging.INFO, "", 0, line, None, None)
    return JsonFormatter(process_name).format(record)


def setup(process_name: str, level: str, as_json: bool) -> None:
    """Configure the root logger of this process."""
    handler = logging.StreamHandler(sys.stderr)
    if as_json:
        handler.setFormatter(JsonFormatter(process_name))
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(as_json)
    for name in QUIET:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))
