"""`explain`: its parts are those that the functions give one by one, for every kind of model; its files; what it refuses."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import attnflow as af
from attnflow.models.wiring.find import find_wirings
from tests.families import build, word_tokenizer

TEXT = "the key to the cabinets"


def test_an_explanation_holds_what_the_functions_give() -> None:
    found = af.explain(TEXT)
    model = af.load("verb-number")
    attention = af.capture(model, TEXT)
    assert found.prediction == pytest.approx(model.predict([TEXT])[0])
    assert (found.position, found.tokens, found.special) == (
        0,
        attention.tokens,
        (True, *[False] * 5),
    )
    for name, method in af.METHODS.items():
        np.testing.assert_allclose(
            found.results[name].values, method(attention, layers=range(1, 7)).values, atol=1e-6
        )
    np.testing.assert_allclose(
        found.importance["blank_out"].values, af.blank_out(model, TEXT).values, atol=1e-6
    )
    np.testing.assert_allclose(
        found.importance["input_gradient"].values, af.input_gradient(model, TEXT).values, atol=1e-5
    )
    assert found.importance["blank_out"].tokens == found.tokens
    assert repr(found).startswith("<Explanation: 6 tokens, position 0 of VerbNumber")


def test_scores_are_rows_of_one_layer_by_token_or_by_word() -> None:
    tokenizer = word_tokenizer()
    found = af.explain(
        "the lost key", model=af.Model(build("distilbert"), tokenizer), importance="blank_out"
    )
    scores = found.scores(layer=2)
    assert list(scores) == ["relevance flow", "raw", "rollout", "flow", "blank_out"]
    np.testing.assert_array_equal(scores["flow"][1], found.flow.at(0, 2))
    words = found.scores(layer=2, by_word=True)
    assert words["raw"][0] == words["flow"][0] == ("[CLS]", "the", "lost", "key", "[SEP]")
    exact = af.flow(found.attention, layers=[2], positions=[0], groups="words").at(0)
    np.testing.assert_array_equal(words["flow"][1], exact)


@pytest.mark.parametrize(
    ("family", "value", "position", "importances"),
    [
        ("distilbert", "the lost key", 0, 2),
        ("bert", "the lost key", 0, 0),  # predicts nothing
        ("modernbert", "the [MASK] key", 2, 2),
        ("llama", "the lost key", 4, 2),
        ("electra", "the lost key", 0, 2),
        ("vit", torch.zeros(3, 24, 24), 0, 0),
        ("t5", "the lost key", 5, 0),
    ],
)
def test_every_kind_of_model_is_explained_at_its_focal_position(
    family: str, value: Any, position: int, importances: int
) -> None:
    found = af.explain(
        value, model=af.Model(build(family), None if family == "vit" else word_tokenizer())
    )
    assert (found.position, len(found.importance)) == (position, importances)
    assert (found.prediction is None) == (family == "bert")
    assert len(found.special) == len(found.tokens) == found.rollout.values.shape[2]
    assert found.flow.at(found.position).sum() == pytest.approx(1.0)


def test_beyond_64_tokens_flow_is_given_for_the_focal_position_alone() -> None:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 8,
        "vocab_size": 90,
    }
    model = BertForSequenceClassification(BertConfig(**sizes))
    found = af.explain(list(range(5, 75)), model=model, importance=())
    assert (found.flow.positions, found.flow.layers, len(found.rollout.positions)) == (
        (0,),
        (1, 2),
        70,
    )
    assert af.explain(list(range(5, 60)), model=model, importance=()).flow.values.shape == (
        2,
        55,
        55,
    )


def test_another_position_target_and_residual() -> None:
    found = af.explain(TEXT, position=2, target="plural", residual=0.3)
    graph = af.capture(af.load("verb-number"), TEXT).graph(residual=0.3)
    np.testing.assert_allclose(
        found.scores()["rollout"][1], af.rollout(graph).at(position=2), atol=1e-6
    )
    assert {each.target for each in found.importance.values()} == {"plural"}


def test_weights_are_explained_at_their_first_position_or_at_the_last_if_causal() -> None:
    weights = np.random.default_rng(0).dirichlet(np.ones(4), (2, 4))  # [layer, query, key]
    causal = np.tril(weights) / np.tril(weights).sum(axis=-1, keepdims=True)
    options: dict[str, Any] = {"methods": ["rollout"]}
    assert af.explain(af.Attention(weights), **options).position == 0
    assert af.explain(af.Attention(weights), without=[0], **options).position == 1
    assert af.explain(af.Attention(causal), **options).position == 3
    assert af.explain(af.Attention(causal), without=[3], **options).position == 2


def test_an_explanation_and_a_generation_show_themselves_in_a_notebook() -> None:
    story = af.generate(build("gpt2"), [5, 6, 7], max_new_tokens=2, eos_token_id=None)
    for shown in (af.explain(TEXT)._repr_html_(), story._repr_html_()):
        assert shown.startswith('<iframe title="attnflow" srcdoc="&lt;!doctype html&gt;')
    with pytest.raises(
        af.FileError, match=r"the ending must be one of \.html, \.png, \.svg, \.pdf, .*; got \.xls"
    ):
        story.save("x.xls")


@pytest.mark.parametrize("ending", [".csv", ".json", ".npz"])
def test_saved_files_hold_the_explained_row(ending: str, tmp_path: Path) -> None:
    found = af.explain(TEXT)
    path = found.save(tmp_path / f"x{ending}")
    expected = found.rollout.at(0, 4)
    if ending == ".csv":
        rows = [
            row
            for row in csv.DictReader(path.read_text().splitlines())
            if (row["method"], row["layer"]) == ("rollout", "4")
        ]
        values = [float(row["value"]) for row in rows]
        assert [row["token"] for row in rows] == list(found.tokens)
    elif ending == ".json":
        content = json.loads(path.read_text())
        values = content["rollout"]["values"][3]
        assert content["prediction"][0] == found.prediction[0] if found.prediction else None
        assert len(content["blank_out"]["values"]) == 6
    else:
        with np.load(path) as arrays:
            values = arrays["rollout"][3].tolist()
            assert arrays["input_gradient"].shape == (6,)
    np.testing.assert_allclose(values, expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"importance": "saliency"},
            "unknown importance 'saliency'; choose from blank_out, input_gradient",
        ),
        ({"position": 6}, "position must be from 0 to 5; got 6"),
        ({"target": "dual"}, "unknown target 'dual'; choose from singular, plural"),
        ({"model": "no-such-folder-or-model"}, "cannot load no-such-folder-or-model"),
        ({"model": 7}, "Model takes a Hugging Face model, or a module that holds one; got int"),
        ({"residual": 1.0}, "residual"),
    ],
)
def test_bad_options_are_one_clear_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(af.AttnFlowError) as error:
        af.explain(TEXT, **options)
    assert message in str(error.value)
    with pytest.raises(af.FileError, match=r"the ending must be one of"):
        af.explain(TEXT, importance=()).save("x.doc")


@pytest.mark.parametrize("way", ["explain", "evaluate", "corpus"])
def test_an_input_is_tokenised_once_and_runs_once_beside_what_importance_needs(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One pass for attention and prediction; on top only blank-out's variants and the gradient."""
    text, model = "the keys to the old house", af.load()
    model.is_causal  # noqa: B018  # asked once per model
    find_wirings(model)  # likewise
    calls: dict[str, list[int]] = {"tokenizer": [], "passes": []}
    tokenize, forward = type(model.tokenizer).__call__, type(model.model).forward

    def count_tokens(self: Any, *given: Any, **options: Any) -> Any:
        calls["tokenizer"].append(1)
        return tokenize(self, *given, **options)

    def count_passes(self: Any, input_ids: Any, *given: Any, **options: Any) -> Any:
        calls["passes"].append(len(input_ids))
        return forward(self, input_ids, *given, **options)

    monkeypatch.setattr(type(model.tokenizer), "__call__", count_tokens)
    monkeypatch.setattr(type(model.model), "forward", count_passes)
    if way == "explain":
        names = list(af.explain(text, model=model).results)
        assert names == ["relevance flow", "raw", "rollout", "flow"]
    elif way == "evaluate":
        af.evaluate(model, [text])
    else:
        path = tmp_path / "texts.csv"
        path.write_text(f"text\n{text}\n")
        monkeypatch.setattr("attnflow.corpus.explain_corpus.plan_job", planned(model))
        importance = ["blank_out", "input_gradient"]
        calls.update(tokenizer=[], passes=[])
        af.explain_corpus(path, tmp_path / "out", model=model, importance=importance)
    assert len(calls["tokenizer"]) == 1
    size = len(model.encode(text).tokens)
    # the forward pass of the edges that come first gives the input gradient too; then the input,
    # and its variants in one batch
    assert calls["passes"] == [1, 1, size]


@pytest.mark.parametrize("edges", ["attention", "gradient", "relevance", "relevance_and_gradient"])
def test_edges_and_importances_share_one_forward_pass_with_gradients(
    edges: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, model = "the keys to the old house", af.load()
    alone = {
        "input_gradient": af.input_gradient(model, text).values,
        "relevance": af.relevance(model, text).values,
    }
    find_wirings(model)  # asked once per model
    passes: list[bool] = []
    forward = type(model.model).forward

    def count_passes(self: Any, *given: Any, **options: Any) -> Any:
        passes.append(torch.is_grad_enabled())
        return forward(self, *given, **options)

    monkeypatch.setattr(type(model.model), "forward", count_passes)
    found = af.explain(text, model=model, edges=edges, importance=list(alone))
    assert sorted(passes) == [False, True]
    for name, values in alone.items():
        np.testing.assert_allclose(found.importance[name].values, values, atol=1e-6)


def planned(model: af.Model) -> Any:
    """A job planned beforehand, so that what its trial run costs is not counted."""
    from attnflow.corpus.job import CorpusOptions, plan_job, read_job

    asked = CorpusOptions(importance=["blank_out", "input_gradient"])
    plan = plan_job(model, asked, *read_job(asked))
    return lambda *given, **options: plan


def test_words_are_shown_as_groups_give_them_and_pairs_keep_their_texts(tmp_path: Path) -> None:
    model = af.Model(build("roberta"), word_tokenizer())
    for normalize in ("sum", "receptive_field", None):
        found = af.explain("the key's here", model=model, normalize=normalize, importance=())
        for name, (tokens, values) in found.scores(by_word=True).items():
            graph = found.graphs[name]
            words = af.METHODS[name.split()[-1]](
                graph, layers=[3], positions=[0], groups="words", normalize=normalize
            )
            assert tokens == words.tokens
            assert np.abs(values - words.at(0)).max() < 1e-12
    graph = found.attention.graph()
    with pytest.raises(af.OptionError, match="do not add up over a word's tokens"):
        af.rollout(graph, normalize="receptive_field").by_word()
    pair = ("the key", "is lost")
    explained = af.explain(pair, model=model, importance=())
    assert explained.texts == pair
    assert json.loads(explained.save(tmp_path / "pair.json").read_text())["text"] == list(pair)


def test_a_target_needs_a_model_that_predicts() -> None:
    with pytest.raises(af.OptionError, match="BertModel has no head that predicts; got 'green'"):
        af.explain([5, 6, 7], model=build("bert"), target="green")


@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_bytes_are_no_token_ids(kind: type) -> None:
    with pytest.raises(af.OptionError, match=r"a text must be a str; got byte.*: decode it"):
        af.explain(kind(b"the keys"))
