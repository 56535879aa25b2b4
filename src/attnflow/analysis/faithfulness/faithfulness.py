"""`faithfulness`: does the prediction change as scores say when tokens are taken away?"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import overload

import numpy as np

from attnflow.analysis.faithfulness.metrics import (
    BINS,
    DEFAULT_METRICS,
    Metric,
    MetricFunction,
    PerturbationCurve,
    measure_curve,
    read_bins,
    read_metrics,
)
from attnflow.analysis.faithfulness.orders import Order, Search, find_order, list_sets, order_units
from attnflow.analysis.faithfulness.perturb import (
    VALUES,
    Inquiry,
    Perturber,
    Question,
    list_perturbed,
    read_replacement,
)
from attnflow.analysis.faithfulness.plausibility import read_token_row
from attnflow.analysis.importance.watch import Foils, Targets, read_watched
from attnflow.core.arrays import Floats
from attnflow.core.choices import Choices
from attnflow.core.groups import Group, Groups
from attnflow.core.results import TokenAttention
from attnflow.errors import OptionError
from attnflow.models.encoded import AnInput, Encoded, OneInput
from attnflow.models.load import ModelLike
from attnflow.models.model import Model


@overload
def faithfulness(
    model: ModelLike,
    inputs: OneInput,
    scores: object,
    *,
    target: Targets = None,
    foil: Foils = None,
    metrics: Choices = DEFAULT_METRICS,
    replacement: int | str | None = None,
    bins: Sequence[float] = BINS,
    groups: Groups | None = None,
    target_of: str | None = None,
    position: int | None = None,
    batch_tokens: int | None = None,
) -> dict[str, float]: ...
@overload
def faithfulness(
    model: ModelLike,
    inputs: list[AnInput],
    scores: object,
    *,
    target: Targets = None,
    foil: Foils = None,
    metrics: Choices = DEFAULT_METRICS,
    replacement: int | str | None = None,
    bins: Sequence[float] = BINS,
    groups: Groups | None = None,
    target_of: str | None = None,
    position: int | None = None,
    batch_tokens: int | None = None,
) -> list[dict[str, float]]: ...
def faithfulness(
    model: ModelLike,
    inputs: object,
    scores: object,
    *,
    target: Targets = None,
    foil: Foils = None,
    metrics: Choices = DEFAULT_METRICS,
    replacement: int | str | None = None,
    bins: Sequence[float] = BINS,
    groups: Groups | None = None,
    target_of: str | None = None,
    position: int | None = None,
    batch_tokens: int | None = None,
) -> dict[str, float] | list[dict[str, float]]:
    """How much a prediction changes without the tokens of the highest scores, or with them alone.

    x is the input and n the number of its units, which are tokens or groups; f is the value of the
    target. x - k is x without the k units of the highest scores, x : k has only those; k(q) is q
    percent of n, rounded up; B is the set of bins.

    - comprehensiveness = mean over q in B of f(x) - f(x - k(q)). Higher is better.
    - sufficiency = mean over q in B of f(x) - f(x : k(q)). Lower is better.
    - log_odds = mean over q in B of log p(x - k(q)) - log p(x). Lower is better.
    - comprehensiveness@20 and similar: the same with the single bin 20.
    - deletion = the area under f(x - k) over k/n, k = 0..n, by trapezoids. Lower is better.
    - insertion = the same under f(x : k). Higher is better.
    - normalised_comprehensiveness, normalised_sufficiency = (v - worst) / (best - worst), where v
      is the metric, and worst and best are its values for the worst and the best order of the
      units: exact for up to 12 units, by beam search above. Higher is better; NaN where all
      orders are equal.

    With a foil, f is the logit of the target minus that of the foil, and log_odds is the mean of
    f(x - k(q)) - f(x): the logarithm of the odds of the target against the foil.

    Special tokens are never perturbed, nor is the token where the prediction is read (in a decoder
    the last one): without it the model would answer another question. Scores that are equal up to
    rounding are ordered as in the text; signed scores keep their sign.

    Parameters
    ----------
    model
        A `Model`, a name or folder as `load` takes it, or a Hugging Face model.
    inputs
        As in `blank_out`.
    scores
        One number per token, or per group: an array, an `Importance`, or a `TokenAttention`, of
        which the row of the explained position in the top layer is used. A list for a list of
        inputs.
    target, foil
        As in `blank_out`.
    metrics
        Names of metrics, or {name: function} with user-defined metrics, functions of a
        `PerturbationCurve` that return a number.
    replacement
        How tokens are taken away: "unknown" or "mask" put that token of the tokenizer in their
        place, "removal" deletes them, "attention" removes them from the attention mask; or a
        token, or its id. The default of `blank_out` if None. Each leaves the distribution of the
        training texts in its own way: compare two before you believe one.
    bins
        Percentages of the units.
    groups
        "words", or lists of positions: each group is taken away as a whole, and has one score. By
        default the groups of `scores`, if they have any.
    target_of
        The value of the target: "probability" (default), "log_probability" or "logit"; with a foil
        always the logit, from which that of the foil is subtracted.
    position
        As in `Model.predict`.
    batch_tokens
        The number of tokens per batch; the model's default if None.

    >>> from attnflow import blank_out, load
    >>> model, text = load("verb-number"), "the keys to the cabinet"
    >>> found = faithfulness(model, text, blank_out(model, text), metrics="comprehensiveness@20")
    >>> round(found["comprehensiveness@20"], 2)
    0.49
    """
    request = Measurement.read(metrics, bins, choose_value(target_of, contrasts=foil is not None))
    watched = read_watched(model, inputs, target, "faithfulness", foil)
    model, encoded = watched.model, watched.encoded
    way = read_replacement(model, replacement)
    places = [model.logit_position(value, position) for value in encoded]
    given = list_scores(scores, len(encoded)) if watched.several else [scores]
    ordered = []
    for number, (value, score) in enumerate(zip(encoded, given, strict=True)):
        of = f" of input {number}" if watched.several else ""
        ordered.append(order_scores(model, value, score, groups, position, of))
    intact = watched.watch(places, batch_tokens)
    inquiries = []
    for value, place, seen, (units, order) in zip(encoded, places, intact, ordered, strict=True):
        question = Question(value, place, seen.target, units, way, seen.foil)
        inquiries.append((question, measure_orders(question, [order], request)))
    found = Perturber(model, batch_tokens).answer(inquiries)
    return watched.unwrap([request.measure(measured.curves[0]) for measured in found])


# ---- scores --------------------------------------------------------------------------------------


def list_scores(scores: object, count: int) -> list[object]:
    """The scores of each of several inputs."""
    several = isinstance(scores, list | tuple) or getattr(scores, "ndim", 0) > 1
    given: list[object] = list(scores) if several else []  # type: ignore[call-overload]
    if len(given) != count:
        got = len(given) if several else type(scores).__name__
        raise OptionError(
            f"scores must be a list with one array per input, {count} here; got {got}"
        )
    return given


def order_scores(
    model: Model,
    encoded: Encoded,
    score: object,
    groups: Groups | None,
    position: int | None,
    of: str,
) -> tuple[tuple[Group, ...], Order]:
    """The units of an input that can be taken away, and their order by the scores.

    of: which input this is, for messages.
    """
    if groups is None:
        groups = getattr(score, "groups", None)
    units, places, total = list_perturbed(model, encoded, groups, position)
    if groups is None:
        check_tokens(score, encoded.tokens, f"scores{of}")
    if isinstance(score, TokenAttention):  # the row that explains the position
        only = score.positions[0] if len(score.positions) == 1 else None
        score = score.at(model.locate(encoded, position) if only is None else only)
    unit = "token" if groups is None else "group"
    values = read_token_row(score, total, f"scores{of}", f"one number per {unit}")
    if not np.isfinite(values).all():
        worst = values[~np.isfinite(values)][0]
        raise OptionError(f"scores{of} must be finite; got {worst}")
    if len(units) < 2:
        raise OptionError(
            f"an order needs at least two tokens or groups{of} that can be perturbed, besides"
            " special tokens and the one where the prediction is read;"
            f" got {len(units)} of {' '.join(encoded.tokens)!r}"
        )
    return units, order_units(values[list(places)])


def check_tokens(score: object, tokens: Sequence[str], what: str) -> None:
    """Refuse a result with the right number of tokens but of another text."""
    own = getattr(score, "tokens", None)
    if own is None or len(own) != len(tokens) or tuple(own) == tuple(tokens):
        return
    if tuple(own) == tuple(map(str, range(len(own)))):  # arrays without named tokens
        return
    place = next(place for place, name in enumerate(own) if name != tokens[place])
    raise OptionError(
        f"{what} must be of the same tokens as the input; got a result of {' '.join(own)[:60]!r},"
        f" whose token {place} is {own[place]!r} and not {tokens[place]!r}"
    )


# ---- curves --------------------------------------------------------------------------------------


def choose_value(target_of: str | None, *, contrasts: bool) -> str:
    """The value of the target to watch. contrasts: whether it has a foil."""
    if contrasts and target_of not in (None, "logit"):
        option = f"target_of={target_of!r}"
        raise OptionError(
            f"with a foil the difference of two logits is watched; got {option}: leave it out",
            options=[option],
        )
    return ("logit" if contrasts else "probability") if target_of is None else target_of


@dataclass(frozen=True)
class Measurement:
    """The metrics to measure of every order, their bins, and the value to watch."""

    metrics: dict[str, MetricFunction]
    bins: tuple[float, ...]
    value: int  # the column of `VALUES`

    @classmethod
    def read(cls, metrics: Choices, bins: object, target_of: object) -> "Measurement":
        """From the options of `faithfulness`, validated."""
        named = target_of.replace("-", "_") if isinstance(target_of, str) else target_of
        if named not in VALUES:
            option = f"target_of={target_of!r}"
            raise OptionError(
                f"unknown {option}; choose from {', '.join(VALUES)}", options=[option]
            )
        return cls(read_metrics(metrics), read_bins(bins), VALUES.index(named))

    def measure(self, curve: PerturbationCurve) -> dict[str, float]:
        """Every metric of one curve."""
        return {name: measure_curve(name, each, curve) for name, each in self.metrics.items()}

    def find_steps(self, size: int) -> tuple[list[int], list[int]]:
        """The steps that any metric needs: of deleted, and of kept units."""
        used = np.zeros((2, size + 1), bool)
        for metric in self.metrics.values():
            if isinstance(metric, Metric):
                used[int(metric.kept)] |= metric.weigh(size, self.bins) != 0
            else:
                used[:] = True  # a user-defined function may read any step
        return np.flatnonzero(used[0]).tolist(), np.flatnonzero(used[1]).tolist()

    def search(self, metric: Metric, size: int, best: bool) -> Search:
        """The search for the best order by a metric, or for the worst."""
        column = VALUES.index("log_probability") if metric.logarithm else self.value
        largest = best != metric.lower
        return Search(metric.weigh(size, self.bins), column, metric.kept, largest)


@dataclass(frozen=True, eq=False)
class Measured:
    """The curves of orders of one input, and those of the best orders found."""

    curves: list[PerturbationCurve]
    best: dict[str, PerturbationCurve]  # by metric


def measure_orders(
    question: Question, orders: Sequence[Order], request: Measurement, *, best: bool = False
) -> Inquiry[Measured]:
    """The curve of each order, and the best curve by each metric if `best` or normalised."""
    curves = yield from trace_orders(question, orders, request)
    limits: dict[str, tuple[float, float]] = {}
    winners: dict[str, PerturbationCurve] = {}
    for name, metric in request.metrics.items():
        if not isinstance(metric, Metric) or not (best or metric.normalised):
            continue
        plain = replace(metric, normalised=False)
        size = len(question.units)
        upper = yield from find_order(request.search(plain, size, best=True))
        tried = [*curves, *(yield from trace_orders(question, [upper], request))]
        # a beam may miss what one of the orders has found
        pick = min if metric.lower else max
        winners[name] = pick(tried, key=plain)
        if metric.normalised:
            lower = yield from find_order(request.search(plain, size, best=False))
            tried += yield from trace_orders(question, [lower], request)
            values = sorted(map(plain, tried), reverse=metric.lower)
            limits[name] = values[0], values[-1]
    return Measured(
        [replace(curve, limits=limits) for curve in curves],
        {name: replace(curve, limits=limits) for name, curve in winners.items()},
    )


def trace_orders(
    question: Question, orders: Sequence[Order], request: Measurement
) -> Inquiry[list[PerturbationCurve]]:
    """The curve of each order, at the steps that the metrics need."""
    size = len(question.units)
    deleted, kept = request.find_steps(size)
    asked: list[int] = []
    for order in orders:
        sets = list_sets(order)
        asked += [sets[step] for step in deleted]
        asked += [question.everything ^ sets[step] for step in kept]
    found = yield asked
    rows = found.reshape(len(orders), len(deleted) + len(kept), len(VALUES))
    logs = VALUES.index("log_probability")

    def place(values: Floats, steps: Sequence[int]) -> Floats:
        curve: Floats = np.full(size + 1, np.nan)
        curve[list(steps)] = values
        return curve

    return [
        PerturbationCurve(
            place(row[: len(deleted), request.value], deleted),
            place(row[len(deleted) :, request.value], kept),
            place(row[: len(deleted), logs], deleted),
            place(row[len(deleted) :, logs], kept),
            request.bins,
        )
        for row in rows
    ]
