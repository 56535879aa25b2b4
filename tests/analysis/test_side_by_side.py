"""Two explanations side by side: aligned, with the difference."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import attnflow as af
from attnflow.analysis.explain.compare import align
from attnflow.cli.commands import main_app
from tests.families import build

some_words = st.lists(st.sampled_from(["the", "key", "keys", "to", "old"]), max_size=8)
KEYS, KEY = "the keys to the house", "the key to the old house"


@pytest.fixture(scope="module")
def keys() -> af.Explanation:
    return af.explain(KEYS, importance=())


@given(left=some_words, right=some_words)
def test_every_place_stands_in_one_pair_in_its_order(left: list[str], right: list[str]) -> None:
    pairs = list(align(left, right))
    for side, names in enumerate((left, right)):
        assert [places[side] for places in pairs if places[side] is not None] == [
            *range(len(names))
        ]
    assert (None, None) not in pairs
    if left == right:
        assert pairs == [(place, place) for place in range(len(left))]


def test_shares_are_those_of_the_results_without_what_is_left_out(keys: af.Explanation) -> None:
    other = af.explain(KEY, importance=())
    pair = af.compare(keys, other, methods="rollout")
    expected = keys.rollout.at(0)[1:] / keys.rollout.at(0)[1:].sum()
    np.testing.assert_allclose(pair.left.shares[1:], expected)
    assert np.isnan(pair.left.shares[0])
    assert pair.left.left_out == pytest.approx(keys.rollout.at(0)[0])
    names = [(row[1], row[4]) for row in pair.rows()]
    assert names == [
        ("[CLS]", "[CLS]"),
        ("the", "the"),
        ("keys", "key"),
        ("to", "to"),
        ("the", "the"),
        (None, "old"),
        ("house", "house"),
    ]
    house = other.rollout.at(0)[-1] / other.rollout.at(0)[1:].sum() - expected[-1]
    assert pair.difference[-1] == pytest.approx(house)
    assert np.isnan(pair.difference[[0, 5]]).all()


def test_two_methods_of_one_explanation(keys: af.Explanation) -> None:
    pair = af.compare(keys, methods=("rollout", "flow"), layer=3)
    assert (pair.left.name, pair.right.name) == ("rollout", "flow")
    assert pair.left.layer == pair.right.layer == 3
    rolled, flown = (keys.results[name].at(0, 3)[1:] for name in ("rollout", "flow"))
    np.testing.assert_allclose(pair.difference[1:], flown / flown.sum() - rolled / rolled.sum())
    swapped = af.compare(keys, methods=("flow", "rollout"), layer=3)
    np.testing.assert_allclose(swapped.difference, -pair.difference)


def test_two_models_are_aligned_by_words() -> None:
    left = af.explain("red the blue so", model="planted:last", importance=())
    right = af.explain("red the blue so", model="verb-number", importance=())
    pair = af.compare(left, right, methods="rollout")
    assert pair.unit == "word"
    assert pair.left.name != pair.right.name
    assert [row[1] for row in pair.rows()][1:] == ["red", "the", "blue", "so"]


def test_what_differs_names_the_sides() -> None:
    texts = ("the keys to the house", "the key to the house")
    models = ("verb-number", "verb-number-plain")
    options: dict[str, Any] = {"methods": ["rollout"], "importance": ()}
    left, right = (
        af.explain(text, model=model, **options) for text, model in zip(texts, models, strict=True)
    )
    pair = af.compare(left, right, unit="token")
    assert pair.left.name == "the keys to the house | verb-number"
    assert pair.right.name == "the key to the house | verb-number-plain"
    other = af.explain(texts[0], model=models[1], **options)
    both = af.compare(left, other, unit="token")
    assert (both.left.name, both.right.name) == models
    told = both.to_markdown()
    assert "source: verb-number " in told
    assert "source of verb-number-plain: verb-number-plain " in told


def test_images_of_one_grid_are_compared_and_others_refused() -> None:
    import torch

    model = af.Model(build("vit"))
    size = model.model.config.image_size
    one, other = (
        af.explain(torch.full((3, size, size), value), model=model) for value in (0.1, 0.9)
    )
    pair = af.compare(one, other)
    assert all(left == right for left, right in pair.pairs)
    with pytest.raises(af.OptionError, match=r"grids must be the same; got .* and a text"):
        af.compare(one, af.explain(KEYS, importance=()), methods="rollout")


def test_files_hold_what_it_says(keys: af.Explanation, tmp_path: Any) -> None:
    pair = af.compare(keys, methods=("rollout", "flow"))
    rows = json.loads(pair.save(tmp_path / "pair.json").read_text())["table"]
    assert [row["difference"] for row in rows][1:] == pytest.approx(pair.difference[1:].tolist())
    assert rows[0]["difference"] is None
    assert "| keys |" in pair.save(tmp_path / "pair.md").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "compared with another one, or by two methods"),
        ({"right": 3}, "takes what explain returned; got int as right"),
        ({"methods": ("rollout", "rolout")}, "unknown result 'rolout'; choose from"),
        ({"methods": ("a", "b", "c")}, "one name or a pair of them; got 3"),
        ({"right": "self", "unit": "letter"}, "unknown unit 'letter'; choose from token, word"),
        ({"right": "other"}, "must have words in common; got 'the keys to the house' and 'a man'"),
    ],
)
def test_bad_input_is_one_line(keys: af.Explanation, options: dict[str, Any], message: str) -> None:
    others = {"self": keys, "other": af.explain("a man", importance=())}
    if options.get("right") in others:
        options = options | {"right": others[options["right"]]}
    with pytest.raises(af.OptionError, match=message):
        af.compare(keys, **options)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ([KEYS, KEY], ["| keys / key |", "relevance flow, layer 6"]),
        (
            [KEYS, "--results", "rollout,contribution rollout"],
            ["| rollout | contribution rollout |"],
        ),
        (["the cat", "--model", "planted:majority", "--model", "verb-number"], ["| word |"]),
    ],
)
def test_the_command_prints_both_and_the_difference(arguments: list[str], shown: list[str]) -> None:
    result = CliRunner().invoke(main_app, ["compare", *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    for part in [*shown, "difference |"]:
        assert part in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([KEYS], "two are compared: give two texts"),
        ([KEYS, KEY, KEY], "two are compared; got 3 of text"),
        ([KEYS, "--results", "rolout,flow"], "unknown method 'rolout'"),
        ([KEYS, KEY, "--out", "x.gif"], "one of .html, .csv, .json"),
    ],
)
def test_a_command_that_cannot_be_meant_is_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(af.AttnFlowError, match=message):
        CliRunner().invoke(main_app, ["compare", *arguments], catch_exceptions=False)
