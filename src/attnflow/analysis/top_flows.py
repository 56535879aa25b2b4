"""The maximum flows to what one position reads most, each with the edges that limit it."""

from collections.abc import Sequence

import numpy as np

from attnflow.core.arrays import Floats
from attnflow.core.graph import AttentionGraph
from attnflow.core.groups import Group
from attnflow.core.methods import max_flow
from attnflow.core.single_flow import MaxFlow

TOP = 10  # tokens, words and sentences whose flows are found


def find_top_flows(
    graph: AttentionGraph,
    position: int,
    row: Floats,
    targets: Sequence[Group],
    *,
    limit: int = TOP,
    leave_out: Sequence[int] = (),
) -> list[MaxFlow]:
    """The maximum flows from a position of the top layer to the targets it reads most.

    Parameters
    ----------
    graph
        What the flow travels on.
    position
        Where it starts.
    row
        [target]: what the position reads of each.
    targets
        Positions, or groups of them.
    limit
        At most so many flows.
    leave_out
        Positions that are no targets: sinks.

    >>> graph = AttentionGraph([[[0.5, 0.5], [1.0, 0.0]]] * 2)
    >>> targets = [Group("the", (0,)), Group("key", (1,))]
    >>> [flow.value for flow in find_top_flows(graph, 0, np.array([0.6, 0.4]), targets, limit=1)]
    [1.0]
    """
    unwanted = {*leave_out, *graph.removed}
    order = np.argsort(-row, kind="stable").tolist()
    wanted = [at for at in order if row[at] > 0 and not unwanted & {*targets[at].positions}]
    return [
        max_flow(graph, source=(graph.depth, position), target=(0, targets[at].positions))
        for at in wanted[:limit]
    ]
