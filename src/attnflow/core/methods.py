"""Raw attention, attention rollout and attention flow: a graph in, token attention out."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from attnflow.core.arrays import Floats
from attnflow.core.checks import check_count
from attnflow.core.evenness import warn_if_even
from attnflow.core.flow.max_flow import MaxFlow
from attnflow.core.graph import AttentionGraph
from attnflow.core.groups import Groups, is_several
from attnflow.core.layers import Layers
from attnflow.core.request import (
    Codes,
    Request,
    Weights,
    name_positions,
    read_graph,
    read_node,
    refuse_signed,
    sum_sources,
)
from attnflow.core.results import LIMITS, TokenAttention
from attnflow.errors import OptionError, RoundingWarning, WeightsError
from attnflow.notices import are_notices_read, give_notice
from attnflow.progress import progress_bar

if TYPE_CHECKING:
    from attnflow.core.flow.solve import FlowOptions, Sources

SATURATED = 1e-9  # a flow this close to the source's row sum, or the target's column sum, is at it
LOST_SHARE = 1e-9  # of the largest row sum: flow through a smaller row has lost half its digits
SAFE_DIGITS = 250.0  # products of up to this many decimal digits keep all of float64's precision


def raw(
    attention: Weights,
    *,
    layers: Iterable[int] | int | None = None,
    positions: Iterable[int] | int | None = None,
    bottom: int | None = None,
    normalize: str | None = "sum",
    groups: Groups | None = None,
    sources: Groups | None = None,
) -> TokenAttention:
    """Raw attention: the model's weights, fused over heads, without the residual.

    Parameters
    ----------
    attention, layers, positions, normalize, groups, sources
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
    ask = Request.read(
        attention, "raw", layers, positions, 0, normalize, groups, sources, every_layer=True
    )

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
    sources: Groups | None = None,
) -> TokenAttention:
    """Attention rollout: the product of the layers' matrices, down to layer `bottom`.

    Parameters
    ----------
    attention
        A graph, or weights, which stand for their default graph.
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
    sources
        Positions whose rows are taken together, given as groups are: values are then
        [layer, source, key], the mean of the rows of each source. Rows are normalised before; with
        None, those with larger sums weigh more.

    >>> rollout([[[0.5, 0.5], [1.0, 0.0]]] * 2).at(position=0, layer=2)
    array([0.6875, 0.3125])
    """
    ask = Request.read(
        attention,
        "rollout",
        layers,
        positions,
        bottom,
        normalize,
        groups,
        sources,
        every_layer=True,
    )

    def compute(graph: AttentionGraph) -> Floats:
        below, size = ask.bottom, graph.size
        # a few rows travel down by vector-matrix products; many are cheaper as full products from
        # the bottom up
        downwards = sum(layer - below for layer in ask.layers) * len(ask.positions)
        upwards = (max(ask.layers) - below) * size
        travel = roll_down if downwards < upwards else roll_up
        layers, edges = [layer - below for layer in ask.layers], graph.edge_layers[below:]
        if graph.residual is None and count_digits(edges[: max(layers)]) > SAFE_DIGITS:
            values = roll_scaled(edges, layers, list(ask.positions), ask.normalize is None)
        else:
            values = travel(edges, layers, list(ask.positions))
        return ask.sum_groups(values)

    return ask.answer(compute)


def count_digits(edges: Layers) -> float:
    """By how many decimal digits products of some of these layers differ from 1, at most.

    Row sums of a product are between the products of the layers' smallest and largest row sums.
    Products of large and small layers may come out right although those on the way did not.
    """
    digits = 0.0
    for weights in edges.weights:
        with np.errstate(over="ignore"):
            sums = np.abs(weights).sum(axis=-1, dtype=np.float64)
        digits += float(np.abs(np.log10(sums[sums > 0])).max(initial=0.0))
    return digits


def roll_down(edges: Layers, layers: Sequence[int], positions: Sequence[int]) -> Floats:
    """[layer, query, key]: rows of rollout, carried down together, layer by layer."""
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


def roll_span(graph: AttentionGraph, positions: Sequence[int]) -> Floats:
    """[layer, key]: the mean of the rollout rows of some positions, each divided by its sum first.

    A single row is carried down. It starts at these positions, with one over the sums of their
    rows, which are carried up.
    """
    edges, size = graph.edge_layers, graph.size
    if graph.residual is None and count_digits(edges) > SAFE_DIGITS:
        mean: Floats = rollout(graph, positions=positions).values.mean(axis=1)
        return mean
    sums, starts = np.ones(size), np.zeros((graph.depth, size))
    for layer, start in enumerate(starts):
        sums = edges.carry_up(layer, sums)
        np.divide(1, sums * len(positions), out=start, where=sums > 0)
    starts[:, [place for place in range(size) if place not in positions]] = 0.0
    rolled = np.empty((0, size))
    for layer in reversed(range(graph.depth)):
        rolled = edges.carry_down(layer, np.concatenate([starts[layer, None], rolled]))
    return rolled


def roll_scaled(
    edges: Layers, layers: Sequence[int], positions: Sequence[int], unscaled: bool
) -> Floats:
    """[layer, query, key]: the same rows of edges whose products exceed the range of float64.

    A row is scaled by a power of two after each layer, which is exact, and so are its shares.
    unscaled: whether to undo that at the end.
    """
    values = np.zeros((len(layers), len(positions), edges.shape[1]))
    for place, top in enumerate(layers):
        row = np.zeros((len(positions), edges.shape[1]))  # [query, key]
        row[np.arange(len(positions)), positions] = 1.0
        exponents = np.zeros((len(positions), 1), dtype=np.int64)
        for layer in range(top, 0, -1):
            row = edges.carry_down(layer - 1, row)
            _, exponent = np.frexp(np.abs(row).max(axis=-1, keepdims=True))
            row, exponents = np.ldexp(row, -exponent), exponents + exponent
        with np.errstate(over="ignore", under="ignore"):
            values[place] = np.ldexp(row, np.clip(exponents, -9999, 9999)) if unscaled else row
        largest = np.abs(values[place]).max(axis=-1)
        is_lost = row.any(axis=-1) & (largest < np.finfo(np.float64).tiny)
        if is_lost.any() or not np.isfinite(largest).all():
            how, remedy = ("is below", "larger") if is_lost.any() else ("exceeds", "smaller")
            raise WeightsError(
                f"the rollout of these edges {how} the range of float64: let rows sum to 1, with"
                f" normalize='sum', or give {remedy} edges",
                options=["normalize='sum'"],
            )
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
    sources: Groups | None = None,
    workers: int = 1,
) -> TokenAttention:
    """Attention flow: the maximum flow to every position of layer `bottom`, or to every group.

    A capacity of at most 2^-52 of the graph's largest row sum carries nothing, at any depth. Rows
    that hardly tell keys, or sources, apart raise a `SaturationWarning`.

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
        a group is one maximum flow, at most the sum of the flows to its positions and mostly less.
    sources
        Positions that send together, given as groups are: values are then [layer, source, key], one
        maximum flow each, at least the largest flow from one of the positions and at most the sum.
    workers
        The number of threads; it does not change values. Each thread holds the inner layers in
        float64.

    >>> flow([[[0.5, 0.5], [1.0, 0.0]]] * 2, normalize=None).at(position=0)
    array([1. , 0.5])
    """
    from attnflow.core.flow.solve import find_all_flows, find_flows

    refuse_signed(attention)
    ask = Request.read(
        attention, "flow", layers, positions, bottom, normalize, groups, sources, every_layer=False
    )
    workers = check_count("workers", workers)
    heights = [layer - ask.bottom for layer in ask.layers]
    targets = None if ask.groups is None else [group.positions for group in ask.groups]

    def compute(graph: AttentionGraph) -> Floats:
        below, positions = graph.edge_layers[ask.bottom :], np.array(ask.positions)
        origins: Sources = positions
        if ask.sources is not None:
            origins = [source.positions for source in ask.sources]
        several = len(heights) > 1 and ask.sources is None
        rows_asked, rows = len(set(heights)) * len(positions), max(heights) * graph.size
        with progress_bar("attention flow") as tick:
            options: FlowOptions = {
                "groups": targets,
                "scale": graph.largest_row_sum,
                "causal": graph.causal,
                "workers": workers,
                "tick": tick,
            }
            if several and 2 * rows_asked > rows:
                every = find_all_flows(below[: max(heights)], **options)
                flows: Floats = every[np.array(heights) - 1][:, positions]
                return flows
            found = [find_flows(below[:height], origins, **options) for height in heights]
            return np.stack(found)

    result = ask.answer(compute, partial(find_limits, ask), joint=True)
    if are_notices_read():
        warn_if_uneven(ask.graph)
        warn_if_even(result)
    return result


def warn_if_uneven(graph: AttentionGraph) -> None:
    """Warn where rows are so small beside the largest one that they carry little or nothing."""
    if graph.residual is not None:
        return  # rows sum to 1
    sums = np.concatenate([layer.sum(axis=-1) for layer in graph.edge_layers])
    smallest = sums[sums > 0].min(initial=np.inf)
    if smallest < LOST_SHARE * graph.largest_row_sum:
        give_notice(
            f"the edges of a row sum to {smallest:.2g}, of another to"
            f" {graph.largest_row_sum:.2g}: flow counts capacities below 2e-16 of the largest as 0;"
            " give edges of similar size",
            RoundingWarning,
            stacklevel=3,
        )


def find_limits(ask: Request, flows: Floats) -> Codes:
    """[layer, query, key]: what limits the flows, as indices into LIMITS."""
    edges, positions = ask.graph.edge_layers, list(ask.positions)
    rows = [edges.rows(layer - 1, positions) for layer in ask.layers]
    leaving = np.stack(rows).sum(axis=-1, keepdims=True)  # [layer, query, 1]
    if ask.sources is not None:
        leaving = sum_sources(leaving, ask.sources)
    entering = ask.sum_groups(edges.sum_columns(ask.bottom))  # [key]
    near = SATURATED * ask.graph.largest_row_sum
    limits = np.full(flows.shape, LIMITS.index("between"), np.int8)
    limits[flows >= entering - near] = LIMITS.index("target")
    limits[flows >= leaving - near] = LIMITS.index("source")
    if ask.groups is None and ask.graph.removed:
        limits[..., list(ask.graph.removed)] = LIMITS.index("between")
    return limits


def max_flow(
    attention: Weights,
    *,
    source: tuple[int, int] | tuple[int, Iterable[int]],
    target: tuple[int, int] | tuple[int, Iterable[int]],
) -> MaxFlow:
    """The maximum flow between two nodes, with the flow on every edge and a minimum cut.

    Parameters
    ----------
    attention
        A graph, or weights, which stand for their default graph.
    source
        (layer, position), where the flow starts, or (layer, positions), which send together. A
        negative position counts from the end.
    target
        (layer, position), where it ends, or (layer, positions) for the flow to a group.

    >>> best = max_flow([[[0.5, 0.5], [1.0, 0.0]]] * 2, source=(2, 0), target=(0, 1))
    >>> best.value, best.cut
    (0.5, ((1, 0, 1), (2, 0, 1)))
    """
    from attnflow.core.flow.cut import find_flow_and_cut

    refuse_signed(attention)
    graph = read_graph(attention)
    upper, starts = read_node(graph, source, "source")
    lower, ends = read_node(graph, target, "target")
    if upper <= lower:
        raise OptionError(
            f"the source must be in a higher layer than the target; got {source=}, {target=}"
        )
    edges = graph.edge_layers[lower:upper]
    value, on_edges, cut = find_flow_and_cut(edges, starts, ends, scale=graph.largest_row_sum)
    places = tuple(
        (int(layer) + lower + 1, int(query), int(key)) for layer, query, key in np.argwhere(cut)
    )
    start = starts if is_several(source[1]) else starts[0]
    end = ends if is_several(target[1]) else ends[0]
    capacity = sum(float(layer[full].sum()) for layer, full in zip(edges, cut, strict=True))
    if are_notices_read():
        warn_if_uneven(graph)
    provenance = graph.source.by_method("max_flow")
    names = name_positions(graph)
    return MaxFlow(
        value, (upper, start), (lower, end), on_edges, places, capacity, names, provenance
    )


METHODS: dict[str, Callable[..., TokenAttention]] = {"raw": raw, "rollout": rollout, "flow": flow}
