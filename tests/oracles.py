"""Independent answers to compare with, and attention of every kind to compare on."""

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import igraph
import networkx as nx
import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

import attnflow as af

Floats = npt.NDArray[np.float64]
DATA = Path(__file__).parent / "data"
KINDS = [
    "peaky",
    "flat",
    "uniform",
    "identity",
    "one-hot",
    "causal",
    "causal uniform",
    "window",
    "blocks",
    "sparse",
    "swap",
    "extreme",
]


def rational_flow(edges: Floats, source: int, *targets: int) -> float:
    """The maximum flow to targets taken together, in exact arithmetic: networkx on fractions.

    Floats convert to fractions without loss.
    """
    depth, size, _ = edges.shape
    graph = nx.DiGraph()
    graph.add_node((depth, source))
    for target in targets:
        graph.add_edge((0, target), "drain")  # without a capacity: networkx takes it as unlimited
    for layer in range(depth, 0, -1):
        for query in range(size):
            for key in range(size):
                if edges[layer - 1, query, key] > 0:
                    graph.add_edge(
                        (layer, query),
                        (layer - 1, key),
                        capacity=Fraction(edges[layer - 1, query, key]),
                    )
    return float(
        nx.maximum_flow_value(
            graph, (depth, source), "drain", flow_func=nx.algorithms.flow.edmonds_karp
        )
    )


class Igraph:
    """igraph's push-relabel on the same graph, for sizes where fractions take too long.

    Each of `groups` is one more node, into which the group drains by edges that never fill. Each of
    `sources` is one more, with an edge to each of its nodes as wide as the sum of that node's row.
    """

    def __init__(
        self,
        edges: Floats,
        groups: Sequence[Sequence[int]] = (),
        sources: Sequence[Sequence[int]] = (),
    ) -> None:
        self.depth, self.size, _ = edges.shape
        nodes = (self.depth + 1) * self.size
        layer, query, key = np.nonzero(edges)
        upper, lower = (layer + 1) * self.size + query, layer * self.size + key
        ends = np.stack([upper, lower], axis=1).tolist()
        self.capacities = edges[layer, query, key].tolist()
        for number, group in enumerate(groups):
            ends += [(target, nodes + number) for target in group]
            self.capacities += [2 * float(edges[0].sum())] * len(group)
        self.drains = range(nodes, nodes + len(groups))
        self.feeds = range(self.drains.stop, self.drains.stop + len(sources))
        for feed, source in zip(self.feeds, sources, strict=True):
            ends += [(feed, self.depth * self.size + node) for node in source]
            self.capacities += edges[-1].sum(axis=-1)[list(source)].tolist()
        self.graph = igraph.Graph(n=self.feeds.stop, edges=ends, directed=True)

    def flow(self, source: int, target: int) -> float:
        return float(
            self.graph.maxflow_value(self.depth * self.size + source, target, self.capacities)
        )

    def flow_to_group(self, source: int, group: int) -> float:
        return self.flow(source, self.drains[group])

    def flow_of_sources(self, source: int, end: int) -> float:
        """From one of `sources` to a node: of layer 0, or one of `drains`."""
        return float(self.graph.maxflow_value(self.feeds[source], end, self.capacities))


def attention(kind: str, layers: int, size: int, rng: np.random.Generator) -> Floats:
    """Weights [layer, query, key] of one kind, rows summing to 1."""
    shape = (layers, size, size)
    past = np.tril(np.ones((size, size)))
    kinds: dict[str, Callable[[], Floats]] = {
        "peaky": lambda: np.exp(6 * rng.normal(size=shape)),
        "flat": lambda: np.exp(0.3 * rng.normal(size=shape)),
        "uniform": lambda: np.ones(shape),
        "identity": lambda: np.broadcast_to(np.eye(size), shape),
        "one-hot": lambda: np.eye(size)[rng.integers(0, size, shape[:2])],
        "causal": lambda: np.exp(2 * rng.normal(size=shape)) * past,
        "causal uniform": lambda: past * np.ones(shape),
        "window": lambda: (
            np.exp(rng.normal(size=shape)) * past * np.triu(np.ones((size, size)), -2)
        ),
        "blocks": lambda: (
            np.exp(rng.normal(size=shape))
            * (np.arange(size)[:, None] // 3 == np.arange(size)[None] // 3)
        ),
        "sparse": lambda: rng.random(shape) * (rng.random(shape) < 0.3) + np.eye(size) * 1e-3,
        "swap": lambda: np.broadcast_to(np.eye(size)[::-1], shape),
        "extreme": lambda: np.exp(14 * rng.normal(size=shape)),
    }
    weights = kinds[kind]()
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True), dtype=np.float64)


@st.composite
def any_attention(
    draw: st.DrawFn, max_layers: int = 5, max_size: int = 7, kinds: list[str] = KINDS
) -> Floats:
    """Weights [layer, query, key] of any kind; layers may be of different kinds."""
    layers = draw(st.integers(1, max_layers))
    size = draw(st.integers(1, max_size))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return np.concatenate(
        [attention(draw(st.sampled_from(kinds)), 1, size, rng) for _ in range(layers)]
    )


@st.composite
def any_capacities(
    draw: st.DrawFn, max_layers: int = 5, max_size: int = 6, kinds: list[str] = KINDS
) -> Floats:
    """Edges [layer, query, key] whose rows sum to anything, 0 too, on any scale."""
    weights = draw(any_attention(max_layers=max_layers, max_size=max_size, kinds=kinds))
    layers, size, _ = weights.shape
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sums = np.exp(draw(st.sampled_from([0.0, 0.5, 3.0])) * rng.normal(size=(layers, size, 1)))
    sums[rng.random(sums.shape) < draw(st.sampled_from([0.0, 0.2]))] = 0.0
    return edges_of(weights, draw(st.sampled_from([0.0, 0.5]))) * (
        sums * draw(st.sampled_from([1e-9, 0.3, 1.0, 7.0, 1e9]))
    )


@st.composite
def any_groups(draw: st.DrawFn, size: int) -> list[list[int]]:
    """Groups of positions, in any order, that need not cover all."""
    order = draw(st.permutations(range(size)))
    ends = sorted(draw(st.sets(st.integers(1, size), min_size=1, max_size=4)))
    return [list(order[start:end]) for start, end in pairwise([0, *ends])]


def edges_of(weights: Floats, residual: float = 0.5) -> Floats:
    """The graph's edges by the plain formula."""
    return (1 - residual) * weights + residual * np.eye(weights.shape[-1])


def real_attention() -> Iterator[tuple[str, Floats]]:
    """Attention of MiniLM (12 layers: two texts stacked) and of SmolLM2's first layers (causal), 64 tokens each."""
    with np.load(DATA / "real.npz") as stored:
        for name in stored.files:
            weights = stored[name].astype(np.float64)
            yield name, weights / weights.sum(axis=-1, keepdims=True)


SAME = 1e-12


def check_flow(edges: Floats, best: af.MaxFlow, source: int | Sequence[int], *targets: int) -> None:
    """Capacity, conservation, and a cut of the same size: the proof of a maximum flow."""
    origins = [source] if isinstance(source, int) else list(source)
    flow, same, group = best.edges, SAME * max_sum(edges) * len(origins), list(targets)
    assert (flow >= -same).all()
    assert (flow <= edges + same).all()
    sent, received = flow.sum(axis=2), flow.sum(axis=1)  # [layer, query] and [layer, key]
    # what enters an inner node leaves it
    assert np.abs(sent[:-1] - received[1:]).max(initial=0.0) <= same
    assert np.abs(np.delete(sent[-1], origins)).max(initial=0.0) == 0.0
    assert np.abs(np.delete(received[0], group)).max(initial=0.0) == 0.0
    assert abs(sent[-1, origins].sum() - best.value) <= same
    assert abs(received[0, group].sum() - best.value) <= same
    assert abs(best.cut_capacity - best.value) <= same
    without_cut = edges > 0
    for layer, query, key in best.cut:
        # every edge of the cut is full
        assert abs(flow[layer - 1, query, key] - edges[layer - 1, query, key]) <= same
        without_cut[layer - 1, query, key] = False
    reached = np.isin(np.arange(edges.shape[1]), origins)
    for layer in without_cut[::-1]:
        reached = reached @ layer
    assert not reached[group].any()  # and nothing gets past it


def max_sum(edges: Floats) -> float:
    return float(edges.sum(axis=-1).max())
