"""GGUF files: converted once, read from the cache afterwards, and never an error of the cache."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

import attnflow as af
from attnflow.models import load as loading
from attnflow.models.fingerprint import model_fingerprint
from tests.console import say_inside
from tests.families import build, word_tokenizer


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "cache"
    monkeypatch.setenv("ATTNFLOW_CACHE", str(place))
    return place


@pytest.fixture
def unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The GGUF files that were unpacked so far; a tiny model stands for what is in each."""
    names: list[str] = []
    read = loading.load_stored

    def load_stored(files: Any, gguf: str | None, origin: str) -> af.Model:
        if gguf is None:
            return read(files, gguf, origin)
        names.append(gguf)
        model = deepcopy(build("llama"))
        model.config.architectures, model.config.dtype = None, torch.float32  # as transformers does
        return af.Model(model, word_tokenizer(), origin=origin)

    monkeypatch.setattr(loading, "load_stored", load_stored)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "tiny.gguf").write_bytes(b"GGUF one")
    return names


def load_converting(folder: Path) -> af.Model:
    with pytest.warns(UserWarning, match="GGUF file of tiny was converted once, to 0 MB"):
        return af.load(folder)


def test_a_file_is_unpacked_once_and_then_read_as_the_same_model(
    tmp_path: Path, cache: Path, unpacked: list[str]
) -> None:
    first = load_converting(tmp_path / "tiny")
    second = af.load(tmp_path / "tiny")
    assert unpacked == ["tiny.gguf"]
    assert model_fingerprint(first) == model_fingerprint(second)
    assert (first.origin, first.task) == (second.origin, second.task) == ("tiny", "causal LM")
    text = "the key to the cabinets"
    assert first.encode(text).ids == second.encode(text).ids
    ((label, probability),) = first.predict([text])
    ((same, again),) = second.predict([text])
    assert same == label
    assert again == pytest.approx(probability, abs=1e-6)
    (tmp_path / "tiny" / "tiny.gguf").write_bytes(b"GGUF two")  # another model
    load_converting(tmp_path / "tiny")
    assert unpacked == ["tiny.gguf"] * 2
    assert len(list(cache.iterdir())) == 2  # nothing unfinished is left


def test_a_damaged_copy_is_made_again(tmp_path: Path, cache: Path, unpacked: list[str]) -> None:
    load_converting(tmp_path / "tiny")
    (weights,) = cache.rglob("model.safetensors")
    weights.write_bytes(weights.read_bytes()[:100])
    load_converting(tmp_path / "tiny")
    af.load(tmp_path / "tiny")
    assert len(unpacked) == 2


@pytest.mark.parametrize("kept", ["a file", ""])
def test_a_cache_that_cannot_be_written_is_no_error(
    kept: str, tmp_path: Path, unpacked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if kept:
        (tmp_path / kept).write_text("not a folder")
    monkeypatch.setenv("ATTNFLOW_CACHE", str(tmp_path / kept) if kept else "")
    for _ in range(2):
        loaded = af.load(tmp_path / "tiny").model
        assert torch.equal(loaded.lm_head.weight, build("llama").lm_head.weight)
    assert len(unpacked) == 2
    assert not kept or (tmp_path / kept).read_text() == "not a folder"


def test_the_command_lists_and_removes(
    tmp_path: Path,
    cache: Path,
    unpacked: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert f"no converted models in {cache}" in say_inside(monkeypatch, capsys, "cache")
    load_converting(tmp_path / "tiny")
    (cache / "mine").mkdir()
    (place,) = (each for each in cache.iterdir() if each.name != "mine")
    assert say_inside(monkeypatch, capsys, "cache") == f"{place}: 0 MB\n"
    assert say_inside(monkeypatch, capsys, "cache", "--clear").endswith("removed 1 model: 0 MB\n")
    assert [each.name for each in cache.iterdir()] == ["mine"]  # what is not attnflow's own stays
    assert "no converted models" in say_inside(monkeypatch, capsys, "cache", "--clear")
