"""The metrics of faithfulness: numbers computed from the curve of a perturbed input.

x is the input, n the number of its units (tokens or groups), f the value of the target: its
probability, log-probability or logit. The units are ordered by score, highest first; x - k is x
without the first k units, x : k has the first k units alone. A bin of q percent takes
k(q) = ceil(n q / 100) units, and B is the set of bins, 10, 20, ..., 100 by default.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil
from numbers import Real

import numpy as np

from attnflow.core.arrays import Floats
from attnflow.core.choices import Choices, call_own, read_choices
from attnflow.errors import OptionError

BINS = tuple(range(10, 101, 10))
ROUNDING = 1e-9  # of n q / 100


@dataclass(frozen=True, eq=False)
class PerturbationCurve:
    """The prediction of a model as the units of an input are taken away, or put back, one by one.

    User-defined metrics are functions of it. Steps that no metric needs are NaN; a user-defined
    metric needs all of them.

    Parameters
    ----------
    deleted
        [step]: the value of the target without the k units of the highest scores, k = 0..n.
    kept
        [step]: the value with these k units alone.
    log_deleted, log_kept
        [step]: the same as log-probabilities, for every `target_of`.
    bins
        The percentages over which metrics such as `comprehensiveness` take their mean.
    limits
        By metric, its value for the worst and the best order found.

    >>> steps = np.array([0.9, 0.4, 0.1])
    >>> curve = PerturbationCurve(steps, steps[::-1], np.log(steps), np.log(steps[::-1]))
    >>> curve.size, METRICS["comprehensiveness@50"](curve)
    (2, 0.5)
    """

    deleted: Floats
    kept: Floats
    log_deleted: Floats
    log_kept: Floats
    bins: tuple[float, ...] = BINS
    limits: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """The number of units, n."""
        return len(self.deleted) - 1


MetricFunction = Callable[[PerturbationCurve], float]
METRIC_FORM = "f(curve) -> number"


@dataclass(frozen=True)
class Metric:
    """A weighted sum over one of the curves of an input.

    Parameters
    ----------
    name
        Its name.
    weigh
        From n and the bins to the weight [step] of each step, k = 0..n.
    kept
        Whether the curve is that of the units that are kept, not of those that are deleted.
    lower
        Whether lower is better.
    logarithm
        Whether the curve is always that of log-probabilities.
    normalised
        Whether the value is scaled from 0, that of the worst order, to 1, that of the best.
    """

    name: str
    weigh: Callable[[int, Sequence[float]], Floats]
    kept: bool = False
    lower: bool = False
    logarithm: bool = False
    normalised: bool = False

    @property
    def is_lower(self) -> bool:
        """Whether lower values are better; of normalised metrics, higher values always are."""
        return self.lower and not self.normalised

    def __call__(self, curve: PerturbationCurve) -> float:
        """The value on a curve; of a normalised metric NaN if all orders are equal."""
        curves = (
            (curve.log_deleted, curve.log_kept) if self.logarithm else (curve.deleted, curve.kept)
        )
        weights = self.weigh(curve.size, curve.bins)
        used = np.flatnonzero(weights)
        value = float(weights[used] @ curves[self.kept][used])
        if not self.normalised:
            return value
        worst, best = curve.limits[self.name]
        # an order that the search has missed moves the limit that it exceeds
        low, high = min(worst, best, value), max(worst, best, value)
        if high - low <= ROUNDING * max(1.0, abs(low), abs(high)):
            return float("nan")
        return (high - value if self.lower else value - low) / (high - low)


# ---- formulas ------------------------------------------------------------------------------------


def count_units(size: int, percent: float) -> int:
    """k(q): the number of units that are q percent of n, at least one.

    >>> [count_units(7, percent) for percent in (1, 10, 50, 100)]
    [1, 1, 4, 7]
    """
    return min(max(ceil(size * percent / 100 - ROUNDING), 1), size)


def weigh_bins(size: int, bins: Sequence[float], *, whole: int, sign: int = 1) -> Floats:
    """f(x) minus the mean over bins: weight 1 at the whole input, -1/|B| at each k(q).

    whole: the step of the unchanged input, 0 of deletion and n of insertion; -1 is n.
    """
    weights = np.zeros(size + 1)
    weights[whole] += 1.0
    for percent in bins:
        weights[count_units(size, percent)] -= 1.0 / len(bins)
    return sign * weights


def weigh_area(size: int, bins: Sequence[float]) -> Floats:
    """The area under a curve over k/n, by trapezoids: 1/n sum_{k=1..n} (f_{k-1} + f_k) / 2.

    deletion = the area under f(x - k): lower is better. insertion = the area under f(x : k): higher
    is better.
    """
    weights = np.full(size + 1, 1.0 / size)
    weights[[0, -1]] /= 2
    return weights


BINNED = {  # also at one threshold: comprehensiveness@20
    # 1/|B| sum_{q in B} f(x) - f(x - k(q))
    "comprehensiveness": Metric("comprehensiveness", partial(weigh_bins, whole=0)),
    # 1/|B| sum_{q in B} f(x) - f(x : k(q))
    "sufficiency": Metric("sufficiency", partial(weigh_bins, whole=-1), kept=True, lower=True),
    # 1/|B| sum_{q in B} log p(x - k(q)) - log p(x)
    "log_odds": Metric(
        "log_odds", partial(weigh_bins, whole=0, sign=-1), lower=True, logarithm=True
    ),
}


class Metrics(dict[str, Metric]):
    """Metrics by name; those over bins also at any one threshold, as comprehensiveness@35."""

    def __missing__(self, name: str) -> Metric:
        base, _, text = name.partition("@")
        try:
            return take_threshold(BINNED[base], float(text))
        except ValueError:
            raise KeyError(name) from None

    def __contains__(self, name: object) -> bool:
        try:
            return isinstance(name, str) and bool(self[name])
        except KeyError:
            return False


def take_threshold(metric: Metric, percent: float) -> Metric:
    """A metric over bins at one threshold alone, whatever the bins are."""
    if not 0 < percent <= 100:
        raise ValueError(percent)
    weigh = metric.weigh
    return replace(
        metric, name=f"{metric.name}@{percent:g}", weigh=lambda size, _: weigh(size, (percent,))
    )


METRICS = Metrics(
    BINNED
    | {
        "deletion": Metric("deletion", weigh_area, lower=True),
        "insertion": Metric("insertion", weigh_area, kept=True),
    }
    | {
        f"normalised_{name}": replace(BINNED[name], name=f"normalised_{name}", normalised=True)
        for name in ("comprehensiveness", "sufficiency")
    }
    | {f"{name}@20": take_threshold(metric, 20) for name, metric in BINNED.items()}
)
DEFAULT_METRICS = ("comprehensiveness", "sufficiency", "deletion", "insertion", "log_odds")


def prefers_lower(name: str) -> bool:
    """Whether lower is better by this metric; unknown, and so False, if it is user-defined.

    >>> prefers_lower("deletion"), prefers_lower("comprehensiveness@20")
    (True, False)
    """
    return name in METRICS and METRICS[name].is_lower


# ---- options -------------------------------------------------------------------------------------


def read_metrics(chosen: Choices) -> dict[str, MetricFunction]:
    """Metrics by name, from names, functions of a curve, or {name: function}, checked."""
    known: Mapping[str, MetricFunction] = METRICS
    metrics = read_choices(chosen, known, "metric", METRIC_FORM, (None,), {})
    if not metrics:
        raise OptionError(f"at least one metric is needed; choose from {', '.join(METRICS)}")
    return metrics


def read_bins(bins: object) -> tuple[float, ...]:
    """Percentages above 0 and up to 100, at least one, each once."""
    given = tuple(bins) if isinstance(bins, Iterable) and not isinstance(bins, str) else (bins,)
    for percent in given:
        number = isinstance(percent, Real) and not isinstance(percent, bool)
        if not number or not 0 < float(percent) <= 100:
            raise OptionError(f"bins must be percentages above 0 and up to 100; got {percent!r}")
    if not given or len(set(given)) < len(given):
        raise OptionError(f"bins must be at least one percentage, each once; got {bins!r}")
    return tuple(sorted(float(percent) for percent in given))


def measure_curve(name: str, metric: MetricFunction, curve: PerturbationCurve) -> float:
    """The value of a metric on a curve; of a user-defined one it must be a number."""
    if isinstance(metric, Metric):
        return metric(curve)
    value = call_own(name, metric, curve)
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"the metric {name!r} must give a number, as {METRIC_FORM}; got {type(value).__name__}"
        ) from error
