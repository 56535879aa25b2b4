"""`AttentionGraph`: attention weights of one sequence, fused over heads, as a layered graph.

Numbering, here and everywhere: layers are numbered like Hugging Face's `hidden_states`: 0 is the
input, l is the output of layer l, for l = 1..depth. Nodes are (l, position); edges lead from
(l, query) down to (l-1, key). Heads and positions count from 0. The weight of an edge is
`(1 - residual) * weights[l-1, query, key] + residual * (query == key)`, so the edges out of a node
sum to 1.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Self

import numpy as np

from attnflow.core.arrays import (
    Array,
    Floats,
    check_edges,
    check_rows,
    needs_copy,
    read_only,
    stack_layers,
)
from attnflow.core.checks import (
    check_layer_names,
    check_names,
    check_positions,
    check_residual,
    check_source,
    check_words,
)
from attnflow.core.io.formatting import format_count
from attnflow.core.layers import Layers
from attnflow.core.masks import LEAK, check_mask, find_visible, take_out
from attnflow.core.provenance import Source
from attnflow.errors import OptionError, WeightsError

RESIDUAL = 0.5


@dataclass(frozen=True, eq=False, init=False, repr=False)
class LayeredWeights:
    """What `Attention` and `AttentionGraph` share: the weights of one sequence, layer by layer."""

    weights: Array  # [layer, ..., query, key]
    tokens: tuple[str, ...] | None
    causal: bool
    window: tuple[int | None, ...]
    words: tuple[int | None, ...] | None
    layer_names: tuple[str, ...] | None

    def _fill(
        self,
        weights: Array,
        *,
        tokens: Iterable[str] | None,
        words: Iterable[int | None] | None,
        layer_names: Iterable[str] | None,
        **fields: object,
    ) -> None:
        """Check the names and set all fields, once, in the constructor."""
        depth, size = len(weights), weights.shape[-1]
        freeze(
            self,
            weights=read_only(weights),
            tokens=check_names(tokens, size, "tokens"),
            words=check_words(words, size),
            layer_names=check_layer_names(layer_names, depth),
            **fields,
        )

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self  # nothing of it can change

    def __setstate__(self, state: dict[str, object]) -> None:
        """The state that was pickled; its arrays are read-only again."""
        for value in state.values():
            if isinstance(value, np.ndarray):
                value.flags.writeable = False
        self.__dict__.update(state)

    @property
    def depth(self) -> int:
        """The number of layers; the top one has this number."""
        return int(self.weights.shape[0])

    @property
    def size(self) -> int:
        """The number of positions."""
        return int(self.weights.shape[-1])


@dataclass(frozen=True, eq=False, init=False, repr=False)
class AttentionGraph(LayeredWeights):
    """The layered graph that methods run on. Usually made by `Attention.graph()`.

    It is made either from fused attention weights, into which the residual is mixed, or from edges
    of any kind, which include it. Weights of float32 stay float32, in which rows sum to 1 only
    nearly; `edges` are float64, in which they do. All arrays are read-only.

    Parameters
    ----------
    weights
        [layer, query, key], rows sum to 1.
    edges
        [layer, query, key] instead of weights: finite, not negative, rows of any sum.
    residual
        The weight of the residual connection, from 0 up to but not including 1; 0.5 if None.
        Refused with edges, which include it.
    tokens
        One name per position.
    causal
        No query sees a later key; inferred if None.
    window
        The size of a sliding window: a query sees only keys less than this many positions away.
        One number for all layers, or one (or None) per layer.
    words
        The number of the word per token.
    removed
        Positions to remove; negative ones count from the end.
    layer_names
        The names of the layers, if they are not simply a model's layers.
    edge_name
        The name of the edge weight; if None, "attention" for weights and "given" for edges.
    signed
        Whether edges may be negative; rollout adds up their products, flow refuses them.
    source
        The origin of the weights; a `Source` without a model if None.
    copy
        If False, a numpy array of float32 or float64 is not copied: it is renormalised in place and
        belongs to the graph.

    >>> graph = AttentionGraph([[[0.5, 0.5], [1.0, 0.0]]])
    >>> graph.edges[0].tolist()
    [[0.75, 0.25], [0.5, 0.5]]
    >>> AttentionGraph(edges=[[[2.0, 1.0], [0.0, 3.0]]])
    <AttentionGraph: 1 layer, 2 positions, residual inside>
    """

    # weights are [layer, query, key], in float32 if they were; the edges if the residual is inside
    residual: float | None  # None: inside the edges
    removed: tuple[int, ...]
    edge_name: str
    signed: bool
    source: Source

    def __init__(
        self,
        weights: object = None,
        *,
        edges: object = None,
        residual: float | None = None,
        tokens: Iterable[str] | None = None,
        causal: bool | None = None,
        window: int | Sequence[int | None] | None = None,
        words: Iterable[int | None] | None = None,
        removed: Iterable[int] = (),
        layer_names: Iterable[str] | None = None,
        edge_name: str | None = None,
        signed: bool = False,
        source: Source | None = None,
        copy: bool = True,
    ) -> None:
        inside = edges is not None
        if inside and weights is not None:
            raise OptionError("a graph is made of weights or of edges; got both: give one")
        share = read_residual(residual, inside)
        if not isinstance(edge_name, str | None):
            raise OptionError(f"edge_name must be a string; got {edge_name!r}")
        edge_name = edge_name or ("given" if inside else "attention")
        if check_source(source) is None or not inside:
            source = replace(source or Source(), edges=edge_name, residual=share)
        given = edges if inside else weights
        array, precision = stack_layers(given)
        if array.ndim != 3:
            what = "edges" if inside else "weights"
            raise WeightsError(
                f"a graph's {what} must have 3 axes [layer, query, key]; got shape {array.shape}"
            )
        gone = check_positions(removed, array.shape[-1], "removed")
        copy = needs_copy(array, given, copy)
        if inside:
            checked = check_edges(array, precision, copy=copy, signed=signed)
            causal, windows = check_mask(checked, "edges", causal, window, leak=0.0)
            checked[:, gone, :] = checked[:, :, gone] = 0.0
        else:
            checked = check_rows(array, precision, skip=gone, copy=copy)
            causal, windows = check_mask(checked, "weights", causal, window, leak=LEAK)
            if gone:
                take_out(checked, gone)
        self._fill(
            checked,
            tokens=tokens,
            words=words,
            layer_names=layer_names,
            residual=share,
            causal=causal,
            window=windows,
            removed=gone,
            edge_name=edge_name,
            signed=inside and signed,
            source=source,
        )

    @property
    def kept(self) -> tuple[int, ...]:
        """The positions that were not removed."""
        return tuple(position for position in range(self.size) if position not in self.removed)

    @cached_property
    def edge_layers(self) -> Layers:
        """The edges as `Layers`, for methods that work layer by layer."""
        if self.residual is None:
            return Layers.of_edges(self.weights)
        diagonal = np.full(self.weights.shape[:2], self.residual)
        diagonal[:, list(self.removed)] = 0.0
        return Layers(self.weights, (1 - self.residual) * self._factors, diagonal)

    @cached_property
    def _factors(self) -> Floats:
        """[layer, query]: the factors by which rows sum to 1; rows of float64 do already."""
        if self.residual is None or self.weights.dtype == np.float64:
            return np.ones(self.weights.shape[:2])
        sums: Floats = self.weights.sum(axis=-1, dtype=np.float64)
        return np.divide(1.0, sums, out=np.ones_like(sums), where=sums > 0)

    @cached_property
    def largest_row_sum(self) -> float:
        """The largest row sum of the edges; 1 if the residual is mixed in."""
        return 1.0 if self.residual is not None else self.edge_layers.largest_row_sum()

    @cached_property
    def edges(self) -> Floats:
        """[layer, query, key] in float64: edges[l-1] leads from layer l to layer l-1.

        Rows of weights with their residual sum to 1, those of removed positions to 0. The whole
        array is computed and kept; `layer_edges` computes one layer.
        """
        return read_only(np.stack(list(self.edge_layers)))

    def layer_edges(self, number: int) -> Floats:
        """[query, key]: the edges from one layer to the one below, in float64, a new array.

        Parameters
        ----------
        number
            The upper layer, from 1 to depth.

        >>> AttentionGraph([[[0.5, 0.5], [1.0, 0.0]]]).layer_edges(1).tolist()
        [[0.75, 0.25], [0.5, 0.5]]
        """
        if not 1 <= number <= self.depth:
            raise OptionError(f"a layer's number must be from 1 to {self.depth}; got {number!r}")
        return self.edge_layers[number - 1]

    def weight_rows(self, layers: Sequence[int], positions: Sequence[int]) -> Floats:
        """[layer, query, key]: rows of the weights, which sum to 1 in float64.

        Parameters
        ----------
        layers
            Layers, from 1 to depth.
        positions
            The rows, from 0.

        >>> AttentionGraph([[[0.5, 0.5], [1.0, 0.0]]]).weight_rows([1], [1]).tolist()
        [[[1.0, 0.0]]]
        """
        picked = np.ix_([layer - 1 for layer in layers], positions)
        rows: Floats = self._factors[picked][..., None] * self.weights[picked]
        return rows

    def uniform(self) -> "AttentionGraph":
        """The same graph with uniform attention over the keys that each query may see."""
        if self.residual is None:
            raise OptionError(
                "normalize='receptive_field' compares with uniform attention, and edges with the"
                " residual inside are not attention; choose 'sum' or None"
            )
        # rows of equal numbers are even in any precision, and sum to 1 once in float64
        even: dict[int | None, Array] = {}
        for window in self.window:
            if window not in even:
                even[window] = find_visible(self.size, self.causal, window).astype(np.float32)
                take_out(even[window][None], self.removed)
        layers = [even[window] for window in self.window]
        same = np.broadcast_to(layers[0], (self.depth, self.size, self.size))
        kept = {field.name: getattr(self, field.name) for field in fields(self)}
        weights = same if len(even) == 1 else np.stack(layers)
        return make_graph(**(kept | {"weights": weights}))

    def __repr__(self) -> str:
        layers = format_count(self.depth, "layer")
        positions = format_count(self.size, f"{'causal ' * self.causal}position")
        residual = "inside" if self.residual is None else f"{self.residual:g}"
        return f"<AttentionGraph: {layers}, {positions}, residual {residual}>"


def read_residual(residual: float | None, inside: bool) -> float | None:
    """The weight of the residual to mix in; None if edges have it inside."""
    if not inside:
        return check_residual(RESIDUAL if residual is None else residual)
    if residual is not None:
        raise OptionError(
            f"edges have the residual inside, so residual is not mixed in; got {residual!r}"
        )
    return None


def make_graph(*, weights: Array, **others: object) -> AttentionGraph:
    """Make a graph from all of its fields, already checked: weights [layer, query, key]."""
    graph = object.__new__(AttentionGraph)
    freeze(graph, weights=read_only(weights), **others)
    return graph


def freeze(instance: object, **fields: object) -> None:
    """Set the fields of a frozen dataclass, in its own __init__."""
    for name, value in fields.items():
        object.__setattr__(instance, name, value)
