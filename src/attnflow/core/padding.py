"""Padded batches: the weights of each sequence without its padding."""

from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from attnflow.core.arrays import (
    ROW_TOLERANCE,
    Array,
    check_rows,
    check_shapes,
    convert_layers,
    find_first,
    to_array,
)
from attnflow.core.checks import check_list
from attnflow.errors import WeightsError

Tag = TypeVar("Tag")
Bools = npt.NDArray[np.bool_]


def read_padded(weights: object) -> tuple[list[Array], int]:
    """Per layer one array [batch, head, query, key] or [batch, query, key]; bytes per number."""
    layers, precision = convert_layers(weights)
    if not isinstance(layers, list):
        if layers.ndim != 5:
            raise WeightsError(
                "a batch must be one array [layer, batch, head, query, key], or a list of one array"
                " [batch, head, query, key] or [batch, query, key] per layer; got shape"
                f" {layers.shape}: with fewer axes, heads and sequences cannot be told apart"
            )
        layers = list(layers)
    check_shapes(layers)
    shape = layers[0].shape if layers else ()
    if len(shape) not in (3, 4) or shape[-1] != shape[-2] or 0 in shape:
        raise WeightsError(
            "layers must be [batch, head, query, key], or [batch, query, key] if heads are"
            f" fused, as many queries as keys; got shape {shape}"
        )
    return layers, precision


def read_padding(mask: object, sequences: int, size: int) -> Bools:
    """[batch, position]: True where a token is real, from 1 and 0."""
    array = to_array(mask, "mask")[0]
    if array.shape != (sequences, size):
        raise WeightsError(
            f"mask must have shape [batch, position], here {(sequences, size)}; got {array.shape}"
        )
    if not np.isin(array, (0, 1)).all():
        raise WeightsError("mask must be 1 for real tokens and 0 for padding; got other numbers")
    for number, row in enumerate(array):
        if not row.any():
            raise WeightsError(
                f"a sequence must have at least one real token; got none in sequence {number},"
                " whose mask is all 0: leave it out"
            )
    real: Bools = array == 1
    return real


def cut_sequence(layers: Sequence[Array], precision: int, sequence: int, real: Bools) -> Array:
    """[layer, ..., query, key] of one sequence of a batch; real: [position].

    Real queries give 0 to padding, up to rounding; otherwise the mask is wrong.
    """
    kept, padding = np.flatnonzero(real), np.flatnonzero(~real)
    parts = []
    for number, layer in enumerate(layers, start=1):
        rows = layer[sequence][..., kept, :]  # [..., query, position]
        given = rows[..., padding].sum(axis=-1, dtype=np.float64)
        wrong = ~(np.abs(given) <= ROW_TOLERANCE[precision])  # NaN included
        if wrong.any():
            *head, query = find_first(wrong)
            of_head = f", head {head[0]}" if head else ""
            raise WeightsError(
                f"real tokens must give no attention to padding; layer {number}{of_head}, query"
                f" {kept[query]} gives {given[find_first(wrong)]:.3g}: is this the mask that the"
                " model was given?"
            )
        parts.append(rows[..., kept])
    return check_rows(np.stack(parts), precision, copy=False)


def pick_real(
    items: Iterable[Iterable[Tag]] | None, what: str, reals: Bools
) -> list[list[Tag] | None]:
    """The items of the real tokens of each sequence; items may include those of padding."""
    if items is None:
        return [None] * len(reals)
    lists = list(check_list(items, what))
    if any(isinstance(own, str) for own in lists):
        raise WeightsError(f"{what} must be one list per sequence; got a string: split it first")
    given = [list(check_list(own, what)) for own in lists]
    if len(given) != len(reals):
        raise WeightsError(
            f"{what} must be one list per sequence; got {len(given)} for {len(reals)} sequences"
        )
    picked: list[list[Tag] | None] = []
    for number, (own, real) in enumerate(zip(given, reals, strict=True)):
        if len(own) not in (len(real), real.sum()):
            raise WeightsError(
                f"{what} of sequence {number} must be one per position, {len(real)}, or one per"
                f" real token, {real.sum()}; got {len(own)}"
            )
        padded = len(own) == len(real)
        picked.append([own[at] for at in np.flatnonzero(real)] if padded else own)
    return picked
