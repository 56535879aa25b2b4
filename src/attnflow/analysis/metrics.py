"""The metrics of faithfulness: numbers that are made of the curve of a perturbed input.

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
from typing import Any

import numpy as np

from attnflow.core.arrays import Floats
from attnflow.core.custom import call_own, check_name, name_function
from attnflow.errors import OptionError

BINS = tuple(range(10, 101, 10))
ROUNDING = 1e-9  # of n q / 100


@dataclass(frozen=True, eq=False)
class PerturbationCurve:
    """What a model says of an input while its units are taken away, or put back, one by one.

    A metric of your own is a function of this. Steps that no metric asked for are NaN; where a
    function of yours is among the metrics, there are none.

    Parameters
    ----------
    deleted
        [step]: the value of the target without the k units of the highest scores, k = 0..n.
    kept
        [step]: the value with these k units alone.
    log_deleted, log_kept
        [step]: the same as log-probabilities, whatever the value is.
    bins
        The percentages over which `comprehensiveness` and its like take their mean.
    limits
        By metric, its value for the worst and the best order that were found.

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
        Whether the value is put between that of the worst order, 0, and of the best, 1.
    """

    name: str
    weigh: Callable[[int, Sequence[float]], Floats]
    kept: bool = False
    lower: bool = False
    logarithm: bool = False
    normalised: bool = False

    @property
    def is_lower(self) -> bool:
        """Whether a lower value is better, of what the metric gives."""
        return self.lower and not self.normalised

    def __call__(self, curve: PerturbationCurve) -> float:
        """Its value on a curve; NaN where all orders are equal and it is normalised."""
        curves = (
            (curve.log_deleted, curve.log_kept) if self.logarithm else (curve.deleted, curve.kept)
        )
        weights = self.weigh(curve.size, curve.bins)
        used = np.flatnonzero(weights)
        value = float(weights[used] @ curves[self.kept][used])
        if not self.normalised:
            return value
        worst, best = curve.limits[self.name]
        # an order that a search has missed moves the limit that it passes
        low, high = min(worst, best, value), max(worst, best, value)
        if high - low <= ROUNDING * max(1.0, abs(low), abs(high)):
            return float("nan")
        return (high - value if self.lower else value - low) / (high - low)


# ---- formulas ------------------------------------------------------------------------------------


def count_units(size: int, percent: float) -> int:
    """k(q): how many of n units are q percent, at least one.

    >>> [count_units(7, percent) for percent in (1, 10, 50, 100)]
    [1, 1, 4, 7]
    """
    return min(max(ceil(size * percent / 100 - ROUNDING), 1), size)


def weigh_bins(size: int, bins: Sequence[float], *, whole: int) -> Floats:
    """f(x) minus the mean over bins: weight 1 at the whole input, -1/|B| at each k(q).

    whole: the step that is the input as it stands, 0 of deletion and n of insertion; -1 is n.
    """
    weights = np.zeros(size + 1)
    weights[whole] += 1.0
    for percent in bins:
        weights[count_units(size, percent)] -= 1.0 / len(bins)
    return weights


def weigh_comprehensiveness(size: int, bins: Sequence[float]) -> Floats:
    """comprehensiveness = 1/|B| sum_{q in B} f(x) - f(x - k(q)). Higher is better."""
    return weigh_bins(size, bins, whole=0)


def weigh_sufficiency(size: int, bins: Sequence[float]) -> Floats:
    """sufficiency = 1/|B| sum_{q in B} f(x) - f(x : k(q)). Lower is better."""
    return weigh_bins(size, bins, whole=-1)


def weigh_log_odds(size: int, bins: Sequence[float]) -> Floats:
    """log_odds = 1/|B| sum_{q in B} log p(x - k(q)) - log p(x). Lower is better."""
    return -weigh_bins(size, bins, whole=0)


def weigh_area(size: int, bins: Sequence[float]) -> Floats:
    """The area under a curve over k/n, by trapezoids: 1/n sum_{k=1..n} (f_{k-1} + f_k) / 2.

    deletion = the area under f(x - k): lower is better. insertion = the area under f(x : k): higher
    is better.
    """
    weights = np.full(size + 1, 1.0 / size)
    weights[[0, -1]] /= 2
    return weights


BINNED = {  # also at one threshold: comprehensiveness@20
    "comprehensiveness": Metric("comprehensiveness", weigh_comprehensiveness),
    "sufficiency": Metric("sufficiency", weigh_sufficiency, kept=True, lower=True),
    "log_odds": Metric("log_odds", weigh_log_odds, lower=True, logarithm=True),
}


class Metrics(dict[str, Metric]):
    """Metrics by name; those over bins also at one threshold, as comprehensiveness@20."""

    def __missing__(self, name: str) -> Metric:
        base, at, text = name.partition("@")
        try:
            percent = float(text)
        except ValueError:
            raise KeyError(name) from None
        if not at or base not in BINNED or not 0 < percent <= 100:
            raise KeyError(name)
        metric = BINNED[base]
        return replace(metric, name=name, weigh=partial(weigh_at, metric.weigh, percent))


def weigh_at(
    weigh: Callable[[int, Sequence[float]], Floats],
    percent: float,
    size: int,
    bins: Sequence[float],
) -> Floats:
    """The weights of a metric at one threshold, whatever the bins are."""
    return weigh(size, (percent,))


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
)
DEFAULTS = ("comprehensiveness", "sufficiency", "deletion", "insertion", "log_odds")


def prefers_lower(name: str) -> bool:
    """Whether lower is better by this metric; of metrics of the user's own nobody knows.

    >>> prefers_lower("deletion"), prefers_lower("comprehensiveness@20")
    (True, False)
    """
    try:
        return METRICS[name].is_lower
    except KeyError:
        return False


# ---- what is asked for ---------------------------------------------------------------------------


def read_metrics(chosen: Any) -> dict[str, Metric | MetricFunction]:
    """Metrics by name, from names, functions of a curve, or {name: function}, checked."""
    if isinstance(chosen, str) or callable(chosen):
        chosen = [chosen]
    if not isinstance(chosen, Iterable):
        raise OptionError(f"metrics must be names, or {{name: function}}; got {chosen!r}")
    pairs = (
        list(chosen.items())
        if isinstance(chosen, Mapping)
        else [(item if isinstance(item, str) else None, item) for item in chosen]
    )
    metrics: dict[str, Metric | MetricFunction] = {}
    for name, function in pairs:
        if function is None or isinstance(function, str):
            name, function = read_metric(name if function is None else function)
        else:
            name = name_function(function, "metric") if name is None else name
            check_name(name, "metric")
            if name in METRICS and function is not METRICS[name]:
                raise OptionError(f"a metric of your own must have a name of its own; got {name!r}")
            if not callable(function):
                raise OptionError(
                    f"a metric of your own must be a function, {METRIC_FORM};"
                    f" got {name!r}: {type(function).__name__}"
                )
        if name in metrics:
            raise OptionError(f"each metric must have a name of its own; got {name!r} twice")
        metrics[name] = function
    if not metrics:
        raise OptionError(f"at least one metric is needed; choose from {', '.join(METRICS)}")
    return metrics


def read_metric(name: Any) -> tuple[str, Metric]:
    """One of attnflow's metrics, by its name."""
    try:
        return name, METRICS[name]
    except (KeyError, TypeError, AttributeError):
        raise OptionError(
            f"unknown metric {name!r}; choose from {', '.join(METRICS)}, comprehensiveness@20 and"
            " the like, or give a function of the curve: {name: function}"
        ) from None


def read_bins(bins: Any) -> tuple[float, ...]:
    """Percentages above 0 and up to 100, at least one, each once."""
    given = tuple(bins) if isinstance(bins, Iterable) and not isinstance(bins, str) else (bins,)
    for percent in given:
        number = isinstance(percent, Real) and not isinstance(percent, bool)
        if not number or not 0 < float(percent) <= 100:
            raise OptionError(f"bins must be percentages above 0 and up to 100; got {percent!r}")
    if not given or len(set(given)) < len(given):
        raise OptionError(f"bins must be at least one percentage, each once; got {bins!r}")
    return tuple(sorted(float(percent) for percent in given))


def measure_curve(name: str, metric: Metric | MetricFunction, curve: PerturbationCurve) -> float:
    """The value of a metric, attnflow's or of the user's own, on a curve."""
    if isinstance(metric, Metric):
        return metric(curve)
    value = call_own(name, metric, curve)
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"the metric {name!r} must give a number, as {METRIC_FORM}; got {type(value).__name__}"
        ) from error
