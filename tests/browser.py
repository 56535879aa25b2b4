"""Chromium for pages, with the network cut: what a page says, raises or asks for is noted."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@contextmanager
def launch() -> Iterator["Browser"]:
    """A browser for as long as the block lasts."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield chromium
        chromium.close()


class Visitor:
    """Opens pages; anything on the console, any error, dialog or request is a complaint."""

    def __init__(self, browser: "Browser", folder: Path) -> None:
        self.browser, self.folder = browser, folder
        self.contexts: list[Any] = []
        self.complaints: list[str] = []

    def visit(self, html: str, *, width: int = 1100, scheme: Any = "light") -> "Page":
        """Open a page, and wait until it says that it is ready."""
        context = self.browser.new_context(
            viewport={"width": width, "height": 800}, color_scheme=scheme, offline=True
        )
        context.set_default_timeout(10_000)
        self.contexts.append(context)
        path = self.folder / f"page{len(self.contexts)}.html"
        path.write_text(html, encoding="utf-8")
        address = path.as_uri()

        def only_itself(route: Any) -> None:
            if route.request.url.split("#")[0] == address:
                route.continue_()
            else:
                self.complaints.append(f"request: {route.request.url}")
                route.abort()

        def refuse(dialog: Any) -> None:
            self.complaints.append(f"dialog: {dialog.message}")
            dialog.dismiss()

        context.route("**/*", only_itself)
        tab = context.new_page()
        tab.on("console", lambda message: self.complaints.append(f"console: {message.text}"))
        tab.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        tab.on("dialog", refuse)
        tab.goto(address)
        if "<iframe" not in html:
            tab.wait_for_selector("body[data-ready]")
        return tab

    def close(self) -> None:
        """Close all pages, and forget what they did."""
        for context in self.contexts:
            context.close()
        self.contexts, self.complaints = [], []
