"""Planted models: their answers by enumeration, the tokens behind them by intervention on the model, and what is refused."""

import itertools
import random
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import attnflow as af
from attnflow.cli.commands import main
from attnflow.models.fingerprint import model_fingerprint
from attnflow.models.planted.planted import MAX_WORDS, Planted
from attnflow.models.wiring.find import find_wirings

NAMES = tuple(af.PLANTED)
# of each kind some words, so that all texts of some length can be asked
FEW = {
    "copy": ("ant", "dog", "hen"),
    "relay": ("ant", "dog", "hen"),
    "conjunction": ("salt", "pepper", "the", "so"),
    "majority": ("apple", "plum", "cat", "the"),
    "last": ("red", "blue", "the", "so"),
}


@cache
def get(name: str) -> Planted:
    return af.planted(name)


def list_texts(planted: Planted, words: tuple[str, ...], longest: int) -> list[str]:
    sizes = range(planted.k or 1, longest + 1)
    return [" ".join(text) for n in sizes for text in itertools.product(words, repeat=n)]


def predict(planted: Planted, texts: list[str]) -> dict[str, str]:
    return {
        text: label
        for text, (label, _) in zip(texts, planted.model.predict(list(texts)), strict=True)
    }


# ---- what they answer, and why ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_short_text_and_many_long_ones_are_answered_by_the_rule(name: str) -> None:
    planted = get(name)
    rng = random.Random(0)
    longer = [
        " ".join(rng.choices(planted.words, k=rng.randint(5, MAX_WORDS))) for _ in range(1000)
    ]
    for text, label in predict(planted, list_texts(planted, planted.words, 4) + longer).items():
        assert label == planted.answer(text), text


def ask_by_intervention(planted: Planted, text: str, answers: dict[str, str]) -> set[int]:
    """The positions of all smallest sets of words whose replacement changes the model's answer."""
    words = text.split()
    changes: set[frozenset[int]] = set()
    for other in itertools.product(*[(word, *planted.swaps(word)) for word in words]):
        if answers.get(" ".join(other), answers[text]) != answers[text]:
            pairs = enumerate(zip(words, other, strict=True))
            changes.add(frozenset(place for place, (one, two) in pairs if one != two))
    smallest = [change for change in changes if not any(part < change for part in changes)]
    return {place + 1 for change in smallest for place in change}


@pytest.mark.parametrize("name", NAMES)
def test_the_truth_is_what_interventions_on_the_model_find(name: str) -> None:
    planted = get(name)
    texts = list_texts(planted, FEW[name], 4)
    answers = predict(planted, texts)
    found = {text: tuple(sorted(ask_by_intervention(planted, text, answers))) for text in texts}
    assert found == {text: planted.truth(text) for text in texts}
    assert len(set(found.values())) > (name not in ("copy", "relay"))


@pytest.mark.parametrize("name", ["copy", "relay"])
def test_any_word_can_be_copied(name: str) -> None:
    for k in range(af.PLANTED[name].least, MAX_WORDS + 1):
        planted = af.planted(name, k=k)
        texts = planted.examples(8, seed=k)
        assert [planted.model.predict([text])[0][0] for text in texts] == [
            text.split()[k - 1] for text in texts
        ]
        assert {planted.truth(text) for text in texts} == {(k,)}


def test_examples_are_seeded_and_take_turns() -> None:
    for name in NAMES:
        planted = get(name)
        texts = planted.examples(24, seed=5)
        assert texts == planted.examples(24, seed=5) != planted.examples(24, seed=6)
        assert texts[:3] == planted.examples(3, seed=5)
        answers = [planted.answer(text) for text in texts]
        shown = af.PLANTED[name].shown or af.PLANTED[name].labels
        assert {answers.count(label) for label in shown} == {24 // len(shown)}
        for text in texts:
            assert 0 < len(planted.truth(text)) < len(text.split())
            assert 6 <= len(text.split()) <= 10


# ---- they are Transformers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_probe_and_wiring_understand_them(name: str) -> None:
    model = get(name).model
    assert (model.probe.interface, model.probe.causal, model.probe.mixer) == (True, False, None)
    assert [wiring.attention for wiring in find_wirings(model)] == [
        "blocks.0.attention",
        "blocks.1.attention",
    ]
    kinds = [type(part) for part in model.model.modules()]
    assert kinds.count(nn.LayerNorm) == 5
    assert kinds.count(nn.GELU) == 2


@pytest.mark.parametrize("name", NAMES)
def test_all_edges_and_importances_work_on_batches_of_any_lengths(name: str) -> None:
    planted = get(name)
    texts = planted.examples(6, seed=1)
    for edges in af.EDGES:
        together = af.attention_graph(planted.model, texts, edges=edges)
        alone = [af.attention_graph(planted.model, text, edges=edges) for text in texts]
        for one, other in zip(together, alone, strict=True):
            found, expected = af.rollout(one), af.rollout(other)
            if one.signed:  # what a node hands on is shared out anew where the node has almost none
                np.testing.assert_allclose(found.at(0), expected.at(0), atol=1e-4)
            else:
                np.testing.assert_allclose(found.values, expected.values, atol=1e-4)
    for text, importance in zip(texts, af.blank_out(planted.model, texts), strict=True):
        assert len(importance.values) == len(text.split()) + 1
    assert all(np.isfinite(found.values).all() for found in af.input_gradient(planted.model, texts))


@pytest.mark.parametrize("name", NAMES)
def test_decoys_look_elsewhere_and_change_nothing(name: str) -> None:
    """Made to look at all positions evenly, decoys change no probability."""
    planted = af.planted(name)
    texts = planted.examples(20, seed=2)
    decoys = {0: [0, 1, 3] if name == "relay" else [0, 1, 2, 3]}
    decoys[1] = [2, 3] if name == "conjunction" else [1, 2, 3]
    for text in texts:
        heads = af.capture(planted.model, text, heads=None).weights  # [layer, head, query, key]
        assert [heads[0, 0, 0].argmax(), heads[1, 2, 0].argmax()] == [1, 1]
        assert [heads[0, 1, 0].argmax(), heads[1, 3, 0].argmax()] == [len(text.split())] * 2
    before = planted.model.predict(list(texts))
    with torch.no_grad():
        for layer, idle in decoys.items():
            projected = planted.model.model.blocks[layer].attention.query_key_value
            for head in idle:
                projected.weight[16 * head : 16 * head + 16] = 0.0  # its queries
                projected.bias[16 * head : 16 * head + 16] = 0.0
    for text, one, two in zip(texts, before, planted.model.predict(list(texts)), strict=True):
        moved = af.capture(planted.model, text, heads=None).weights
        for layer, idle in decoys.items():
            np.testing.assert_allclose(moved[layer, idle], 1 / (len(text.split()) + 1), atol=1e-6)
        assert one[0] == two[0]
        assert one[1] == pytest.approx(two[1], abs=1e-6)


def test_building_one_draws_nothing_and_is_the_same_every_time() -> None:
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    first = af.planted("copy")
    assert torch.equal(torch.rand(3), expected)
    assert model_fingerprint(first.model) == model_fingerprint(af.planted("copy").model)
    assert model_fingerprint(first.model) != model_fingerprint(af.planted("copy", k=4).model)


def test_gradient_edges_find_the_words_that_are_copied_and_attention_does_not() -> None:
    planted = get("copy")
    for text in planted.examples(10):
        graph = af.attention_graph(planted.model, text, edges="gradient")
        assert af.rollout(graph).at(0)[1:].argmax() + 1 == 3
        assert af.rollout(af.capture(planted.model, text)).at(0)[1:].argmax() + 1 != 3


# ---- doors ----------------------------------------------------------------------------------------------------------------------


def test_load_and_explain_know_them_by_name() -> None:
    found = af.explain("elk ant fox hen", model="planted:copy", edges="gradient")
    assert found.prediction is not None
    assert found.prediction[0] == "fox"
    assert str(af.load("planted:copy").origin) == "planted:copy"
    assert af.load("planted:last").predict(["So RED then", "[UNK] blue"])[0][0] == "warm"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: af.planted("copi"),
            "unknown planted model 'copi'; choose from copy, relay, conjunction, majority, last",
        ),
        (lambda: af.load("planted:x"), "unknown planted model 'x'; choose from copy, relay"),
        (lambda: af.planted("copy", k=13), "k must be from 1 to 12 for copy, .*; got 13"),
        (lambda: af.planted("relay", k=1), "k must be from 2 to 12 for relay, .*; got 1"),
        (lambda: af.planted("last", k=1), "k is for copy and relay, .*; got k=1 for last"),
        (lambda: af.planted("copy", k="x"), "k must be"),  # type: ignore[arg-type]
        (lambda: get("last").truth("the zorb"), "knows the words red, .*; got 'zorb'"),
        (lambda: get("last").model.encode("the zorb"), "knows the words red, .*; got 'zorb'"),
        (lambda: get("last").truth(" "), "a text must not be empty; got ' '"),
        (lambda: get("last").model.predict([""]), "a text must not be empty; got ''"),
        (lambda: get("copy").truth("ant bee"), "has 3 to 12 words; got 2"),
        (lambda: get("copy").model.predict(["ant bee"]), "has 3 to 12 words; got 2"),
        (lambda: get("last").answer("so " * 13), "has 1 to 12 words; got 13"),
        (lambda: get("last").model.encode("so " * 13), "has 1 to 12 words; got 13"),
        (lambda: get("last").examples(0), "count must be"),
        (lambda: get("last").swaps("zorb"), "got 'zorb'"),
    ],
)
def test_what_is_wrong_is_one_line(call: Any, message: str) -> None:
    with pytest.raises(af.OptionError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


def test_the_command_line_knows_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = tmp_path / "texts.tsv"
    texts.write_text("".join(f"{text}\n" for text in get("last").examples(3)))
    explaining = ["explain", "--model", "planted:copy", "elk ant fox hen"]
    evaluating = ["evaluate", "planted:last", str(texts), "--methods", "raw", "--sanity"]
    for arguments, expected in (
        (explaining, "fox 0.96. It read mostly fox"),
        (evaluating, "randomised from"),
    ):
        monkeypatch.setattr(sys, "argv", ["attnflow", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        assert expected in " ".join(capsys.readouterr().out.split())
