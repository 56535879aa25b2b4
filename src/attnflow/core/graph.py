"""`AttentionGraph`: attention weights of one sequence, fused over heads, as a layered graph.

Numbering, here and everywhere: layers are numbered like Hugging Face's `hidden_states`: 0 is the input, l is the output of layer l,
for l = 1..depth. Nodes are (l, position); edges lead from (l, query) down to (l-1, key). Heads and positions count from 0.
The weight of an edge is `(1 - residual) * weights[l-1, query, key] + residual * (query == key)`, so the edges out of a node sum to 1.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from numbers import Real
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from attnflow.core.layers import Array as Array
from attnflow.core.layers import Floats as Floats
from attnflow.core.layers import Layers
from attnflow.core.provenance import Source
from attnflow.errors import OptionError, WeightsError

Number = TypeVar("Number", bound=np.generic)

RESIDUAL = 0.5
ROW_TOLERANCE = {8: 1e-6, 4: 1e-4, 2: 1e-2}  # how far from 1 a row may sum, by bytes a number
ROUNDING = {
    8: 1e-14,
    4: 1e-6,
    2: 0.0,
}  # ... and still be left as it is, so that what was saved loads bit for bit
LARGE = 2**31  # beyond this no layer, head or position is numbered
LEAK = 1e-6  # how much weight may stand where a mask says there is none
SLAB = 2**16  # numbers worked on together: some rows of a long input, all layers of a short one


@dataclass(frozen=True, eq=False, init=False, repr=False)
class AttentionGraph:
    """What rollout and flow run on: a layered graph. Usually made by `Attention.graph()`.

    Either from fused attention weights, into which the residual is mixed, or from edges of any kind,
    which hold it already.

    Parameters
    ----------
    weights
        [layer, query, key], rows sum to 1.
    edges
        [layer, query, key] instead of weights: finite, not negative, rows of any sum.
    residual
        The weight of the residual connection, from 0 up to but not including 1; 0.5 if None. Not
        with edges, which have it inside.
    tokens
        One name per position.
    causal
        No query sees a later key; inferred if None.
    window
        A query sees only keys less than so many positions away: one number for all layers, or one
        (or None) per layer.
    words
        The word that each token belongs to, by number.
    removed
        Positions that are taken out.
    layer_names
        What each layer is, where they are not simply a model's layers.
    edge_name
        What an edge weighs; "attention" for weights, "given" for edges if None.
    source
        Where the weights came from; a `Source` that names no model if None.
    copy
        False: the array given, if it is a numpy array of float32 or float64, becomes the graph's
        own and is renormalised in place.

    Weights of float32 stay float32, in which rows sum to 1 only nearly; edges are float64, in
    which they do. All arrays are read-only.

    >>> graph = AttentionGraph([[[0.5, 0.5], [1.0, 0.0]]])
    >>> graph.edges[0].tolist()
    [[0.75, 0.25], [0.5, 0.5]]
    >>> AttentionGraph(edges=[[[2.0, 1.0], [0.0, 3.0]]])
    <AttentionGraph: 1 layer, 2 positions, residual inside>
    """

    # [layer, query, key] in float32 where that came in; the edges where the residual is inside
    weights: Array
    residual: float | None  # None: inside the edges
    tokens: tuple[str, ...] | None
    causal: bool
    window: tuple[int | None, ...]
    words: tuple[int | None, ...] | None
    removed: tuple[int, ...]
    layer_names: tuple[str, ...] | None
    edge_name: str
    source: Source

    def __init__(
        self,
        weights: Any = None,
        *,
        edges: Any = None,
        residual: float | None = None,
        tokens: Iterable[str] | None = None,
        causal: bool | None = None,
        window: int | Sequence[int | None] | None = None,
        words: Iterable[int | None] | None = None,
        removed: Iterable[int] = (),
        layer_names: Iterable[str] | None = None,
        edge_name: str | None = None,
        source: Source | None = None,
        copy: bool = True,
    ) -> None:
        inside = edges is not None
        if inside and weights is not None:
            raise OptionError("a graph is made of weights or of edges; got both: give one")
        if not inside:
            residual = check_residual(RESIDUAL if residual is None else residual)
        elif residual is not None:
            raise OptionError(
                f"edges have the residual inside, so residual is not mixed in; got {residual!r}"
            )
        if not isinstance(edge_name, str | None):
            raise OptionError(f"edge_name must be a string; got {edge_name!r}")
        edge_name = edge_name or ("given" if inside else "attention")
        if check_source(source) is None or not inside:
            source = replace(source or Source(), edges=edge_name, residual=residual)
        given = edges if inside else weights
        array, precision = stack_layers(given)
        if array.ndim != 3:
            what = "edges" if inside else "weights"
            raise WeightsError(
                f"a graph's {what} must have 3 axes [layer, query, key]; got shape {array.shape}"
            )
        depth, size, _ = array.shape
        gone = positions_of(removed, size, "removed")
        copy = needs_copy(array, given, copy)
        if inside:
            checked = check_edges(array, precision, copy=copy)
            causal, windows = check_mask(checked, "edges", causal, window, leak=0.0)
            checked[:, gone, :] = checked[:, :, gone] = 0.0
        else:
            checked = check_rows(array, precision, skip=gone, copy=copy)
            causal, windows = check_mask(checked, "weights", causal, window, leak=LEAK)
            if gone:
                take_out(checked, gone)
        freeze(
            self,
            weights=read_only(checked),
            residual=residual,
            tokens=names_of(tokens, size, "tokens"),
            causal=causal,
            window=windows,
            words=words_of(words, size),
            removed=gone,
            layer_names=layer_names_of(layer_names, depth),
            edge_name=edge_name,
            source=source,
        )

    @property
    def depth(self) -> int:
        """The number of layers; the top one has this number."""
        return int(self.weights.shape[0])

    @property
    def size(self) -> int:
        """The number of positions."""
        return int(self.weights.shape[1])

    @property
    def kept(self) -> tuple[int, ...]:
        """The positions that were not taken out."""
        return tuple(position for position in range(self.size) if position not in self.removed)

    @cached_property
    def edge_layers(self) -> Layers:
        """The edges as they are held, for methods that take one layer after another."""
        if self.residual is None:
            return Layers.of_edges(self.weights)
        diagonal = np.full(self.weights.shape[:2], self.residual)
        diagonal[:, list(self.removed)] = 0.0
        return Layers(self.weights, (1 - self.residual) * self._factors, diagonal)

    @cached_property
    def _factors(self) -> Floats:
        """[layer, query]: what rows are multiplied by to sum to 1, which those of float64 do already."""
        if self.residual is None or self.weights.dtype == np.float64:
            return np.ones(self.weights.shape[:2])
        sums: Floats = self.weights.sum(axis=-1, dtype=np.float64)
        return np.divide(1.0, sums, out=np.ones_like(sums), where=sums > 0)

    @cached_property
    def largest_row_sum(self) -> float:
        """The scale of the edges: the most that leaves any node, 1 if the residual is mixed in."""
        return 1.0 if self.residual is not None else self.edge_layers.largest_row_sum()

    @cached_property
    def edges(self) -> Floats:
        """[layer, query, key] in float64: edges[l-1] leads from layer l to layer l-1.

        Rows of weights with their residual sum to 1, those of removed positions to 0. This is the
        whole array, and it is kept; `layer_edges` makes one layer.
        """
        return read_only(np.stack(list(self.edge_layers)))

    def layer_edges(self, number: int) -> Floats:
        """[query, key]: the edges from layer `number` to the one below, in float64, a new array.

        >>> AttentionGraph([[[0.5, 0.5], [1.0, 0.0]]]).layer_edges(1).tolist()
        [[0.75, 0.25], [0.5, 0.5]]
        """
        if not 1 <= number <= self.depth:
            raise OptionError(f"a layer's number must be from 1 to {self.depth}; got {number!r}")
        return self.edge_layers[number - 1]

    def weight_rows(self, layers: Sequence[int], positions: Sequence[int]) -> Floats:
        """[layer, query, key]: rows of the weights in float64, in which they sum to 1."""
        picked = np.ix_([layer - 1 for layer in layers], positions)
        rows: Floats = self._factors[picked][..., None] * self.weights[picked]
        return rows

    def uniform(self) -> "AttentionGraph":
        """The same graph for attention without preference, even over the keys that a query sees."""
        if self.residual is None:
            raise OptionError(
                "normalize='receptive_field' compares with even attention, and edges with the"
                " residual inside are no attention; choose 'sum' or None"
            )
        # rows of equal numbers are even in any precision, and sum to 1 once they are in float64
        even: dict[int | None, Array] = {}
        for window in self.window:
            if window not in even:
                even[window] = visible(self.size, self.causal, window).astype(np.float32)
                take_out(even[window][None], self.removed)
        layers = [even[window] for window in self.window]
        same = np.broadcast_to(layers[0], (self.depth, self.size, self.size))
        kept = {each.name: getattr(self, each.name) for each in fields(self)}
        return make_graph(**kept | {"weights": same if len(even) == 1 else np.stack(layers)})

    def __repr__(self) -> str:
        layers = f"{self.depth} layer{'s' * (self.depth > 1)}"
        kind = "causal " if self.causal else ""
        residual = "inside" if self.residual is None else f"{self.residual:g}"
        return f"<AttentionGraph: {layers}, {self.size} {kind}positions, residual {residual}>"


def make_graph(*, weights: Array, **options: Any) -> AttentionGraph:
    """A graph of weights [layer, query, key] that have been checked; they are not copied."""
    graph = object.__new__(AttentionGraph)
    freeze(graph, weights=read_only(weights), **options)
    return graph


def read_only(array: npt.NDArray[Number]) -> npt.NDArray[Number]:
    """The same array, which nobody can write to by this name."""
    view = array.view()
    view.setflags(write=False)
    return view


def freeze(instance: object, **fields: Any) -> None:
    """Set the fields of a frozen dataclass, in its own __init__."""
    for name, value in fields.items():
        object.__setattr__(instance, name, value)


# ---- checks of all that enters ------------------------------------------------------------------------------------------------


NO_WEIGHTS = "the model returned no attention weights; load it with attn_implementation='eager', or use af.capture"


def stack_layers(weights: Any) -> tuple[Array, int]:
    """One array [layer, head, query, key] or [layer, query, key], and its bytes a number, from whatever came."""
    if weights is None or (isinstance(weights, list | tuple) and not weights):
        raise WeightsError(f"weights are empty: {NO_WEIGHTS}")
    if isinstance(weights, list | tuple) and any(
        hasattr(layer, "shape") or layer is None for layer in weights
    ):
        layers, precision = [], 8
        for number, layer in enumerate(weights, start=1):
            if layer is None:
                raise WeightsError(f"layer {number} is None: {NO_WEIGHTS}")
            array, bytes_a_number = to_array(layer, f"layer {number}")
            layers.append(one_sequence(array) if array.ndim == 4 else array)
            precision = min(precision, bytes_a_number)
        shapes = {layer.shape for layer in layers}
        if len(shapes) > 1:
            raise WeightsError(
                f"all layers must have the same shape; got {', '.join(str(shape) for shape in sorted(shapes))}"
            )
        return np.stack(layers), precision
    array, precision = to_array(weights, "weights")
    if array.ndim == 5:
        array = np.stack([one_sequence(layer) for layer in array])
    return array, precision


def one_sequence(layer: Array) -> Array:
    """[head, query, key] from a layer's [batch=1, head, query, key]."""
    if layer.shape[0] != 1:
        raise WeightsError(
            f"each layer must be of one sequence, [batch=1, head, query, key]; got shape {layer.shape}: pick one"
        )
    return layer[0]  # type: ignore[no-any-return]


def to_array(value: Any, name: str) -> tuple[Array, int]:
    """A numpy array of float32 or float64 from any library's array, and the bytes a number had when it came."""
    if isinstance(value, np.ma.MaskedArray):
        raise WeightsError(
            f"{name} must not be a masked array, whose mask would be lost; fill it first: array.filled(0)"
        )
    try:
        if hasattr(
            value, "detach"
        ):  # torch: on any device, with or without gradient, and numpy knows no bfloat16
            value = value.detach().cpu()
            if value.dtype.is_floating_point and value.element_size() <= 2:
                return value.float().numpy(), 2
            value = value.numpy()
        elif (
            not isinstance(value, np.ndarray | list | tuple)
            and not hasattr(value, "__array__")
            and hasattr(value, "__dlpack__")
        ):
            value = np.from_dlpack(value)
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise WeightsError(
            f"{name} must be one array of numbers, its parts of one shape; got {type(value).__name__}: {error}"
        ) from error
    if array.dtype.name == "bfloat16":
        return array.astype(np.float32), 2
    if array.dtype.kind in "iub":
        return array.astype(np.float64), 8
    if array.dtype.kind != "f":
        raise WeightsError(f"{name} must be an array of real numbers; got type {array.dtype.name}")
    precision = min(array.dtype.itemsize, 8)
    return array.astype(np.float64 if precision == 8 else np.float32, copy=False), precision


def needs_copy(array: Array, given: Any, copy: bool) -> bool:
    """Whether an array made of what was given must be copied before it is written to.

    Not what was stacked just now, nor what its owner gave away by copy=False.
    """
    stacked = isinstance(given, list | tuple)
    given_away = not copy and array is given and array.flags.writeable
    return not (stacked or given_away) or not array.flags.c_contiguous


def check_rows(
    weights: Array, precision: int, *, skip: Sequence[int] = (), copy: bool = True
) -> Array:
    """weights [layer, ..., query, key] with rows that sum to 1, renormalised in float64 slab by slab, or an error with the place.

    precision: the bytes a number had. Rows of the positions in `skip` are not looked at. copy=False: the array itself is renormalised.
    """
    check_square(weights, "weights")
    checked = make_room(weights.shape, precision) if copy else weights
    for layers, queries in slabs(weights):
        part = weights[layers, ..., queries, :].astype(np.float64, order="C")
        check_numbers(part, "weights", layers, queries)
        with np.errstate(over="ignore"):
            sums = part.sum(axis=-1, keepdims=True)
        distance = np.abs(sums - 1)
        off = distance[..., 0] > ROW_TOLERANCE[precision]
        if skip:
            off[..., np.isin(np.arange(weights.shape[-1])[queries], skip)] = False
        if off.any():
            place = first_true(off)
            raise WeightsError(
                f"rows of the weights must sum to 1 within {ROW_TOLERANCE[precision]:g}; {name_place(part, place, layers, queries)} sums to"
                f" {sums[place][0]:.6g} (are these weights after softmax, of a model in eval mode, [layer, head, query, key]?)"
            )
        checked[layers, ..., queries, :] = np.divide(
            part, sums, out=part, where=(sums > 0) & (distance > ROUNDING[precision])
        )
    return checked


def check_edges(edges: Array, precision: int, *, copy: bool = True) -> Array:
    """edges [layer, query, key]: finite and not negative, rows of any sum; or an error."""
    check_square(edges, "edges")
    checked = make_room(edges.shape, precision) if copy else edges
    for layers, queries in slabs(edges):
        part = edges[layers, queries].astype(np.float64)
        check_numbers(part, "edges", layers, queries)
        with np.errstate(over="ignore"):
            sums = part.sum(axis=-1)
        if not np.isfinite(sums).all():
            place = name_place(part, first_true(~np.isfinite(sums)), layers, queries)
            raise WeightsError(f"edges must have finite row sums; got {place}: scale them")
        checked[layers, queries] = part
    return checked


def check_square(weights: Array, what: str) -> None:
    """Refuse layers [..., query, key] of different numbers of queries and keys, or without any."""
    if weights.shape[-1] != weights.shape[-2]:
        raise WeightsError(
            f"each layer of the {what} must be square, [query, key]; got shape {weights.shape}"
        )
    if weights.size == 0:
        raise WeightsError(
            f"{what} are empty; got shape {weights.shape}: at least one layer, head and token are needed"
        )


def check_numbers(part: Floats, what: str, layers: slice, queries: slice) -> None:
    """Refuse what is not finite, or negative, in a slab."""
    bad = ~np.isfinite(part) | (part < 0)
    if bad.any():
        place = first_true(bad)
        raise WeightsError(
            f"{what} must be finite and not negative; got {part[place]} at"
            f" {name_place(part, place, layers, queries)}"
        )


def make_room(shape: tuple[int, ...], precision: int) -> Array:
    """An uninitialised array, or an error that says what it would need."""
    try:
        return np.empty(shape, np.float64 if precision == 8 else np.float32)
    except (MemoryError, ValueError) as error:
        size = math.prod(shape) * min(precision, 8)
        raise WeightsError(
            f"weights of shape {shape} need {size / 1e9:,.0f} GB, more than this machine gives;"
            " give fewer layers, fused heads, or a shorter input"
        ) from error


def slabs(weights: Array) -> Iterator[tuple[slice, slice]]:
    """Some layers and some queries of weights [layer, ..., query, key] after others.

    As many together as SLAB allows: of a long input at least one row, of a short one many layers.
    """
    depth, size = len(weights), weights.shape[-2]
    rows = max(1, SLAB // max(1, weights[0].size // size))
    step = max(1, SLAB // max(1, weights[0].size))
    for first in range(0, depth, step):
        for start in range(0, size, rows):
            yield slice(first, first + step), slice(start, start + rows)


def first_true(flags: Array) -> tuple[int, ...]:
    return tuple(int(index) for index in np.argwhere(flags)[0])


def name_place(part: Array, place: tuple[int, ...], layers: slice, queries: slice) -> str:
    """Name a place of a slab [layer, query, key] or [layer, head, query, key]; the key may be left out."""
    axes = ["layer", "head", "query", "key"] if part.ndim == 4 else ["layer", "query", "key"]
    first = {"layer": layers.start + 1, "query": queries.start}
    return ", ".join(
        f"{axis} {first.get(axis, 0) + index}" for axis, index in zip(axes, place, strict=False)
    )


def check_residual(residual: Any) -> float:
    if isinstance(residual, bool) or not isinstance(residual, Real) or not 0 <= float(residual) < 1:
        raise OptionError(
            f"residual must be a number from 0 up to, but not including, 1; got {residual!r} (0.5 is the paper's)"
        )
    return float(residual)


def check_source(source: Any) -> Source | None:
    if not isinstance(source, Source | None):
        raise OptionError(
            f"source must be a Source, which says where weights came from, or None; got {source!r}"
        )
    return source


def names_of(names: Iterable[str] | None, size: int, what: str) -> tuple[str, ...] | None:
    if names is None:
        return None
    if isinstance(names, str):
        raise WeightsError(
            f"{what} must be a list of {size} names, one a position; got one string {names!r}: split it first"
        )
    found = tuple(iterated(names, what))
    for name in found:
        if not isinstance(name, str):
            raise WeightsError(f"{what} must be strings; got {name!r}")
    if len(found) != size:
        raise WeightsError(f"{what} must name each of {size} positions; got {len(found)} names")
    return found


def layer_names_of(names: Iterable[str] | None, depth: int) -> tuple[str, ...] | None:
    found = None if names is None else tuple(str(name) for name in iterated(names, "layer_names"))
    if found is not None and len(found) != depth:
        raise WeightsError(f"layer_names must name each of {depth} layers; got {len(found)} names")
    return found


def words_of(words: Iterable[int | None] | None, size: int) -> tuple[int | None, ...] | None:
    if words is None:
        return None
    given = list(iterated(words, "words"))
    integers([word for word in given if word is not None], "words")
    found = tuple(None if word is None or word < 0 else int(word) for word in given)
    if len(found) != size:
        raise WeightsError(
            f"words must give a word number (or None) to each of {size} positions; got {len(found)}"
        )
    return found


def positions_of(positions: Iterable[int], size: int, what: str = "positions") -> tuple[int, ...]:
    """The positions as numbers from 0 to size - 1, or an error."""
    found = tuple(integers(positions, what))
    for position in found:
        if not 0 <= position < size:
            raise OptionError(f"{what} must be from 0 to {size - 1}; got {position}")
    return found


def integers(values: Iterable[Any], what: str) -> list[int]:
    """Whole numbers, or an error that tells which value is none."""
    found = list(iterated(values, what)) if isinstance(values, Iterable) else [values]
    for value in found:
        if (
            isinstance(value, bool)
            or not isinstance(value, int | np.integer)
            or not -LARGE < value < LARGE
        ):
            raise OptionError(f"{what} must be whole numbers; got {value!r}")
    return [int(value) for value in found]


def check_whole(name: str, value: Any, most: int | None = None) -> None:
    """Refuse what is no whole number, at least 1."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or value < 1
        or (most is not None and value > most)
    ):
        raise OptionError(
            f"{name} must be a whole number, at least 1{'' if most is None else f' and at most {most}'}; got {value!r}"
        )


def iterated(values: Any, what: str) -> Iterable[Any]:
    """The values, if they are several."""
    if isinstance(values, np.ndarray) and values.ndim == 0:
        return [values[()]]
    if not isinstance(values, Iterable):
        raise OptionError(f"{what} must be a list; got {values!r}")
    return values


# ---- masks --------------------------------------------------------------------------------------------------------------------


def windows_of(window: int | Sequence[int | None] | None, depth: int) -> tuple[int | None, ...]:
    """One window (or None) a layer."""
    windows: tuple[Any, ...] = tuple(window) if isinstance(window, Sequence) else (window,) * depth
    if len(windows) != depth:
        raise OptionError(
            f"window must be one number, or one a layer; got {len(windows)} for {depth} layers"
        )
    for each in windows:
        if each is not None and (
            isinstance(each, bool)
            or not isinstance(each, int | np.integer)
            or not 1 <= each < LARGE
        ):
            raise OptionError(
                f"a window must be a whole number of positions, at least 1, or None; got {each!r}"
            )
    return tuple(None if each is None else int(each) for each in windows)


def visible(
    size: int, causal: bool, window: int | None, queries: slice = slice(None)
) -> npt.NDArray[np.bool_]:
    """[query, key]: which keys the queries of one layer may see."""
    keys = np.arange(size)
    own = keys[queries, None]
    sees = np.broadcast_to(keys <= own if causal else True, (len(own), size))
    if window is not None:
        sees = sees & (keys > own - window) & (keys < own + window)
    return sees


def check_mask(
    weights: Array,
    what: str,
    causal: bool | None,
    window: int | Sequence[int | None] | None,
    *,
    leak: float,
) -> tuple[bool, tuple[int | None, ...]]:
    """Whether weights [layer, ..., query, key] are causal, and each layer's window, or an error.

    At most `leak` may stand where the mask hides a key; it is cleared in place.
    """
    inferred = causal is None
    causal, windows = read_mask(weights, causal, window)
    if any(each is not None for each in windows) or (causal and not inferred):
        apply_mask(weights, what, causal, windows, leak)
    return causal, windows


def read_mask(
    weights: Array, causal: bool | None, window: int | Sequence[int | None] | None
) -> tuple[bool, tuple[int | None, ...]]:
    """Whether weights [layer, ..., query, key] are causal, inferred if None; each layer's window."""
    windows = windows_of(window, len(weights))
    if causal is not None and not isinstance(causal, bool | np.bool_):
        raise OptionError(f"causal must be True, False, or None to find out; got {causal!r}")
    return is_causal(weights) if causal is None else bool(causal), windows


def is_causal(weights: Array) -> bool:
    """Whether no query of weights [..., query, key] sees a later key; one token alone is not called causal."""
    size = weights.shape[-1]
    return size > 1 and not any(weights[..., query, query + 1 :].any() for query in range(size))


def apply_mask(
    weights: Array, what: str, causal: bool, windows: Sequence[int | None], leak: float
) -> None:
    """Clear in place what rounding left of weights [layer, ..., query, key] outside of the mask."""
    for _, queries in slabs(weights[:1]):
        hidden_by = {
            window: ~visible(weights.shape[-1], causal, window, queries) for window in set(windows)
        }
        for number, window in enumerate(windows):
            rows, hidden = weights[number, ..., queries, :], hidden_by[window]
            outside = np.where(hidden, rows, rows.dtype.type(0))
            if outside.max() > leak:
                place = first_true(outside > leak)
                layers = slice(number, number + 1)
                raise WeightsError(
                    f"{what} must be 0 where the mask hides a key (causal={causal}, window={window});"
                    f" got {outside[place]:.3g} at {name_place(rows[None], (0, *place), layers, queries)}"
                )
            if outside.any():
                kept = np.where(hidden, 0.0, rows.astype(np.float64))
                sums = kept.sum(axis=-1, keepdims=True)
                rows[...] = np.divide(kept, sums, out=kept, where=sums > 0)


def take_out(weights: Array, positions: Sequence[int]) -> None:
    """Clear some positions of weights [layer, query, key] in place, rows summing to 1 again; a row with nothing left looks at itself."""
    gone = list(positions)
    own = np.arange(weights.shape[-1])
    for layers, queries in slabs(weights):
        part = weights[layers, queries].astype(np.float64)
        part[..., gone] = 0.0
        sums = part.sum(axis=-1, keepdims=True)
        left = sums > 0
        np.divide(part, sums, out=part, where=left)
        if not left.all():
            part += np.where(left, 0.0, own[queries, None] == own)
        part[:, np.isin(own[queries], gone)] = 0.0
        weights[layers, queries] = part



def check_position(position, size):
    (number,) = integers([position], "position")
    if not -size <= number < size:
        raise OptionError(f"position must be from {-size} to {size - 1}; got {number}")
    return number % size
