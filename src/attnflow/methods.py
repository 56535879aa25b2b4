"""The methods: raw attention, attention rollout and attention flow, from an attention graph to token attention."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from attnflow.attention import Attention
from attnflow.errors import OptionError, SaturationWarning
from attnflow.graph import AttentionGraph, Floats, integers, positions_of
from attnflow.progress import progress_bar
from attnflow.results import MaxFlow, TokenAttention, listed

Weights = (
    Attention | AttentionGraph | npt.ArrayLike
)  # an array, or a list of per-layer arrays, stands for its Attention
NORMALIZATIONS = ("sum", "receptive_field", None)
SATURATED = 1e-9  # a flow this close to min(1, column sum) sits at the bound
MOSTLY = 0.95  # the share of a row at the bound from which on the reader is warned
WORTH_A_WARNING = (2, 8)  # layers and tokens below which saturation is nothing to speak of


def raw(
    attention: Weights,
    *,
    layers: Iterable[int] | int | None = None,
    positions: Iterable[int] | int | None = None,
    bottom: int | None = None,
    normalize: str | None = "sum",
) -> TokenAttention:
    """Raw attention: the model's weights, fused over heads, without the residual; all layers and positions by default.

    Its keys are positions of the layer below, so `bottom` is refused.

    >>> raw(Attention([[[0.5, 0.5], [1.0, 0.0]]])).at(position=1, layer=1)
    array([1., 0.])
    """
    if bottom is not None:
        raise OptionError(
            f"raw attention looks one layer down, so it takes no bottom; got bottom={bottom}"
        )
    ask = Request.read(attention, "raw", layers, positions, 0, normalize, every_layer=True)

    def compute(graph: AttentionGraph) -> Floats:
        rows: Floats = graph.weights[np.array(ask.layers) - 1][:, list(ask.positions)]
        return rows

    return replace(ask.answer(compute), bottom=None)


def rollout(
    attention: Weights,
    *,
    layers: Iterable[int] | int | None = None,
    positions: Iterable[int] | int | None = None,
    bottom: int = 0,
    normalize: str | None = "sum",
) -> TokenAttention:
    """Attention rollout: the product of the layers' matrices, down to layer `bottom`; all layers and positions by default.

    >>> rollout(Attention([[[0.5, 0.5], [1.0, 0.0]]] * 2)).at(position=0, layer=2)
    array([0.6875, 0.3125])
    """
    ask = Request.read(attention, "rollout", layers, positions, bottom, normalize, every_layer=True)

    def compute(graph: AttentionGraph) -> Floats:
        below, size = ask.bottom, graph.size
        # rows of a layer travel down by vector-matrix products; many rows are cheaper as full products from the bottom up
        downwards = sum(layer - below for layer in ask.layers) * len(ask.positions)
        upwards = (max(ask.layers) - below) * size
        travel = roll_down if downwards < upwards else roll_up
        return travel(
            graph.edges[below:], [layer - below for layer in ask.layers], list(ask.positions)
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
    workers: int = 1,
) -> TokenAttention:
    """Attention flow: the maximum flow to each position of layer `bottom`; of the top layer, and all positions, by default.

    normalize=None gives the maximum flows themselves. workers: threads; the values do not depend on their number.

    >>> flow(Attention([[[0.5, 0.5], [1.0, 0.0]]] * 2), normalize=None).at(position=0)
    array([1. , 0.5])
    """
    from attnflow.flows import flows_from, flows_of_all_layers

    ask = Request.read(attention, "flow", layers, positions, bottom, normalize, every_layer=False)
    (workers,) = integers([workers], "workers")
    if workers < 1:
        raise OptionError(f"workers must be a whole number of threads, at least 1; got {workers!r}")
    depth = max(ask.layers) - ask.bottom

    def compute(graph: AttentionGraph) -> Floats:
        below = graph.edges[ask.bottom :]
        positions = np.array(ask.positions)
        with progress_bar("attention flow") as tick:
            if (
                len(ask.layers) > 1
                and 2 * len(set(ask.layers)) * len(positions) > depth * graph.size
            ):
                every = flows_of_all_layers(
                    below[:depth], causal=graph.causal, workers=workers, tick=tick
                )
                rows: Floats = every[np.array(ask.layers) - ask.bottom - 1][:, positions]
                return rows
            return np.stack(
                [
                    flows_from(
                        below[: layer - ask.bottom],
                        positions,
                        causal=graph.causal,
                        workers=workers,
                        tick=tick,
                    )
                    for layer in ask.layers
                ]
            )

    def saturated(values: Floats) -> npt.NDArray[np.bool_]:
        bound = np.minimum(1.0, ask.graph.edges[ask.bottom].sum(axis=0))
        at_bound: npt.NDArray[np.bool_] = values >= bound - SATURATED
        at_bound[..., list(ask.graph.removed)] = False
        return at_bound

    return ask.answer(compute, saturated)


def max_flow(attention: Weights, *, source: tuple[int, int], target: tuple[int, int]) -> MaxFlow:
    """The maximum flow from one node (layer, position) to one of a lower layer, on every edge, with what limits it.

    >>> best = max_flow(Attention([[[0.5, 0.5], [1.0, 0.0]]] * 2), source=(2, 0), target=(0, 1))
    >>> best.value, best.cut
    (0.5, ((1, 0, 1), (2, 0, 1)))
    """
    from attnflow.maxflow import one_flow

    graph = graph_of(attention)
    (upper, start), (lower, end) = (
        node_of(graph, source, "source"),
        node_of(graph, target, "target"),
    )
    if upper <= lower:
        raise OptionError(
            f"the source must be in a higher layer than the target; got source={source}, target={target}"
        )
    edges = graph.edges[lower:upper]
    value, on_edges, cut = one_flow(edges, start, end)
    places = tuple(
        (int(layer) + lower + 1, int(query), int(key)) for layer, query, key in np.argwhere(cut)
    )
    return MaxFlow(
        value, (upper, start), (lower, end), on_edges, places, float(edges[cut].sum()), names(graph)
    )


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

    @classmethod
    def read(
        cls,
        attention: Weights,
        method: str,
        layers: Iterable[int] | int | None,
        positions: Iterable[int] | int | None,
        bottom: int,
        normalize: str | None,
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
        for position in wanted:
            if position in graph.removed:
                raise OptionError(
                    f"position {position} was taken out of this graph; it has positions {listed(graph.kept)}"
                )
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
        return cls(graph, method, tuple(asked), tuple(wanted), bottom, normalize)

    def answer(
        self,
        compute: Callable[[AttentionGraph], Floats],
        saturated: Callable[[Floats], npt.NDArray[np.bool_]] | None = None,
    ) -> TokenAttention:
        """Compute values [layer, query, key], normalise them and name them."""
        values = compute(self.graph)
        at_bound = None if saturated is None else saturated(values)
        if at_bound is not None:
            self.warn_if_saturated(at_bound)
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
            tokens=tokens,
            queries=tuple(tokens[position] for position in self.positions),
            causal=self.graph.causal,
            normalize=self.normalize,
            words=self.graph.words,
            saturated=at_bound,
        )

    def warn_if_saturated(self, saturated: npt.NDArray[np.bool_]) -> None:
        """One warning a call if in some row nearly all flows say nothing about the source."""
        deep, long = WORTH_A_WARNING
        kept = list(self.graph.kept)
        if len(kept) < long:
            return
        shares = saturated[..., kept].mean(axis=-1)  # [layer, query]
        shares[np.array(self.layers) - self.bottom < deep] = 0.0
        full = [
            layer
            for layer, share in zip(self.layers, shares, strict=True)
            if (share > MOSTLY).any()
        ]
        if full:
            warnings.warn(
                f"attention flow from layer {listed(full)} is saturated: over {MOSTLY:.0%} of a row equals min(1, column sum), the bound"
                " that no source can pass, so it tells inputs apart but not sources; look at a lower layer or at rollout",
                SaturationWarning,
                stacklevel=4,
            )


def graph_of(attention: Weights) -> AttentionGraph:
    """The graph itself, or the default graph of attention weights."""
    if isinstance(attention, AttentionGraph):
        return attention
    return (attention if isinstance(attention, Attention) else Attention(attention)).graph()


def node_of(graph: AttentionGraph, node: Any, what: str) -> tuple[int, int]:
    """A node (layer, position) that is in the graph, or an error."""
    if np.shape(node) != (2,):
        raise OptionError(f"{what} must be a pair (layer, position); got {node!r}")
    layer, position = integers(node, what)
    if not 0 <= layer <= graph.depth:
        raise OptionError(f"the layer of {what} must be from 0 to {graph.depth}; got {layer}")
    positions_of([position], graph.size, f"the position of {what}")
    if position in graph.removed:
        raise OptionError(
            f"position {position} was taken out of this graph; it has positions {listed(graph.kept)}"
        )
    return layer, position


def names(graph: AttentionGraph) -> tuple[str, ...]:
    """The tokens, or the positions' numbers where tokens have no names."""
    return (
        graph.tokens
        if graph.tokens is not None
        else tuple(str(position) for position in range(graph.size))
    )
