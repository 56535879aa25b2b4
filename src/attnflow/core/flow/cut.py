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
    edges: Layers | Array, source: int, targets: Sequence[int], *, scale: float | None = None
) -> tuple[float, Floats, npt.NDArray[np.bool_]]:
    """One maximum flow, from a node of the top layer to some nodes of layer 0 taken together.

    Returns its value, the flow on every edge [layer, query, key], and which edges are a minimum
    cut. edges [layer, query, key] may be any finite numbers that are not negative; scale: the
    largest row sum of the graph that the layers belong to, computed if None.
    """
    edges, scale = rescale(edges, scale)
    depth, nodes, _ = edges.shape
    group = list(targets)
    flow = np.zeros(edges.shape)
    # the cut lies around the nodes that could pass more on to the target
    reaching = np.zeros((depth + 1, nodes), bool)
    reaching[0, group] = True
    draining = keep_usable(edges[0][:, group])  # [node, target]
    if depth == 1:
        flow[0, source, group] = draining[source]
    else:
        inner = edges[1:-1]
        net = make_network(inner.held, find_ways(inner.held))
        row, column = keep_usable(edges.rows(-1, [source]))[0], draining.sum(axis=1)
        net.supply[:], net.demand[:] = row, column
        search(np.inf, 0, nodes - 1, net)
        flow[-1, source] = row - net.supply
        for step, capacities in enumerate(inner):
            flow[step + 1] = capacities - net.unused[step]
        # a node fills its edges into the group one after another
        before = draining.cumsum(axis=1) - draining
        flow[0][:, group] = np.clip((column - net.demand)[:, None] - before, 0.0, draining)
        reaching[1:-1] = unpack_nodes(net.known, nodes)
    outside = ~reaching
    outside[-1] = np.arange(nodes) == source
    cut = outside[1:, :, None] & reaching[:-1, None, :]
    for layer, capacities in enumerate(edges):
        cut[layer] &= capacities > 0
    value = scale * float(flow[-1, source].sum())
    flow *= scale
    return value, flow, cut
