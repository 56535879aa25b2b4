"""A browser for tests of pages: opened once a module, with the network cut."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.browser import CHROMIUM, Visitor, launch

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    """Chromium; where CHROMIUM is set, tests do not skip."""
    if "CHROMIUM" not in os.environ:
        pytest.importorskip("playwright")
        if not Path(CHROMIUM).exists():
            pytest.skip(f"no browser at {CHROMIUM}; set CHROMIUM")
    with launch() as chromium:
        yield chromium


@pytest.fixture
def visit(browser: "Browser", tmp_path: Path) -> Iterator[Callable[..., "Page"]]:
    """Open a page with the network cut; anything on the console, any error, dialog or request fails the test."""
    visitor = Visitor(browser, tmp_path)
    yield visitor.visit
    complaints = visitor.complaints
    visitor.close()
    assert complaints == []
