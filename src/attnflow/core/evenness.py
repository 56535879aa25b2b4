"""Rows that carry little information: even over their keys, or, of flow, saturated.

A row is even if its spread is below `EVEN` and no key has `EVEN_PEAK` times the even share. This is
the only rule: sentences, notes, tables, figures and pages ask it of the row that they show, for
every method and kind of edges.

The limits lie in a gap between rows of real models: of 15 methods and edges each on 31 sentences of
SST-2 (MiniLM), 30 of the grammar (verb-number) and 12 prompts (SmolLM2). In rows of flow that are
at the bound of their source, the first of many equal keys has 1.00 to 1.24 times the even share,
and the spread is up to 0.08: what is named first is then an accident. The flattest rows that point
at something begin beyond: rollout of MiniLM has a spread of 0.09 and more with a peak of 1.4,
relevance flow a peak of 1.3 at a spread of 0.07. No row of raw attention or rollout with 4 keys and
more is even. One limit would not do: a long row in which one word has ten times the even share has
a small spread, and a row that leaves a few of many keys out has a low peak.
"""

import numpy as np

from attnflow.core.arrays import Floats
from attnflow.core.comparison import Comparison
from attnflow.core.groups import list_numbers
from attnflow.core.results import TokenAttention, measure_spread
from attnflow.core.sinks import BoolArray
from attnflow.errors import SaturationWarning
from attnflow.notices import give_notice

MOSTLY = 0.95  # a row is saturated if more than this share of it is at a bound
EVEN = (
    0.08  # a row is even below this spread: keys differ from an even share by 16 % on average ...
)
EVEN_PEAK = 1.25  # ... if its largest share is also below this many times the even one
WORTH_A_WARNING = (2, 8)  # layers and keys; shorter rows are not warned of


def are_even(values: Floats, seen: BoolArray) -> BoolArray:
    """[...]: which rows of values [..., key] hardly tell the keys apart that are seen.

    However few these are; see `say_nothing`.
    """
    return judge_even(measure_spread(values, seen), measure_peak(values, seen))


def say_nothing(values: Floats, seen: BoolArray) -> BoolArray:
    """[...]: which rows are even over enough keys to be told of."""
    flags: BoolArray = are_even(values, seen) & (seen.sum(axis=-1) >= WORTH_A_WARNING[1])
    return flags


def judge_even(spread: Floats, peak: Floats) -> BoolArray:
    """The rule: which rows are even, by their spread and their largest share in even shares."""
    flags: BoolArray = (spread < EVEN) & (peak < EVEN_PEAK)
    return flags


def measure_peak(values: Floats, seen: BoolArray) -> Floats:
    """[...]: the largest share of rows of values [..., key], in even shares of the keys seen."""
    rows = np.where(seen, values, 0.0)
    sums = rows.sum(axis=-1)
    largest = rows.max(axis=-1, initial=0.0) * seen.sum(axis=-1)
    peak: Floats = np.divide(largest, sums, out=np.zeros_like(sums), where=sums > 0)
    return peak


def find_even_spread(compared: Comparison) -> float | None:
    """The spread of the one row of a comparison if it says nothing; None if it does.

    Keys that are left out, or that the row may not see, are not judged.
    """
    seen = compared.expected > 0  # [layer, query, key]
    if not say_nothing(compared.shares, seen).all():
        return None
    return float(measure_spread(compared.shares, seen)[0, 0])


def phrase_even(name: str, layers: str, spread: float) -> str:
    """The note on rows of a result that are even."""
    return (
        f"{name} from layer {layers} is even: the spread of a row is {spread:.2g}"
        " (0: all keys alike, 1: all on one key), so it hardly tells inputs apart"
    )


def warn_if_even(result: TokenAttention) -> None:
    """Warn once if some row of a flow hardly tells keys, or sources, apart.

    Rows are judged without their own position, which stands out of rows that say nothing too.
    """
    deep, long = WORTH_A_WARNING
    layers = np.array(result.layers)
    worth = (layers - (result.bottom or 0) >= deep)[:, None]  # [layer, 1]
    kept = len(result.tokens) - (0 if result.groups else len(set(result.removed)))
    if result.saturated is None or kept < long or not worth.any():
        return
    at_bound = worth & (result.saturated.sum(axis=-1) / kept > MOSTLY)  # [layer, query]
    spread = measure_even_rows(result)
    even = worth & ~np.isnan(spread)
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
        problems.append(phrase_even("attention flow", those, float(spread[even].min())))
    if problems:
        text = f"{'; '.join(problems)}; look at a lower layer or at rollout"
        give_notice(text, SaturationWarning, stacklevel=3)


def measure_even_rows(result: TokenAttention) -> Floats:
    """[layer, query]: the spread of even rows without their own position; NaN for other rows."""
    rows = result.values
    own = np.zeros(rows.shape[1:], bool)  # [query, key]
    if result.groups is None and rows.shape[-1] == result.size:  # keys are positions
        for row, members in enumerate(result.members):
            own[row, list(members)] = True
        rows = np.where(own, 0.0, rows)
    spread = np.full(rows.shape[:2], np.nan)
    # no share of an even row is larger: for most short texts this is enough
    least = WORTH_A_WARNING[1] - 1
    likely = rows.max(axis=-1) < EVEN_PEAK / least * rows.sum(axis=-1)
    for place in np.flatnonzero(likely.any(axis=1)):
        visible = result.mask_visible(int(place))
        flags = are_even(rows[place], visible & ~own) & (visible.sum(axis=-1) > least)
        spread[place] = np.where(flags, measure_spread(rows[place], visible & ~own), np.nan)
    return spread
