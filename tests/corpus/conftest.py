"""The input of a small corpus."""

from pathlib import Path

import pytest

from tests.corpora import sentences, write_csv


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A file of 30 texts, one of them empty."""
    return write_csv(tmp_path / "texts.csv", [*sentences(20), "", *sentences(9, 1)])
