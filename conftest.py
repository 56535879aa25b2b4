"""Examples in docstrings and README run in an empty folder, and write nothing into the project."""

import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from attnflow import SaturationWarning


@pytest.fixture(autouse=True)
def _examples_run_elsewhere(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    if not isinstance(request.node, pytest.DoctestItem):
        yield
        return
    before = Path.cwd()
    os.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SaturationWarning)
        yield
    os.chdir(before)
