"""The yardsticks of `evaluate` that perturb inputs, for all methods and the orders beside them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from attnflow.analysis.faithfulness.faithfulness import Measured, Measurement, measure_orders
from attnflow.analysis.faithfulness.metrics import Metric, PerturbationCurve
from attnflow.analysis.faithfulness.orders import Order, draw_orders, order_units
from attnflow.analysis.faithfulness.perturb import (
    Inquiry,
    Perturber,
    Question,
    Replacement,
    list_perturbed,
    read_replacement,
)
from attnflow.analysis.importance.watch import check_scorable
from attnflow.core.arrays import Floats
from attnflow.errors import OptionError
from attnflow.models.encoded import Encoded
from attnflow.models.model import Model

SEEDS = 10  # of random orders
RANDOM, BEST = "random order", "best found"
BASELINES = (RANDOM, BEST)

# of one method: by layer, the orders whose mean counts: one, none if undefined, or random ones
LayerOrders = list[list[Order]]


@dataclass(frozen=True, eq=False)
class Faithful:
    """How faithful the methods are on one example, under one replacement.

    Parameters
    ----------
    replacement
        How tokens were taken away.
    values
        By metric, then by method: [layer]; NaN where it is undefined. Scorers, `random order` and,
        if it was asked for, `best found` have one number.
    curves
        By method: [layer, side, step], the value of the target, or its difference to that of the
        foil, as tokens are deleted (side 0), or as only they are kept (side 1); NaN at steps that
        no metric needs.
    """

    replacement: str
    values: dict[str, dict[str, Floats]]
    curves: dict[str, Floats]


@dataclass(frozen=True)
class Subject:
    """One example to perturb."""

    encoded: Encoded
    position: int  # where the prediction is read
    explained: int | None  # the position that was asked for
    target: int
    foil: int | None = None
    removed: tuple[int, ...] = ()  # positions that the graph was made without; they stay


class MeasuredOrder(NamedTuple):
    """The metrics and curves of one order, or means over several."""

    numbers: Floats  # [metric]
    sides: Floats  # [side, step]: deleted and kept


@dataclass(frozen=True)
class Yardsticks:
    """Metrics of faithfulness under some replacements."""

    model: Model
    request: Measurement
    replacements: tuple[Replacement, ...]
    best: bool = False  # whether the best order is searched, for a row of its own

    @classmethod
    def read(
        cls,
        model: Model,
        request: Measurement | None,
        replacement: object,
        *,
        best: bool = False,
    ) -> "Yardsticks | None":
        """The yardsticks for a model, under one or several replacements; None without metrics."""
        if request is None:
            return None
        check_scorable(model, "faithfulness")
        given = list(replacement) if isinstance(replacement, list | tuple) else [replacement]
        ways = [read_replacement(model, each) for each in given]
        names = {way.name for way in ways}
        if not names or len(names) < len(ways):
            raise OptionError(f"replacement must be one or several, each once; got {replacement!r}")
        return cls(model, request, tuple(ways), best)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the replacements."""
        return tuple(way.name for way in self.replacements)

    def measure(
        self,
        subjects: Sequence[Subject],
        scores: Mapping[str, Sequence[Floats]],
        batch_tokens: int | None = None,
    ) -> list[tuple[Faithful, ...]]:
        """The faithfulness of each example under each replacement, all of them batched together.

        scores: by method, for each example [layer, token].
        """
        inquiries = []
        for number, subject in enumerate(subjects):
            units, places, _ = list_perturbed(
                self.model, subject.encoded, None, subject.explained, subject.removed
            )
            orders = {
                name: [order_row(row[list(places)]) for row in rows[number]]
                for name, rows in scores.items()
            }
            for way in self.replacements:
                question = Question(
                    subject.encoded, subject.position, subject.target, units, way, subject.foil
                )
                inquiries.append((question, self.measure_example(question, orders)))
        found = Perturber(self.model, batch_tokens).answer(inquiries)
        ways = len(self.replacements)
        return [tuple(found[place : place + ways]) for place in range(0, len(found), ways)]

    def measure_example(
        self, question: Question, orders: Mapping[str, LayerOrders]
    ) -> Inquiry[Faithful]:
        """Every metric of every order of one example, and of the orders to compare them with.

        Everything is NaN for an example with fewer than two units: there is nothing to order.
        """
        size = len(question.units)
        measured, known = Measured([], {}), dict[Order, MeasuredOrder]()
        drawn = draw_orders(size, SEEDS)
        if size > 1:
            given = [order for layers in orders.values() for layer in layers for order in layer]
            different = list(dict.fromkeys([*drawn, *given]))
            measured = yield from measure_orders(question, different, self.request, best=self.best)
            for order, curve in zip(different, measured.curves, strict=True):
                numbers = np.array(list(self.request.measure(curve).values()))
                known[order] = MeasuredOrder(numbers, join_sides(curve))
        empty = MeasuredOrder(
            np.full(len(self.request.metrics), np.nan), np.full((2, size + 1), np.nan)
        )
        rows = {  # by method and layer
            name: [
                average_orders([known[order] for order in layer if order in known], empty)
                for layer in layers
            ]
            for name, layers in [*orders.items(), (RANDOM, [drawn])]
        }
        if self.best:
            rows[BEST] = [self.join_best(measured.best, empty)]
        values = {
            metric: {
                name: np.array([layer.numbers[column] for layer in layers])
                for name, layers in rows.items()
            }
            for column, metric in enumerate(self.request.metrics)
        }
        curves = {name: np.stack([layer.sides for layer in rows[name]]) for name in rows}
        return Faithful(question.replacement.name, values, curves)

    def join_best(
        self, best: Mapping[str, PerturbationCurve], empty: MeasuredOrder
    ) -> MeasuredOrder:
        """Each metric of its own best order; each side by the first metric that reads it."""
        numbers, sides = empty.numbers.copy(), empty.sides.copy()
        for column, name in reversed(list(enumerate(self.request.metrics))):
            metric = self.request.metrics[name]
            if name in best and isinstance(metric, Metric):
                numbers[column] = metric(best[name])
                sides[int(metric.kept)] = join_sides(best[name])[int(metric.kept)]
        return MeasuredOrder(numbers, sides)


def check_best(best: bool, request: Measurement | None) -> None:
    """Refuse the row of the best order where no metric is measured."""
    if best and request is None:
        raise OptionError(
            "best adds a row to the metrics of faithfulness; got best=True without one:"
            " name one, as faithfulness=['comprehensiveness'], or leave it out",
            options=["best=True"],
        )


def order_row(scores: Floats) -> list[Order]:
    """The order of the units by their scores, alone; none if a score is not finite."""
    return [order_units(scores)] if np.isfinite(scores).all() else []


def average_orders(orders: Sequence[MeasuredOrder], empty: MeasuredOrder) -> MeasuredOrder:
    """The means over orders, of each metric over those where it is defined."""
    if not orders:
        return empty
    numbers, sides = (np.array(parts) for parts in zip(*orders, strict=True))
    counts = (~np.isnan(numbers)).sum(axis=0)
    with np.errstate(invalid="ignore"):
        means = np.nansum(numbers, axis=0) / counts
    return MeasuredOrder(means, sides.mean(axis=0))


def join_sides(curve: PerturbationCurve) -> Floats:
    """[side, step]: deleted and kept."""
    return np.stack([curve.deleted, curve.kept])
