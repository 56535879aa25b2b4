"""Arrays of any library and precision, converted, checked and renormalised slab by slab."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from attnflow.errors import WeightsError

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]
Number = TypeVar("Number", bound=np.generic)

ROW_TOLERANCE = {8: 1e-6, 4: 1e-4, 2: 1e-2}  # how far from 1 a row may sum, by bytes per number
# ... and still be left as it is, so that what was saved loads bit for bit
ROW_ROUNDING = {8: 1e-14, 4: 1e-6, 2: 0.0}
SLAB = 2**16  # numbers worked on together: some rows of a long input, all layers of a short one
NO_WEIGHTS = (
    "the model returned no attention weights; load it with attn_implementation='eager',"
    " or use af.capture"
)

# the way out for whoever gives an object of attnflow's own where arrays are taken
INSTEAD = {
    "Attention": "attention.graph() makes a graph of it",
    "AttentionGraph": "it is a graph already, which every method takes",
    "Explanation": "give its .graph",
    "Generation": "give its .attention",
    "Model": "give af.capture(model, text)",
    **dict.fromkeys(
        ("TokenAttention", "Comparison", "MaxFlow", "PromptAttention", "Importance"),
        "give the Attention or AttentionGraph that it was computed from",
    ),
}


def find_instead(value: Any) -> str | None:
    """What to give instead of an object of attnflow's own; None for any other."""
    kind = type(value)
    ours = kind.__module__.partition(".")[0] == "attnflow"
    return INSTEAD.get(kind.__name__) if ours else None


def stack_layers(weights: Any) -> tuple[Array, int]:
    """One array [layer, head, query, key] or [layer, query, key], and its bytes per number."""
    layers, precision = convert_layers(weights)
    if not isinstance(layers, list):
        several = layers.ndim == 5
        return np.stack(
            [pick_sequence(layer) for layer in layers]
        ) if several else layers, precision
    layers = [pick_sequence(layer) if layer.ndim == 4 else layer for layer in layers]
    check_shapes(layers)
    # layers of different precisions are all of the lowest
    return np.stack(layers, dtype=np.float64 if precision == 8 else np.float32), precision


def convert_layers(weights: Any) -> tuple[Array | list[Array], int]:
    """One array, or a list of one per layer if given so, and the lowest bytes per number."""
    if weights is None or (isinstance(weights, list | tuple) and not weights):
        raise WeightsError(f"weights are empty: {NO_WEIGHTS}")
    instead = find_instead(weights)
    if instead is not None:
        raise WeightsError(
            f"weights must be an array, or one per layer; got {type(weights).__name__}: {instead}"
        )
    if not isinstance(weights, list | tuple) or not any(
        hasattr(layer, "shape") or layer is None for layer in weights
    ):
        return to_array(weights, "weights")
    layers, precision = [], 8
    for number, layer in enumerate(weights, start=1):
        if layer is None:
            raise WeightsError(f"layer {number} is None: {NO_WEIGHTS}")
        array, its_precision = to_array(layer, f"layer {number}")
        layers.append(array)
        precision = min(precision, its_precision)
    return layers, precision


def check_shapes(layers: Sequence[Array]) -> None:
    """Refuse layers of different shapes."""
    shapes = sorted({layer.shape for layer in layers})
    if len(shapes) > 1:
        raise WeightsError(
            f"all layers must have the same shape; got {', '.join(map(str, shapes))}"
        )


def pick_sequence(layer: Array) -> Array:
    """[head, query, key] from a layer's [batch=1, head, query, key]."""
    if layer.shape[0] != 1:
        raise WeightsError(
            "layers must be of one sequence, [batch=1, head, query, key]; got shape"
            f" {layer.shape}: pick one, or use Attention.from_batch"
        )
    return layer[0]  # type: ignore[no-any-return]


def to_array(value: Any, name: str) -> tuple[Array, int]:
    """Any library's array as a numpy array of float32 or float64, and its bytes per number."""
    if isinstance(value, np.ma.MaskedArray):
        raise WeightsError(
            f"{name} must not be a masked array, whose mask would be lost; fill it first:"
            " array.filled(0)"
        )
    try:
        # torch: on any device, with or without gradient, and numpy knows no bfloat16
        if hasattr(value, "detach"):
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
            f"{name} must be one array of numbers, its parts of one shape;"
            f" got {type(value).__name__}: {error}"
        ) from error
    if array.dtype.name == "bfloat16":
        return array.astype(np.float32), 2
    if array.dtype.kind in "iub":
        return array.astype(np.float64), 8
    if array.dtype.kind != "f":
        what = f"type {array.dtype.name}" if array.ndim else type(value).__name__
        raise WeightsError(f"{name} must be an array of real numbers; got {what}")
    precision = min(array.dtype.itemsize, 8)
    return array.astype(np.float64 if precision == 8 else np.float32, copy=False), precision


def needs_copy(array: Array, given: Any, copy: bool) -> bool:
    """Whether an array must be copied before it is written to.

    Not if it was just stacked from a list, nor if its owner gave it away by copy=False.
    """
    stacked = isinstance(given, list | tuple)
    given_away = not copy and array is given and array.flags.writeable
    return not (stacked or given_away) or not array.flags.c_contiguous


def make_room(shape: tuple[int, ...], precision: int) -> Array:
    """An uninitialised array, or an error that says what it would need."""
    try:
        return np.empty(shape, np.float64 if precision == 8 else np.float32)
    except (MemoryError, ValueError) as error:
        size = math.prod(shape) * min(precision, 8)
        raise WeightsError(
            f"weights of shape {shape} need {size / 1e9:,.0f} GB, more than this machine has;"
            " give fewer layers, fused heads, or a shorter input"
        ) from error


def read_only(array: npt.NDArray[Number]) -> npt.NDArray[Number]:
    """A read-only view of an array."""
    view = array.view()
    view.setflags(write=False)
    return view


def check_rows(
    weights: Array, precision: int, *, skip: Sequence[int] = (), copy: bool = True
) -> Array:
    """weights [layer, ..., query, key] with rows that sum to 1, or an error with the place.

    They are renormalised in float64, slab by slab. precision: the bytes per number they had. Rows
    of the positions in `skip` are not checked. copy=False: the array itself is renormalised.
    """
    check_square(weights, "weights")
    checked = make_room(weights.shape, precision) if copy else weights
    for layers, queries in cut_slabs(weights):
        part = weights[layers, ..., queries, :].astype(np.float64, order="C")
        check_numbers(part, "weights", layers, queries)
        with np.errstate(over="ignore"):
            sums = part.sum(axis=-1, keepdims=True)
        distance = np.abs(sums - 1)
        off = distance[..., 0] > ROW_TOLERANCE[precision]
        if skip:
            off[..., np.isin(np.arange(weights.shape[-1])[queries], skip)] = False
        if off.any():
            place = find_first(off)
            raise WeightsError(
                f"rows of the weights must sum to 1 within {ROW_TOLERANCE[precision]:g};"
                f" {name_place(part, place, layers, queries)} sums to {sums[place][0]:.6g} (are"
                " these weights after softmax, of a model in eval mode, [layer, head, query, key]?)"
            )
        checked[layers, ..., queries, :] = np.divide(
            part, sums, out=part, where=(sums > 0) & (distance > ROW_ROUNDING[precision])
        )
    return checked


def check_edges(edges: Array, precision: int, *, copy: bool = True) -> Array:
    """edges [layer, query, key]: finite and not negative, rows of any sum; or an error."""
    check_square(edges, "edges")
    checked = make_room(edges.shape, precision) if copy else edges
    for layers, queries in cut_slabs(edges):
        part = edges[layers, queries].astype(np.float64)
        check_numbers(part, "edges", layers, queries)
        with np.errstate(over="ignore"):
            sums = part.sum(axis=-1)
        if not np.isfinite(sums).all():
            place = name_place(part, find_first(~np.isfinite(sums)), layers, queries)
            raise WeightsError(f"edges must have finite row sums; got {place}: scale them")
        checked[layers, queries] = part
    return checked


def check_square(weights: Array, what: str) -> None:
    """Refuse layers [..., query, key] of different numbers of queries and keys, or without any."""
    if weights.shape[-1] != weights.shape[-2]:
        raise WeightsError(
            f"layers of the {what} must be square, [query, key]; got shape {weights.shape}"
        )
    if weights.size == 0:
        raise WeightsError(
            f"{what} are empty; got shape {weights.shape}: at least one layer, head and token are"
            " needed"
        )


def check_numbers(part: Floats, what: str, layers: slice, queries: slice) -> None:
    """Refuse what is not finite, or negative, in a slab."""
    bad = ~np.isfinite(part) | (part < 0)
    if bad.any():
        place = find_first(bad)
        raise WeightsError(
            f"{what} must be finite and not negative; got {part[place]} at"
            f" {name_place(part, place, layers, queries)}"
        )


def cut_slabs(weights: Array) -> Iterator[tuple[slice, slice]]:
    """Yield slices of the layers and queries of weights [layer, ..., query, key], slab by slab.

    A slab has about SLAB numbers: one row or more of a long input, many layers of a short one.
    """
    depth, size = len(weights), weights.shape[-2]
    rows = max(1, SLAB // max(1, weights[0].size // size))
    step = max(1, SLAB // max(1, weights[0].size))
    for first in range(0, depth, step):
        for start in range(0, size, rows):
            yield slice(first, first + step), slice(start, start + rows)


def find_first(flags: Array) -> tuple[int, ...]:
    """The place of the first flag that is set."""
    return tuple(int(index) for index in np.argwhere(flags)[0])


def name_place(part: Array, place: tuple[int, ...], layers: slice, queries: slice) -> str:
    """Name a place in a slab [layer, query, key] or [layer, head, query, key], the key optional."""
    axes = ["layer", "head", "query", "key"] if part.ndim == 4 else ["layer", "query", "key"]
    first = {"layer": layers.start + 1, "query": queries.start}
    return ", ".join(
        f"{axis} {first.get(axis, 0) + index}" for axis, index in zip(axes, place, strict=False)
    )
