"""Token attention beside what was to be expected: equal to plain loops, even attention as expected, a fixed scale."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import attnflow as af
from tests.oracles import Floats, any_attention, attention

TOKENS = ["[CLS]", "Ġthe", "key", "s", "are", "lost", "[SEP]"]


def expect(result: af.TokenAttention, gone: set[int], reference: str) -> tuple[Floats, Floats]:
    """(shares, expected) of a result without windows, by plain loops."""
    layers, queries, keys = result.values.shape
    shares, even = np.zeros(result.values.shape), np.zeros(result.values.shape)
    for layer in range(layers):
        for row, position in enumerate(result.positions):
            seen = [
                key
                for key in range(keys)
                if key not in gone and (not result.causal or key <= position)
            ]
            whole = sum(result.values[layer, row, key] for key in seen)
            for key in seen if whole > 0 else []:
                shares[layer, row, key] = result.values[layer, row, key] / whole
                even[layer, row, key] = 1 / len(seen)
    if reference == "even":
        return shares, even
    expected = np.zeros(shares.shape)
    for layer in range(layers):
        for row in range(queries):
            here = {}
            for key in range(keys):
                others = [
                    shares[layer, other, key] / even[layer, other, key]
                    for other in range(queries)
                    if other != row and even[layer, other, key] > 0
                ]
                if others and even[layer, row, key] > 0:
                    here[key] = even[layer, row, key] * float(np.mean(others))
            given_there = sum(shares[layer, row, key] for key in here)
            total = sum(here.values())
            for key, value in here.items():
                expected[layer, row, key] = given_there * value / total if total > 0 else 0.0
            for key in set(range(keys)) - set(here):
                expected[layer, row, key] = shares[layer, row, key]  # nobody else sees it
    return shares, expected


@given(any_attention(max_layers=3, max_size=6), st.data())
def test_a_comparison_equals_plain_loops(weights: Floats, data: st.DataObject) -> None:
    size = weights.shape[-1]
    positions = sorted(data.draw(st.sets(st.integers(0, size - 1), min_size=1)))
    gone = data.draw(st.sets(st.integers(0, size - 1), max_size=2))
    method = data.draw(st.sampled_from([af.raw, af.rollout]))
    normalize = data.draw(st.sampled_from(["sum", None]))
    result = method(weights, positions=positions, normalize=normalize)
    for reference in ("even", "others"):
        if reference == "others" and len(positions) < 2:
            continue
        compared = result.compared_with(reference, exclude=gone)
        shares, expected = expect(result, gone, reference)
        assert np.allclose(compared.shares, shares, atol=1e-12)
        assert np.allclose(compared.expected, expected, atol=1e-9)
        assert np.allclose(compared.difference, shares - expected, atol=1e-9)
        sums = compared.shares.sum(axis=-1)
        assert np.all((np.abs(sums - 1) < 1e-12) | (sums == 0))
        assert np.isnan(compared.ratio[compared.expected == 0]).all()
        assert np.abs(compared.scaled).max() <= 1
        assert np.isfinite(compared.scaled).all()
        left = 1 - result.values[..., sorted(gone)].sum(-1) / result.values.sum(-1)
        assert np.allclose(compared.excluded_share, 1 - left)


@pytest.mark.parametrize("kind", ["uniform", "causal uniform"])
@pytest.mark.parametrize("reference", ["even", "others"])
@pytest.mark.parametrize("exclude", [[], [0], [0, 4]])
def test_even_attention_is_as_expected(kind: str, reference: str, exclude: list[int]) -> None:
    weights = attention(kind, 2, 7, np.random.default_rng(0))
    compared = af.raw(weights).compared_with(reference, exclude=exclude)
    told = compared.expected > 0
    assert told.sum() > 20
    assert np.allclose(compared.ratio[told], 1)
    assert np.abs(compared.scaled).max() < 1e-9
    assert not compared.shares[..., exclude].any()


def test_even_means_the_keys_that_windows_and_removed_positions_leave() -> None:
    weights = attention("window", 2, 7, np.random.default_rng(0))  # of three positions, causal
    graph = af.Attention(weights, causal=True, window=3).graph(without=[1])
    compared = af.raw(graph).compared_with("even")
    seen = [[0], [0, 2], [2, 3], [2, 3, 4], [3, 4, 5], [4, 5, 6]]
    for place, keys in enumerate(seen):
        assert np.flatnonzero(compared.expected[0, place]).tolist() == keys
        assert np.allclose(compared.expected[0, place, keys], 1 / len(keys))


def test_words_are_expected_by_their_tokens_and_left_out_as_a_whole() -> None:
    weights = np.full((1, 7, 7), 1 / 7)
    words = [None, 0, 1, 1, 2, 3, None]
    result = af.rollout(af.Attention(weights, tokens=TOKENS, words=words).graph(residual=0.0))
    compared = result.by_word().compared_with("even", exclude=[0, -1])
    assert compared.tokens[2] == "keys"
    assert compared.expected[0, 0].tolist() == pytest.approx([0, 0.2, 0.4, 0.2, 0.2, 0])
    assert np.allclose(compared.ratio[0, 0, 1:5], 1)
    without_keys = result.by_word().compared_with("even", exclude=[3])
    assert without_keys.excluded == (2,)
    assert without_keys.excluded_share[0, 0] == pytest.approx(2 / 7)


def test_the_scale_is_three_doublings_and_says_what_is_zero() -> None:
    values = np.array([[[1 / 32, 1 / 2, 1 / 4, 7 / 32, 0.0], [0.0, 1 / 16, 1 / 4, 0.0, 11 / 16]]])
    weights = np.concatenate([values, np.full((1, 3, 5), 0.2)], axis=1)
    compared = af.raw(weights, positions=[0, 1]).compared_with("others")
    row = compared.select(0)
    assert row.ratio[0, 0].tolist()[1:3] == [8.0, 1.0]
    assert np.isnan(row.ratio[0, 0, [0, 3]]).all()  # the other row gives them nothing
    assert row.scaled[0, 0].tolist() == [1.0, 1.0, 0.0, 1.0, -1.0]
    back = compared.select(1)
    assert back.scaled[0, 0].tolist() == [-1.0, -1.0, 0.0, -1.0, 1.0]
    half = af.raw([[[0.4, 0.4, 0.1, 0.1]] * 4]).compared_with("even")
    assert half.scaled[0, 0].tolist() == pytest.approx(np.log2([1.6, 1.6, 0.4, 0.4]) / 3)


def story(values: Floats) -> af.PromptAttention:
    """Values [generated, prompt] of one layer."""
    prompt = tuple(f"p{at}" for at in range(values.shape[1]))
    generated = tuple(f"g{at}" for at in range(values.shape[0]))
    return af.PromptAttention(values[..., None], "rollout", prompt, generated, (4,))


def test_generated_tokens_are_compared_with_the_mean_of_the_others() -> None:
    rng = np.random.default_rng(3)
    values = rng.random((5, 6)) * 0.1
    values[:, 0] = 0.9  # a sink
    values[:, 5] = 0.0  # taken out of the graph
    compared = story(values).compared_with("others", exclude=[0])
    kept = values[:, 1:5] / values[:, 1:5].sum(axis=1, keepdims=True)
    assert np.allclose(compared.shares[0, :, 1:5], kept)
    for row in range(5):
        others = kept[[other for other in range(5) if other != row]].mean(axis=0)
        assert np.allclose(compared.expected[0, row, 1:5], others)
    assert np.allclose(compared.excluded_share[0], values[:, 0] / values.sum(axis=1))
    assert not compared.scaled[..., [0, 5]].any()
    even = story(values).compared_with("even", exclude=[0])
    assert np.allclose(even.expected[0, :, 1:5], 0.25)
    best = kept - [kept[[o for o in range(5) if o != row]].mean(axis=0) for row in range(5)]
    key, token, more = compared.top(1, position=2)[0]
    assert (key, token) == (1 + int(best[2].argmax()), f"p{key}")
    assert more == pytest.approx(best[2].max())


@pytest.mark.parametrize(
    ("reference", "exclude", "message"),
    [
        ("evne", [], "unknown reference 'evne'; choose from even, others"),
        ("others", [], "'others' are the other rows of a layer, and this result has one"),
        ("even", [9], "exclude must be from -3 to 2; got 9"),
        ("even", ["a"], "exclude must be whole numbers; got 'a'"),
    ],
)
def test_what_cannot_be_compared_is_one_line(
    reference: str, exclude: list[int], message: str
) -> None:
    one = af.raw([[[0.2, 0.3, 0.5]] * 3], positions=[1])
    prompt = story(np.array([[0.2, 0.3, 0.5]]))
    for result in (one, prompt):
        with pytest.raises(af.OptionError, match=message) as error:
            result.compared_with(reference, exclude=exclude)
        assert "\n" not in str(error.value)


def test_a_comparison_is_a_table(tmp_path: Path) -> None:
    weights = attention("flat", 2, 7, np.random.default_rng(1))
    result = af.rollout(af.Attention(weights, tokens=TOKENS))
    compared = result.compared_with("others", exclude=[0])
    frame = compared.to_pandas()
    assert list(frame.columns) == list(af.Comparison.columns)
    assert len(frame) == 2 * 7 * 7
    rows = list(compared.rows())
    assert rows[0][:6] == ("rollout", 1, 0, "[CLS]", 0, "[CLS]")
    assert rows[0][-1] is None  # left out, so no ratio
    for number, column in ((6, "share"), (7, "expected"), (8, "difference")):
        assert [row[number] for row in rows] == frame[column].tolist()
    content = json.loads(compared.to_json())
    assert content["reference"] == "others"
    assert content["excluded"] == [0]
    assert np.allclose(content["shares"], compared.shares)
    assert "compared with others: layer 2, position 0" in compared._repr_html_()
    assert "left out: keys 0" in compared._repr_html_()
    assert repr(compared) == "<Comparison: rollout with others, layers 1, 2, without keys 0>"
    with np.load(compared.save(tmp_path / "it.npz")) as stored:
        assert np.array_equal(stored["expected"], compared.expected)
    for ending in (".csv", ".md", ".tex", ".json"):
        assert compared.save(tmp_path / f"it{ending}").stat().st_size > 1000


def test_the_row_of_a_comparison_is_found_as_that_of_its_result() -> None:
    result = af.rollout(attention("causal", 3, 6, np.random.default_rng(2)), positions=[2, 4])
    compared = result.compared_with("even")
    one = compared.select(-2, 2)
    assert (one.layers, one.positions) == ((2,), (4,))
    assert np.array_equal(one.shares[0, 0], compared.shares[1, 1])
    assert compared.top(2) == compared.top(2, position=4, layer=3)
    with pytest.raises(af.OptionError, match="position 3 was not computed"):
        compared.select(3)
