"""Raw attention, rollout and flow: shapes, closed forms, consistency, normalisation and what they refuse."""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import attnflow as af
from tests.oracles import Floats, any_attention, attention, edges_of, rational_flow, real_attention

SAME = 1e-12
WEIGHTS = attention("peaky", 4, 6, np.random.default_rng(1))
GRAPH = af.AttentionGraph(WEIGHTS, tokens=tuple("abcdef"))


@settings(max_examples=100, deadline=None)
@given(any_attention(max_layers=6), st.sampled_from([0.0, 0.3, 0.5]))
def test_rollout_is_the_product_and_its_rows_sum_to_one(weights: Floats, residual: float) -> None:
    result = af.rollout(af.AttentionGraph(weights, residual=residual), normalize=None)
    product = np.eye(weights.shape[-1])
    for layer, edges in enumerate(edges_of(weights, residual), start=1):
        product = edges @ product
        for position in range(len(product)):
            assert np.abs(result.at(position, layer) - product[position]).max() < SAME
    assert np.abs(result.values.sum(axis=-1) - 1).max() < SAME


@settings(max_examples=100, deadline=None)
@given(any_attention(max_layers=6), st.data())
def test_a_few_rows_equal_the_same_rows_of_the_full_result(
    weights: Floats, data: st.DataObject
) -> None:
    graph = af.AttentionGraph(weights)
    bottom = data.draw(st.integers(0, graph.depth - 1))
    layers = data.draw(st.lists(st.integers(bottom + 1, graph.depth), min_size=1, max_size=4))
    positions = data.draw(st.lists(st.integers(0, graph.size - 1), min_size=1, max_size=3))
    for method in (af.rollout, af.flow):
        full = method(
            graph, layers=range(bottom + 1, graph.depth + 1), bottom=bottom, normalize=None
        )
        few = method(graph, layers=layers, positions=positions, bottom=bottom, normalize=None)
        assert few.values.shape == (len(layers), len(positions), graph.size)
        for layer in layers:
            for position in positions:
                assert np.abs(few.at(position, layer) - full.at(position, layer)).max() < SAME


@pytest.mark.parametrize("upper", range(1, 5))
@pytest.mark.parametrize("lower", range(4))
def test_from_any_layer_to_any_layer_below(upper: int, lower: int) -> None:
    if lower >= upper:
        for method in (af.rollout, af.flow):
            with pytest.raises(af.OptionError, match="bottom must be"):
                method(GRAPH, layers=[upper], bottom=lower)
        return
    edges = GRAPH.edges[lower:upper]
    rolled = af.rollout(GRAPH, layers=[upper], bottom=lower, normalize=None).values[0]
    flowed = af.flow(GRAPH, layers=[upper], bottom=lower, normalize=None).values[0]
    assert np.abs(rolled - np.linalg.multi_dot([np.eye(6), np.eye(6), *edges[::-1]])).max() < SAME
    for source, target in [(0, 0), (2, 5), (5, 1)]:
        assert abs(flowed[source, target] - rational_flow(edges, source, target)) < 1e-9
        best = af.max_flow(GRAPH, source=(upper, source), target=(lower, target))
        assert abs(best.value - flowed[source, target]) < SAME
        assert all(lower < layer <= upper for layer, _, _ in best.cut)


def test_first_layer_of_rollout_and_flow_agree() -> None:
    for _, weights in real_attention():
        graph = af.AttentionGraph(weights)
        assert (
            np.abs(af.rollout(graph, layers=[1]).values - af.flow(graph, layers=[1]).values).max()
            < SAME
        )


def test_raw_is_the_weights_before_the_residual() -> None:
    for residual in (0.0, 0.5):
        result = af.raw(af.AttentionGraph(WEIGHTS, residual=residual))
        assert np.abs(result.values - WEIGHTS).max() < SAME
        assert result.bottom is None


def test_permuting_tokens_permutes_every_method() -> None:
    order = np.array([3, 0, 5, 1, 4, 2])
    moved = af.AttentionGraph(WEIGHTS[:, order][:, :, order])
    for method in (af.raw, af.rollout, af.flow):
        assert (
            np.abs(
                method(moved, layers=[3]).values[0]
                - method(GRAPH, layers=[3]).values[0][order][:, order]
            ).max()
            < SAME
        )


def test_methods_take_attention_arrays_and_graphs_alike() -> None:
    for method in af.METHODS.values():
        results = [
            method(given, layers=[3]).values for given in (WEIGHTS, af.Attention(WEIGHTS), GRAPH)
        ]
        assert all(np.abs(result - results[0]).max() < SAME for result in results)


def test_defaults_are_all_layers_for_raw_and_rollout_and_the_top_for_flow() -> None:
    assert af.raw(GRAPH).layers == af.rollout(GRAPH).layers == (1, 2, 3, 4)
    assert af.rollout(GRAPH, bottom=2).layers == (3, 4)
    assert af.flow(GRAPH).layers == (4,)
    assert af.flow(GRAPH).positions == (0, 1, 2, 3, 4, 5)
    assert np.abs(af.flow(GRAPH).values.sum(axis=-1) - 1).max() < SAME


# ---- receptive field ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["raw", "rollout", "flow"])
@pytest.mark.parametrize("window", [None, 2, 3])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("residual", [0.0, 0.5])
def test_uniform_attention_comes_out_uniform_over_what_can_be_seen(
    method: str, window: int | None, causal: bool, residual: float
) -> None:
    size, depth = 7, 3
    sees = np.tril(np.ones((size, size))) if causal else np.ones((size, size))
    if window is not None:
        sees *= np.abs(np.arange(size)[:, None] - np.arange(size)) < window
    weights = np.broadcast_to(sees / sees.sum(axis=1, keepdims=True), (depth, size, size))
    graph = af.AttentionGraph(weights, residual=residual, window=window)
    result = af.METHODS[method](graph, layers=[depth], normalize="receptive_field").values[0]
    reach = sees if method == "raw" else np.linalg.matrix_power(sees, depth)
    expected = (reach > 0) / (reach > 0).sum(axis=1, keepdims=True)
    assert np.abs(result - expected).max() < SAME


def test_receptive_field_of_three_tokens_and_two_layers_worked_by_hand() -> None:
    """Causal; the last query looks at (0.2, 0.3, 0.5) in layer 2, where uniform attention looks at thirds; layer 1 is uniform."""
    uniform = np.array([[1, 0, 0], [1 / 2, 1 / 2, 0], [1 / 3, 1 / 3, 1 / 3]])
    top = np.array([[1, 0, 0], [1 / 2, 1 / 2, 0], [0.2, 0.3, 0.5]])
    result = af.rollout(
        af.AttentionGraph(np.stack([uniform, top])),
        layers=[2],
        positions=[2],
        normalize="receptive_field",
    )
    below = np.array(
        [[1, 0, 0], [0.25, 0.75, 0], [1 / 6, 1 / 6, 2 / 3]]
    )  # half uniform, half identity
    mine = 0.1 * below[0] + 0.15 * below[1] + 0.75 * below[2]
    base = 1 / 6 * below[0] + 1 / 6 * below[1] + 2 / 3 * below[2]
    ratio = mine / base
    assert np.abs(result.at(2) - ratio / ratio.sum()).max() < SAME
    # the same as fractions: mine = (21/80, 19/80, 1/2), base = (23/72, 17/72, 4/9)
    by_hand = np.array([21 / 80 * 72 / 23, 19 / 80 * 72 / 17, 1 / 2 * 9 / 4])
    assert np.abs(result.at(2) - by_hand / by_hand.sum()).max() < SAME


def test_receptive_field_changes_nothing_without_a_mask_when_attention_is_uniform() -> None:
    weights = np.full((3, 5, 5), 1 / 5)
    assert (
        np.abs(af.raw(weights, normalize="receptive_field").values - af.raw(weights).values).max()
        < SAME
    )
    graph = af.AttentionGraph(weights, residual=0.0)
    for method in (af.rollout, af.flow):
        assert (
            np.abs(method(graph, normalize="receptive_field").values - method(graph).values).max()
            < SAME
        )


def test_receptive_field_keeps_positions_that_were_taken_out_at_zero() -> None:
    graph = af.Attention(attention("causal", 3, 5, np.random.default_rng(2))).graph(without=[0])
    for method in (af.raw, af.rollout, af.flow):
        values = method(graph, layers=[3], normalize="receptive_field").values
        assert (values[..., 0] == 0).all()
        assert np.abs(values.sum(axis=-1) - 1).max() < SAME


# ---- saturation -----------------------------------------------------------------------------------------------------------------


def test_saturation_is_marked_and_warned_of_once() -> None:
    weights = dict(real_attention())["minilm"]
    graph = af.AttentionGraph(weights)
    with pytest.warns(af.SaturationWarning, match="look at a lower layer or at rollout") as caught:
        result = af.flow(graph, layers=[11, 12], normalize=None, positions=[0, 1, 2])
    assert len(caught) == 1
    assert caught[0].filename == __file__
    bound = np.minimum(1, graph.edges[0].sum(axis=0))
    assert result.saturated is not None
    assert (result.saturated == (result.values >= bound - 1e-9)).all()
    assert result.saturated.mean() > 0.95
    low = af.flow(graph, layers=[3], positions=[0]).saturated
    assert low is not None
    assert low.mean() < 0.5


def test_short_or_shallow_graphs_are_not_warned_of() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        af.flow(np.full((6, 7, 7), 1 / 7))
        af.flow(np.full((1, 20, 20), 1 / 20))
    assert caught == []


# ---- results --------------------------------------------------------------------------------------------------------------------


def test_top_gives_the_strongest_keys_first() -> None:
    result = af.rollout(GRAPH)
    top = result.top(3, position=2, layer=4)
    assert [value for _, _, value in top] == sorted(result.at(2), reverse=True)[:3]
    assert all("abcdef"[key] == token for key, token, _ in top)
    causal = af.rollout(attention("causal", 2, 4, np.random.default_rng(0)))
    assert causal.top(1) == causal.top(1, position=3)


def test_by_word_sums_subwords_over_keys() -> None:
    attended = af.Attention(
        WEIGHTS,
        tokens=["[CLS]", "un", "##believ", "##able", "Ġkeys", "[SEP]"],
        words=[None, 0, 0, 0, 1, None],
    )
    tokens, words = af.rollout(attended), af.rollout(attended).by_word()
    assert words.tokens == ("[CLS]", "unbelievable", "keys", "[SEP]")
    assert np.abs(words.at(2)[1] - tokens.at(2)[1:4].sum()) < SAME
    assert np.abs(words.values.sum(axis=-1) - 1).max() < SAME
    with pytest.raises(af.OptionError, match="no words"):
        words.by_word()


def test_results_become_tables_and_files(tmp_path: Path) -> None:
    result = af.flow(GRAPH, layers=[2, 3], positions=[1, 4], normalize=None)
    table = result.to_pandas()
    assert list(table.columns) == ["layer", "position", "query", "key", "token", "value"]
    assert len(table) == 2 * 2 * 6
    for ending in ("csv", "json", "npz"):
        assert result.save(tmp_path / f"result.{ending}").exists()
    lines = (tmp_path / "result.csv").read_text().splitlines()
    assert lines[0] == "layer,position,query,key,token,value"
    assert float(lines[1].split(",")[-1]) == result.values[0, 0, 0]
    read = json.loads((tmp_path / "result.json").read_text())
    assert np.array_equal(read["values"], result.values)
    assert read["tokens"] == list("abcdef")
    with np.load(tmp_path / "result.npz") as arrays:
        assert (arrays["values"] == result.values).all()
        assert (arrays["saturated"] == result.saturated).all()
    assert (np.asarray(result) == result.values).all()


def test_numbers_may_be_numpys() -> None:
    expected = af.flow(GRAPH, layers=[3], positions=[2], normalize=None).values
    given = af.flow(
        GRAPH,
        layers=np.array(3),
        positions=np.array([2]),
        normalize=None,
        workers=np.int64(2),  # type: ignore[arg-type]
    )
    assert (given.values == expected).all()
    assert af.max_flow(GRAPH, source=np.array([3, 2]), target=(0, 1)).value == pytest.approx(  # type: ignore[arg-type]
        expected[0, 0, 1]
    )


def test_what_was_taken_out_is_not_called_saturated() -> None:
    graph = af.Attention(np.full((6, 10, 10), 0.1)).graph(without=[0, 3])
    with pytest.warns(af.SaturationWarning):
        saturated = af.flow(graph).saturated
    assert saturated is not None
    assert not saturated[..., [0, 3]].any()
    assert saturated[..., 1].all()


def test_reprs_are_short() -> None:
    assert repr(GRAPH) == "<AttentionGraph: 4 layers, 6 positions, residual 0.5>"
    assert (
        repr(af.rollout(GRAPH))
        == "<TokenAttention: rollout from layers 1..4 to layer 0, 6 positions, 6 keys>"
    )
    assert "limited by" in repr(af.max_flow(GRAPH, source=(4, 0), target=(0, 1)))


# ---- bad input ------------------------------------------------------------------------------------------------------------------


BAD: list[tuple[Any, str]] = [
    (
        lambda: af.rollout(GRAPH, layers=[2], bottom=2),
        r"bottom must be below every layer asked for; got bottom=2, layers=\[2\]",
    ),
    (lambda: af.rollout(GRAPH, bottom=4), "bottom must be from 0 to 3; got 4"),
    (lambda: af.rollout(GRAPH, bottom=-1), "bottom must be from 0 to 3; got -1"),
    (lambda: af.raw(GRAPH, bottom=1), "takes no bottom"),
    (lambda: af.flow(GRAPH, layers=[7]), "layers must be from 1 to 4; got 7"),
    (lambda: af.flow(GRAPH, layers=[0]), "layers must be from 1 to 4; got 0"),
    (lambda: af.flow(GRAPH, layers=[]), "at least one layer"),
    (lambda: af.flow(GRAPH, layers=2.5), "layers must be whole numbers; got 2.5"),  # type: ignore[arg-type]
    (lambda: af.flow(GRAPH, positions=slice(None)), "positions must be whole numbers"),  # type: ignore[arg-type]
    (lambda: af.flow(GRAPH, normalize=np.array(["sum", "sum"])), "unknown normalize"),  # type: ignore[arg-type]
    (lambda: af.rollout(GRAPH).top(0), "top takes a whole number, at least 1; got 0"),
    (lambda: af.flow(GRAPH, positions=[6]), "positions must be from 0 to 5; got 6"),
    (lambda: af.flow(GRAPH, positions=[-1]), "positions must be from 0 to 5; got -1"),
    (lambda: af.flow(GRAPH, positions=[]), "at least one position"),
    (
        lambda: af.flow(GRAPH, positions=["a"]),  # type: ignore[list-item]
        "whole numbers; got 'a'",
    ),
    (lambda: af.flow(GRAPH, normalize="max"), "unknown normalize 'max'"),
    (lambda: af.flow(GRAPH, workers=0), "workers must be a whole number"),
    (lambda: af.max_flow(GRAPH, source=(2, 0), target=(2, 1)), "higher layer than the target"),
    (
        lambda: af.max_flow(GRAPH, source=(9, 0), target=(0, 1)),
        "layer of source must be from 0 to 4; got 9",
    ),
    (
        lambda: af.max_flow(GRAPH, source=(4, 0), target=(0, 6)),
        "position of target must be from 0 to 5; got 6",
    ),
    (lambda: af.max_flow(GRAPH, source=4, target=(0, 6)), "source must be a pair"),  # type: ignore[arg-type]
    (lambda: af.rollout(GRAPH).at(9), "position 9 was not computed"),
    (lambda: af.flow(GRAPH).at(0, layer=2), "layer 2 was not computed; this result has layers 4"),
    (
        lambda: af.rollout(
            af.AttentionGraph(WEIGHTS, layer_names=tuple("abcd")), normalize="receptive_field"
        ),
        "encoder-decoder",
    ),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_bad_requests_get_one_clear_line(call: Any, message: str) -> None:
    with pytest.raises(af.OptionError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


def test_an_unknown_ending_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(af.FileError, match=r"must be one of .csv, .json, .npz; got .xlsx"):
        af.raw(GRAPH).save(tmp_path / "result.xlsx")
