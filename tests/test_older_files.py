"""Files and folders that version 0.3.0 wrote open, are resumed, and hold the numbers of today."""

import shutil
from pathlib import Path

import numpy as np
import pytest

import attnflow as af
from attnflow.corpus.status import verify_corpus

OLDER = Path(__file__).parent / "data" / "v03"
TEXT = "the key to the cabinets"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the corpus and of its input."""
    shutil.copytree(OLDER / "corpus", tmp_path / "corpus")
    shutil.copy(OLDER / "texts.csv", tmp_path / "texts.csv")
    return tmp_path


def test_a_folder_of_0_3_is_read_and_has_the_numbers_of_today(folder: Path) -> None:
    assert verify_corpus(folder / "corpus") == []
    rows = af.read_corpus(folder / "corpus").to_pylist()
    assert [row["prediction"] for row in rows] == ["singular", "plural", "singular"]
    found = af.explain(TEXT, methods=["rollout", "flow"], edges=["attention", "norm"])
    for name in ("rollout", "norm rollout"):
        layers = [found.results[name].at(0, layer) for layer in range(1, 7)]
        np.testing.assert_allclose(np.stack(layers), np.array(rows[0][name]), atol=1e-5)
    for name in ("flow", "norm flow"):
        np.testing.assert_allclose(found.results[name].at(0), rows[0][name][0], atol=1e-5)


def test_a_folder_of_0_3_is_resumed(folder: Path) -> None:
    before = (folder / "corpus" / "shard-00000.parquet").read_bytes()
    (folder / "corpus" / "shard-00001.parquet").unlink()
    notes: list[str] = []
    manifest = af.explain_corpus(folder / "texts.csv", folder / "corpus", report=notes.append)
    assert any("attnflow was 0.3.0 when" in note for note in notes)
    assert manifest.finished
    assert (folder / "corpus" / "shard-00000.parquet").read_bytes() == before
    assert verify_corpus(folder / "corpus") == []
    with pytest.raises(af.FileError, match=r"was begun otherwise: option methods was \['rollout'"):
        af.explain_corpus(folder / "texts.csv", folder / "corpus", methods=["raw"])


def test_attention_of_0_3_is_loaded() -> None:
    older, now = (
        af.Attention.load(OLDER / "attention.npz"),
        af.capture("verb-number", TEXT, heads=None),
    )
    assert older.tokens == now.tokens
    np.testing.assert_allclose(older.weights, now.weights, atol=1e-6)
