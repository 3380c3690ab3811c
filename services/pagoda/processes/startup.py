"""What `pagoda serve` shows while it starts: progress on a terminal, plain lines elsewhere, then how to use it."""

from __future__ import annotations

import logging
import sys
import time

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn
from rich.text import Text

from pagoda.processes.logs import as_entry
from pagoda_gateway.config import GatewayConfig
from pagoda_proto.pooling.kinds import CLASSIFY, EMBED, GENERATE

MIB = 1024**2
LOG_EVERY_S = 5.0

log = logging.getLogger(__name__)

_COLOURS = {"gateway": "cyan", "engine-core": "magenta"}
_WORKER_COLOURS = ("green", "yellow", "blue", "bright_cyan")


def announcement(url: str, gateway: GatewayConfig, seconds: float, locked: bool, kind: str = GENERATE) -> str:
    """The text printed once requests can be served; `locked`: they need an API key. `kind` is the model's."""
    model = gateway.model_names[0]
    header = ' -H "authorization: Bearer $PAGODA_API_KEY"' if locked else ""
    key = 'os.environ["PAGODA_API_KEY"]' if locked else '"none"'
    path, body, lines = _EXAMPLES[kind]
    curl = f"  curl {url}{path} -H 'content-type: application/json'{header} \\\n    -d '{body % model}'\n"
    code = f'\n  from openai import OpenAI\n  client = OpenAI(base_url="{url}/v1", api_key={key})\n{lines % model}'
    return f"\nPagoda serves {model} at {url} (ready in {seconds:.1f} s)\n\n{curl}{code if kind != CLASSIFY else ''}"


# By kind of model: a path, a body, and lines of a program that uses the client.
_EXAMPLES = {
    GENERATE: (
        "/v1/chat/completions",
        '{"model": "%s", "messages": [{"role": "user", "content": "Hello!"}]}',
        '  answer = client.chat.completions.create(model="%s", messages=[{"role": "user", "content": "Hello!"}])\n'
        "  print(answer.choices[0].message.content)\n",
    ),
    EMBED: (
        "/v1/embeddings",
        '{"model": "%s", "input": ["Hello!"]}',
        '  answer = client.embeddings.create(model="%s", input=["Hello!"])\n  print(answer.data[0].embedding)\n',
    ),
    CLASSIFY: ("/rerank", '{"model": "%s", "query": "What is red?", "documents": ["Roses.", "Violets."]}', "%.0s"),
}


def announce(text: str, as_json: bool) -> None:
    """Print all of it on standard output, or log its first line if `as_json`."""
    if as_json:
        log.info("%s", text.strip().partition("\n")[0])
    else:
        print(text, flush=True)


class StartupView:
    """Prints the children's lines, prefixed by their names or as JSON, and draws loading progress on a terminal."""

    def __init__(self, *, as_json: bool) -> None:
        self._console = Console(file=sys.stderr, highlight=False, soft_wrap=True)
        self._as_json = as_json
        self._plain = as_json or not self._console.is_terminal
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(),
            console=self._console, transient=True,
        )  # fmt: skip
        self._tasks: dict[str, TaskID] = {}
        self._logged_at: dict[str, float] = {}

    def on_line(self, child: str, line: str) -> None:
        if self._plain:
            print(as_entry(child, line) if self._as_json else f"[{child}] {line}", file=sys.stderr, flush=True)
        else:
            tier = child.rstrip("-0123456789")
            colour = _COLOURS.get(tier) or _WORKER_COLOURS[sum(child.encode()) % len(_WORKER_COLOURS)]
            self._console.print(Text.assemble((f"[{child}] ", colour), Text.from_ansi(line)))

    def loading(self, child: str, num_bytes: int, of: int, what: str = "loading weights") -> None:
        """Show how much of a worker's weights is loaded."""
        if self._plain:
            self._log_loading(child, num_bytes, of, what)
            return
        if child not in self._tasks:
            if not self._tasks:
                self._progress.start()
            self._tasks[child] = self._progress.add_task(escape(f"[{child}] {what}"), total=of)
        self._progress.update(self._tasks[child], completed=num_bytes, total=of)

    def _log_loading(self, child: str, num_bytes: int, of: int, what: str) -> None:
        now = time.monotonic()
        if now - self._logged_at.setdefault(child, now) >= LOG_EVERY_S:
            self._logged_at[child] = now
            log.info("%s: %s, %d of %d MiB", child, what, num_bytes // MIB, of // MIB)

    def recording(self, child: str, graphs: int, of: int) -> None:
        """Show how many decode steps a worker has recorded on its device."""
        now = time.monotonic()
        if child in self._tasks:
            text = escape(f"[{child}] recording decode graphs, {graphs} of {of}")
            self._progress.update(self._tasks[child], description=text)
        elif graphs == of or now - self._logged_at.get(child, 0.0) >= LOG_EVERY_S:
            self._logged_at[child] = now
            log.info("%s: recorded %d of %d decode graphs", child, graphs, of)

    def loaded(self, child: str) -> None:
        task = self._tasks.pop(child, None)
        if task is not None:
            self._progress.remove_task(task)
            if not self._tasks:
                self._progress.stop()

    def announce(self, text: str) -> None:
        for child in list(self._tasks):
            self.loaded(child)
        announce(text, self._as_json)

    def close(self) -> None:
        if self._tasks:
            self._progress.stop()
