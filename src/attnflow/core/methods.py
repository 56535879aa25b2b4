"""Raw attention, attention rollout and attention flow: a graph in, token attention out."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from attnflow.core.arrays import Floats
from attnflow.core.checks import check_count
from attnflow.core.graph import AttentionGraph
from attnflow.core.groups import Groups, is_several
from attnflow.core.layers import Layers
from attnflow.core.requests import (
    Codes,
    Request,
    Weights,
    name_positions,
    read_graph,
    read_node,
    warn_if_even,
)
from attnflow.core.results import LIMITS, TokenAttention
from attnflow.core.single_flow import MaxFlow
from attnflow.errors import OptionError
from attnflow.notices import are_notices_read
from attnflow.progress import progress_bar

SATURATED = 1e-9  # a flow this close to the source's row sum, or the target's column sum, is at it


def raw(
    attention: Weights,
    *,
    layers: Iterable[int] | int | None = None,
    positions: Iterable[int] | int | None = None,
    bottom: int | None = None,
    normalize: str | None = "sum",
    groups: Groups | None = None,
) -> TokenAttention:
    """Raw attention: the model's weights, fused over heads, without the residual.

    Parameters
    ----------
    attention, layers, positions, normalize, groups
        As for `rollout`.
    bottom
        Refused: keys are positions of the layer below.

    >>> raw([[[0.5, 0.5], [1.0, 0.0]]]).at(position=1, layer=1)
    array([1., 0.])
    """
    if bottom is not None:
        raise OptionError(
            f"raw attention looks one layer down, so it takes no bottom; got bottom={bottom}"
        )
    ask = Request.read(attention, "raw", layers, positions, 0, normalize, groups, every_layer=True)

    def compute(graph: AttentionGraph) -> Floats:
        return ask.sum_groups(graph.weight_rows(ask.layers, ask.positions))

    return ask.answer(compute, one_layer=True)


def rollout(
    attention: Weights,
    *,
    layers: Iterable[int] | int | None = None,
    positions: Iterable[int] | int | None = None,
    bottom: int = 0,
    normalize: str | None = "sum",
    groups: Groups | None = None,
) -> TokenAttention:
    """Attention rollout: the product of the layers' matrices, down to layer `bottom`.

    Parameters
    ----------
    attention
        A graph, or weights, of which the default graph is taken.
    layers, positions
        The rows to compute; all if None. Negative positions count from the end.
    bottom
        The layer that the keys are positions of.
    normalize
        "sum": rows sum to 1. "receptive_field": values are divided by those of uniform attention,
        then rows sum to 1. None: values as they are.
    groups
        Keys to sum: "words", lists of positions, or {name: positions}. Rows are then normalised
        over the groups, which need not cover all positions.

    >>> rollout([[[0.5, 0.5], [1.0, 0.0]]] * 2).at(position=0, layer=2)
    array([0.6875, 0.3125])
    """
    ask = Request.read(
        attention, "rollout", layers, positions, bottom, normalize, groups, every_layer=True
    )

    def compute(graph: AttentionGraph) -> Floats:
        below, size = ask.bottom, graph.size
        # rows of a layer travel down by vector-matrix products; many rows are cheaper as full
        # products from the bottom up
        downwards = sum(layer - below for layer in ask.layers) * len(ask.positions)
        upwards = (max(ask.layers) - below) * size
        travel = roll_down if downwards < upwards else roll_up
        layers = [layer - below for layer in ask.layers]
        return ask.sum_groups(travel(graph.edge_layers[below:], layers, list(ask.positions)))

    return ask.answer(compute)


def roll_down(edges: Layers, layers: Sequence[int], positions: Sequence[int]) -> Floats:
    """[layer, query, key]: the rows asked for, carried down together, layer by layer."""
    size = edges.shape[1]
    start = np.zeros((len(positions), size))  # [query, key]
    start[np.arange(len(positions)), positions] = 1.0
    rolled = np.empty((0, size))  # [layer and query, key]
    for layer in range(max(layers), 0, -1):
        rolled = np.concatenate([*[start] * layers.count(layer), rolled])
        rolled = edges.carry_down(layer - 1, rolled)
    order = np.argsort(np.argsort(layers, kind="stable"), kind="stable")
    values: Floats = rolled.reshape(len(layers), len(positions), size)[order]
    return values


def roll_up(edges: Layers, layers: Sequence[int], positions: Sequence[int]) -> Floats:
    """[layer, query, key]: the same rows, from the product of all layers below."""
    values = np.empty((len(layers), len(positions), edges.shape[2]))
    rolled = edges[0]
    for layer in range(1, max(layers) + 1):
        if layer > 1:
            rolled = edges[layer - 1] @ rolled
        for place in [place for place, asked in enumerate(layers) if asked == layer]:
            values[place] = rolled[positions]
    return values


def flow(
    attention: Weights,
    *,
    layers: Iterable[int] | int | None = None,
    positions: Iterable[int] | int | None = None,
    bottom: int = 0,
    normalize: str | None = "sum",
    groups: Groups | None = None,
    workers: int = 1,
) -> TokenAttention:
    """Attention flow: the maximum flow to every position of layer `bottom`, or to every group.

    A capacity of at most 2^-52 of the graph's largest row sum carries nothing, at any depth. A
    `SaturationWarning` says where a row that was asked for hardly tells keys, or sources, apart.

    Parameters
    ----------
    attention, positions, bottom
        As for `rollout`.
    layers
        The layers to compute; the top one if None.
    normalize
        As for `rollout`; None gives the maximum flows themselves.
    groups
        Positions to take together: "words", lists of positions, or {name: positions}. The flow to
        a group is a maximum flow of its own, at most the sum of the flows to its positions and
        mostly less.
    workers
        The number of threads, on which values do not depend; every thread holds the inner
        layers in float64.

    >>> flow([[[0.5, 0.5], [1.0, 0.0]]] * 2, normalize=None).at(position=0)
    array([1. , 0.5])
    """
    from attnflow.core.flows import find_all_flows, find_flows

    ask = Request.read(
        attention, "flow", layers, positions, bottom, normalize, groups, every_layer=False
    )
    workers = check_count("workers", workers)
    depth = max(ask.layers) - ask.bottom
    targets = None if ask.groups is None else [group.positions for group in ask.groups]

    def compute(graph: AttentionGraph) -> Floats:
        below = graph.edge_layers[ask.bottom :]
        positions = np.array(ask.positions)
        options: dict[str, Any] = {
            "groups": targets,
            "scale": graph.largest_row_sum,
            "causal": graph.causal,
            "workers": workers,
        }
        with progress_bar("attention flow") as tick:
            if (
                len(ask.layers) > 1
                and 2 * len(set(ask.layers)) * len(positions) > depth * graph.size
            ):
                every = find_all_flows(below[:depth], tick=tick, **options)
                rows: Floats = every[np.array(ask.layers) - ask.bottom - 1][:, positions]
                return rows
            return np.stack(
                [
                    find_flows(below[: layer - ask.bottom], positions, tick=tick, **options)
                    for layer in ask.layers
                ]
            )

    def find_limits(flows: Floats) -> Codes:
        """[layer, query, key]: what the flows equal, as indices into LIMITS."""
        edges, positions = ask.graph.edge_layers, list(ask.positions)
        rows = [edges.rows(layer - 1, positions) for layer in ask.layers]
        leaving = np.stack(rows).sum(axis=-1, keepdims=True)  # [layer, query, 1]
        entering = ask.sum_groups(edges.sum_columns(ask.bottom))  # [key]
        near = SATURATED * ask.graph.largest_row_sum
        limits = np.full(flows.shape, LIMITS.index("between"), np.int8)
        limits[flows >= entering - near] = LIMITS.index("target")
        limits[flows >= leaving - near] = LIMITS.index("source")
        if ask.groups is None and ask.graph.removed:
            limits[..., list(ask.graph.removed)] = LIMITS.index("between")
        return limits

    result = ask.answer(compute, find_limits)
    if are_notices_read():
        warn_if_even(result)
    return result


def max_flow(
    attention: Weights,
    *,
    source: tuple[int, int],
    target: tuple[int, int] | tuple[int, Iterable[int]],
) -> MaxFlow:
    """The maximum flow between two nodes, with the flow on every edge and a minimum cut.

    Parameters
    ----------
    attention
        A graph, or weights, of which the default graph is taken.
    source
        (layer, position), where the flow starts. A negative position counts from the end.
    target
        (layer, position), where it ends, or (layer, positions) for the flow to all of these taken
        together.

    >>> best = max_flow([[[0.5, 0.5], [1.0, 0.0]]] * 2, source=(2, 0), target=(0, 1))
    >>> best.value, best.cut
    (0.5, ((1, 0, 1), (2, 0, 1)))
    """
    from attnflow.core.mincut import find_flow_and_cut

    graph = read_graph(attention)
    upper, (start,) = read_node(graph, source, "source")
    lower, ends = read_node(graph, target, "target", several=True)
    if upper <= lower:
        raise OptionError(
            f"the source must be in a higher layer than the target; got {source=}, {target=}"
        )
    edges = graph.edge_layers[lower:upper]
    value, on_edges, cut = find_flow_and_cut(edges, start, ends, scale=graph.largest_row_sum)
    places = tuple(
        (int(layer) + lower + 1, int(query), int(key)) for layer, query, key in np.argwhere(cut)
    )
    end = ends if is_several(target[1]) else ends[0]
    capacity = sum(float(layer[full].sum()) for layer, full in zip(edges, cut, strict=True))
    return MaxFlow(
        value,
        (upper, start),
        (lower, end),
        on_edges,
        places,
        capacity,
        name_positions(graph),
        provenance=graph.source.by_method("max_flow"),
    )


METHODS: dict[str, Callable[..., TokenAttention]] = {"raw": raw, "rollout": rollout, "flow": flow}
