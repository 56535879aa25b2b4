"""The maximum-flow solvers that attnflow is compared with, each in its best case.

A solver gets the graph from the source's layer downwards, without edges of capacity 0, built once for each layer; building is not
timed. What a solver's API requires again for every pair is timed: networkx and scipy make a residual graph, igraph reads
the capacities from its edge attribute, ortools prepares its arcs, and PyMaxflow needs a copy, since it solves in place.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import igraph
import maxflow
import networkx as nx
import numpy as np
import numpy.typing as npt
from ortools.graph.python import max_flow
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Solver = Callable[[int, int], float]  # from source and target to the maximum flow
Build = Callable[
    [int, Integers, Integers, Floats], Solver
]  # from the number of nodes and the arcs' starts, ends and capacities


def with_igraph(nodes: int, starts: Integers, ends: Integers, capacities: Floats) -> Solver:
    """Push-relabel in C, in floating point."""
    graph = igraph.Graph(n=nodes, edges=np.stack([starts, ends], axis=1), directed=True)
    graph.es["capacity"] = capacities.tolist()
    return lambda source, target: float(graph.maxflow_value(source, target, capacity="capacity"))


def with_ortools(nodes: int, starts: Integers, ends: Integers, capacities: Floats) -> Solver:
    """Push-relabel in C++, on 64-bit integers: capacities are rounded to 50 bits, which is as good as floating point."""
    scale = 2.0**50
    graph = max_flow.SimpleMaxFlow()
    graph.add_arcs_with_capacity(starts, ends, np.rint(capacities * scale).astype(np.int64))

    def solve(source: int, target: int) -> float:
        if graph.solve(source, target) != graph.OPTIMAL:
            raise RuntimeError("ortools found no maximum flow")
        return float(graph.optimal_flow() / scale)

    return solve


def with_scipy(nodes: int, starts: Integers, ends: Integers, capacities: Floats) -> Solver:
    """Dinic's algorithm in Cython, on 32-bit integers: not exact, as capacities are rounded to 30 bits."""
    scale = 2.0**30
    graph = csr_array(
        (np.rint(capacities * scale).astype(np.int32), (starts, ends)), shape=(nodes, nodes)
    )
    return lambda source, target: float(
        maximum_flow(graph, source, target, method="dinic").flow_value / scale
    )


def with_pymaxflow(nodes: int, starts: Integers, ends: Integers, capacities: Floats) -> Solver:
    """Boykov and Kolmogorov's algorithm in C++, in floating point."""
    original = maxflow.GraphFloat(nodes, len(starts))
    original.add_nodes(nodes)
    original.add_edges(starts, ends, capacities, np.zeros_like(capacities))

    def solve(source: int, target: int) -> float:
        graph = original.copy()
        graph.add_tedge(source, 2.0, 0.0)  # more than any source sends out, which is 1
        graph.add_tedge(target, 0.0, 2.0)
        return float(graph.maxflow())

    return solve


def with_networkx(algorithm: Callable[..., Any]) -> Build:
    """One of networkx's algorithms, in Python, called as the authors of attention flow call Edmonds-Karp."""

    def build(nodes: int, starts: Integers, ends: Integers, capacities: Floats) -> Solver:
        graph = nx.DiGraph()
        graph.add_nodes_from(range(nodes))
        graph.add_weighted_edges_from(
            zip(starts.tolist(), ends.tolist(), capacities.tolist(), strict=True), weight="capacity"
        )
        return lambda source, target: float(
            nx.maximum_flow_value(graph, source, target, flow_func=algorithm)
        )

    return build


EDMONDS_KARP = "networkx Edmonds-Karp"
PEERS: dict[str, Build] = {
    "igraph": with_igraph,
    "ortools": with_ortools,
    "scipy": with_scipy,
    "PyMaxflow": with_pymaxflow,
    "networkx preflow-push": with_networkx(nx.algorithms.flow.preflow_push),
    EDMONDS_KARP: with_networkx(nx.algorithms.flow.edmonds_karp),
}
EXACT_AND_FAST = (
    "igraph",
    "ortools",
)  # targets refer to the faster of these two
MOST_ARCS = {
    EDMONDS_KARP: 6 * 128 * 128
}  # beyond this a single pair takes longer than about 30 seconds


@dataclass
class Peer:
    """A solver on one graph, edges [layer, query, key]."""

    name: str
    edges: Floats
    solvers: dict[int, Solver] = field(default_factory=dict)  # by the source's layer

    def pair(self, layer: int, source: int, target: int) -> tuple[float, float]:
        """The maximum flow from (layer, source) to (0, target), and the seconds it took."""
        size = self.edges.shape[1]  # node (layer, position) has number layer * size + position
        if layer not in self.solvers:
            below, query, key = np.nonzero(self.edges[:layer])
            arcs = (below + 1) * size + query, below * size + key, self.edges[below, query, key]
            self.solvers[layer] = PEERS[self.name]((layer + 1) * size, *arcs)
        start = time.perf_counter()
        value = self.solvers[layer](layer * size + source, target)
        return value, time.perf_counter() - start
