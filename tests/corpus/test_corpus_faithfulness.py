"""Faithfulness of stored scores equals that of `evaluate`; and what a corpus cannot give."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyarrow")

import attnflow as af
from attnflow.corpus.scores import evaluate_corpus
from tests.console import inside
from tests.families import build, word_tokenizer

ROWS = [
    ("the key to the cabinets", "singular"),
    ("the old keys", "plural"),
    ("the men near the house", "plural"),
    ("keys", "plural"),
]
METRICS = ["comprehensiveness", "deletion", "normalised_sufficiency"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpora")
    lines = ["text\tlabel", *("\t".join(row) for row in ROWS)]
    (folder / "texts.tsv").write_text("\n".join(lines) + "\n")
    af.explain_corpus(
        folder / "texts.tsv",
        folder / "out",
        label_column="label",
        methods=["raw", "rollout"],
        layers=[2, 6],
        importance=["blank_out"],
    )
    return folder / "out"


def test_stored_scores_are_as_faithful_as_those_of_evaluate(corpus: Path) -> None:
    options: dict[str, Any] = {
        "faithfulness": METRICS,
        "replacement": ["unknown", "removal"],
        "best": True,
    }
    stored = evaluate_corpus(corpus, statistic="kendall", **options)
    fresh = af.evaluate(
        af.load("verb-number"),
        ROWS,
        methods=["raw", "rollout"],
        layers=[2, 6],
        against="blank_out",
        statistic="kendall",
        **options,
    )
    for (metric, way, method), values in stored.measured.items():
        expected = fresh.values(method, metric, way)
        np.testing.assert_allclose(values, expected, atol=1e-5, equal_nan=True)
    assert {method for _, _, method in stored.measured} == {
        "raw",
        "rollout",
        "random order",
        "best found",
    }
    row = next(row for row in stored.rows() if row[:3] == ("deletion", "rollout", 6))
    assert row[7:] == (4, 1, "unknown")
    assert "lower is better: deletion" in stored.to_markdown()
    assert stored.to_pandas().columns.tolist()[-1] == "replacement"
    assert evaluate_corpus(corpus).to_pandas().columns.tolist()[-1] == "undefined"


def test_the_command_measures_a_corpus(
    corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--faithfulness", "deletion", "--limit", "2", "--undefined", "zero"]
    for command in (["corpus", "evaluate", str(corpus)], ["evaluate", str(corpus)]):
        assert inside(monkeypatch, *command, *options) == 0
        shown = capsys.readouterr().out
        assert "| deletion | random order |" in shown
        assert "undefined correlations count as 0" in shown
    assert inside(monkeypatch, "evaluate", corpus, "--differences") != 0
    assert "--differences is for texts in a file" in capsys.readouterr().err


def test_another_model_is_refused_and_a_loaded_one_must_be_given(tmp_path: Path) -> None:
    model = af.Model(build("distilbert"), word_tokenizer())
    (tmp_path / "texts.tsv").write_text("text\nthe key is here\nthe lost key\n")
    af.explain_corpus(tmp_path / "texts.tsv", tmp_path / "out", model=model, methods="rollout")
    with pytest.raises(
        af.OptionError,
        match=r"a loaded one, a DistilBert.*give it as model .*corpus evaluate --model",
    ):
        evaluate_corpus(tmp_path / "out", faithfulness="deletion")
    with pytest.raises(af.FileError, match="VerbNumber has other weights"):
        evaluate_corpus(tmp_path / "out", faithfulness="deletion", model="verb-number")
    found = evaluate_corpus(tmp_path / "out", faithfulness="deletion", model=model)
    assert {row[0] for row in found.rows()} == {"deletion"}
    with pytest.raises(af.OptionError, match="holds no importance"):
        evaluate_corpus(tmp_path / "out")


def test_the_command_takes_the_model_of_a_corpus_that_was_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = af.Model(build("distilbert"), word_tokenizer())
    model.model.save_pretrained(tmp_path / "model")
    model.tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "texts.tsv").write_text("text\nthe key is here\nthe lost key\n")
    loaded = af.load(tmp_path / "model")
    given = af.Model(loaded.model, loaded.tokenizer)  # known by its class alone
    af.explain_corpus(tmp_path / "texts.tsv", tmp_path / "out", model=given, methods="rollout")
    command = ("corpus", "evaluate", tmp_path / "out", "--faithfulness", "deletion")
    capsys.readouterr()  # transformers' bars
    assert inside(monkeypatch, *command) != 0
    shown = capsys.readouterr().err.strip()
    assert "--model" in shown
    assert "\n" not in shown
    assert inside(monkeypatch, *command, "--model", tmp_path / "model") == 0
    assert "| deletion | rollout |" in capsys.readouterr().out
    assert inside(monkeypatch, *command, "--model", "verb-number") != 0
    assert "has other weights or another tokenizer" in capsys.readouterr().err
