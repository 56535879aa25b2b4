"""Raw attention, rollout and flow: shapes, closed forms, consistency, normalisation and what they refuse."""

import json
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import attnflow as af
from attnflow.notices import collect_notices
from tests.oracles import (
    Floats,
    any_attention,
    any_groups,
    attention,
    edges_of,
    rational_flow,
    real_attention,
)

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


def test_a_row_that_hardly_tells_keys_apart_is_warned_of_if_it_was_asked_for() -> None:
    """From MiniLM's CLS at layer 6 nearly all flows are alike, and few sit at a bound."""
    graph = af.AttentionGraph(dict(real_attention())["minilm"][:6])
    message = r"attention flow from layer 6 is even: the spread of a row is 0\.0024 .*rollout"
    with pytest.warns(af.SaturationWarning, match=message) as caught:
        shown = af.flow(graph, layers=[2, 6], positions=[0])
    assert len(caught) == 1
    assert shown.saturated is not None
    assert shown.saturated[1].mean() < 0.95
    with collect_notices() as notices:
        af.flow(graph, layers=[2, 3, 4], positions=[0])
    assert notices == []


def test_short_sentences_of_the_bundled_model_are_not_called_even() -> None:
    """They are even in the upper layers, but have fewer than 8 tokens."""
    model = af.load("verb-number")
    texts = ["the key to the cabinets", "the lost key is here", "today every station for that"]
    with collect_notices() as notices:
        for attention in af.capture(model, texts):
            af.flow(attention, layers=range(1, 7))
    assert not [text for text in notices if "is even" in text]
    longer = af.capture(model, "a popular author that describes this teacher")
    with pytest.warns(af.SaturationWarning, match="from layer 6 is even"):
        shown = af.flow(longer, layers=[6], positions=[0]).at(0)[1:]
    assert shown.max() < 1.1 * shown.mean()  # what is read most is 8 % above an even share


def test_rows_that_see_few_keys_are_not_called_even() -> None:
    causal = np.tril(np.ones((12, 12))) / np.arange(1, 13)[:, None]
    with collect_notices() as notices:
        af.flow(np.stack([causal] * 4), positions=range(7), normalize="receptive_field")
    assert notices == []
    with pytest.warns(af.SaturationWarning, match="is even: the spread of a row is"):
        af.flow(np.stack([causal] * 4), positions=[7], normalize="receptive_field")


def test_notices_stay_in_their_context_and_leave_the_filters_alone() -> None:
    """Threads that collect and threads that do not, all at once."""
    even = af.AttentionGraph(np.full((6, 9, 9), 1 / 9), residual=0)
    together = threading.Barrier(8)
    before = (list(warnings.filters), warnings.showwarning)
    heard: dict[int, list[str]] = {}

    def ask(number: int) -> None:
        layers = number // 2 + 2  # each message names its thread's own layer
        together.wait()
        for _ in range(20):
            if number % 2:
                with collect_notices() as notices:
                    af.flow(even, layers=layers)
                    time.sleep(0.001)
                heard.setdefault(number, []).extend(notices)
            else:
                try:
                    af.flow(even, layers=layers)
                except af.SaturationWarning as warning:  # as pytest's filter has it
                    heard.setdefault(number, []).append(str(warning))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(8)))
    assert (list(warnings.filters), warnings.showwarning) == before
    for number in range(8):
        assert len(heard[number]) == 20
        assert len(set(heard[number])) == 1
        assert f"from layer {number // 2 + 2} is" in heard[number][0]


def test_explaining_in_threads_leaves_the_filters_alone() -> None:
    model = af.load("verb-number")
    text = "today that popular player that some large authors visit usually"
    af.explain(text, model=model, importance=())  # libraries that are imported here change them
    before = (list(warnings.filters), warnings.showwarning)
    inside: list[bool] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            inside.append((list(warnings.filters), warnings.showwarning) == before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for _ in range(3):
            af.explain(text, model=model, importance=())
    finally:
        done.set()
        watcher.join()
    assert all(inside)


def test_short_or_shallow_graphs_are_not_warned_of() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        af.flow(np.full((6, 7, 7), 1 / 7))
        af.flow(np.full((1, 20, 20), 1 / 20))
    assert caught == []


# ---- what limits a flow, and how much a row tells ---------------------------------------------


@settings(max_examples=60, deadline=None)
@given(any_attention(max_layers=4), st.sampled_from([0.0, 0.5]), st.data())
def test_what_limits_a_flow_is_its_source_its_target_or_neither(
    weights: Floats, residual: float, data: st.DataObject
) -> None:
    graph = af.AttentionGraph(weights, residual=residual)
    groups = data.draw(st.none() | any_groups(graph.size))
    targets = [[key] for key in range(graph.size)] if groups is None else groups
    result = af.flow(graph, groups=groups, layers=range(1, graph.depth + 1))
    assert result.limited_by.shape == result.values.shape
    assert ((result.limited_by != "between") == result.saturated).all()
    for layer in result.layers:
        for source in range(graph.size):
            for place, group in enumerate(targets):
                value = rational_flow(graph.edges[:layer], source, *group)
                bounds = {
                    "source": graph.edges[layer - 1, source].sum(),
                    "target": graph.edges[0][:, group].sum(),
                }
                met = [name for name, bound in bounds.items() if abs(value - bound) <= 1e-9]
                assert result.limited_by[layer - 1, source, place] == (*met, "between")[0]


def test_only_flow_has_limits() -> None:
    for method in (af.raw, af.rollout):
        result = method(GRAPH)
        assert result.saturated is None
        with pytest.raises(af.OptionError, match="limited_by requires a maximum flow"):
            _ = result.limited_by


def plain_spread(row: Floats, seen: list[bool]) -> float:
    """By the definition, one row at a time."""
    count = sum(seen)
    if count < 2 or row.sum() == 0:
        return 0.0
    shares = [value / row.sum() for value, sees in zip(row, seen, strict=True) if sees]
    return float(sum(abs(share - 1 / count) for share in shares) / 2 / (1 - 1 / count))


@pytest.mark.parametrize("method", ["raw", "rollout", "flow"])
@pytest.mark.parametrize("window", [None, 2, (None, 3, 2), (3, 2, 4)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("normalize", ["sum", None])
@pytest.mark.parametrize("groups", [None, [[1, 2], [6], [4, 3]]])
@pytest.mark.parametrize("without", [(), (5,)])
def test_spread_is_the_distance_from_even_over_the_keys_that_a_row_may_see(
    method: str,
    window: Any,
    causal: bool,
    normalize: str | None,
    groups: list[list[int]] | None,
    without: tuple[int, ...],
) -> None:
    size, depth = 7, 3
    windows = window if isinstance(window, tuple) else (window,) * depth
    distance = np.arange(size)[None, :] - np.arange(size)[:, None]  # key minus query
    sees = np.array(
        [
            (distance <= (0 if causal else size)) & (np.abs(distance) < (each or size + 1))
            for each in windows
        ]
    )
    weights = np.random.default_rng(3).random((depth, size, size)) * sees
    weights /= weights.sum(axis=-1, keepdims=True)
    attention = af.Attention(weights, causal=causal, window=window)
    options: dict[str, Any] = {"groups": groups, "normalize": normalize}
    result = af.METHODS[method](
        attention.graph(without=without), layers=range(1, depth + 1), **options
    )
    reach = np.eye(size, dtype=bool)
    targets = [[key] for key in range(size)] if groups is None else groups
    for layer in result.layers:
        reach = sees[layer - 1] if method == "raw" else sees[layer - 1] @ reach
        for position in result.positions:
            keys = reach[position] & ~np.isin(np.arange(size), without)
            seen = [bool(keys[group].any()) for group in targets]
            expected = plain_spread(result.at(position, layer), seen)
            place = result.layers.index(layer), result.positions.index(position)
            assert abs(result.spread[place] - expected) < SAME


def test_spread_goes_from_nothing_told_to_one_key() -> None:
    assert (af.rollout(np.full((2, 5, 5), 0.2)).spread > 0.1).all()  # the residual favours one key
    even = af.AttentionGraph(np.full((2, 5, 5), 0.2), residual=0)
    assert np.abs(af.rollout(even).spread).max() < SAME
    alone = af.AttentionGraph(np.eye(5)[None], causal=False)
    assert np.abs(af.rollout(alone).spread - 1).max() < SAME
    assert af.rollout([[[1.0]]]).spread.tolist() == [[0.0]]
    causal = af.rollout(attention("causal", 2, 4, np.random.default_rng(0)), groups=[[2], [3]])
    assert causal.spread[0, :3].tolist() == [0.0, 0.0, 0.0]  # no group, none, and one to be seen


# ---- groups -------------------------------------------------------------------------------------


WORDS = af.Attention(
    WEIGHTS,
    tokens=["[CLS]", "un", "##believ", "##able", "Ġkeys", "[SEP]"],
    words=[None, 0, 0, 0, 1, None],
)
OWN = af.token_attention("squared", lambda graph: graph.weights**2)


@pytest.mark.parametrize("normalize", ["sum", "receptive_field", None])
@pytest.mark.parametrize("method", [af.raw, af.rollout])
def test_groups_of_raw_and_rollout_are_sums(method: Any, normalize: str | None) -> None:
    groups = [[4, 1], [0], [5]]
    single = method(GRAPH, normalize=None)
    together = method(GRAPH, normalize=normalize, groups=groups)
    expected = np.stack([single.values[..., group].sum(axis=-1) for group in groups], axis=-1)
    if normalize == "receptive_field":
        even = method(GRAPH.uniform(), normalize=None).values
        expected /= np.stack([even[..., group].sum(axis=-1) for group in groups], axis=-1)
    if normalize is not None:
        expected /= expected.sum(axis=-1, keepdims=True)
    assert np.abs(together.values - expected).max() < SAME


@settings(max_examples=40, deadline=None)
@given(any_attention(max_layers=5), st.data())
def test_flow_to_a_group_is_its_own_maximum_flow(weights: Floats, data: st.DataObject) -> None:
    graph = af.AttentionGraph(weights)
    groups = data.draw(any_groups(graph.size))
    bottom = data.draw(st.integers(0, graph.depth - 1))
    source = data.draw(st.integers(0, graph.size - 1))
    options: dict[str, Any] = {"groups": groups, "bottom": bottom, "normalize": None}
    row = af.flow(graph, positions=[source], **options).at(source)
    every = af.flow(graph, layers=range(bottom + 1, graph.depth + 1), **options).at(source)
    for place, group in enumerate(groups):
        expected = rational_flow(graph.edges[bottom:], source, *group)
        best = af.max_flow(graph, source=(graph.depth, source), target=(bottom, group))
        assert best.targets == tuple(group)
        assert abs(best.cut_capacity - expected) < 1e-9
        for found in (row[place], every[place], best.value):
            assert abs(found - expected) < 1e-9


@pytest.mark.parametrize("method", [af.raw, af.rollout, af.flow])
def test_even_attention_is_even_over_groups_of_a_receptive_field(method: Any) -> None:
    causal = np.tril(np.ones((6, 6))) / np.arange(1, 7)[:, None]
    groups = [[0, 1], [2], [3, 4]]
    options: dict[str, Any] = {"groups": groups, "positions": [5]}
    result = method(np.stack([causal] * 3), normalize="receptive_field", **options)
    assert np.abs(result.values - 1 / 3).max() < SAME


@pytest.mark.parametrize("method", [af.raw, af.rollout, af.flow])
def test_groups_have_names_and_positions(method: Any) -> None:
    words = method(WORDS, groups="words")
    assert words.tokens == ("[CLS]", "unbelievable", "keys", "[SEP]")
    assert [group.positions for group in words.groups] == [(0,), (1, 2, 3), (4,), (5,)]
    assert words.words is None
    assert words.queries == WORDS.tokens
    assert method(WORDS).groups is None
    lists = method(WORDS, groups=[range(1, 5), np.array([0])])
    assert lists.tokens == ("unbelievable keys", "[CLS]")
    named = method(WORDS, groups={"all of it": {1, 2, 3, 4}, "start": (0,)})
    assert named.tokens == ("all of it", "start")
    assert np.abs(named.values - lists.values).max() < SAME
    again = method(WORDS, groups=named.groups)
    assert again.groups == named.groups
    assert method(WEIGHTS, groups=[[3, 1], [0]]).tokens == ("1, 3", "0")
    assert method(WORDS, groups="words").at(2).shape == (4,)
    left = method(WORDS.graph(without=[0, 2]), groups="words")
    assert [group.positions for group in left.groups] == [(1, 3), (4,), (5,)]


def test_by_word_is_a_group_for_each_word_and_flow_refuses_to_be_summed() -> None:
    for method in (af.raw, af.rollout):
        summed, grouped = method(WORDS).by_word(), method(WORDS, groups="words")
        assert summed.groups == grouped.groups
        assert np.abs(summed.values - grouped.values).max() < SAME
        assert np.abs(summed.spread - grouped.spread).max() < SAME
    with pytest.raises(af.OptionError, match=r"not the sum .* flow\(graph, groups='words'\)"):
        af.flow(WORDS).by_word()


def test_sources_of_raw_and_rollout_are_mean_rows() -> None:
    """Each row is normalised first, where edges do not sum to 1 too."""
    rng = np.random.default_rng(5)
    given = af.AttentionGraph(edges=rng.random((3, 6, 6)) * rng.uniform(0.1, 9.0, (3, 6, 1)))
    sources = {"two": [4, 1], "one": [2]}
    for graph in (GRAPH, given):
        for method in (af.raw, af.rollout):
            single = method(graph).values
            together = method(graph, sources=sources)
            expected = np.stack([single[:, [4, 1]].mean(axis=1), single[:, 2]], axis=1)
            assert np.abs(together.values - expected).max() < SAME
    rolled = np.linalg.multi_dot(given.edges[::-1])[[4, 1]]
    top = af.rollout(given, sources=sources).at(4)
    assert np.abs(top - (rolled / rolled.sum(axis=1, keepdims=True)).mean(axis=0)).max() < SAME
    plain = af.rollout(given, sources=sources, normalize=None).at(4)
    assert np.abs(plain - rolled.mean(axis=0)).max() < SAME * rolled.max()


@pytest.mark.parametrize("method", [*af.METHODS.values(), OWN])
def test_sources_have_names_positions_and_what_they_see(method: Any) -> None:
    words = method(WORDS, sources="words", groups="words", layers=[4])
    assert [source.positions for source in words.sources] == [(0,), (1, 2, 3), (4,), (5,)]
    assert words.queries == words.tokens
    assert words.positions == (0, 3, 4, 5)
    assert words.values.shape == (1, 4, 4)
    assert words.at(3).shape == (4,)
    assert "4 sources" in repr(words)
    assert words.select(3).sources == words.sources[1:2]
    assert words.select(3).select(3).queries == words.queries[1:2]
    causal = af.AttentionGraph(np.tril(np.ones((2, 5, 5))) / np.arange(1, 6)[:, None])
    seen = method(causal, sources=[[0, 3], [1]], layers=[1, 2])
    assert (seen.mask_visible(1) == [[True] * 4 + [False], [True] * 2 + [False] * 3]).all()
    assert seen.compared_with("even").select(1).sources == seen.sources[1:]
    near = af.AttentionGraph(np.eye(9)[None], window=2, causal=True)
    sees = method(near, sources=[[1, 8]]).mask_visible(0)[0]
    assert np.flatnonzero(sees).tolist() == [0, 1, 7, 8]


def test_what_limits_sources_is_known_and_written(tmp_path: Path) -> None:
    edges = np.array([[[1.0, 0.0], [1.0, 0.0]], [[0.0, 2.0], [1.0, 2.0]]])
    result = af.flow(af.AttentionGraph(edges=edges), sources=[[1, 0]], normalize=None)
    assert result.values.tolist() == [[[2.0, 0.0]]]  # row sums 5, column sums 2 and 0
    assert result.limited_by.tolist() == [[["target", "target"]]]
    narrow = af.AttentionGraph(edges=edges * [[[1.0]], [[0.1]]])
    assert af.flow(narrow, sources=[[1, 0]]).limited_by[0, 0, 0] == "source"
    assert json.loads(result.save(tmp_path / "f.json").read_text())["sources"] == [[1, 0]]
    with np.load(result.save(tmp_path / "f.npz")) as read:
        assert (read["source_positions"] == [1, 0]).all()
        assert read["source_lengths"] == [2]
    best = af.max_flow(WEIGHTS, source=(4, [2, 3]), target=(0, 1))
    with np.load(best.save(tmp_path / "m.npz")) as read:
        assert read["source_layer"] == 4
        assert (read["source_positions"] == [2, 3]).all()
    assert json.loads(best.to_json())["source"] == [4, [2, 3]]
    assert "positions 2, 3 (2, 3)" in best._repr_html_()
    af.figures.flow_paths(best).save(tmp_path / "paths.png")
    with pytest.raises(af.OptionError, match="these rows are of several taken together"):
        af.figures.layered_graph(af.rollout(WEIGHTS, sources=[[1, 2], [0]]))


def test_groups_are_written_to_files(tmp_path: Path) -> None:
    result = af.flow(WORDS, groups="words")
    read = json.loads(result.save(tmp_path / "words.json").read_text())
    assert read["groups"] == [[0], [1, 2, 3], [4], [5]]
    assert read["tokens"] == list(result.tokens)
    with np.load(result.save(tmp_path / "words.npz")) as arrays:
        ends = np.cumsum(arrays["group_lengths"])[:-1]
        assert [part.tolist() for part in np.split(arrays["group_positions"], ends)] == [
            [0],
            [1, 2, 3],
            [4],
            [5],
        ]
    assert repr(result) == "<TokenAttention: flow from layers 4 to layer 0, 6 positions, 4 groups>"


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


def test_by_word_refuses_maximum_flows_under_any_name() -> None:
    attended = af.Attention(WEIGHTS, words=[None, 0, 0, 0, 1, None])
    for renamed in ("flow", "flow on contribution"):
        result = replace(af.flow(attended), method=renamed)
        assert result.limits is not None
        with pytest.raises(af.OptionError, match="not the sum of the flows"):
            result.by_word()
    assert af.rollout(attended).by_word().limits is None


def test_a_negative_position_counts_from_the_end_of_the_sequence() -> None:
    result = af.rollout(GRAPH, positions=[1, 5])
    assert (result.at(-1) == result.at(5)).all()
    assert (result.select(-1).values[0] == result.at(5)).all()
    assert result.select(-5, layer=2).positions == (1,)
    assert result.top(2, position=-1) == result.top(2, position=5)
    with pytest.raises(af.OptionError, match=r"position -2 was not computed; .* positions 1, 5"):
        result.at(-2)
    with pytest.raises(af.OptionError, match="position -7 was not computed"):
        result.at(-7)  # is not position -1 of a sequence of 6


def test_a_result_by_group_counts_positions_of_the_graph_not_groups() -> None:
    attended = af.Attention(WEIGHTS, words=[None, 0, 0, 0, 1, None])
    words = af.rollout(attended).by_word()
    assert [words.size, len(words.tokens)] == [6, 4]
    assert (words.at(-1) == words.at(5)).all()
    unknown = replace(words, size=None)
    with pytest.raises(af.OptionError, match=r"whose size is known; got -1: give one of 0\.\.5"):
        unknown.at(-1)
    assert (unknown.at(5) == words.at(5)).all()
    # without a size, positions up to the last one of any group can be excluded
    assert unknown.compared_with("even", exclude=[4]).excluded == (2,)


def test_results_become_tables_and_files(tmp_path: Path) -> None:
    result = af.flow(GRAPH, layers=[2, 3], positions=[1, 4], normalize=None)
    table = result.to_pandas()
    columns = ["method", "layer", "position", "query", "key", "token", "value"]
    assert list(table.columns) == columns
    assert len(table) == 2 * 2 * 6
    for ending in ("csv", "json", "npz"):
        assert result.save(tmp_path / f"result.{ending}").exists()
    lines = (tmp_path / "result.csv").read_text().splitlines()
    assert lines[0] == ",".join([*columns, "source"])
    assert float(lines[1].split(",")[6]) == result.values[0, 0, 0]
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
    (lambda: af.rollout(GRAPH).top(0), "k must be a whole number, at least 1; got 0"),
    (lambda: af.flow(GRAPH, positions=[6]), "positions must be from -6 to 5; got 6"),
    (lambda: af.flow(GRAPH, positions=[-7]), "positions must be from -6 to 5; got -7"),
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
        "position of target must be from -6 to 5; got 6",
    ),
    (lambda: af.max_flow(GRAPH, source=4, target=(0, 6)), "source must be a pair"),  # type: ignore[arg-type]
    (lambda: af.max_flow(GRAPH, source=(4, [0, 0]), target=(0, 1)), "source must be distinct"),
    (lambda: af.max_flow(GRAPH, source=(4, [9]), target=(0, 1)), "of source must be from -6 to 5"),
    (lambda: af.flow(GRAPH, sources=[[0], [6]]), "source 1 must be from -6 to 5; got 6"),
    (lambda: af.flow(GRAPH, sources=[[0, 1], [1]]), "in one source only; got 1 in sources 0 and 1"),
    (lambda: af.flow(GRAPH, sources=[]), "at least one source must be given; got none"),
    (lambda: af.raw(GRAPH, sources=[0, 1]), "sources must be lists of positions.*; got 0 as sou"),  # type: ignore[list-item]
    (lambda: af.rollout(GRAPH, sources=[[0]], positions=[1]), "of positions or of sources; got"),
    (lambda: af.max_flow(GRAPH, source=(4, 0), target=(0, [])), "must be at least one; got none"),
    (lambda: af.max_flow(GRAPH, source=(4, 0), target=(0, [1, 1])), "distinct; got 1 twice"),
    (lambda: af.flow(GRAPH, groups="words"), "here are none: give Attention.words="),
    (lambda: af.raw(GRAPH, groups="sentences"), "unknown groups 'sentences'; choose 'words'"),
    (lambda: af.raw(GRAPH, groups=[]), "at least one group must be given; got none"),
    (lambda: af.raw(GRAPH, groups=5), "groups must be a list; got 5"),  # type: ignore[arg-type]
    (lambda: af.raw(GRAPH, groups=[0, 1]), "groups must be lists of positions.*; got 0"),  # type: ignore[list-item]
    (lambda: af.raw(GRAPH, groups=["ab"]), "groups must be lists of positions.*; got 'ab'"),  # type: ignore[list-item]
    (lambda: af.flow(GRAPH, groups=[[0], []]), "positions of group 1 must be at least one"),
    (lambda: af.flow(GRAPH, groups=[[0], [6]]), "group 1 must be from -6 to 5; got 6"),
    (lambda: af.flow(GRAPH, groups=[[0], [1, 1]]), "group 1 must be distinct; got 1 twice"),
    (
        lambda: af.rollout(GRAPH, groups=[[0, 1], [2, 1]]),
        "in one group only; got 1 in groups 0 and 1",
    ),
    (lambda: af.rollout(GRAPH, groups={1: [2]}), "names of groups must be strings; got 1"),  # type: ignore[arg-type]
    (
        lambda: af.rollout(af.Attention(WEIGHTS).graph(without=[2]), groups=[[2]]),
        "position 2 was taken out of this graph",
    ),
    (lambda: af.rollout(GRAPH).at(9), "position 9 was not computed"),
    (lambda: af.flow(GRAPH).at(0, layer=2), "layer must be one of 4, those of this result; got 2"),
    (
        lambda: af.rollout(
            af.AttentionGraph(WEIGHTS, layer_names=tuple("abcd")), normalize="receptive_field"
        ),
        "encoder-decoder",
    ),
]


@settings(max_examples=30, deadline=None)
@given(st.integers(-6, 5), st.integers(-6, 5))
def test_negative_positions_count_from_the_end_at_every_door(one: int, two: int) -> None:
    first, second = one % 6, two % 6
    for method in (af.raw, af.rollout, af.flow):
        asked = method(GRAPH, positions=[one, two])
        assert asked.positions == (first, second)
        assert (asked.values == method(GRAPH, positions=[first, second]).values).all()
    best = af.max_flow(GRAPH, source=(4, one), target=(0, [two]))
    assert (best.source, best.target) == ((4, first), (0, (second,)))
    assert best.value == af.max_flow(GRAPH, source=(4, first), target=(0, second)).value
    (group,) = af.rollout(GRAPH, groups=[[two]]).groups or ()
    assert group.positions == (second,)
    weights = GRAPH.weights
    assert af.Attention(weights).graph(without=[one]).removed == (first,)
    assert af.AttentionGraph(weights, removed=[one]).removed == (first,)
    with pytest.raises(af.OptionError, match=f"position {first} was taken out"):
        af.rollout(af.AttentionGraph(weights, removed=[one]), positions=[first])


@pytest.mark.parametrize(("call", "message"), BAD)
def test_bad_requests_get_one_clear_line(call: Any, message: str) -> None:
    with pytest.raises(af.OptionError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


def test_an_unknown_ending_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(
        af.FileError, match=r"must be one of .csv, .json, .md, .tex, .npz; got .xlsx"
    ):
        af.raw(GRAPH).save(tmp_path / "result.xlsx")
