"""What `evaluate` measures by perturbation: every method, random orders, and the best one found."""

from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnflow.analysis.measuring import Measured, Measurement, measure_orders
from attnflow.analysis.metrics import BINS, Metric, PerturbationCurve
from attnflow.analysis.orders import Order, draw_orders, order_units
from attnflow.analysis.perturbing import (
    Inquiry,
    Perturber,
    Question,
    Replacement,
    list_perturbed,
    read_replacement,
)
from attnflow.analysis.watching import check_scorable
from attnflow.core.arrays import Floats
from attnflow.errors import OptionError
from attnflow.models.inputs import Encoded
from attnflow.models.model import Model

SEEDS = 10  # of random orders
RANDOM, BEST = "random order", "best found"
BASELINES = (RANDOM, BEST)

Orders = list[Order | None]  # of one method: one per layer; None where there is none


@dataclass(frozen=True, eq=False)
class Faithful:
    """How faithful the methods are on one example, under one replacement.

    Parameters
    ----------
    replacement
        What was done to tokens that were taken away.
    values
        By metric, then by method: [layer]; NaN where it is undefined. Scorers, `random order` and
        `best found` have one number.
    curves
        By method: [layer, side, step], the value of the target as tokens are deleted (side 0), or
        as they alone are kept (side 1); NaN at steps that no metric needs.
    """

    replacement: str
    values: dict[str, dict[str, Floats]]
    curves: dict[str, Floats]


@dataclass(frozen=True)
class Subject:
    """One example as it is perturbed."""

    encoded: Encoded
    position: int  # where the prediction is read
    explained: int | None  # the position that was asked for
    target: int
    removed: tuple[int, ...] = ()  # positions that the graph was made without; they stay


@dataclass(frozen=True)
class Yardsticks:
    """Metrics of faithfulness under some replacements."""

    model: Model
    request: Measurement
    replacements: tuple[Replacement, ...]

    @classmethod
    def read(
        cls, model: Model, metrics: Any, replacement: Any, target_of: str
    ) -> "Yardsticks | None":
        """From the options of a user, checked; None if no metric is asked for."""
        if metrics is None or (isinstance(metrics, Sized) and not len(metrics)):
            return None
        request = Measurement.read(metrics, BINS, target_of)
        check_scorable(model, "faithfulness")
        several = isinstance(replacement, list | tuple)
        ways = [
            read_replacement(model, each) for each in (replacement if several else [replacement])
        ]
        names = {way.name for way in ways}
        if not names or len(names) < len(ways):
            raise OptionError(f"replacement must be one or several, each once; got {replacement!r}")
        return cls(model, request, tuple(ways))

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
        """What each example gives under each replacement, all of them run together.

        scores: by method, for each example [layer, token].
        """
        jobs: list[tuple[Question, dict[str, Orders]]] = []
        for place, subject in enumerate(subjects):
            units, at, _ = list_perturbed(
                self.model, subject.encoded, None, subject.explained, subject.removed
            )
            orders = {
                name: [order_row(row[list(at)]) for row in rows[place]]
                for name, rows in scores.items()
            }
            jobs += [
                (Question(subject.encoded, subject.position, subject.target, units, way), orders)
                for way in self.replacements
            ]
        found = Perturber(self.model, batch_tokens).answer(
            [(question, self.ask(question, orders)) for question, orders in jobs]
        )
        ways = len(self.replacements)
        return [tuple(found[place : place + ways]) for place in range(0, len(found), ways)]

    def ask(self, question: Question, orders: Mapping[str, Orders]) -> Inquiry[Faithful]:
        """Every metric of every order of one example, and of the orders to compare with."""
        size = len(question.units)
        if size < 2:  # nothing to order
            return self.tell_undefined(question, orders)
        drawn = draw_orders(size, SEEDS)
        known = [order for rows in orders.values() for order in rows if order is not None]
        different = list(dict.fromkeys([*drawn, *known]))
        measured: Measured = yield from measure_orders(question, different, self.request, best=True)
        curves = dict(zip(different, measured.curves, strict=True))
        numbers = {order: self.request.measure(curve) for order, curve in curves.items()}
        rows: dict[str, list[list[dict[str, float]]]] = {  # by method and layer, to take means of
            name: [[] if order is None else [numbers[order]] for order in layers]
            for name, layers in orders.items()
        }
        rows[RANDOM] = [[numbers[order] for order in drawn]]
        best = {name: self.request.measure(curve)[name] for name, curve in measured.best.items()}
        rows[BEST] = [[dict.fromkeys(self.request.metrics, np.nan) | best]]
        values = {
            metric: {
                name: np.array([take_mean([each[metric] for each in layer]) for layer in layers])
                for name, layers in rows.items()
            }
            for metric in self.request.metrics
        }
        drawings = {
            name: np.stack(
                [join_sides(None if order is None else curves[order], size) for order in layers]
            )
            for name, layers in orders.items()
        }
        drawings[RANDOM] = np.mean([[join_sides(curves[order], size)] for order in drawn], axis=0)
        drawings[BEST] = self.join_best(measured.best, size)[None]
        return Faithful(question.replacement.name, values, drawings)

    def tell_undefined(self, question: Question, orders: Mapping[str, Orders]) -> Faithful:
        """What an example gives that has nothing to order."""
        counts = {name: len(rows) for name, rows in orders.items()} | dict.fromkeys(BASELINES, 1)
        missing = {name: np.full(count, np.nan) for name, count in counts.items()}
        size = len(question.units)
        curves = {name: np.full((count, 2, size + 1), np.nan) for name, count in counts.items()}
        return Faithful(
            question.replacement.name, dict.fromkeys(self.request.metrics, missing), curves
        )

    def join_best(self, best: Mapping[str, PerturbationCurve], size: int) -> Floats:
        """[side, step]: the curve of the best order, by the first metric of either side."""
        sides: Floats = np.full((2, size + 1), np.nan)
        for name, curve in reversed(list(best.items())):
            metric = self.request.metrics[name]
            side = int(isinstance(metric, Metric) and metric.kept)
            sides[side] = join_sides(curve, size)[side]
        return sides


def order_row(scores: Floats) -> Order | None:
    """The order of the units by their scores; None if a score is not a number."""
    return order_units(scores) if np.isfinite(scores).all() else None


def take_mean(values: Sequence[float]) -> float:
    """The mean of what is defined."""
    known = [value for value in values if not np.isnan(value)]
    return float(np.mean(known)) if known else float("nan")


def join_sides(curve: PerturbationCurve | None, size: int) -> Floats:
    """[side, step]: deleted and kept."""
    if curve is None:
        return np.full((2, size + 1), np.nan)
    return np.stack([curve.deleted, curve.kept])
