"""Masks: the keys that a query may see, small weights elsewhere, and removed positions."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from attnflow.core.arrays import Array, cut_slabs, find_first, name_place
from attnflow.core.checks import LARGE, check_count
from attnflow.errors import OptionError, WeightsError

LEAK = 1e-6  # the largest weight tolerated where a mask hides a key


def check_mask(
    weights: Array,
    what: str,
    causal: bool | None,
    window: int | Sequence[int | None] | None,
    *,
    leak: float,
) -> tuple[bool, tuple[int | None, ...]]:
    """Whether weights [layer, ..., query, key] are causal, and one window per layer.

    Weights of at most `leak` where the mask hides a key are cleared in place; larger ones are
    refused.
    """
    inferred = causal is None
    causal, windows = read_mask(weights, causal, window)
    if windows.count(None) < len(windows) or (causal and not inferred):
        apply_mask(weights, what, causal, windows, leak)
    return causal, windows


def read_mask(
    weights: Array, causal: bool | None, window: int | Sequence[int | None] | None
) -> tuple[bool, tuple[int | None, ...]]:
    """Whether weights [layer, ..., query, key] are causal, inferred if None; their windows."""
    windows = check_windows(window, len(weights))
    if causal is not None and not isinstance(causal, bool | np.bool_):
        raise OptionError(f"causal must be True, False, or None to infer it; got {causal!r}")
    return is_causal(weights) if causal is None else bool(causal), windows


def check_windows(window: int | Sequence[int | None] | None, depth: int) -> tuple[int | None, ...]:
    """One window (or None) per layer."""
    windows = tuple(window) if isinstance(window, Sequence) else (window,) * depth
    if len(windows) != depth:
        raise OptionError(
            f"window must be one number, or one per layer; got {len(windows)} for {depth} layers"
        )
    return tuple(None if w is None else check_count("a window", w, LARGE) for w in windows)


def is_causal(weights: Array) -> bool:
    """Whether no query sees a later key in weights [..., query, key]; False for a single token."""
    size = weights.shape[-1]
    return size > 1 and not any(weights[..., query, query + 1 :].any() for query in range(size))


def find_visible(
    size: int, causal: bool, window: int | None, queries: slice | Sequence[int] = slice(None)
) -> npt.NDArray[np.bool_]:
    """[query, key]: which keys the queries of one layer may see."""
    keys = np.arange(size)
    own = keys[queries, None]
    sees = np.broadcast_to(keys <= own if causal else True, (len(own), size))
    if window is not None:
        sees = sees & (keys > own - window) & (keys < own + window)
    return sees


def apply_mask(
    weights: Array, what: str, causal: bool, windows: Sequence[int | None], leak: float
) -> None:
    """Clear in place the rounding error outside the mask in weights [layer, ..., query, key]."""
    for _, queries in cut_slabs(weights[:1]):
        hidden_by = {
            window: ~find_visible(weights.shape[-1], causal, window, queries)
            for window in set(windows)
        }
        for number, window in enumerate(windows):
            rows, hidden = weights[number, ..., queries, :], hidden_by[window]
            outside = np.where(hidden, rows, rows.dtype.type(0))
            if outside.max() > leak:
                place = find_first(outside > leak)
                layers = slice(number, number + 1)
                where = name_place(rows[None], (0, *place), layers, queries)
                raise WeightsError(
                    f"{what} must be 0 where the mask hides a key (causal={causal},"
                    f" window={window}); got {outside[place]:.3g} at {where}"
                )
            if outside.any():
                kept = np.where(hidden, 0.0, rows.astype(np.float64))
                sums = kept.sum(axis=-1, keepdims=True)
                rows[...] = np.divide(kept, sums, out=kept, where=sums > 0)


def take_out(weights: Array, positions: Sequence[int]) -> None:
    """Remove positions from weights [layer, query, key] in place, and renormalise the rows.

    A row with nothing left becomes the identity.
    """
    gone = list(positions)
    own = np.arange(weights.shape[-1])
    for layers, queries in cut_slabs(weights):
        part = weights[layers, queries].astype(np.float64)
        part[..., gone] = 0.0
        sums = part.sum(axis=-1, keepdims=True)
        left = sums > 0
        np.divide(part, sums, out=part, where=left)
        if not left.all():
            part += np.where(left, 0.0, own[queries, None] == own)
        part[:, np.isin(own[queries], gone)] = 0.0
        weights[layers, queries] = part
