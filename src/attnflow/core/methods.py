"""The methods: raw attention, attention rollout and attention flow, from an attention graph to token attention."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from attnflow.core.attention import Attention
from attnflow.core.graph import AttentionGraph, Floats, integers, positions_of
from attnflow.core.groups import (
    Group,
    Groups,
    check_group,
    is_several,
    list_numbers,
    read_groups,
    refuse_removed,
    sum_groups,
)
from attnflow.core.results import LIMITS, MaxFlow, TokenAttention
from attnflow.errors import OptionError, SaturationWarning
from attnflow.notices import give_notice
from attnflow.progress import progress_bar

Weights = (
    Attention | AttentionGraph | npt.ArrayLike
)  # an array, or a list of per-layer arrays, stands for its Attention
Codes = npt.NDArray[np.int8]
NORMALIZATIONS = ("sum", "receptive_field", None)
SATURATED = 1e-9  # a flow this close to the source's row sum, or the target's column sum, is at it
MOSTLY = 0.95  # the share of a row at the bound from which on the reader is warned
# ... and the spread below which: keys then differ from an even share by 4 % of it, on average
EVEN = 0.02
WORTH_A_WARNING = (2, 8)  # layers and keys below which a row is too short to speak of


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

    attention, layers, positions, normalize, groups: as for `rollout`. Its keys are positions of
    the layer below, so `bottom` is refused.

    >>> raw(Attention([[[0.5, 0.5], [1.0, 0.0]]])).at(position=1, layer=1)
    array([1., 0.])
    """
    if bottom is not None:
        raise OptionError(
            f"raw attention looks one layer down, so it takes no bottom; got bottom={bottom}"
        )
    ask = Request.read(attention, "raw", layers, positions, 0, normalize, groups, every_layer=True)

    def compute(graph: AttentionGraph) -> Floats:
        return ask.grouped(graph.weights[np.array(ask.layers) - 1][:, list(ask.positions)])

    return replace(ask.answer(compute), bottom=None)


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

    attention: a graph, or weights, which stand for their default graph. layers, positions: whose
    rows to give; all if None. normalize: "sum", so that rows sum to 1; "receptive_field", divided
    by what attention without preference would give, then the same; None, as they are. groups: keys
    to take together, their sum: "words", lists of positions, or {name: positions}; rows are then
    normalised over the groups, which need not cover all positions.

    >>> rollout(Attention([[[0.5, 0.5], [1.0, 0.0]]] * 2)).at(position=0, layer=2)
    array([0.6875, 0.3125])
    """
    ask = Request.read(
        attention, "rollout", layers, positions, bottom, normalize, groups, every_layer=True
    )

    def compute(graph: AttentionGraph) -> Floats:
        below, size = ask.bottom, graph.size
        # rows of a layer travel down by vector-matrix products; many rows are cheaper as full products from the bottom up
        downwards = sum(layer - below for layer in ask.layers) * len(ask.positions)
        upwards = (max(ask.layers) - below) * size
        travel = roll_down if downwards < upwards else roll_up
        return ask.grouped(
            travel(
                graph.edges[below:], [layer - below for layer in ask.layers], list(ask.positions)
            )
        )

    return ask.answer(compute)


def roll_down(edges: Floats, layers: Sequence[int], positions: Sequence[int]) -> Floats:
    """[layer, query, key]: the rows asked for, carried down together; edges [layer, query, key] from the bottom on."""
    start = np.eye(edges.shape[1])[positions]  # [query, key]
    rolled = np.empty((0, *start.shape))  # [layer, query, key]
    for layer in range(max(layers), 0, -1):
        joining = layers.count(layer)
        rolled = np.concatenate([np.broadcast_to(start, (joining, *start.shape)), rolled])
        rolled = rolled @ edges[layer - 1]
    return rolled[np.argsort(np.argsort(layers, kind="stable"), kind="stable")]


def roll_up(edges: Floats, layers: Sequence[int], positions: Sequence[int]) -> Floats:
    """[layer, query, key]: the same rows, from the product of all layers below; edges [layer, query, key] from the bottom on."""
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
    """Attention flow: the maximum flow to each position of layer `bottom`, or to each group.

    attention, positions: as for `rollout`. layers: the top one if None. normalize: as for
    `rollout`; None gives the maximum flows themselves. groups: positions to take together,
    "words", lists of positions, or {name: positions}. The flow to a group is a maximum flow of its
    own, at most the sum of the flows to its positions and mostly less. workers: threads; the
    values do not depend on their number.

    A capacity of at most 2^-52 of the graph's largest row sum carries nothing, at any depth. A
    `SaturationWarning` says where a row that was asked for hardly tells keys, or sources, apart.

    >>> flow(Attention([[[0.5, 0.5], [1.0, 0.0]]] * 2), normalize=None).at(position=0)
    array([1. , 0.5])
    """
    from attnflow.core.flows import flows_from, flows_of_all_layers
    from attnflow.core.maxflow import find_scale

    ask = Request.read(
        attention, "flow", layers, positions, bottom, normalize, groups, every_layer=False
    )
    (workers,) = integers([workers], "workers")
    if workers < 1:
        raise OptionError(f"workers must be a whole number of threads, at least 1; got {workers!r}")
    depth = max(ask.layers) - ask.bottom
    targets = None if ask.groups is None else [group.positions for group in ask.groups]

    def compute(graph: AttentionGraph) -> Floats:
        below = graph.edges[ask.bottom :]
        positions = np.array(ask.positions)
        options: dict[str, Any] = {
            "groups": targets,
            "scale": find_scale(graph.edges),
            "causal": graph.causal,
            "workers": workers,
        }
        with progress_bar("attention flow") as tick:
            if (
                len(ask.layers) > 1
                and 2 * len(set(ask.layers)) * len(positions) > depth * graph.size
            ):
                every = flows_of_all_layers(below[:depth], tick=tick, **options)
                rows: Floats = every[np.array(ask.layers) - ask.bottom - 1][:, positions]
                return rows
            return np.stack(
                [
                    flows_from(below[: layer - ask.bottom], positions, tick=tick, **options)
                    for layer in ask.layers
                ]
            )

    def find_limits(flows: Floats) -> Codes:
        """[layer, query, key]: what each flow equals, as places in LIMITS."""
        edges = ask.graph.edges
        leaving = edges.sum(axis=-1)[np.array(ask.layers) - 1][:, list(ask.positions), None]
        entering = ask.grouped(edges[ask.bottom].sum(axis=0))  # [key]
        near = SATURATED * find_scale(edges)
        limits = np.full(flows.shape, LIMITS.index("between"), np.int8)
        limits[flows >= entering - near] = LIMITS.index("target")
        limits[flows >= leaving - near] = LIMITS.index("source")
        if ask.groups is None:
            limits[..., list(ask.graph.removed)] = LIMITS.index("between")
        return limits

    result = ask.answer(compute, find_limits)
    warn_if_even(result)
    return result


def max_flow(
    attention: Weights,
    *,
    source: tuple[int, int],
    target: tuple[int, int] | tuple[int, Iterable[int]],
) -> MaxFlow:
    """The maximum flow from one node to one of a lower layer, on every edge, with what limits it.

    attention: a graph, or weights, which stand for their default graph. source: (layer, position).
    target: (layer, position), or (layer, positions) for the flow to all of these taken together.

    >>> best = max_flow(Attention([[[0.5, 0.5], [1.0, 0.0]]] * 2), source=(2, 0), target=(0, 1))
    >>> best.value, best.cut
    (0.5, ((1, 0, 1), (2, 0, 1)))
    """
    from attnflow.core.maxflow import find_scale
    from attnflow.core.mincut import one_flow

    graph = graph_of(attention)
    upper, (start,) = node_of(graph, source, "source")
    lower, ends = node_of(graph, target, "target", several=True)
    if upper <= lower:
        raise OptionError(
            f"the source must be in a higher layer than the target; got {source=}, {target=}"
        )
    edges = graph.edges[lower:upper]
    value, on_edges, cut = one_flow(edges, start, ends, scale=find_scale(graph.edges))
    places = tuple(
        (int(layer) + lower + 1, int(query), int(key)) for layer, query, key in np.argwhere(cut)
    )
    end = ends if is_several(target[1]) else ends[0]
    capacity = float(edges[cut].sum())
    return MaxFlow(value, (upper, start), (lower, end), on_edges, places, capacity, names(graph))


METHODS: dict[str, Callable[..., TokenAttention]] = {"raw": raw, "rollout": rollout, "flow": flow}


# ---- what the methods share ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """What was asked of a method, checked."""

    graph: AttentionGraph
    method: str
    layers: tuple[int, ...]
    positions: tuple[int, ...]
    bottom: int
    normalize: str | None
    groups: tuple[Group, ...] | None

    @classmethod
    def read(
        cls,
        attention: Weights,
        method: str,
        layers: Iterable[int] | int | None,
        positions: Iterable[int] | int | None,
        bottom: int,
        normalize: str | None,
        groups: Groups | None,
        *,
        every_layer: bool,
    ) -> "Request":
        graph = graph_of(attention)
        (bottom,) = integers([bottom], "bottom")
        if not 0 <= bottom < graph.depth:
            raise OptionError(
                f"bottom must be from 0 to {graph.depth - 1}; got {bottom} (this graph has layers 0..{graph.depth})"
            )
        if layers is None:
            layers = range(bottom + 1, graph.depth + 1) if every_layer else [graph.depth]
        asked = integers(layers, "layers")  # type: ignore[arg-type]
        if not asked:
            raise OptionError("at least one layer must be asked for; got none")
        for layer in asked:
            if not 1 <= layer <= graph.depth:
                raise OptionError(f"layers must be from 1 to {graph.depth}; got {layer}")
        if bottom >= min(asked):
            raise OptionError(
                f"bottom must be below every layer asked for; got bottom={bottom}, layers={asked} (this graph has layers 0..{graph.depth})"
            )
        wanted = graph.kept if positions is None else positions_of(positions, graph.size)  # type: ignore[arg-type]
        refuse_removed(wanted, graph.size, graph.removed)
        if not wanted:
            raise OptionError("at least one position must be asked for; got none")
        if not isinstance(normalize, str | None) or normalize not in NORMALIZATIONS:
            raise OptionError(
                f"unknown normalize {normalize!r}; choose from 'sum', 'receptive_field' or None"
            )
        if normalize == "receptive_field" and graph.layer_names is not None:
            raise OptionError(
                "normalize='receptive_field' is not defined for encoder-decoder graphs; choose 'sum' or None"
            )
        found = None
        if groups is not None:
            found = read_groups(
                groups,
                graph.size,
                tokens=graph.tokens,
                words=graph.words,
                removed=graph.removed,
            )
        return cls(graph, method, tuple(asked), tuple(wanted), bottom, normalize, found)

    def grouped(self, values: Floats) -> Floats:
        """values [..., key] summed over the groups, or as they are."""
        return values if self.groups is None else sum_groups(values, self.groups)

    def answer(
        self,
        compute: Callable[[AttentionGraph], Floats],
        find_limits: Callable[[Floats], Codes] | None = None,
    ) -> TokenAttention:
        """Compute values [layer, query, key], normalise them and name them."""
        values = compute(self.graph)
        limits = None if find_limits is None else find_limits(values)
        if self.normalize == "receptive_field":
            field = compute(self.graph.uniform())
            np.divide(
                values, field, out=values, where=field > 0
            )  # nothing is reached outside of the field
        if self.normalize is not None:
            sums = values.sum(axis=-1, keepdims=True)
            np.divide(values, sums, out=values, where=sums > 0)
        tokens = names(self.graph)
        return TokenAttention(
            values=values,
            method=self.method,
            layers=self.layers,
            positions=self.positions,
            bottom=self.bottom,
            tokens=tokens if self.groups is None else tuple(group.name for group in self.groups),
            queries=tuple(tokens[position] for position in self.positions),
            causal=self.graph.causal,
            normalize=self.normalize,
            words=self.graph.words if self.groups is None else None,
            groups=self.groups,
            limits=limits,
            window=self.graph.window,
            removed=self.graph.removed,
        )


def are_even(spread: Floats, keys: Any) -> npt.NDArray[np.bool_]:
    """Which rows hardly tell keys apart, by their spread and how many keys they see."""
    return (spread < EVEN) & (np.asarray(keys) >= WORTH_A_WARNING[1])


def warn_if_even(result: TokenAttention) -> None:
    """One warning per call, if some row of a flow hardly tells keys, or sources, apart."""
    deep, long = WORTH_A_WARNING
    layers = np.array(result.layers)
    worth = (layers - (result.bottom or 0) >= deep)[:, None]  # [layer, 1]
    kept = len(result.tokens) - (0 if result.groups else len(set(result.removed)))
    if result.saturated is None or kept < long or not worth.any():
        return
    at_bound = worth & (result.saturated.sum(axis=-1) / kept > MOSTLY)  # [layer, query]
    even = are_even(result.spread, result.visible_keys) & worth
    problems = []
    if at_bound.any():
        found = list_numbers(layers[at_bound.any(axis=1)].tolist())
        problems.append(
            f"attention flow from layer {found} is saturated: over {MOSTLY:.0%} of a row equals"
            " the row sum of its source or the column sum of its target, so it says nothing about"
            " the layers between them"
        )
    if even.any():
        found = list_numbers(layers[even.any(axis=1)].tolist())
        least = result.spread[even].min()
        problems.append(
            f"attention flow from layer {found} is even: the spread of a row is {least:.2g}"
            " (0: all keys alike, 1: all on one key), so it hardly tells inputs apart"
        )
    if problems:
        text = f"{'; '.join(problems)}; look at a lower layer or at rollout"
        give_notice(text, SaturationWarning, stacklevel=3)


def graph_of(attention: Weights) -> AttentionGraph:
    """The graph itself, or the default graph of attention weights."""
    if isinstance(attention, AttentionGraph):
        return attention
    return (attention if isinstance(attention, Attention) else Attention(attention)).graph()


def node_of(
    graph: AttentionGraph, node: Any, what: str, *, several: bool = False
) -> tuple[int, tuple[int, ...]]:
    """The layer of a node (layer, position) of the graph, and its position, or positions."""
    if not isinstance(node, Sequence | np.ndarray) or len(node) != 2 or isinstance(node, str):
        raise OptionError(f"{what} must be a pair (layer, position); got {node!r}")
    layer_given, position = node
    if is_several(position) and not several:
        raise OptionError(f"the position of {what} must be one; got {position!r}")
    (layer,) = integers([layer_given], what)
    if not 0 <= layer <= graph.depth:
        raise OptionError(f"the layer of {what} must be from 0 to {graph.depth}; got {layer}")
    if is_several(position):
        return layer, check_group(position, graph.size, graph.removed, f"the positions of {what}")
    found = positions_of([position], graph.size, f"the position of {what}")
    refuse_removed(found, graph.size, graph.removed)
    return layer, found


def names(graph: AttentionGraph) -> tuple[str, ...]:
    """The tokens, or the positions' numbers where tokens have no names."""
    return (
        graph.tokens
        if graph.tokens is not None
        else tuple(str(position) for position in range(graph.size))
    )
