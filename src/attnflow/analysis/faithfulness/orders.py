"""Orders of units: by their scores, at random, and the best and worst possible.

An order is good if a weighted sum over its steps, sum_k w_k g(S_k), is large (or small), where S_k
is the set of its first k units. Sets are bit masks: bit i is unit i.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from attnflow.analysis.faithfulness.perturb import Inquiry
from attnflow.analysis.statistics import round_scores
from attnflow.core.arrays import Floats

EXACT_UNITS = 12  # up to this number, all sets are run: at most 4,096
BEAM = 5  # the width of the beam for more units

Order = tuple[int, ...]


def order_units(scores: Floats) -> Order:
    """Units by score [unit], highest first; ties, but for rounding, in the order of the text.

    >>> order_units(np.array([0.2, 0.5, 0.2, 0.1 + 0.1]))
    (1, 0, 2, 3)
    """
    return tuple(np.argsort(-round_scores(scores), kind="stable").tolist())


def draw_orders(size: int, seeds: int) -> list[Order]:
    """Random orders of `size` units, one for each seed from 0."""
    return [tuple(np.random.default_rng(seed).permutation(size).tolist()) for seed in range(seeds)]


def list_sets(order: Sequence[int]) -> list[int]:
    """The sets of the first 0, 1, ..., n units.

    >>> list_sets((1, 0, 2))
    [0, 2, 3, 7]
    """
    sets = [0]
    for unit in order:
        sets.append(sets[-1] | 1 << unit)
    return sets


@dataclass(frozen=True)
class Search:
    """A search for the order whose weighted sum over steps is largest, or smallest.

    weights: [step]. value: the column of the values of a set. kept: whether the units of the set
    are kept, not taken away. largest: whether the largest sum is searched for.
    """

    weights: Floats
    value: int
    kept: bool
    largest: bool

    def ask(self, sets: Sequence[int]) -> list[int]:
        """The sets of units to take away, for the first units of orders."""
        everything = (1 << len(self.weights) - 1) - 1
        return [everything ^ units if self.kept else units for units in sets]


def find_order(search: Search) -> Inquiry[Order]:
    """The result of a search: exact for few units, by beam search for more."""
    size = len(search.weights) - 1
    found: Order = yield from (find_exact(search) if size <= EXACT_UNITS else find_by_beam(search))
    return found


def find_exact(search: Search) -> Inquiry[Order]:
    """Dynamic programming over all sets: the best path to a set extends one to a subset."""
    size = len(search.weights) - 1
    values = (yield search.ask(range(1 << size)))[:, search.value]
    sign = 1.0 if search.largest else -1.0
    sets = np.arange(1 << size)
    bits = 1 << np.arange(size)
    inside = (sets[:, None] & bits) > 0  # [set, unit]
    counts = inside.sum(axis=1)
    best = sign * search.weights[counts] * values  # [set]: the sum along the best path to it
    last: npt.NDArray[np.intp] = np.zeros(1 << size, dtype=np.intp)  # the unit that came last
    for count in range(1, size + 1):
        here = np.flatnonzero(counts == count)
        ways = np.where(inside[here], best[here[:, None] & ~bits], -np.inf)  # [set, unit]
        last[here] = ways.argmax(axis=1)
        best[here] += ways.max(axis=1)
    order: list[int] = []
    units = (1 << size) - 1
    while units:
        order.append(int(last[units]))
        units &= ~(1 << order[-1])
    return tuple(reversed(order))


def find_by_beam(search: Search) -> Inquiry[Order]:
    """Beam search over the first units of orders; ties are broken by the value of the last step."""
    size = len(search.weights) - 1
    sign = 1.0 if search.largest else -1.0
    # of orders with equal sums so far, prefer the one that moves the value more
    slope = float(np.sign(search.weights[1:-1].sum())) or 1.0
    beam: list[tuple[float, int, Order]] = [(0.0, 0, ())]
    for step in range(1, size + 1):
        ways: dict[int, tuple[float, Order]] = {}
        for total, units, order in beam:
            for unit in range(size):
                if units >> unit & 1:
                    continue
                longer = units | 1 << unit
                if longer not in ways or total > ways[longer][0]:
                    ways[longer] = (total, (*order, unit))
        values = (yield search.ask(list(ways)))[:, search.value]
        reached = [
            (total + sign * search.weights[step] * value, sign * slope * value, units, order)
            for value, (units, (total, order)) in zip(values.tolist(), ways.items(), strict=True)
        ]
        reached.sort(key=lambda way: way[:2], reverse=True)
        beam = [(total, units, order) for total, _, units, order in reached[:BEAM]]
    return beam[0][2]
