"""A real browser that opens the page and records what it must not do: contact other hosts, violate its CSP, raise."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import axe_playwright_python
from playwright.sync_api import Browser, Locator, Page, Route, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
PATIENCE_MS = 120_000.0
WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 360, "height": 700}
AXE = (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text("utf-8")


def executable(downloaded: str, names: Sequence[str] = NAMES) -> str:
    """The path of the machine's own browser, or of the one that playwright has downloaded."""
    found = next(filter(None, map(shutil.which, names)), downloaded)
    if not Path(found).exists():
        raise RuntimeError("no Chromium: `make browser` or `apt-get install chromium` installs one")
    return found


@contextlib.contextmanager
def running_browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        options = ["--no-sandbox", "--disable-gpu"]
        browser = playwright.chromium.launch(
            executable_path=executable(playwright.chromium.executable_path), args=options
        )
        try:
            yield browser
        finally:
            browser.close()


def main() -> int:
    """Start the browser: its name alone proves nothing, since it may be a stub."""
    with running_browser() as browser:
        print(browser.version)
    return 0


@dataclass
class Tab:
    """The page, as `opened` shows it."""

    page: Page
    url: str
    requested: list[str] = field(default_factory=list)
    wrongs: list[str] = field(default_factory=list)

    @property
    def answers(self) -> Locator:
        return self.page.locator(".message.assistant")

    @property
    def answer(self) -> Locator:
        """The last answer, which may be incomplete."""
        return self.answers.last

    def send(self, text: str) -> None:
        self.page.fill("#draft", text)
        self.page.press("#draft", "Enter")

    def ask(self, text: str) -> str:
        """Send a message; return the text of the complete answer."""
        before = self.answers.count()
        self.send(text)
        self.page.locator(".message.assistant:not(.busy)").nth(before).wait_for()
        return self.answer.locator(".body").inner_text()

    def set(self, **settings: str | bool) -> None:
        for name, value in settings.items():
            control = self.page.locator(f"#settings [name={name}]")
            if isinstance(value, bool):
                control.set_checked(value)
            elif name == "format":
                control.select_option(value)
            else:
                control.fill(value)

    def do(self, action: str, message: Locator) -> None:
        """Press a message's own button."""
        message.hover()
        message.get_by_role("button", name=action, exact=True).click()

    def conversations(self) -> list[Any]:
        """The stored conversations."""
        script = (
            "Object.entries(localStorage).filter(([name]) => name.startsWith('pagoda.conversation.')).map((e) => e[1])"
        )
        return [json.loads(text) for text in self.page.evaluate(script)]

    def run(self, script: str, argument: Any = None) -> Any:
        """Run `markdown.js: (m, x) => ..` with the module's exports `m` and `argument`; return its value."""
        name, _, body = script.partition(": ")
        return self.page.evaluate(f"async (x) => ({body})(await import('{self.url}/page/{name}'), x)", argument)

    def barriers(self, **options: Any) -> list[str]:
        """Accessibility violations that axe finds in the page's current state. `options` are axe's."""
        if not self.page.evaluate("'axe' in window"):
            self.page.evaluate(AXE)
        found = self.page.evaluate(
            "(options) => axe.run(document, options)", {"resultTypes": ["violations"], **options}
        )
        return [
            f"{each['id']}: {node['html']} {node['failureSummary']}"
            for each in found["violations"]
            for node in each["nodes"]
        ]

    def answer_with(self, *deltas: dict[str, Any], **last: Any) -> None:
        """Answer chat requests with these deltas from now on, as a server would stream them."""
        chunks: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
        chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]} | last)
        body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"

        def fulfil(route: Route) -> None:
            route.fulfill(body=body, content_type="text/event-stream")

        self.page.route("**/v1/chat/completions", fulfil)


@contextlib.contextmanager
def blank_page(browser: Browser, key: str = "", **options: Any) -> Iterator[Page]:
    """A new browser context with one blank page. `key` is the API key, as if typed in before."""
    context = browser.new_context(viewport=options.pop("viewport", WIDE), reduced_motion="reduce", **options)
    context.set_default_timeout(PATIENCE_MS)
    if key:
        context.add_init_script(f"sessionStorage.setItem('pagoda.key', {json.dumps(key)})")
    try:
        yield context.new_page()
    finally:
        context.close()


@contextlib.contextmanager
def open_tab(browser: Browser, url: str, key: str = "", **options: Any) -> Iterator[Tab]:
    with blank_page(browser, key, **options) as page, opened(page, url) as tab:
        yield tab


@contextlib.contextmanager
def opened(page: Page, url: str) -> Iterator[Tab]:
    """Open the page as a first-time visitor; check at the end what it did. `page` is blank before and after, and reused
    because every new one starts four browser processes."""
    tab = Tab(page, url)
    listeners: dict[Any, Callable[[Any], None]] = {
        "request": lambda request: tab.requested.append(request.url),
        "pageerror": lambda error: tab.wrongs.append(f"raised {error}"),
        "console": lambda said: tab.wrongs.append(said.text) if "Content Security Policy" in said.text else None,
    }
    for event, listener in listeners.items():
        page.on(event, listener)
    try:
        tab.page.goto(url + "/")
        tab.page.locator("#model option").first.wait_for(state="attached")
        yield tab
        wrongs = tab.wrongs + [asked for asked in tab.requested if not asked.startswith((url + "/", "data:"))]
        if wrongs:
            raise AssertionError(f"the page did what it must not: {wrongs}")
    finally:
        for event, listener in listeners.items():
            page.remove_listener(event, listener)
        _forget(page, url)


def _forget(page: Page, url: str) -> None:
    """Remove all that the page and its visitor left: mocked answers, stored data, permissions, media settings."""
    page.unroute_all()
    # A page that is left still stores that its answer broke off. This clears the storage after that, in its process.
    page.goto(f"{url}/page/icon.svg")
    page.evaluate("sessionStorage.clear(), localStorage.clear()")
    page.goto("about:blank")
    session = page.context.new_cdp_session(page)
    session.send("Storage.clearDataForOrigin", {"origin": url, "storageTypes": "all"})
    session.detach()
    page.context.clear_cookies()
    page.context.clear_permissions()
    page.emulate_media(color_scheme="light", reduced_motion="reduce")


if __name__ == "__main__":
    sys.exit(main())
