"""Statistics of scores and of examples: rank correlation, bootstrap, paired tests."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from attnflow.core.arrays import Floats
from attnflow.errors import OptionError

# scores of one example are equal if they agree to this many digits of the largest: the rest is
# rounding
TIE_DIGITS = 9
RESAMPLES = 1000
RESAMPLES_TOGETHER = 100  # held in memory at a time
EXACT_SIGNS = 12  # pairs whose signs can be changed in 4,096 ways, all of which are tried
DRAWN_SIGNS = 9999


# ---- rank correlation ----------------------------------------------------------------------------


def spearman(scores: Floats, importance: Floats) -> Floats:
    """[layer]: Spearman's rank correlation of scores [layer, token] with importance [token].

    Ties share their mean rank. NaN where it is undefined: fewer than two tokens, or all equal.

    >>> scores = np.array([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0], [1.0, 1.0, 1.0]])
    >>> spearman(scores, np.array([0.1, 0.2, 0.9]))
    array([ 1., -1., nan])
    """
    return correlate_ranks(scores, importance, "average")


def dense(scores: Floats, importance: Floats) -> Floats:
    """[layer]: Pearson's correlation of dense ranks, as the authors of the paper compute it.

    Ties share a rank and the next value has the next one, so that the more ties there are, the
    less the ranks of one side spread.

    >>> dense(np.array([[1.0, 1.0, 1.0, 2.0]]), np.array([1.0, 2.0, 3.0, 4.0])).round(3)
    array([0.775])
    """
    return correlate_ranks(scores, importance, "dense")


def correlate_ranks(scores: Floats, importance: Floats, ties: str) -> Floats:
    """[layer]: the correlation of ranks; `ties` is a method of scipy's `rankdata`."""
    from scipy.stats import rankdata

    rows = np.vstack([scores, importance])
    if rows.shape[1] < 2 or not np.isfinite(rows).all():
        return np.full(len(scores), np.nan)
    ranks = rankdata(round_scores(rows), method=ties, axis=1)
    with np.errstate(invalid="ignore"):  # equal scores have no variance: NaN
        correlations: Floats = np.corrcoef(ranks)[-1, :-1]
    return correlations


def kendall(scores: Floats, importance: Floats) -> Floats:
    """[layer]: Kendall's tau-b of scores [layer, token] with importance [token].

    NaN where Spearman's is.

    >>> kendall(np.array([[1.0, 2.0, 3.0], [1.0, 3.0, 2.0]]), np.array([0.1, 0.2, 0.9])).round(3)
    array([1.   , 0.333])
    """
    rows = np.vstack([scores, importance])
    if rows.shape[1] < 2 or not np.isfinite(rows).all():
        return np.full(len(scores), np.nan)
    rounded = round_scores(rows)
    # all rows at once: scipy's kendalltau gives the same by row, for 12 tokens 30 times as slowly
    first, second = np.triu_indices(rows.shape[1], k=1)
    signs = np.sign(rounded[:, first] - rounded[:, second])  # [row, pair]
    untied = np.abs(signs).sum(axis=1)
    with np.errstate(invalid="ignore"):
        correlations: Floats = signs[:-1] @ signs[-1] / np.sqrt(untied[:-1] * untied[-1])
    return np.clip(correlations, -1.0, 1.0)


STATISTICS: dict[str, Callable[[Floats, Floats], Floats]] = {
    "spearman": spearman,
    "kendall": kendall,
    "dense": dense,
}
STATISTIC_NAMES = {
    "spearman": "Spearman correlation",
    "kendall": "Kendall correlation",
    "dense": "Spearman correlation of dense ranks",
}
UNDEFINED = ("drop", "zero")


def check_statistic(statistic: str, undefined: str) -> None:
    """Refuse an unknown statistic, and an unknown treatment of undefined values."""
    if statistic not in list(STATISTICS):  # it may be what cannot be hashed
        raise OptionError(
            f"unknown statistic {statistic!r}; choose from {', '.join(STATISTICS)}",
            options=["statistic"],
        )
    if undefined not in UNDEFINED:
        option = f"undefined={undefined!r}"
        raise OptionError(f"unknown {option}; choose from {', '.join(UNDEFINED)}", options=[option])


def round_scores(scores: Floats) -> Floats:
    """Scores [..., token] relative to the largest of their row, rounded to `TIE_DIGITS`."""
    largest = np.abs(scores).max(axis=-1, keepdims=True, initial=0.0)
    rounded: Floats = np.round(scores / np.where(largest > 0, largest, 1.0), TIE_DIGITS)
    return rounded


# ---- examples ------------------------------------------------------------------------------------


def treat_undefined(values: Floats, undefined: str) -> Floats:
    """The values [example] that count: undefined ones are dropped, or count as zero."""
    missing = np.isnan(values)
    return np.where(missing, 0.0, values) if undefined == "zero" else values[~missing]


class Summary(NamedTuple):
    """The mean and standard deviation of some examples, and how many of them are undefined."""

    mean: float
    std: float
    examples: int
    undefined: int


def summarise(values: Floats, undefined: str = "drop") -> Summary:
    """The summary of values [example]; its mean is NaN if no value counts."""
    counted = treat_undefined(values, undefined)
    missing = int(np.isnan(values).sum())
    if not len(counted):
        return Summary(float("nan"), float("nan"), len(values), missing)
    return Summary(float(counted.mean()), float(counted.std()), len(values), missing)


def bootstrap(values: Floats, *, seed: int = 0, resamples: int = RESAMPLES) -> tuple[float, float]:
    """The 95 % confidence interval of a mean, from percentiles of the means of resampled values.

    >>> low, high = bootstrap(np.arange(100.0))
    >>> 40 < low < 49.5 < high < 60
    True
    """
    from scipy import stats

    if len(values) < 2:  # which scipy refuses
        return (float(values[0]),) * 2 if len(values) else (float("nan"),) * 2
    low, high = stats.bootstrap(
        (values,),
        np.mean,
        n_resamples=resamples,
        batch=RESAMPLES_TOGETHER,
        method="percentile",
        random_state=np.random.default_rng(seed),
    ).confidence_interval
    return float(low), float(high)


def bootstrap_runs(
    values: Floats, *, seed: int = 0, resamples: int = RESAMPLES
) -> tuple[float, float]:
    """The 95 % confidence interval of the mean of values [run, example], NaN left out.

    Both runs (such as trainings with several seeds) and examples are resampled; the examples are
    the same in every run. For one run, this is `bootstrap` over its examples.

    >>> alike, apart = np.zeros((3, 50)), np.repeat([[0.0], [1.0], [2.0]], 50, axis=1)
    >>> bootstrap_runs(alike), bootstrap_runs(apart)[0] < 0.5 < 1.5 < bootstrap_runs(apart)[1]
    ((0.0, 0.0), True)
    """
    runs, count = values.shape
    known = ~np.isnan(values)
    if runs == 1 or not known.any():
        return bootstrap(values[known], seed=seed, resamples=resamples)
    rng = np.random.default_rng(seed)
    filled = np.where(known, values, 0.0)
    means = []
    for _ in range(resamples):
        chosen = np.ix_(rng.integers(0, runs, runs), rng.integers(0, count, count))
        if drawn := known[chosen].sum():
            means.append(filled[chosen].sum() / drawn)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def find_p_value(differences: Floats, *, seed: int = 0) -> float:
    """The two-sided p value of a mean of paired differences [example], by a sign-flip test.

    Under the null hypothesis each difference is as likely to have the opposite sign. All sign
    flips are tried for up to 12 differences, 9,999 random ones for more; NaN if there are none.
    (scipy's `permutation_test` gives the same if all are tried; it takes 10 to 80 times as long.)

    >>> find_p_value(np.array([0.1, 0.2, 0.3])), find_p_value(np.zeros(20))
    (0.25, 1.0)
    """
    count = len(differences)
    if not count:
        return float("nan")
    exact = count <= EXACT_SIGNS
    if exact:
        bits = np.arange(1 << count)[:, None] >> np.arange(count) & 1
    else:
        bits = np.random.default_rng(seed).integers(0, 2, (DRAWN_SIGNS, count))
    sums = np.abs((1 - 2 * bits) @ differences)
    observed = abs(differences.sum())
    reached = int((sums >= observed - 1e-12 * max(1.0, float(np.abs(differences).sum()))).sum())
    return reached / len(sums) if exact else (reached + 1) / (len(sums) + 1)


def correct_family(values: Sequence[float]) -> list[float]:
    """p values by Holm's correction for multiple comparisons; NaN stays NaN, and does not count.

    >>> correct_family([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    corrected = list(values)
    known = sorted((p, place) for place, p in enumerate(values) if not np.isnan(p))
    largest = 0.0
    for rank, (p, place) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - rank) * p))
        corrected[place] = largest
    return corrected
