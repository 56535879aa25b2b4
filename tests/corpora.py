"""Texts and files of them for tests of corpora, and what a corpus folder holds."""

import os
import random
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import attnflow as af

if TYPE_CHECKING:
    import pyarrow

WORDS = [
    "the",
    "key",
    "keys",
    "to",
    "old",
    "cabinets",
    "house",
    "man",
    "of",
    "with",
    "dogs",
    "in",
    "near",
    "zorbs",
]


def sentences(count: int, seed: int = 0) -> list[str]:
    """Random words, 2 to 12 of them."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(2, 12))) for _ in range(count)]


def write_csv(path: Path, texts: list[str]) -> Path:
    """Write texts without commas as a file of one column."""
    path.write_text("text\n" + "".join(f"{text}\n" for text in texts))
    return path


def table(out: Path) -> "pyarrow.Table":
    """The results of a corpus."""
    return af.read_corpus(out)


def errors(out: Path) -> list[dict[str, Any]]:
    """The rows of a finished corpus that have no result."""
    import pyarrow.parquet as pq

    found: list[dict[str, Any]] = pq.read_table(out / "errors.parquet").to_pylist()
    return found


def command(*arguments: object) -> list[str]:
    """`attnflow corpus` with these arguments, in a process of its own."""
    return [sys.executable, "-m", "attnflow", "corpus", *map(str, arguments)]


def is_gone(group: int) -> bool:
    """Whether all processes of a group end within ten seconds."""
    for _ in range(200):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def assert_refused(options: dict[str, Any], message: str, folder: Path) -> None:
    """Wrong options are an error of one line, before the input is opened; no manifest is written."""
    with pytest.raises(af.AttnFlowError) as error:
        af.explain_corpus(folder / "nowhere.csv", folder / "out", **options)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert not (folder / "out" / "manifest.json").exists()
