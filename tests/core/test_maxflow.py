"""Attention flow is exact: against rational arithmetic, against igraph, and by what is proved of it."""

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import attnflow as af
from attnflow.core.flow import solve as flows
from attnflow.core.flow.bounds import bound_from_below
from attnflow.core.flow.capacities import TINY, find_ways
from attnflow.core.flow.cut import find_flow_and_cut
from attnflow.core.flow.kernels import unpack_nodes
from attnflow.core.flow.solve import (
    Problem,
    bound_by_outer_cuts,
    find_all_flows,
    find_flows,
    find_waist,
    lower_supplies,
    raise_demands,
    settle,
)
from attnflow.core.layers import Layers
from attnflow.core.masks import is_causal
from attnflow.notices import ignore_notices
from tests.oracles import (
    KINDS,
    SAME,
    Floats,
    Igraph,
    any_attention,
    any_capacities,
    any_groups,
    attention,
    check_flow,
    edges_of,
    max_sum,
    rational_flow,
    real_attention,
)

EXACT = 1e-9
NOTHING = 2.0**-52  # of the largest row sum: what carries nothing


def all_flows(edges: Floats) -> Floats:
    """[source, target] by the layer job."""
    return find_flows(edges, np.arange(edges.shape[1]), causal=bool(is_causal(edges)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("layers", "size"), [(1, 1), (1, 4), (4, 1), (2, 5), (3, 5), (4, 4), (7, 3)]
)
@pytest.mark.parametrize("residual", [0.5, 0.0, 0.2])
def test_flow_equals_rational_oracle(kind: str, layers: int, size: int, residual: float) -> None:
    edges = edges_of(attention(kind, layers, size, np.random.default_rng(layers + size)), residual)
    flows = all_flows(edges)
    for source in range(size):
        for target in range(size):
            assert abs(flows[source, target] - rational_flow(edges, source, target)) < EXACT


@settings(max_examples=200, deadline=None)
@given(any_attention(), st.sampled_from([0.0, 0.1, 0.5, 0.9]), st.data())
def test_flow_of_mixed_layers_equals_rational_oracle(
    weights: Floats, residual: float, data: st.DataObject
) -> None:
    edges = edges_of(weights, residual)
    source, target = (data.draw(st.integers(0, len(edges[0]) - 1)) for _ in range(2))
    expected = rational_flow(edges, source, target)
    assert abs(all_flows(edges)[source, target] - expected) < EXACT
    assert abs(find_flow_and_cut(edges, [source], [target])[0] - expected) < EXACT


@pytest.mark.parametrize(("name", "weights"), list(real_attention()))
@pytest.mark.parametrize("layers", [3, 4, 5, 6, 8, 12])
def test_flow_equals_igraph_on_real_attention(name: str, weights: Floats, layers: int) -> None:
    edges = edges_of(weights[:layers])
    peer, flows = Igraph(edges), all_flows(edges)
    rng = np.random.default_rng(0)
    for source, target in rng.integers(0, edges.shape[1], (40, 2)):
        assert abs(flows[source, target] - peer.flow(source, target)) < EXACT


@pytest.mark.parametrize("kind", ["peaky", "flat", "causal", "sparse", "extreme", "uniform"])
@pytest.mark.parametrize(("layers", "size"), [(5, 70), (9, 40), (3, 130)])
def test_flow_equals_igraph_across_word_boundaries(kind: str, layers: int, size: int) -> None:
    edges = edges_of(attention(kind, layers, size, np.random.default_rng(size)))
    peer, flows = Igraph(edges), all_flows(edges)
    for source, target in np.random.default_rng(1).integers(0, size, (25, 2)):
        assert abs(flows[source, target] - peer.flow(source, target)) < EXACT


# ---- one flow in full -----------------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(any_attention(max_layers=6, max_size=8), st.sampled_from([0.0, 0.5]), st.data())
def test_max_flow_keeps_capacity_and_conservation_and_equals_its_cut(
    weights: Floats, residual: float, data: st.DataObject
) -> None:
    graph = af.AttentionGraph(weights, residual=residual)
    source, target = (data.draw(st.integers(0, graph.size - 1)) for _ in range(2))
    best = af.max_flow(graph, source=(graph.depth, source), target=(0, target))
    check_flow(graph.edges, best, source, target)


@pytest.mark.parametrize(("name", "weights"), list(real_attention()))
def test_max_flow_on_real_attention(name: str, weights: Floats) -> None:
    graph = af.AttentionGraph(weights)
    flows = (
        af.flow(graph, positions=[40], normalize=None, layers=[graph.depth])
        if graph.causal
        else silent_flow(graph)
    )
    for target in (0, 7, 39, 63):
        best = af.max_flow(graph, source=(12, 40), target=(0, target))
        check_flow(graph.edges, best, 40, target)
        assert abs(best.value - flows.at(40)[target]) < SAME


def silent_flow(graph: af.AttentionGraph) -> af.TokenAttention:
    with pytest.warns(af.SaturationWarning):
        return af.flow(graph, positions=[40], normalize=None)


# ---- groups, and edges whose rows sum to anything -----------------------------------------------


def certificate(edges: Floats, source: int, *targets: int) -> af.MaxFlow:
    value, flow, cut = find_flow_and_cut(edges, [source], targets)
    places = tuple((layer + 1, query, key) for layer, query, key in np.argwhere(cut).tolist())
    top = (len(edges), source)
    return af.MaxFlow(value, top, (0, targets), flow, places, float(edges[cut].sum()), ())


@settings(max_examples=150, deadline=None)
@given(any_capacities(), st.data())
def test_any_capacities_and_groups_equal_rational_oracle(
    edges: Floats, data: st.DataObject
) -> None:
    size, exact = edges.shape[1], EXACT * max_sum(edges)
    groups = data.draw(any_groups(size))
    source = data.draw(st.integers(0, size - 1))
    causal = bool(is_causal(edges))
    for given_groups, targets in [(None, [[m] for m in range(size)]), (groups, groups)]:
        expected = np.array([rational_flow(edges, source, *group) for group in targets])
        layer = find_flows(edges, np.arange(size), groups=given_groups, causal=causal)
        row = find_flows(edges, np.array([source]), groups=given_groups, causal=causal)
        every = find_all_flows(edges, groups=given_groups, causal=causal)
        for found in (layer[source], row[0], every[-1, source]):
            assert found.shape == expected.shape
            assert (np.abs(found - expected) <= exact).all()
        for group, value in zip(targets, expected, strict=True):
            best = certificate(edges, source, *group)
            assert abs(best.value - value) <= exact
            check_flow(edges, best, source, *group)


@settings(max_examples=60, deadline=None)
@given(any_capacities(max_layers=9, max_size=16), st.data())
def test_any_capacities_and_groups_equal_igraph(edges: Floats, data: st.DataObject) -> None:
    groups = data.draw(any_groups(edges.shape[1]))
    causal = bool(is_causal(edges))
    peer = Igraph(edges, groups)
    flows = find_flows(edges, np.arange(edges.shape[1]), groups=groups, causal=causal)
    every = find_all_flows(edges, groups=groups, causal=causal)
    assert (np.abs(every[-1] - flows) <= SAME * max_sum(edges)).all()
    for source in range(edges.shape[1]):
        for group in range(len(groups)):
            expected = peer.flow_to_group(source, group)
            assert abs(flows[source, group] - expected) <= EXACT * max_sum(edges)


@pytest.mark.parametrize(("name", "weights"), list(real_attention()))
@pytest.mark.parametrize("factor", [1.0, 1e9])
@pytest.mark.parametrize("layers", [2, 6, 12])
def test_groups_on_real_attention_equal_igraph(
    name: str, weights: Floats, factor: float, layers: int
) -> None:
    rng = np.random.default_rng(layers)
    edges = edges_of(weights[:layers]) * rng.uniform(0.5, 1.0, (layers, 64, 1)) * factor
    groups = [list(range(start, start + 4)) for start in range(0, 60, 4)]
    flows = find_flows(edges, np.arange(64), groups=groups, causal=name == "smollm2")
    peer = Igraph(edges, groups)
    for source, group in np.random.default_rng(0).integers(0, (64, 15), (20, 2)):
        expected = peer.flow_to_group(source, group)
        assert abs(flows[source, group] - expected) <= EXACT * max_sum(edges)


# ---- from sets of sources -----------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(any_capacities(max_layers=8, max_size=12), st.booleans(), st.data())
def test_flow_from_sets_of_sources_equals_igraph(
    edges: Floats, grouped: bool, data: st.DataObject
) -> None:
    """A super-source, whose capacity to each source is that source's row sum."""
    size, exact = edges.shape[1], EXACT * max_sum(edges)
    sources = data.draw(any_groups(size))
    groups = data.draw(any_groups(size)) if grouped else [[key] for key in range(size)]
    graph = af.AttentionGraph(edges=edges)
    peer = Igraph(edges, groups, sources)
    with ignore_notices():
        together = af.flow(graph, sources=sources, groups=groups, normalize=None).values[0]
        single = af.flow(graph, groups=groups, normalize=None).values[0]
    for row, source in enumerate(sources):
        for column, _group in enumerate(groups):
            expected = peer.flow_of_sources(row, peer.drains[column])
            assert abs(together[row, column] - expected) <= exact
            flows = single[source, column]
            assert flows.max() - exact <= together[row, column] <= flows.sum() + exact
        target = data.draw(st.integers(0, len(groups) - 1))
        top = graph.depth, source
        with ignore_notices():
            best = af.max_flow(graph, source=top, target=(0, groups[target]))
        assert abs(best.value - together[row, target]) <= exact
        check_flow(edges, best, source, *groups[target])


@pytest.mark.parametrize(("name", "weights"), list(real_attention()))
@pytest.mark.parametrize("layers", [2, 6, 12])
def test_sets_of_sources_on_real_attention_equal_igraph(
    name: str, weights: Floats, layers: int
) -> None:
    rng = np.random.default_rng(layers)
    edges = edges_of(weights[:layers]) * rng.uniform(0.5, 1.0, (layers, 64, 1))
    sources = [[60, 61, 62, 63], [40, 45, 50], [7]]
    graph = af.AttentionGraph(edges=edges)
    assert graph.causal == (name == "smollm2")
    with ignore_notices():
        flows = af.flow(graph, sources=sources, normalize=None).values[0]
    peer = Igraph(edges, sources=sources)
    for source in range(len(sources)):
        for target in rng.integers(0, 64, 6).tolist():
            assert abs(flows[source, target] - peer.flow_of_sources(source, target)) < EXACT
    best = af.max_flow(graph, source=(layers, sources[0]), target=(0, 3))
    check_flow(edges, best, sources[0], 3)


def test_a_set_of_sources_is_limited_by_what_they_share() -> None:
    """Two sources above one narrow edge: together they send no more than one alone."""
    edges = np.zeros((3, 2, 2))
    edges[2], edges[1, 0, 0], edges[0, 0, 0] = [[1.0, 0.0], [1.0, 0.0]], 0.2, 1.0
    graph = af.AttentionGraph(edges=edges)
    for source in ([0], [1], [0, 1]):
        assert af.max_flow(graph, source=(3, source), target=(0, 0)).value == pytest.approx(0.2)
    both = af.max_flow(graph, source=(3, [1, 0]), target=(0, 0))
    assert both.source == (3, (1, 0))
    assert both.sources == (1, 0)
    assert both.cut == ((2, 0, 0),)
    assert af.max_flow(graph, source=(3, [-1, 0]), target=(2, 0)).value == 2.0
    assert both.to_pandas().query("layer == 3").flow.sum() == pytest.approx(0.2)


@pytest.mark.parametrize("seed", range(150))
def test_a_target_column_that_fills_up_keeps_every_capacity(seed: int) -> None:
    """What slides down the target's column is booked late: no other path may use it twice."""
    rng = np.random.default_rng(seed)
    size, layers = int(rng.integers(2, 7)), int(rng.integers(5, 9))
    edges = rng.random((layers, size, size)) * (rng.random((layers, size, size)) < 0.5)
    source, target = rng.integers(0, size, 2).tolist()
    edges[:, target, target] = rng.choice([0.2, 0.5, 1.0], layers)  # wide or narrow, by layer
    edges[0, :, target] = 0.3 * rng.random(size)  # and its demand is soon met
    edges[0, target, target] = 0.35
    best = certificate(edges, source, target)
    check_flow(edges, best, source, target)
    alone = find_flows(edges, np.array([source]))[0, target]
    assert abs(alone - best.value) <= SAME * max_sum(edges)


def test_flow_to_a_group_is_not_the_sum_of_flows() -> None:
    """Two targets that share one narrow edge: each gets all of it, both together no more."""
    edges = np.zeros((3, 3, 3))
    edges[2, 0, 0], edges[1, 0, 0], edges[0, 0] = 1.0, 0.2, (0.0, 0.5, 0.5)
    single = find_flows(edges, np.array([0]))[0]
    together = find_flows(edges, np.array([0]), groups=[[1, 2]])[0]
    np.testing.assert_allclose(single, [0.0, 0.2, 0.2])
    np.testing.assert_allclose(together, [0.2])


@pytest.mark.parametrize("scale", [1.0, 1e-9, 1e9, 3.0])
@pytest.mark.parametrize("layers", [1, 2, 3, 4, 8])
def test_a_capacity_of_2_to_the_minus_52_carries_nothing_at_any_depth(
    layers: int, scale: float
) -> None:
    chain = np.zeros((layers, 2, 2))
    chain[:, 0, 0] = chain[:, 1, 1] = 1.0
    for narrow in range(layers):
        for times, carries in [(0.9, False), (4.0, True)]:
            edges = chain.copy()
            edges[narrow, 0, 0] = times * NOTHING
            edges *= scale
            found = [
                find_flows(edges, np.array([0]))[0, 0],
                find_flows(edges, np.array([0]), groups=[[0]])[0, 0],
                find_all_flows(edges)[-1, 0, 0],
                find_flow_and_cut(edges, [0], [0])[0],
            ]
            expected = times * NOTHING * scale if carries else 0.0
            assert [value > 0 for value in found] == [carries] * 4
            np.testing.assert_allclose(found, expected, rtol=0, atol=NOTHING * scale)


@pytest.mark.parametrize("layers", [3, 4, 8])
def test_a_small_bound_is_not_taken_for_a_flow(layers: int) -> None:
    """A target that takes in next to nothing, and that no path reaches."""
    edges = np.zeros((layers, 2, 2))
    edges[:, 0, 0] = edges[:, 1, 1] = 1.0
    edges[0, 0, 0] = 4 * NOTHING
    edges[1, 0, 0] = 0.0
    assert find_flows(edges, np.array([0]))[0, 0] == 0.0
    assert find_all_flows(edges)[-1, 0, 0] == 0.0
    assert find_flow_and_cut(edges, [0], [0])[0] == 0.0


@settings(max_examples=60, deadline=None)
@given(any_capacities(max_layers=8, kinds=["extreme", "sparse", "peaky", "window", "blocks"]))
def test_what_cannot_be_reached_has_no_flow_at_all(edges: Floats) -> None:
    carrying = edges > NOTHING * max_sum(edges)
    causal = bool(is_causal(edges))
    reached = np.eye(edges.shape[1], dtype=bool)
    every = find_all_flows(edges, causal=causal)
    for layer, found in enumerate(every, start=1):
        reached = carrying[layer - 1] @ reached  # [source, target]: is there any path?
        assert ((found > 0) == reached).all()
        if max_sum(edges[:layer]) == max_sum(edges):
            alone = find_flows(edges[:layer], np.arange(edges.shape[1]), causal=causal)
            assert ((alone > 0) == reached).all()


# ---- what is proved of flow -----------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(any_attention(), st.sampled_from([0.0, 0.5]))
def test_one_layer_and_two_layers_have_closed_forms(weights: Floats, residual: float) -> None:
    edges = edges_of(weights, residual)
    assert (all_flows(edges[:1]) == np.where(edges[0] > NOTHING, edges[0], 0.0)).all()
    if len(edges) > 1:
        both = np.minimum(edges[1][:, :, None], edges[0][None]).sum(axis=1)  # [source, target]
        assert np.abs(all_flows(edges[:2]) - both).max() < SAME


@settings(max_examples=100, deadline=None)
@given(any_attention(max_layers=6), st.sampled_from([0.0, 0.5]))
def test_outer_cuts_and_bounds_from_the_layer_below_hold(weights: Floats, residual: float) -> None:
    edges = edges_of(weights, residual)
    every = find_all_flows(edges, causal=bool(is_causal(edges)))
    positions = np.arange(edges.shape[1])
    for layer in range(1, len(edges)):
        cuts = bound_by_outer_cuts(
            edges[layer],
            np.ascontiguousarray(edges[0].T),
            positions,
            bool(is_causal(edges)),
        )
        most, least = bound_from_below(edges[layer], every[layer - 1])
        assert (every[layer] <= np.minimum(cuts, most) + SAME).all()
        assert (every[layer] >= least - SAME).all()
        assert (
            least >= edges[layer] @ every[layer - 1] - SAME
        ).all()  # the knapsack is no worse than the plain product


@settings(max_examples=60, deadline=None)
@given(any_attention(max_layers=8, kinds=["uniform", "flat", "blocks"]))
def test_a_target_that_every_source_saturates_stays_saturated(weights: Floats) -> None:
    edges = edges_of(weights)
    bound = np.minimum(1.0, edges[0].sum(axis=0))
    every = find_all_flows(edges)
    closed = (every >= bound - 1e-10).all(axis=1)  # [layer, target]
    assert (closed[1:] >= closed[:-1]).all()


@settings(max_examples=80, deadline=None)
@given(any_attention(max_layers=7, max_size=9), st.sampled_from([0.0, 0.5]))
def test_flow_between_lowered_supply_and_raised_demand_is_a_lower_bound(
    weights: Floats, residual: float
) -> None:
    edges = edges_of(weights, residual)
    if len(edges) < 5:
        return
    flows = all_flows(edges)
    inner = Layers.of_edges(edges[1:-1])
    cuts = np.full(flows.shape, np.inf)
    problem = Problem(edges[-1], np.ascontiguousarray(edges[0].T), inner, cuts, False)
    for place in range(1, len(inner) - 1):
        waist = problem.narrow(place)
        through = np.full(flows.shape, np.nan)
        settle(waist, through, 1, None)
        assert (through <= flows + SAME).all()
    assert (lower_supplies(edges[-1], inner).sum(axis=1) <= 1 + SAME).all()
    assert (
        raise_demands(problem.demands, inner).sum(axis=1) <= problem.demands.sum(axis=1) + SAME
    ).all()


def test_the_waist_of_a_deep_graph_is_found_and_changes_no_value() -> None:
    edges = edges_of(dict(real_attention())["minilm"])
    inner, demands = Layers.of_edges(edges[1:-1]), np.ascontiguousarray(edges[0].T)
    cuts = bound_by_outer_cuts(edges[-1], demands, np.arange(64), False)
    assert find_waist(Problem(edges[-1], demands, inner, cuts, False)) is not None
    single = [
        find_flow_and_cut(edges, [source], [target])[0]
        for source in (0, 30)
        for target in range(64)
    ]
    assert np.abs(all_flows(edges)[[0, 30]].ravel() - single).max() < SAME


# ---- the same value whatever else is asked --------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(any_attention(max_layers=8, max_size=9), st.sampled_from([0.0, 0.5]), st.data())
def test_a_value_is_the_same_alone_in_its_row_layer_and_all_layers(
    weights: Floats, residual: float, data: st.DataObject
) -> None:
    graph = af.AttentionGraph(weights, residual=residual)
    source = data.draw(st.integers(0, graph.size - 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", af.SaturationWarning)
        row = af.flow(graph, positions=[source], normalize=None).at(source)
        layer = af.flow(graph, normalize=None).at(source)
        every = af.flow(graph, layers=range(1, graph.depth + 1), normalize=None).at(source)
    alone = [
        af.max_flow(graph, source=(graph.depth, source), target=(0, target)).value
        for target in range(graph.size)
    ]
    for other in (layer, every, alone):
        assert np.abs(row - other).max() < SAME


@pytest.mark.parametrize(("name", "weights"), list(real_attention()))
def test_jobs_agree_on_real_attention(name: str, weights: Floats) -> None:
    edges = edges_of(weights)
    causal = name == "smollm2"
    every = find_all_flows(edges, causal=causal)
    for layer in (3, 5, 6, 9, 12):
        assert (
            np.abs(every[layer - 1] - find_flows(edges[:layer], np.arange(64), causal=causal)).max()
            < SAME
        )
        assert (
            np.abs(
                every[layer - 1, [5, 50]]
                - find_flows(edges[:layer], np.array([5, 50]), causal=causal)
            ).max()
            < SAME
        )


@pytest.mark.parametrize(("name", "weights"), list(real_attention()))
@pytest.mark.parametrize("workers", [2, 3, 8])
def test_bit_for_bit_the_same_for_any_number_of_workers(
    name: str, weights: Floats, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flows, "BLOCK_NODES", 20_000)  # many blocks: threads do share the work
    edges = edges_of(weights[:7])
    alone = find_flows(edges, np.arange(64), causal=name == "smollm2")
    assert (
        find_flows(edges, np.arange(64), causal=name == "smollm2", workers=workers) == alone
    ).all()
    every = find_all_flows(edges, causal=name == "smollm2")
    assert (find_all_flows(edges, causal=name == "smollm2", workers=workers) == every).all()


def test_bit_for_bit_the_same_for_any_memory_order() -> None:
    weights = attention("peaky", 6, 20, np.random.default_rng(3)).astype(np.float32)
    orders = [
        weights,
        np.asfortranarray(weights),
        np.ascontiguousarray(weights.transpose(2, 0, 1)).transpose(1, 2, 0),
        weights[:, :, :].copy(),
    ]
    for method in (af.raw, af.rollout, af.flow):
        results = [
            method(af.Attention(order), layers=[5], normalize=None).values for order in orders
        ]
        assert all((result == results[0]).all() for result in results)


def test_permuting_tokens_permutes_flows() -> None:
    edges = edges_of(attention("peaky", 5, 30, np.random.default_rng(8)))
    order = np.random.default_rng(9).permutation(30)
    assert (
        np.abs(all_flows(edges[:, order][:, :, order]) - all_flows(edges)[order][:, order]).max()
        < SAME
    )


def test_the_scratch_of_one_pair_does_not_leak_into_the_next() -> None:
    edges = edges_of(attention("peaky", 6, 25, np.random.default_rng(5)))
    together = all_flows(edges)
    apart = np.concatenate([find_flows(edges, np.array([source])) for source in range(25)])
    assert np.abs(together - apart).max() < SAME


def test_progress_is_told_and_ends_at_the_total() -> None:
    edges = edges_of(attention("peaky", 4, 20, np.random.default_rng(5)))
    told: list[tuple[int, int]] = []
    find_flows(edges, np.arange(20), tick=lambda done, total: told.append((done, total)))
    assert told[-1] == (400, 400)
    find_all_flows(edges, tick=lambda done, total: told.append((done, total)))
    assert told[-1] == (1600, 1600)


@pytest.mark.parametrize("nodes", [1, 63, 64, 65, 130])
@pytest.mark.parametrize("steps", [0, 3])
def test_the_bits_of_edges_are_those_that_can_carry_something(nodes: int, steps: int) -> None:
    rng = np.random.default_rng(nodes)
    edges = rng.random((steps, nodes, nodes)) * (rng.random((steps, nodes, nodes)) < 0.5)
    edges *= rng.choice([1.0, 1e-17], edges.shape)
    ways = find_ways(Layers.of_edges(edges).held)
    assert ways.shape == (steps, nodes, (nodes + 63) // 64)
    assert (unpack_nodes(ways, nodes) == (edges > TINY)).all()
    for row, words in zip(edges.reshape(-1, nodes), ways.reshape(-1, ways.shape[2]), strict=True):
        assert sum(int(word) << 64 * place for place, word in enumerate(words)) == sum(
            1 << int(node) for node in np.flatnonzero(row > TINY)
        )
