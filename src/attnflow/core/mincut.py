"""One maximum flow in full: its value, the flow on every edge, and the cut that proves it."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from attnflow.core.kernels import unpack
from attnflow.core.maxflow import Floats, find_scale, make_network, search, usable, ways_of


def one_flow(
    edges: Floats, source: int, targets: Sequence[int], *, scale: float | None = None
) -> tuple[float, Floats, npt.NDArray[np.bool_]]:
    """One maximum flow, from a node of the top layer to some nodes of layer 0 taken together.

    Returns its value, the flow on every edge [layer, query, key], and which edges are a minimum
    cut. edges [layer, query, key] may be any finite numbers that are not negative; scale: the
    largest row sum of the graph whose layers they are, found if None.
    """
    if scale is None:
        scale = find_scale(edges)
    if scale != 1.0:
        value, flow, cut = one_flow(edges / scale, source, targets, scale=1.0)
        return scale * value, scale * flow, cut
    depth, nodes, _ = edges.shape
    group = list(targets)
    flow = np.zeros(edges.shape)
    # a cut is proved by the nodes that could pass more on to the target
    reaching = np.zeros((depth + 1, nodes), bool)
    reaching[0, group] = True
    draining = usable(edges[0][:, group])  # [node, target]
    if depth == 1:
        flow[0, source, group] = draining[source]
    else:
        inner = edges[1:-1]
        net = make_network(inner, ways_of(inner))
        row, column = usable(edges[-1, source]), draining.sum(axis=1)
        net.supply[:], net.demand[:] = row, column
        search(np.inf, 0, nodes - 1, net)
        flow[-1, source] = row - net.supply
        flow[1:-1] = inner - net.unused
        # what a node hands on fills its edges into the group one after another
        before = draining.cumsum(axis=1) - draining
        flow[0][:, group] = np.clip((column - net.demand)[:, None] - before, 0.0, draining)
        reaching[1:-1] = unpack(net.known, nodes)
    outside = ~reaching
    outside[-1] = np.arange(nodes) == source
    cut = outside[1:, :, None] & reaching[:-1, None, :] & (edges > 0)
    return float(flow[-1, source].sum()), flow, cut
