"""`AttentionGraph`: attention weights of one sequence, fused over heads, as a layered graph.

Numbering, here and everywhere: layers are numbered like Hugging Face's `hidden_states`: 0 is the input, l is the output of layer l,
for l = 1..depth. Nodes are (l, position); edges lead from (l, query) down to (l-1, key). Heads and positions count from 0.
The weight of an edge is `(1 - residual) * weights[l-1, query, key] + residual * (query == key)`, so the edges out of a node sum to 1.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt

from attnflow.errors import OptionError, WeightsError

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]

RESIDUAL = 0.5
ROW_TOLERANCE = {8: 1e-6, 4: 1e-4, 2: 1e-2}  # how far from 1 a row may sum, by bytes a number
ROUNDING = {
    8: 1e-14,
    4: 1e-6,
    2: 0.0,
}  # ... and still be left as it is, so that what was saved loads bit for bit
LARGE = 2**31  # beyond this no layer, head or position is numbered
LEAK = 1e-6  # how much weight may stand where a mask says there is none
SLAB = (
    2**16
)  # numbers of the layers that are worked on together: few layers of a long input, all of a short one


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

    >>> graph = AttentionGraph([[[0.5, 0.5], [1.0, 0.0]]])
    >>> graph.edges[0].tolist()
    [[0.75, 0.25], [0.5, 0.5]]
    >>> AttentionGraph(edges=[[[2.0, 1.0], [0.0, 3.0]]])
    <AttentionGraph: 1 layer, 2 positions, residual inside>
    """

    weights: Floats  # [layer, query, key]; the edges themselves where the residual is inside
    residual: float | None  # None: inside the edges
    tokens: tuple[str, ...] | None
    causal: bool
    window: tuple[int | None, ...]
    words: tuple[int | None, ...] | None
    removed: tuple[int, ...]
    layer_names: tuple[str, ...] | None

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
    ) -> None:
        inside = edges is not None
        if inside and weights is not None:
            raise OptionError("a graph is made of weights or of edges; got both: give one")
        if inside and residual is not None:
            raise OptionError(
                f"edges have the residual inside, so residual is not mixed in; got {residual!r}"
            )
        array, precision = stack_layers(edges if inside else weights)
        if array.ndim != 3:
            what = "edges" if inside else "weights"
            raise WeightsError(
                f"a graph's {what} must have 3 axes [layer, query, key]; got shape {array.shape}"
            )
        depth, size, _ = array.shape
        gone = positions_of(removed, size, "removed")
        if inside:
            checked = check_edges(array)
            is_masked, windows = check_mask(checked, causal, window)
            checked[:, gone, :] = checked[:, :, gone] = 0.0
        else:
            checked = check_rows(array, precision, skip=gone).astype(np.float64, copy=False)
            checked, is_masked, windows = masked(checked, causal, window)
            checked = take_out(checked, gone) if gone or precision < 8 else checked
        freeze(
            self,
            weights=checked,
            residual=None if inside else check_residual(RESIDUAL if residual is None else residual),
            tokens=names_of(tokens, size, "tokens"),
            causal=is_masked,
            window=windows,
            words=words_of(words, size),
            removed=gone,
            layer_names=layer_names_of(layer_names, depth),
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
    def edges(self) -> Floats:
        """[layer, query, key]: edges[l-1] leads from layer l to layer l-1.

        Rows of weights with their residual sum to 1, those of removed positions to 0.
        """
        if self.residual is None:
            return self.weights
        edges = (1 - self.residual) * self.weights
        diagonal = np.arange(self.size)
        edges[:, diagonal, diagonal] += self.residual
        edges[:, self.removed, self.removed] = 0.0
        return edges

    def uniform(self) -> "AttentionGraph":
        """The same graph for attention without preference, even over the keys that a query sees."""
        if self.residual is None:
            raise OptionError(
                "normalize='receptive_field' compares with even attention, and edges with the"
                " residual inside are no attention; choose 'sum' or None"
            )
        sees = np.stack([visible(self.size, self.causal, window) for window in self.window])
        return AttentionGraph(
            sees / sees.sum(axis=-1, keepdims=True),
            residual=self.residual,
            tokens=self.tokens,
            causal=self.causal,
            window=self.window,
            words=self.words,
            removed=self.removed,
            layer_names=self.layer_names,
        )

    def __repr__(self) -> str:
        layers = f"{self.depth} layer{'s' * (self.depth > 1)}"
        kind = "causal " if self.causal else ""
        residual = "inside" if self.residual is None else f"{self.residual:g}"
        return f"<AttentionGraph: {layers}, {self.size} {kind}positions, residual {residual}>"


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


def check_rows(
    weights: Array, precision: int, *, skip: Sequence[int] = (), copy: bool = True
) -> Array:
    """weights [layer, ..., query, key] with rows that sum to 1, renormalised in float64 slab by slab, or an error with the place.

    precision: the bytes a number had. Rows of the positions in `skip` are not looked at. copy=False: the array itself is renormalised.
    """
    if weights.shape[-1] != weights.shape[-2]:
        raise WeightsError(
            f"each layer of the weights must be square, [query, key]; got shape {weights.shape}"
        )
    if weights.size == 0:
        raise WeightsError(
            f"weights are empty; got shape {weights.shape}: at least one layer, head and token are needed"
        )
    checked = make_room(weights.shape, precision) if copy else weights
    for layers in slabs(weights):
        part = weights[layers].astype(np.float64, order="C")
        bad = ~np.isfinite(part) | (part < 0)
        if bad.any():
            place = first_true(bad)
            raise WeightsError(
                f"weights must be finite and not negative; got {part[place]} at {where(weights, layers.start, place)}"
            )
        with np.errstate(over="ignore"):
            sums = part.sum(axis=-1, keepdims=True)
        distance = np.abs(sums - 1)
        off = distance[..., 0] > ROW_TOLERANCE[precision]
        if skip:
            off[..., list(skip)] = False
        if off.any():
            place = first_true(off)
            raise WeightsError(
                f"rows of the weights must sum to 1 within {ROW_TOLERANCE[precision]:g}; {where(weights, layers.start, place)} sums to"
                f" {sums[place][0]:.6g} (are these weights after softmax, of a model in eval mode, [layer, head, query, key]?)"
            )
        checked[layers] = np.divide(
            part, sums, out=part, where=(sums > 0) & (distance > ROUNDING[precision])
        )
    return checked


def check_edges(edges: Array) -> Floats:
    """edges [layer, query, key] as float64, a copy: finite and not negative, rows of any sum."""
    if edges.shape[-1] != edges.shape[-2]:
        raise WeightsError(
            f"each layer of the edges must be square, [query, key]; got shape {edges.shape}"
        )
    if edges.size == 0:
        raise WeightsError(f"edges are empty; got shape {edges.shape}")
    checked = make_room(edges.shape, 8)
    checked[...] = edges
    bad = ~np.isfinite(checked) | (checked < 0)
    if bad.any():
        place = first_true(bad)
        raise WeightsError(
            f"edges must be finite and not negative; got {checked[place]} at"
            f" {where(edges, 0, place)}"
        )
    with np.errstate(over="ignore"):
        sums = checked.sum(axis=-1)
    if not np.isfinite(sums).all():
        place = first_true(~np.isfinite(sums))
        raise WeightsError(
            f"edges must have finite row sums; got {where(edges, 0, place)}: scale them"
        )
    return checked


def check_mask(
    edges: Floats, causal: bool | None, window: int | Sequence[int | None] | None
) -> tuple[bool, tuple[int | None, ...]]:
    """Whether edges [layer, query, key] are causal, and each layer's window; or an error."""
    causal, windows = read_mask(edges, causal, window)
    for number, each in enumerate(windows):
        outside = np.where(visible(edges.shape[-1], causal, each), 0.0, edges[number])
        if outside.any():
            place = first_true(outside > 0)
            raise WeightsError(
                f"edges must be 0 where the mask hides a key (causal={causal}, window={each});"
                f" got {outside[place]:.3g} at {where(edges, number, (0, *place))}"
            )
    return causal, windows


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


def slabs(weights: Array) -> Iterator[slice]:
    """Some layers of weights [layer, ...] after others, as many together as SLAB allows, at least one."""
    step = max(1, SLAB // max(1, weights[0].size))
    for start in range(0, len(weights), step):
        yield slice(start, start + step)


def first_true(flags: Array) -> tuple[int, ...]:
    return tuple(int(index) for index in np.argwhere(flags)[0])


def where(weights: Array, first: int, place: tuple[int, ...]) -> str:
    """Name a place in weights [layer, query, key] or [layer, head, query, key], from layer `first` on; last axes may be left out."""
    axes = ["head", "query", "key"] if weights.ndim == 4 else ["query", "key"]
    layer, *rest = place
    return ", ".join(
        [
            f"layer {first + layer + 1}",
            *(f"{axis} {index}" for axis, index in zip(axes, rest, strict=False)),
        ]
    )


def check_residual(residual: Any) -> float:
    if isinstance(residual, bool) or not isinstance(residual, Real) or not 0 <= float(residual) < 1:
        raise OptionError(
            f"residual must be a number from 0 up to, but not including, 1; got {residual!r} (0.5 is the paper's)"
        )
    return float(residual)


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


def visible(size: int, causal: bool, window: int | None) -> npt.NDArray[np.bool_]:
    """[query, key]: which keys a query of one layer may see."""
    ahead = np.arange(size)[None, :] - np.arange(size)[:, None]  # key minus query
    sees = ahead <= 0 if causal else np.ones((size, size), bool)
    return sees if window is None else sees & (np.abs(ahead) < window)


def masked(
    weights: Array, causal: bool | None, window: int | Sequence[int | None] | None
) -> tuple[Array, bool, tuple[int | None, ...]]:
    """The weights [layer, ..., query, key] under their mask, whether they are causal, and each layer's window."""
    causal, windows = read_mask(weights, causal, window)
    return apply_mask(weights, causal, windows), causal, windows


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


def apply_mask(weights: Array, causal: bool, windows: Sequence[int | None]) -> Array:
    """Check that weights [layer, ..., query, key] respect the mask, and clear in place what rounding left outside of it."""
    if not causal and all(window is None for window in windows):
        return weights
    hidden_by = {window: ~visible(weights.shape[-1], causal, window) for window in set(windows)}
    for number, window in enumerate(windows):
        layer, hidden = weights[number], hidden_by[window]
        outside = np.where(hidden, layer, layer.dtype.type(0))
        if outside.max() > LEAK:
            place = first_true(outside > LEAK)
            raise WeightsError(
                f"weights must be 0 where the mask hides a key (causal={causal}, window={window});"
                f" got {outside[place]:.3g} at {where(weights, number, (0, *place))}"
            )
        if outside.any():
            layer[...] = np.where(hidden, layer.dtype.type(0), layer)
            sums = layer.sum(axis=-1, keepdims=True)
            np.divide(layer, sums, out=layer, where=sums > 0)
    return weights


def take_out(weights: Floats, positions: Sequence[int]) -> Floats:
    """weights [..., query, key] without some positions, rows summing to 1 again; a row with nothing left looks at itself."""
    weights = weights.copy()
    gone = list(positions)
    if gone:
        weights[..., gone] = 0.0
    sums = weights.sum(axis=-1, keepdims=True)
    left = sums > 0
    weights = np.divide(weights, sums, out=weights, where=left)
    if not left.all():
        weights += np.where(left, 0.0, np.eye(weights.shape[-1]))
    if gone:
        weights[..., gone, :] = 0.0
    return weights
