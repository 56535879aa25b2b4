"""Independent answers to compare with, and attention of every kind to compare on."""

from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path

import igraph
import networkx as nx
import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

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


def rational_flow(edges: Floats, source: int, target: int) -> float:
    """The maximum flow in exact arithmetic: networkx on fractions, which floats convert to without loss."""
    depth, size, _ = edges.shape
    graph = nx.DiGraph()
    graph.add_nodes_from([(depth, source), (0, target)])
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
            graph, (depth, source), (0, target), flow_func=nx.algorithms.flow.edmonds_karp
        )
    )


class Igraph:
    """igraph's push-relabel on the same graph, for sizes where fractions take too long."""

    def __init__(self, edges: Floats) -> None:
        self.depth, self.size, _ = edges.shape
        layer, query, key = np.nonzero(edges)
        ends = np.stack([(layer + 1) * self.size + query, layer * self.size + key], axis=1)
        self.graph = igraph.Graph(n=(self.depth + 1) * self.size, edges=ends, directed=True)
        self.capacities = edges[layer, query, key].tolist()

    def flow(self, source: int, target: int) -> float:
        return float(
            self.graph.maxflow_value(self.depth * self.size + source, target, self.capacities)
        )


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


def edges_of(weights: Floats, residual: float = 0.5) -> Floats:
    """The graph's edges by the plain formula."""
    return (1 - residual) * weights + residual * np.eye(weights.shape[-1])


def real_attention() -> Iterator[tuple[str, Floats]]:
    """Attention of MiniLM (12 layers: two texts stacked) and of SmolLM2's first layers (causal), 64 tokens each."""
    with np.load(DATA / "real.npz") as stored:
        for name in stored.files:
            weights = stored[name].astype(np.float64)
            yield name, weights / weights.sum(axis=-1, keepdims=True)
