"""`plausibility`: do scores agree with the tokens that people marked as the reason?"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from attnflow.analysis.orders import order_units
from attnflow.analysis.statistics import round_scores
from attnflow.core.arrays import Floats, to_array
from attnflow.errors import OptionError, WeightsError

PLAUSIBILITY = ("token_f1", "iou", "auprc")
Marks = npt.NDArray[np.bool_]


def plausibility(scores: Any, rationale: Any) -> dict[str, float]:
    """How well scores find the tokens of a rationale, which somebody marked by hand.

    R are the marked tokens, and T the |R| tokens of the highest scores, ties in the order of the
    text.

    - token_f1 = 2 |T and R| / (|T| + |R|)
    - iou = |T and R| / |T or R|
    - auprc = the area under precision over recall, by trapezoids, over all thresholds of the
      scores; equal scores are above a threshold together.

    All are NaN if no token is marked, and 1 at best. Leave special tokens out of both.

    Parameters
    ----------
    scores
        [token]: an array, or an `Importance`.
    rationale
        [token]: 1 or True where a token is marked, else 0.

    >>> plausibility([0.1, 0.7, 0.2], [0, 1, 1])
    {'token_f1': 1.0, 'iou': 1.0, 'auprc': 1.0}
    """
    try:
        values = to_array(scores, "scores")[0].astype(np.float64)
    except WeightsError as error:
        raise OptionError(str(error)) from error
    if values.ndim != 1 or not np.isfinite(values).all():
        raise OptionError(
            "scores must be one finite number per token;"
            f" got {'shape ' + str(values.shape) if values.ndim != 1 else 'some that are not'}"
        )
    marks = read_rationale(rationale, len(values), "rationale")
    return dict(zip(PLAUSIBILITY, measure_plausibility(values, marks), strict=True))


def read_rationale(rationale: Any, count: int, what: str) -> Marks:
    """[token]: which tokens are marked, checked."""
    try:
        values = to_array(rationale, what)[0]
    except WeightsError as error:
        raise OptionError(str(error)) from error
    if values.shape != (count,):
        raise OptionError(
            f"{what} must be 0 or 1 per token, {count} here; got shape {values.shape}"
        )
    if not np.isin(values, (0, 1)).all():
        worst = values[~np.isin(values, (0, 1))][0]
        raise OptionError(f"{what} must be 0 or 1 per token; got {worst:g}")
    return values.astype(bool)


def read_rationales(rationales: Any, counts: Sequence[int]) -> list[Marks] | None:
    """One rationale per example, of so many tokens each; None if none are given."""
    if rationales is None:
        return None
    if not hasattr(rationales, "__getitem__") or len(rationales) != len(counts):
        got = len(rationales) if hasattr(rationales, "__len__") else type(rationales).__name__
        raise OptionError(
            f"rationales must be a list with one per example, {len(counts)} here; got {got}"
        )
    return [
        read_rationale(rationales[place], count, f"the rationale of example {place + 1}")
        for place, count in enumerate(counts)
    ]


def measure_plausibility(scores: Floats, marks: Marks) -> tuple[float, float, float]:
    """(token F1, IoU, AUPRC) of scores [token]; NaN without a mark, or without a score."""
    marked = int(marks.sum())
    if not marked or not np.isfinite(scores).all():
        return (float("nan"),) * 3
    chosen = list(order_units(scores))[:marked]
    shared = int(marks[chosen].sum())
    return shared / marked, shared / (2 * marked - shared), measure_area(scores, marks)


def measure_area(scores: Floats, marks: Marks) -> float:
    """The area under precision over recall, from precision 1 at recall 0."""
    rounded = round_scores(scores)
    order = np.argsort(-rounded, kind="stable")
    hits = np.cumsum(marks[order])  # of the tokens so far
    ends = np.flatnonzero(np.append(np.diff(rounded[order]) != 0, True))  # of runs of ties
    recall = np.concatenate([[0.0], hits[ends] / hits[-1]])
    precision = np.concatenate([[1.0], hits[ends] / (ends + 1)])
    return float(np.trapezoid(precision, recall))
