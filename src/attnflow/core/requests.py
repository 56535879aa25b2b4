"""What is asked of a method: read, checked, answered by a named result; and its warnings."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

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
    list_numbers,
    read_groups,
    refuse_removed,
    sum_groups,
)
from attnflow.core.results import TokenAttention
from attnflow.errors import OptionError, SaturationWarning
from attnflow.notices import give_notice

# an array, or a list of per-layer arrays, stands for its Attention
Weights = Attention | AttentionGraph | npt.ArrayLike
Codes = npt.NDArray[np.int8]
NORMALIZATIONS = ("sum", "receptive_field", None)
MOSTLY = 0.95  # the share of a row at the bound from which on the reader is warned
# ... and the spread below which: keys then differ from an even share by 4 % of it, on average
EVEN = 0.02
WORTH_A_WARNING = (2, 8)  # layers and keys below which a row is too short to speak of


@dataclass(frozen=True)
class Request:
    """What was asked of a method, checked.

    Parameters
    ----------
    graph
        What the method runs on.
    method
        The name of the method.
    layers, positions
        The rows to compute; positions count from 0.
    bottom
        The layer that the keys are positions of.
    normalize
        One of `NORMALIZATIONS`.
    groups
        Positions to take together as one key; None for single positions.
    """

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
        """Check what was asked of a method.

        Parameters
        ----------
        attention
            A graph, or weights, which stand for their default graph.
        method
            The name of the method.
        layers, positions, bottom, normalize, groups
            As the user gave them.
        every_layer
            Whether layers=None asks for all layers above `bottom`, or for the top one.
        """
        graph = read_graph(attention)
        (bottom,) = check_integers([bottom], "bottom")
        if not 0 <= bottom < graph.depth:
            raise OptionError(
                f"bottom must be from 0 to {graph.depth - 1}; got {bottom}"
                f" (this graph has layers 0..{graph.depth})"
            )
        if layers is None:
            layers = range(bottom + 1, graph.depth + 1) if every_layer else [graph.depth]
        asked = check_integers(layers, "layers")
        if not asked:
            raise OptionError("at least one layer must be asked for; got none")
        for layer in asked:
            if not 1 <= layer <= graph.depth:
                raise OptionError(f"layers must be from 1 to {graph.depth}; got {layer}")
        if bottom >= min(asked):
            raise OptionError(
                f"bottom must be below every layer asked for; got bottom={bottom}, layers={asked}"
                f" (this graph has layers 0..{graph.depth})"
            )
        wanted = graph.kept if positions is None else check_positions(positions, graph.size)
        refuse_removed(wanted, graph.size, graph.removed)
        if not wanted:
            raise OptionError("at least one position must be asked for; got none")
        if not isinstance(normalize, str | None) or normalize not in NORMALIZATIONS:
            raise OptionError(
                f"unknown normalize {normalize!r}; choose from 'sum', 'receptive_field' or None"
            )
        if normalize == "receptive_field" and graph.layer_names is not None:
            raise OptionError(
                "normalize='receptive_field' is not defined for encoder-decoder graphs;"
                " choose 'sum' or None"
            )
        known: dict[str, Any] = {"tokens": graph.tokens, "words": graph.words}
        together = (
            None
            if groups is None
            else read_groups(groups, graph.size, removed=graph.removed, **known)
        )
        return cls(graph, method, tuple(asked), tuple(wanted), bottom, normalize, together)

    def sum_groups(self, values: Floats) -> Floats:
        """values [..., key] summed over the groups, or as they are."""
        return values if self.groups is None else sum_groups(values, self.groups)

    def answer(
        self,
        compute: Callable[[AttentionGraph], Floats],
        find_limits: Callable[[Floats], Codes] | None = None,
        *,
        one_layer: bool = False,
    ) -> TokenAttention:
        """Compute values [layer, query, key], normalise them, and make a named result of them.

        Parameters
        ----------
        compute
            Gives the values for a graph: for `graph` itself, and with
            normalize="receptive_field" also for its uniform counterpart.
        find_limits
            Gives what limits the values, before they are normalised, as indices into `LIMITS`.
        one_layer
            Whether keys are positions of the layer below each layer, not of `bottom`.
        """
        values = compute(self.graph)
        limits = None if find_limits is None else find_limits(values)
        if self.normalize == "receptive_field":
            field = compute(self.graph.uniform())
            # nothing is reached outside of the field
            np.divide(values, field, out=values, where=field > 0)
        if self.normalize is not None:
            sums = values.sum(axis=-1, keepdims=True)
            np.divide(values, sums, out=values, where=sums > 0)
        tokens = name_positions(self.graph)
        return TokenAttention(
            values=values,
            method=self.method,
            layers=self.layers,
            positions=self.positions,
            bottom=None if one_layer else self.bottom,
            tokens=tokens if self.groups is None else tuple(group.name for group in self.groups),
            queries=tuple(tokens[position] for position in self.positions),
            causal=self.graph.causal,
            normalize=self.normalize,
            words=self.graph.words if self.groups is None else None,
            groups=self.groups,
            limits=limits,
            window=self.graph.window,
            removed=self.graph.removed,
            size=self.graph.size,
            edges=self.graph.edge_name,
            source=self.graph.source.by_method(self.method),
        )


def are_even(spread: Floats, keys: Any) -> npt.NDArray[np.bool_]:
    """Which rows hardly tell keys apart, by their spread and how many keys they see."""
    return (spread < EVEN) & (np.asarray(keys) >= WORTH_A_WARNING[1])


def warn_if_even(result: TokenAttention) -> None:
    """Warn once per call if some row of a flow hardly tells keys, or sources, apart."""
    deep, long = WORTH_A_WARNING
    layers = np.array(result.layers)
    worth = (layers - (result.bottom or 0) >= deep)[:, None]  # [layer, 1]
    kept = len(result.tokens) - (0 if result.groups else len(set(result.removed)))
    if result.saturated is None or kept < long or not worth.any():
        return
    at_bound = worth & (result.saturated.sum(axis=-1) / kept > MOSTLY)  # [layer, query]
    # the largest share of an even row, of at least `long` keys, is at most so far above 1 / long:
    # for most short texts this settles it
    peaks, sums = result.values.max(axis=-1), result.values.sum(axis=-1)
    even = worth & (peaks <= (1 / long + EVEN) * sums)
    if even.any():
        even &= are_even(result.spread, result.visible_keys)
    problems = []
    if at_bound.any():
        those = list_numbers(layers[at_bound.any(axis=1)].tolist())
        problems.append(
            f"attention flow from layer {those} is saturated: over {MOSTLY:.0%} of a row equals"
            " the row sum of its source or the column sum of its target, so it says nothing about"
            " the layers between them"
        )
    if even.any():
        those = list_numbers(layers[even.any(axis=1)].tolist())
        least = result.spread[even].min()
        problems.append(
            f"attention flow from layer {those} is even: the spread of a row is {least:.2g}"
            " (0: all keys alike, 1: all on one key), so it hardly tells inputs apart"
        )
    if problems:
        text = f"{'; '.join(problems)}; look at a lower layer or at rollout"
        give_notice(text, SaturationWarning, stacklevel=3)


def read_graph(attention: Weights) -> AttentionGraph:
    """The graph itself, or the default graph of attention weights."""
    if isinstance(attention, AttentionGraph):
        return attention
    return (attention if isinstance(attention, Attention) else Attention(attention)).graph()


def read_node(
    graph: AttentionGraph, node: Any, what: str, *, several: bool = False
) -> tuple[int, tuple[int, ...]]:
    """The layer of a node (layer, position) of the graph, and its position, or positions."""
    if not isinstance(node, Sequence | np.ndarray) or len(node) != 2 or isinstance(node, str):
        raise OptionError(f"{what} must be a pair (layer, position); got {node!r}")
    layer_given, position = node
    if is_several(position) and not several:
        raise OptionError(f"the position of {what} must be one; got {position!r}")
    (layer,) = check_integers([layer_given], what)
    if not 0 <= layer <= graph.depth:
        raise OptionError(f"the layer of {what} must be from 0 to {graph.depth}; got {layer}")
    if is_several(position):
        return layer, check_group(position, graph.size, graph.removed, f"the positions of {what}")
    place = check_position(position, graph.size, f"the position of {what}")
    refuse_removed([place], graph.size, graph.removed)
    return layer, (place,)


def name_positions(graph: AttentionGraph) -> tuple[str, ...]:
    """The tokens, or the positions' numbers where tokens have no names."""
    return tuple(map(str, range(graph.size))) if graph.tokens is None else graph.tokens
