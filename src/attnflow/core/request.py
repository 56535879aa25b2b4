"""`Request`: a validated call of a method on a graph, and the result that it makes of values."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from attnflow.core.arrays import Floats
from attnflow.core.attention import Attention
from attnflow.core.checks import check_integers, check_position, check_positions
from attnflow.core.graph import AttentionGraph
from attnflow.core.groups import (
    Group,
    Groups,
    check_group,
    is_several,
    read_groups,
    refuse_removed,
    sum_groups,
)
from attnflow.core.results import TokenAttention
from attnflow.errors import OptionError

# an array, or a list of per-layer arrays, stands for its Attention
Weights = Attention | AttentionGraph | npt.ArrayLike
Codes = npt.NDArray[np.int8]
NORMALIZATIONS = ("sum", "receptive_field", None)


@dataclass(frozen=True)
class Request:
    """A validated call of a method on a graph.

    Parameters
    ----------
    graph
        The graph that the method runs on.
    method
        The name of the method.
    layers, positions
        The rows to compute; positions count from 0. With sources, those of one after another.
    bottom
        The layer that the keys are positions of.
    normalize
        One of `NORMALIZATIONS`.
    groups
        Positions to take together as one key; None for single positions.
    sources
        Positions to take together as one row each; None for rows of single positions.
    """

    graph: AttentionGraph
    method: str
    layers: tuple[int, ...]
    positions: tuple[int, ...]
    bottom: int
    normalize: str | None
    groups: tuple[Group, ...] | None
    sources: tuple[Group, ...] | None = None

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
        sources: Groups | None = None,
        *,
        every_layer: bool,
    ) -> "Request":
        """Check the options of a call.

        Parameters
        ----------
        attention
            A graph, or weights, which stand for their default graph.
        method
            The name of the method.
        layers, positions, bottom, normalize, groups, sources
            As the method takes them.
        every_layer
            Whether layers=None means all layers above `bottom`, or the top one.
        """
        graph = read_graph(attention)
        (bottom,) = check_integers([bottom], "bottom")
        if not 0 <= bottom < graph.depth:
            raise OptionError(
                f"bottom must be from 0 to {graph.depth - 1}; got {bottom}"
                f" (this graph has layers 0..{graph.depth})",
                options=["bottom"],
            )
        if layers is None:
            layers = range(bottom + 1, graph.depth + 1) if every_layer else [graph.depth]
        tops = check_layers(layers, graph.depth)
        if bottom >= min(tops):
            raise OptionError(
                f"bottom must be below every layer asked for; got bottom={bottom},"
                f" layers={list(tops)} (this graph has layers 0..{graph.depth})",
                options=["bottom"],
            )
        apart = read_together(graph, sources, "sources")
        if apart is not None and positions is not None:
            raise OptionError(
                f"rows are of positions or of sources; got {positions=} as well: leave it out",
                options=["positions"],
            )
        if apart is not None:
            positions = [position for source in apart for position in source.positions]
        asked = graph.kept if positions is None else positions
        rows = check_query_positions(asked, graph.size, graph.removed)
        check_normalize(normalize)
        if normalize == "receptive_field" and graph.layer_names is not None:
            raise OptionError(
                "normalize='receptive_field' is not defined for encoder-decoder graphs;"
                " choose 'sum' or None"
            )
        together = read_together(graph, groups, "groups")
        return cls(graph, method, tops, rows, bottom, normalize, together, apart)

    def sum_groups(self, values: Floats) -> Floats:
        """values [..., key] summed over the groups, or as they are."""
        return values if self.groups is None else sum_groups(values, self.groups)

    def answer(
        self,
        compute: Callable[[AttentionGraph], Floats],
        find_limits: Callable[[Floats], Codes] | None = None,
        *,
        one_layer: bool = False,
        joint: bool = False,
    ) -> TokenAttention:
        """Compute values [layer, query, key], normalise them, and name them.

        Parameters
        ----------
        compute
            Returns the values of a graph: of `graph` itself, and with
            normalize="receptive_field" also of its uniform counterpart.
        find_limits
            Returns what limits the values, before they are normalised, as indices into `LIMITS`.
        one_layer
            Whether keys are positions of the layer below each layer, not of `bottom`.
        joint
            Whether `compute` returns one row per source; if not, one per position of each, whose
            mean is taken once they are normalised.
        """
        values = compute(self.graph)
        limits = None if find_limits is None else find_limits(values)
        if self.normalize is not None:
            relative = self.normalize == "receptive_field"
            normalise_rows(values, compute(self.graph.uniform()) if relative else None)
        tokens = name_positions(self.graph)
        positions, queries = self.positions, tuple(tokens[place] for place in self.positions)
        if self.sources is not None:
            values = values if joint else average_sources(values, self.sources)
            positions = tuple(max(source.positions) for source in self.sources)
            queries = tuple(source.name for source in self.sources)
        return TokenAttention(
            values=values,
            method=self.method,
            layers=self.layers,
            positions=positions,
            bottom=None if one_layer else self.bottom,
            tokens=tokens if self.groups is None else tuple(group.name for group in self.groups),
            queries=queries,
            causal=self.graph.causal,
            normalize=self.normalize,
            words=self.graph.words if self.groups is None else None,
            groups=self.groups,
            sources=self.sources,
            limits=limits,
            window=self.graph.window,
            removed=self.graph.removed,
            size=self.graph.size,
            edges=self.graph.edge_name,
            source=self.graph.source.by_method(self.method),
        )


# ---- checks, also of rows of long inputs (rows/request.py) ---------------------------------------


def check_layers(layers: object, depth: int | None) -> tuple[int, ...]:
    """Check layers: at least one, from 1 to depth. depth: None if it is not known yet."""
    asked = tuple(check_integers(layers, "layers"))
    if not asked:
        raise OptionError("at least one layer must be asked for; got none")
    most = max(asked) if depth is None else depth
    for layer in asked:
        if not 1 <= layer <= most:
            raise OptionError(f"layers must be from 1 to {most}; got {layer}", options=["layers"])
    return asked


def check_query_positions(positions: object, size: int, removed: Sequence[int]) -> tuple[int, ...]:
    """Positions from 0: at least one, none of them removed."""
    asked = check_positions(positions, size)
    if not asked:
        raise OptionError("at least one position must be asked for; got none")
    refuse_removed(asked, size, removed)
    return asked


def check_normalize(normalize: object, known: Sequence[str | None] = NORMALIZATIONS) -> None:
    """Refuse an unknown option `normalize`."""
    if not isinstance(normalize, str | None) or normalize not in known:
        names = [name for name in known if name is not None]
        otherwise = ", or None for values as they are" if None in known else ""
        raise OptionError(
            f"unknown normalize {normalize!r}; choose from {', '.join(names)}{otherwise}",
            options=["normalize"],
        )


def normalise_rows(values: Floats, field: Floats | None = None) -> None:
    """Let rows [..., key] sum to 1, in place; a row of zeros stays.

    field: values of uniform attention to divide by first, 0/0 being 0.
    """
    if field is not None:
        np.divide(values, field, out=values, where=field > 0)
    sums = values.sum(axis=-1, keepdims=True)
    np.divide(values, sums, out=values, where=sums > 0)


def sum_sources(values: Floats, sources: Sequence[Group]) -> Floats:
    """[layer, source, key]: sums of [layer, position, key], one source after another."""
    starts = np.cumsum([0, *(len(source.positions) for source in sources)])[:-1]
    sums: Floats = np.add.reduceat(values, starts, axis=1)
    return sums


def average_sources(values: Floats, sources: Sequence[Group]) -> Floats:
    """[layer, source, key]: the mean rows, likewise."""
    sizes = np.array([len(source.positions) for source in sources])
    mean: Floats = sum_sources(values, sources) / sizes[:, None]
    return mean


# ---- graphs and their nodes ----------------------------------------------------------------------


def read_together(
    graph: AttentionGraph, groups: Groups | None, what: str
) -> tuple[Group, ...] | None:
    """Groups of positions of a graph, checked; None if None. what: the option's name."""
    if groups is None:
        return None
    return read_groups(
        groups,
        graph.size,
        tokens=graph.tokens,
        words=graph.words,
        removed=graph.removed,
        what=what,
    )


def read_graph(attention: Weights) -> AttentionGraph:
    """The graph itself, or the default graph of attention weights."""
    if isinstance(attention, AttentionGraph):
        return attention
    return (attention if isinstance(attention, Attention) else Attention(attention)).graph()


def refuse_signed(attention: Weights) -> None:
    """Refuse edges that may be negative, where they would be capacities."""
    if isinstance(attention, AttentionGraph) and attention.signed:
        raise OptionError(
            f"a capacity is not negative, and {attention.edge_name} edges may be: use rollout, or"
            " relevance edges for flow"
        )


def read_node(graph: AttentionGraph, node: object, what: str) -> tuple[int, tuple[int, ...]]:
    """The layer of a node (layer, position) of a graph, and its position or positions."""
    if not isinstance(node, Sequence | np.ndarray) or len(node) != 2 or isinstance(node, str):
        raise OptionError(f"{what} must be a pair (layer, position); got {node!r}")
    layer_given, position = node
    (layer,) = check_integers([layer_given], what)
    if not 0 <= layer <= graph.depth:
        raise OptionError(f"the layer of {what} must be from 0 to {graph.depth}; got {layer}")
    if is_several(position):
        return layer, check_group(position, graph.size, graph.removed, f"the positions of {what}")
    place = check_position(position, graph.size, f"the position of {what}")
    refuse_removed([place], graph.size, graph.removed)
    return layer, (place,)


def name_positions(graph: AttentionGraph) -> tuple[str, ...]:
    """The tokens, or the numbers of the positions if they have no names."""
    return tuple(map(str, range(graph.size))) if graph.tokens is None else graph.tokens
