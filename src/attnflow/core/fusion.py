"""Fusion of heads into one matrix per layer: mean, maximum, minimum, one head, or a function."""

from collections.abc import Callable

import numpy as np

from attnflow.core.arrays import Array, Floats, cut_slabs, make_room
from attnflow.core.checks import check_integers
from attnflow.core.masks import take_out
from attnflow.errors import OptionError

FUSIONS: dict[str, Callable[..., Array]] = {"mean": np.mean, "max": np.max, "min": np.min}
Fusion = str | int | Callable[..., Array]


def fuse_heads(weights: Array, heads: Fusion) -> Array:
    """[layer, query, key] from weights [layer, head, query, key], rows sum to 1.

    A single head is returned unchanged, as a view if it is the only one; several are fused in
    float64. heads: as in `Attention.graph`.
    """
    if not isinstance(heads, str | int | np.integer | Callable):
        raise OptionError(
            f"heads must be a name, a head's number or a function; got {heads!r}", options=["heads"]
        )
    if isinstance(heads, str) and heads not in FUSIONS:
        raise OptionError(
            f"unknown head fusion {heads!r}; choose from {', '.join(FUSIONS)}, a head's number or a"
            " function",
            options=["heads"],
        )
    depth, count, size, _ = weights.shape
    if not callable(heads) and (count == 1 or not isinstance(heads, str)):
        head = 0 if isinstance(heads, str) else check_head(heads, count)
        return np.ascontiguousarray(weights[:, head])
    fused = make_room((depth, size, size), 8)
    if isinstance(heads, str):
        for layers, queries in cut_slabs(weights):
            rows = weights[layers, :, queries].astype(np.float64)
            fused[layers, queries] = FUSIONS[heads](rows, axis=1)
    else:
        for number, layer in enumerate(weights, start=1):
            fused[number - 1] = call_fusion(heads, layer.astype(np.float64), number)
    take_out(fused, ())  # rows sum to 1 again
    return fused


def name_fusion(heads: Fusion, top_head: tuple[int, int] | None = None) -> str:
    """A description of how heads were fused. top_head: (layer, head) of one alone at the top.

    >>> name_fusion(3), name_fusion(np.median), name_fusion("mean", (6, 3))
    ('3', 'median', 'mean, head 3 alone in layer 6')
    """
    name = getattr(heads, "__name__", type(heads).__name__) if callable(heads) else str(heads)
    return name if top_head is None else f"{name}, head {top_head[1]} alone in layer {top_head[0]}"


def check_head(head: object, count: int) -> int:
    """The number of a head, checked."""
    (number,) = check_integers([head], "heads")
    if not 0 <= number < count:
        raise OptionError(
            f"a head's number must be from 0 to {count - 1}; got {number}", options=["heads"]
        )
    return number


def call_fusion(fusion: Callable[..., Array], layer: Floats, number: int) -> Floats:
    """Fuse a layer [head, query, key] into [query, key] by a user-defined function."""
    try:
        matrix = np.asarray(fusion(layer, axis=0), dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise OptionError(
            "a head fusion is called as f(weights, axis=0) and must give an array; it failed:"
            f" {error}"
        ) from error
    if matrix.shape != layer.shape[1:] or not np.isfinite(matrix).all() or (matrix < 0).any():
        raise OptionError(
            "a head fusion must turn [head, query, key] into [query, key], finite and not negative;"
            f" in layer {number} it gave shape {matrix.shape} for {layer.shape}"
        )
    return matrix
