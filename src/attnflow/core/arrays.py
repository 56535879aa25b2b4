"""Arrays of any library and precision: converted, checked and renormalised slab by slab."""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from attnflow.errors import WeightsError

if TYPE_CHECKING:
    import torch

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]
Number = TypeVar("Number", bound=np.generic)

ROW_TOLERANCE = {8: 1e-6, 4: 1e-4, 2: 1e-2}  # how far from 1 a row may sum, by bytes per number
# ... and not be renormalised, so that saved weights load bit for bit
ROW_ROUNDING = {8: 1e-14, 4: 1e-6, 2: 0.0}
SLAB = 2**16  # numbers worked on together: some rows of a long input, all layers of a short one
NO_WEIGHTS = (
    "the model returned no attention weights; load it with attn_implementation='eager',"
    " or use af.capture"
)

# hints for attnflow objects passed as arrays
HINTS = {
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


def find_hint(value: object) -> str | None:
    """A hint on what to pass instead of an attnflow object; None for all others."""
    kind = type(value)
    is_attnflow = kind.__module__.partition(".")[0] == "attnflow"
    return HINTS.get(kind.__name__) if is_attnflow else None


def stack_layers(weights: object) -> tuple[Array, int]:
    """One array [layer, head, query, key] or [layer, query, key], and its bytes per number."""
    layers, precision = convert_layers(weights)
    if not isinstance(layers, list):
        if layers.ndim == 5:  # with an axis of sequences
            layers = np.stack([pick_sequence(layer) for layer in layers])
        return layers, precision
    layers = [pick_sequence(layer) if layer.ndim == 4 else layer for layer in layers]
    check_shapes(layers)
    # layers of different precisions all get the lowest
    return np.stack(layers, dtype=np.float64 if precision == 8 else np.float32), precision


def convert_layers(weights: object) -> tuple[Array | list[Array], int]:
    """One array, or a list of one per layer if given as such, and the lowest bytes per number."""
    if weights is None or (isinstance(weights, list | tuple) and not weights):
        raise WeightsError(f"weights are empty: {NO_WEIGHTS}")
    hint = find_hint(weights)
    if hint is not None:
        raise WeightsError(
            f"weights must be an array, or one per layer; got {type(weights).__name__}: {hint}"
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


def to_array(value: object, name: str) -> tuple[Array, int]:
    """Any library's array as a numpy array of float32 or float64, and its bytes per number."""
    if isinstance(value, np.ma.MaskedArray):
        raise WeightsError(
            f"{name} must not be a masked array, whose mask would be lost; fill it first:"
            " array.filled(0)"
        )
    try:
        # torch: on any device, with or without gradient, and numpy knows no bfloat16
        if hasattr(value, "detach"):
            tensor: torch.Tensor = value.detach().cpu()
            if tensor.dtype.is_floating_point and tensor.element_size() <= 2:
                return tensor.float().numpy(), 2
            value = tensor.numpy()
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


def needs_copy(array: Array, given: object, copy: bool) -> bool:
    """Whether an array must be copied before it is written to.

    Not if it was just stacked from a list, nor with copy=False.
    """
    stacked = isinstance(given, list | tuple)
    given_away = not copy and array is given and array.flags.writeable
    return not (stacked or given_away) or not array.flags.c_contiguous


def make_room(shape: tuple[int, ...], precision: int) -> Array:
    """An uninitialised array, or an error with the memory that it needs."""
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
    """Check that rows of weights [layer, ..., query, key] sum to 1, and renormalise them.

    precision: the bytes per number they had. Rows of the positions in `skip` are not checked.
    copy=False: the array itself is renormalised.
    """
    check_square(weights, "weights")
    checked = make_room(weights.shape, precision) if copy else weights
    tolerance = ROW_TOLERANCE[precision]
    for layers, queries, part, sums in read_slabs(weights, "weights"):
        distance = np.abs(sums - 1)
        off = distance > tolerance
        if skip:
            off[..., np.isin(np.arange(weights.shape[-1])[queries], skip)] = False
        if off.any():
            place = find_first(off)
            raise WeightsError(
                f"rows of the weights must sum to 1 within {tolerance:g};"
                f" {name_place(part, place, layers, queries)} sums to {sums[place]:.6g} (are"
                " these weights after softmax, of a model in eval mode, [layer, head, query, key]?)"
            )
        rough = (sums > 0) & (distance > ROW_ROUNDING[precision])
        np.divide(part, sums[..., None], out=part, where=rough[..., None])
        checked[layers, ..., queries, :] = part
    return checked


def check_edges(edges: Array, precision: int, *, copy: bool = True, signed: bool = False) -> Array:
    """Check that edges [layer, query, key] are finite; rows may have any sum.

    signed: whether they may be negative.
    """
    check_square(edges, "edges")
    checked = make_room(edges.shape, precision) if copy else edges
    for layers, queries, part, sums in read_slabs(edges, "edges", signed=signed):
        if not np.isfinite(sums).all():
            place = name_place(part, find_first(~np.isfinite(sums)), layers, queries)
            raise WeightsError(f"edges must have finite row sums; got {place}: scale them")
        checked[layers, queries] = part
    return checked


def check_square(weights: Array, what: str) -> None:
    """Refuse layers [..., query, key] that are not square, or empty."""
    if weights.shape[-1] != weights.shape[-2]:
        raise WeightsError(
            f"layers of the {what} must be square, [query, key]; got shape {weights.shape}"
        )
    if weights.size == 0:
        raise WeightsError(
            f"{what} are empty; got shape {weights.shape}: at least one layer, head and token are"
            " needed"
        )


class Slab(NamedTuple):
    """A part of weights [layer, ..., query, key] in float64."""

    layers: slice
    queries: slice
    part: Floats  # [layer, ..., query, key]
    sums: Floats  # [layer, ..., query]


def read_slabs(weights: Array, what: str, *, signed: bool = False) -> Iterator[Slab]:
    """The slabs of weights, one after another; numbers must be finite, and not negative.

    signed: whether they may be negative.
    """
    for layers, queries in cut_slabs(weights):
        part = weights[layers, ..., queries, :].astype(np.float64, order="C")
        bad = ~np.isfinite(part)
        if not signed:
            bad |= part < 0
        if bad.any():
            place = find_first(bad)
            raise WeightsError(
                f"{what} must be finite and not negative; got {part[place]} at"
                f" {name_place(part, place, layers, queries)}"
            )
        with np.errstate(over="ignore"):
            sums = part.sum(axis=-1)
        yield Slab(layers, queries, part, sums)


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
