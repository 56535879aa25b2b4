"""`faithfulness`: does the prediction change as the scores say, when tokens are taken away?"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import numpy as np

from attnflow.analysis.metrics import (
    BINS,
    DEFAULTS,
    Metric,
    MetricFunction,
    PerturbationCurve,
    measure_curve,
    read_bins,
    read_metrics,
)
from attnflow.analysis.orders import Order, Search, find_order, list_sets, order_units
from attnflow.analysis.perturbing import (
    VALUES,
    Inquiry,
    Perturber,
    Question,
    list_perturbed,
    read_replacement,
)
from attnflow.analysis.pipeline import open_model
from attnflow.analysis.watching import Targets, Variant, prepare, watch
from attnflow.core.arrays import Floats, to_array
from attnflow.core.groups import Groups
from attnflow.core.results import TokenAttention
from attnflow.errors import OptionError, WeightsError
from attnflow.models.inputs import AnInput, OneInput


@overload
def faithfulness(
    model: Any,
    inputs: OneInput,
    scores: Any,
    *,
    target: Targets = None,
    metrics: Any = DEFAULTS,
    replacement: int | str | None = None,
    bins: Sequence[float] = BINS,
    groups: Groups | None = None,
    target_of: str = "probability",
    position: int | None = None,
    batch_tokens: int | None = None,
) -> dict[str, float]: ...
@overload
def faithfulness(
    model: Any,
    inputs: list[AnInput],
    scores: Any,
    *,
    target: Targets = None,
    metrics: Any = DEFAULTS,
    replacement: int | str | None = None,
    bins: Sequence[float] = BINS,
    groups: Groups | None = None,
    target_of: str = "probability",
    position: int | None = None,
    batch_tokens: int | None = None,
) -> list[dict[str, float]]: ...
def faithfulness(
    model: Any,
    inputs: Any,
    scores: Any,
    *,
    target: Targets = None,
    metrics: Any = DEFAULTS,
    replacement: int | str | None = None,
    bins: Sequence[float] = BINS,
    groups: Groups | None = None,
    target_of: str = "probability",
    position: int | None = None,
    batch_tokens: int | None = None,
) -> dict[str, float] | list[dict[str, float]]:
    """How much a prediction changes when the tokens with the highest scores go, or stay alone.

    x is the input and n the number of its units, which are tokens or groups; f is the value of the
    target. x - k is x without the k units of the highest scores, x : k has those alone; k(q) is q
    percent of n, rounded up; B are the bins.

    - comprehensiveness = mean over q in B of f(x) - f(x - k(q)). Higher is better.
    - sufficiency = mean over q in B of f(x) - f(x : k(q)). Lower is better.
    - log_odds = mean over q in B of log p(x - k(q)) - log p(x). Lower is better.
    - comprehensiveness@20 and the like: the same with the one bin 20.
    - deletion = the area under f(x - k) over k/n, k = 0..n, by trapezoids. Lower is better.
    - insertion = the same under f(x : k). Higher is better.
    - normalised_comprehensiveness, normalised_sufficiency = (v - worst) / (best - worst), v being
      the metric, and worst and best its values for the worst and the best of all orders of the
      units: exact for up to 12 units, by a beam search above. Higher is better; NaN where all
      orders are equal.

    Special tokens are never perturbed, nor is the token where the prediction is read (of a decoder
    the last one): without it the model would answer another question. Equal scores, but for
    rounding, count in the order of the text; signed scores count with their sign.

    Parameters
    ----------
    model
        A `Model`, a name or folder as `load` takes it, or a Hugging Face model.
    inputs
        A text, a pair of texts, or token ids; or a list of them, which gives a list.
    scores
        One number per token, or per group: an array, an `Importance`, or a `TokenAttention`, of
        which the explained position's row in the top layer counts. For a list of inputs a list.
    target
        As in `blank_out`.
    metrics
        Names of metrics, or {name: function} with metrics of your own, functions of a
        `PerturbationCurve` that return a number.
    replacement
        What is done to tokens that are taken away: "unknown" or "mask" put that token of the
        tokenizer in their place, "removal" deletes them, "attention" takes them out of the
        attention mask; or a token, or its id. As `blank_out` chooses if None. Each leaves the
        texts that the model was trained on in its own way: compare two before you believe one.
    bins
        Percentages of the units.
    groups
        "words", or lists of positions: each group is taken away as a whole, and has one score. The
        groups of `scores`, if they have some, by default.
    target_of
        The value of the target: "probability", "log_probability" or "logit".
    position
        As in `Model.predict`.
    batch_tokens
        How many tokens run through the model together; the model's own number if None.

    >>> from attnflow import blank_out, load
    >>> model, text = load("verb-number"), "the keys to the cabinet"
    >>> found = faithfulness(model, text, blank_out(model, text), metrics="comprehensiveness@20")
    >>> round(found["comprehensiveness@20"], 2)
    0.49
    """
    request = Measurement.read(metrics, bins, target_of)
    model, many, encoded, targets = prepare(open_model(model), inputs, target, "faithfulness")
    way = read_replacement(model, replacement)
    places = [model.logit_position(value, position) for value in encoded]
    given = list_scores(scores, len(encoded)) if many else [scores]
    chosen = [
        list_perturbed(model, value, read_own_groups(groups, score), position)
        for value, score in zip(encoded, given, strict=True)
    ]
    orders = []
    for number, (value, score, (units, at, count)) in enumerate(
        zip(encoded, given, chosen, strict=True)
    ):
        of = f" of input {number}" if many else ""
        grouped = read_own_groups(groups, score) is not None
        if not grouped:
            check_tokens(score, value.tokens, f"scores{of}")
        row = pick_row(score, model.locate(value, position))
        checked = check_scores(row, count, of, "group" if grouped else "token")
        if len(units) < 2:
            raise OptionError(
                f"an order needs at least two tokens or groups{of} that can be perturbed, besides"
                " special tokens and the one where the prediction is read;"
                f" got {len(units)} of {' '.join(value.tokens)!r}"
            )
        orders.append(order_units(checked[list(at)]))
    if None in targets:
        watched = watch(model, list(map(Variant, encoded, places, targets)), batch_tokens)
        targets = [number for number, _ in watched]
    questions = [
        Question(value, place, int(aim or 0), units, way)
        for value, place, aim, (units, _, _) in zip(encoded, places, targets, chosen, strict=True)
    ]
    found = Perturber(model, batch_tokens).answer(
        [
            (question, measure_orders(question, [order], request))
            for question, order in zip(questions, orders, strict=True)
        ]
    )
    results = [request.measure(measured.curves[0]) for measured in found]
    return results if many else results[0]


# ---- scores --------------------------------------------------------------------------------------


def list_scores(scores: Any, count: int) -> list[Any]:
    """The scores of each of several inputs."""
    several = isinstance(scores, list | tuple) or getattr(scores, "ndim", 0) > 1
    if not several or len(scores) != count:
        got = len(scores) if several else type(scores).__name__
        raise OptionError(
            f"scores must be a list with one array per input, {count} here; got {got}"
        )
    return list(scores)


def read_own_groups(groups: Groups | None, score: Any) -> Groups | None:
    """The groups that were asked for, else those of the scores, if they have some."""
    return getattr(score, "groups", None) if groups is None else groups


def pick_row(score: Any, position: int) -> Any:
    """The row of token attention that explains a position; other scores as they are."""
    if not isinstance(score, TokenAttention):
        return score
    return score.at(score.positions[0] if len(score.positions) == 1 else position)


def check_tokens(score: Any, tokens: Sequence[str], what: str) -> None:
    """Refuse a result that is about other tokens, however many: it is of another text."""
    own = getattr(score, "tokens", None)
    if own is None or len(own) != len(tokens) or tuple(own) == tuple(tokens):
        return
    if tuple(own) == tuple(map(str, range(len(own)))):  # of arrays, whose tokens nobody named
        return
    place = next(place for place, name in enumerate(own) if name != tokens[place])
    raise OptionError(
        f"{what} must be of the same tokens as the input; got a result of {' '.join(own)[:60]!r},"
        f" whose token {place} is {own[place]!r} and not {tokens[place]!r}"
    )


def check_scores(score: Any, count: int, of: str, what: str) -> Floats:
    """[token] or [group]: finite numbers, one for each."""
    try:
        values = to_array(score, "scores")[0].astype(np.float64)
    except WeightsError as error:
        raise OptionError(str(error)) from error
    if values.shape != (count,):
        raise OptionError(
            f"scores{of} must be one number per {what}, {count} here; got shape {values.shape}"
        )
    if not np.isfinite(values).all():
        worst = values[~np.isfinite(values)][0]
        raise OptionError(f"scores{of} must be finite; got {worst}")
    return values


# ---- curves --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measurement:
    """What is measured of every order: metrics, over bins, of a value of the target."""

    metrics: dict[str, Metric | MetricFunction]
    bins: tuple[float, ...]
    value: int  # the column of `VALUES`

    @classmethod
    def read(cls, metrics: Any, bins: Any, target_of: Any) -> "Measurement":
        """From the options of a user, checked."""
        named = target_of.replace("-", "_") if isinstance(target_of, str) else target_of
        if named not in VALUES:
            raise OptionError(f"unknown target_of={target_of!r}; choose from {', '.join(VALUES)}")
        return cls(read_metrics(metrics), read_bins(bins), VALUES.index(named))

    def measure(self, curve: PerturbationCurve) -> dict[str, float]:
        """Every metric of one curve."""
        return {name: measure_curve(name, each, curve) for name, each in self.metrics.items()}

    def find_steps(self, size: int) -> tuple[list[int], list[int]]:
        """The steps that some metric needs, of what is deleted and of what is kept."""
        used = np.zeros((2, size + 1), bool)
        for metric in self.metrics.values():
            if isinstance(metric, Metric):
                used[int(metric.kept)] |= metric.weigh(size, self.bins) != 0
            else:
                used[:] = True  # a function of the user's may look at any
        return np.flatnonzero(used[0]).tolist(), np.flatnonzero(used[1]).tolist()

    def search(self, metric: Metric, size: int, best: bool) -> Search:
        """The search for the best order by a metric, or for the worst."""
        column = VALUES.index("log_probability") if metric.logarithm else self.value
        largest = best != metric.lower
        return Search(metric.weigh(size, self.bins), column, metric.kept, largest)


@dataclass(frozen=True, eq=False)
class Measured:
    """The curves of some orders of one input, and those of the best orders, if asked for."""

    curves: list[PerturbationCurve]
    best: dict[str, PerturbationCurve]  # by metric


def measure_orders(
    question: Question, orders: Sequence[Order], request: Measurement, *, best: bool = False
) -> Inquiry[Measured]:
    """The curve of each order; with best, also that of the best order found for each metric."""
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
