"""Generated graphs: flows against igraph, and the certificates of maximum flows.

A third are attention with its residual: flows of a row, a layer and all layers. A third have any
capacities that are not negative. A third ask for flows to groups of positions.
"""

import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import attnflow as af
from attnflow.core.flow.cut import find_flow_and_cut
from attnflow.core.flow.solve import find_all_flows, find_flows
from attnflow.core.masks import is_causal
from tests.hostile.tries import Result, complain, run_tries
from tests.oracles import KINDS, Floats, Igraph, attention, check_flow

CLOSE = 1e-9  # of the largest capacity
SHAPES = [(1, 1), (1, 5), (2, 6), (3, 4), (3, 9), (4, 7), (5, 3), (6, 12), (8, 6), (12, 8)]
LARGE = [(3, 70), (5, 66), (12, 30), (4, 130)]  # across the 64 bits of a word, and deep
PAIRS = 6  # compared in each try


def run(numbers: Sequence[int], seed: int, folder: Path) -> Result:
    """Try these graphs."""
    return run_tries(attempt, "graphs", numbers, seed, folder)


def attempt(draw: random.Random, number: int, folder: Path) -> str | None:
    """Compare one graph; what is wrong, if anything."""
    rng = np.random.default_rng(draw.getrandbits(64))
    depth, size = draw.choice(LARGE if number % 40 == 39 else SHAPES)
    kinds = [draw.choice(KINDS)] * depth if draw.random() < 0.5 else draw.choices(KINDS, k=depth)
    weights = np.concatenate([attention(kind, 1, size, rng) for kind in kinds])
    check = (check_methods, check_capacities, check_groups)[number % 3]
    found = complain(lambda: check(draw, rng, weights))
    what = check.__name__.removeprefix("check_")
    return found and f"{what}, {depth} x {size}, {', '.join(sorted(set(kinds)))}: {found}"


# ---- attention ---------------------------------------------------------------------------------


def graph_of(draw: random.Random, weights: Floats) -> af.AttentionGraph:
    """A graph as users make it: with a residual, sometimes with a window, or without positions."""
    size = weights.shape[1]
    gone = draw.sample(range(size), k=draw.randrange(size)) if draw.random() < 0.2 else []
    full = af.Attention(weights, window=size if draw.random() < 0.2 else None)
    return full.graph(residual=draw.choice([0.0, 0.1, 0.5, 0.9]), without=gone)


def check_methods(draw: random.Random, rng: np.random.Generator, weights: Floats) -> str | None:
    """`af.flow` by row, by layer and for all layers, and `af.max_flow`."""
    graph = graph_of(draw, weights)
    layer = draw.randint(1, graph.depth)
    bottom = draw.randrange(layer)
    layers = range(bottom + 1, graph.depth + 1)
    every = af.flow(graph, layers=layers, bottom=bottom, normalize=None)
    whole = af.flow(graph, layers=[layer], bottom=bottom, normalize=None)
    edges = graph.edges[bottom:layer]
    peer = Igraph(edges)
    for _ in range(PAIRS):
        source, target = draw.choice(graph.kept), draw.choice(graph.kept)
        row = af.flow(graph, layers=[layer], positions=[source], bottom=bottom, normalize=None)
        best = af.max_flow(graph, source=(layer, source), target=(bottom, target))
        values = {
            "row": row.at(source)[target],
            "layer": whole.at(source)[target],
            "all layers": every.at(source, layer)[target],
            "max_flow": best.value,
        }
        wrong = compare(values, peer.flow(source, target), 1.0, source, target)
        if wrong:
            return wrong
        cut = tuple((where - bottom, query, key) for where, query, key in best.cut)
        check_flow(edges, replace_cut(best, cut), source, target)
    return None


def replace_cut(
    best: af.MaxFlow, cut: tuple[tuple[int, int, int], ...], scale: float = 1.0
) -> af.MaxFlow:
    """The same flow with its cut numbered from the first layer on, and divided by `scale`."""
    return af.MaxFlow(
        best.value / scale,
        best.source,
        best.target,
        best.edges / scale,
        cut,
        best.cut_capacity / scale,
        best.tokens,
    )


def compare(
    values: dict[str, float], expected: float, scale: float, source: int, target: object
) -> str | None:
    """The first value that is not the expected one."""
    for name, value in values.items():
        if not abs(value - expected) <= CLOSE * scale:
            return (
                f"{name} from {source} to {target} is {float(value)!r}, igraph says {expected!r}"
                f" (largest capacity {scale:g})"
            )
    return None


# ---- any capacities ----------------------------------------------------------------------------


def capacities_of(draw: random.Random, rng: np.random.Generator, weights: Floats) -> Floats:
    """Capacities [layer, query, key] that are not attention: of any sum and scale, and zeros."""
    depth, size, _ = weights.shape
    change = draw.choice(
        ["rows", "whole", "layers", "scale", "tiny", "zeros", "nothing", "columns"]
    )
    if change == "rows":
        edges = weights * rng.lognormal(sigma=2.0, size=(depth, size, 1))
    elif change == "columns":
        edges = weights * rng.lognormal(sigma=2.0, size=(depth, 1, size))
    elif change == "whole":
        edges = np.floor(weights * 10)
    elif change == "layers":
        edges = weights * 10.0 ** rng.uniform(-4, 4, size=(depth, 1, 1))
    elif change == "scale":
        edges = weights * 2.0 ** draw.randint(-200, 200)
    elif change == "tiny":
        edges = weights * 10.0 ** rng.uniform(-25, 0, size=weights.shape)
    elif change == "zeros":
        edges = weights * (rng.random(weights.shape) < 0.5)
    else:
        edges = np.zeros_like(weights)
    return np.ascontiguousarray(edges)


def check_capacities(draw: random.Random, rng: np.random.Generator, weights: Floats) -> str | None:
    """The functions below `af.flow`, which take any edges, and the certificate of one flow."""
    edges = capacities_of(draw, rng, weights)
    depth, size, _ = edges.shape
    largest = float(edges.max())
    causal = bool(is_causal(edges)) and draw.random() < 0.8
    every = find_all_flows(edges, causal=causal)
    whole = find_flows(edges, np.arange(size), causal=causal, workers=draw.choice([1, 2]))
    layer = draw.randint(1, depth)
    peer, lower_peer = Igraph(edges), Igraph(edges[:layer])
    for _ in range(PAIRS):
        source, target = draw.randrange(size), draw.randrange(size)
        group: Any = (target,)
        value, flow, cut = find_flow_and_cut(edges, [source], group)
        values = {
            "find_flows (row)": find_flows(edges, np.array([source]), causal=causal)[0, target],
            "find_flows (layer)": whole[source, target],
            "find_all_flows": every[-1, source, target],
            "find_flow_and_cut": value,
        }
        lower = {f"layer {layer} of find_all_flows": every[layer - 1, source, target]}
        wrong = compare(values, peer.flow(source, target), largest, source, target)
        wrong = wrong or compare(lower, lower_peer.flow(source, target), largest, source, target)
        if wrong:
            return wrong
        scale = 2.0 ** np.ceil(np.log2(largest)) if largest > 0 else 1.0  # division by it is exact
        places = tuple((int(i) + 1, int(query), int(key)) for i, query, key in np.argwhere(cut))
        names = tuple(map(str, range(size)))
        best = af.MaxFlow(
            value, (depth, source), (0, target), flow, places, float(edges[cut].sum()), names
        )
        check_flow(edges / scale, replace_cut(best, places, scale), source, target)
    return None


# ---- groups ------------------------------------------------------------------------------------


class GroupOracle(Igraph):
    """igraph on the graph with one more node per group, into which its positions drain."""

    def __init__(self, edges: Floats, groups: list[list[int]]) -> None:
        super().__init__(edges)
        self.graph.add_vertices(len(groups))
        self.first = (self.depth + 1) * self.size
        more = [
            (place, self.first + which) for which, group in enumerate(groups) for place in group
        ]
        self.graph.add_edges(more)
        self.capacities += [float(edges[0, :, place].sum()) + 1.0 for place, _ in more]

    def flow_to(self, source: int, group: int) -> float:
        """The maximum flow from a node of the top layer to a group."""
        return self.flow(source, self.first + group)


def check_groups(draw: random.Random, rng: np.random.Generator, weights: Floats) -> str | None:
    """`af.flow(groups=...)`: disjoint groups that may leave positions out."""
    graph = graph_of(draw, weights)
    order = draw.sample(graph.kept, k=len(graph.kept))
    ends = sorted(draw.choices(range(1, len(order) + 1), k=min(3, len(order))))
    groups = [order[start:end] for start, end in pairwise([0, *ends]) if start < end]
    ask: dict[str, Any] = {"groups": groups, "normalize": None}
    every = af.flow(graph, layers=range(1, graph.depth + 1), **ask)
    layer = draw.randint(1, graph.depth)
    peer = GroupOracle(graph.edges[:layer], groups)
    for _ in range(PAIRS):
        source, group = draw.choice(graph.kept), draw.randrange(len(groups))
        row = af.flow(graph, layers=[layer], positions=[source], **ask)
        target: Any = (0, groups[group])
        values = {
            "row": row.at(source)[group],
            "all layers": every.at(source, layer)[group],
            "max_flow": af.max_flow(graph, source=(layer, source), target=target).value,
        }
        wrong = compare(values, peer.flow_to(source, group), 1.0, source, groups[group])
        if wrong:
            return wrong
    return None
