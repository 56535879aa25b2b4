"""Rows of attention flow that carry little information: saturated, or even over their keys."""

import numpy as np
import numpy.typing as npt

from attnflow.core.arrays import Floats
from attnflow.core.comparison import Comparison
from attnflow.core.groups import list_numbers
from attnflow.core.results import TokenAttention, measure_spread
from attnflow.errors import SaturationWarning
from attnflow.notices import give_notice

MOSTLY = 0.95  # a row is saturated if more than this share of it is at a bound
EVEN = 0.02  # a row is even below this spread: keys differ from an even share by 4 % on average
WORTH_A_WARNING = (2, 8)  # layers and keys; shorter rows are not warned of


def are_even(spread: Floats, keys: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """Which rows hardly tell keys apart, by their spread and the number of keys they see."""
    return (spread < EVEN) & (np.asarray(keys) >= WORTH_A_WARNING[1])


def find_even_spread(compared: Comparison) -> float | None:
    """The spread of the one row of a comparison if it is even; None if it is not.

    Keys that are left out, or that the row may not see, are not judged.
    """
    seen = compared.expected > 0  # [layer, query, key]
    spread = measure_spread(compared.shares, seen)
    return float(spread[0, 0]) if are_even(spread, seen.sum(axis=-1)).all() else None


def warn_if_even(result: TokenAttention) -> None:
    """Warn once if some row of a flow hardly tells keys, or sources, apart."""
    deep, long = WORTH_A_WARNING
    layers = np.array(result.layers)
    worth = (layers - (result.bottom or 0) >= deep)[:, None]  # [layer, 1]
    kept = len(result.tokens) - (0 if result.groups else len(set(result.removed)))
    if result.saturated is None or kept < long or not worth.any():
        return
    at_bound = worth & (result.saturated.sum(axis=-1) / kept > MOSTLY)  # [layer, query]
    # no share of an even row of at least `long` keys is larger: for most short texts this is enough
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
