"""One maximum flow in full: its value, the flow on every edge, and the cut that proves it."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from attnflow.core.arrays import Array, Floats
from attnflow.core.flow.capacities import find_ways, keep_usable
from attnflow.core.flow.kernels import unpack_nodes
from attnflow.core.flow.network import make_network
from attnflow.core.flow.search import search
from attnflow.core.layers import Layers, rescale


def find_flow_and_cut(
    edges: Layers | Array,
    sources: Sequence[int],
    targets: Sequence[int],
    *,
    scale: float | None = None,
) -> tuple[float, Floats, npt.NDArray[np.bool_]]:
    """One maximum flow, from nodes of the top layer to nodes of layer 0, each taken together.

    Returns its value, the flow on every edge [layer, query, key], and which edges are a minimum
    cut. edges [layer, query, key] may be any finite numbers that are not negative; scale: the
    largest row sum of the graph that the layers belong to, computed if None.
    """
    edges, scale = rescale(edges, scale)
    depth, nodes, _ = edges.shape
    origins, group = list(sources), list(targets)
    flow = np.zeros(edges.shape)
    # the cut lies around the nodes that could pass more on to the target
    reaching = np.zeros((depth + 1, nodes), bool)
    reaching[0, group] = True
    draining = keep_usable(edges[0][:, group])  # [node, target]
    if depth == 1:
        flow[0][np.ix_(origins, group)] = draining[origins]
    else:
        inner = edges[1:-1]
        net = make_network(inner.held, find_ways(inner.held))
        feeding = keep_usable(edges.rows(-1, origins))  # [source, node]
        row, column = feeding.sum(axis=0), draining.sum(axis=1)
        net.supply[:], net.demand[:] = row, column
        search(np.inf, 0, nodes - 1, net)
        flow[-1, origins] = fill_in_turn(row - net.supply, feeding)
        for step, capacities in enumerate(inner):
            flow[step + 1] = capacities - net.unused[step]
        flow[0][:, group] = fill_in_turn(column - net.demand, draining.T).T
        reaching[1:-1] = unpack_nodes(net.known, nodes)
    outside = ~reaching
    outside[-1] = np.isin(np.arange(nodes), origins)
    cut = outside[1:, :, None] & reaching[:-1, None, :]
    for layer, capacities in enumerate(edges):
        cut[layer] &= capacities > 0
    value = scale * float(flow[-1, origins].sum())
    flow *= scale
    return value, flow, cut


# Which of several edges between a group and a node carry its flow changes neither value nor cut.
def fill_in_turn(amounts: Floats, edges: Floats) -> Floats:
    """[member, node]: amounts [node] on edges [member, node], which fill one after another."""
    before = edges.cumsum(axis=0) - edges
    filled: Floats = np.clip(amounts - before, 0.0, edges)
    return filled
