"""`plausibility`: do scores agree with the tokens that annotators marked as the reason?"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from attnflow.analysis.faithfulness.orders import order_units
from attnflow.analysis.statistics import round_scores
from attnflow.core.arrays import Floats, to_array
from attnflow.errors import OptionError, WeightsError

Marks = npt.NDArray[np.bool_]


class Plausibility(NamedTuple):
    """The measures of plausibility of one ranking."""

    token_f1: float
    iou: float
    auprc: float


PLAUSIBILITY = Plausibility._fields


def plausibility(scores: object, rationale: object) -> dict[str, float]:
    """How well scores find the tokens of a rationale, which an annotator marked.

    R is the set of marked tokens, and T that of the |R| tokens with the highest scores, ties in
    the order of the text.

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
    values = read_array(scores, "scores")
    if values.ndim != 1 or not np.isfinite(values).all():
        raise OptionError(
            "scores must be one finite number per token;"
            f" got {'shape ' + str(values.shape) if values.ndim != 1 else 'some that are not'}"
        )
    marks = read_rationale(rationale, len(values), "rationale")
    return measure_plausibility(values, marks)._asdict()


def read_array(values: object, what: str) -> Floats:
    """An option that is an array of numbers, in float64."""
    try:
        return to_array(values, what)[0].astype(np.float64)
    except WeightsError as error:
        raise OptionError(str(error)) from error


def read_token_row(
    values: object, count: int, what: str, rule: str = "one number per token"
) -> Floats:
    """An option that is an array with one number per token, or another unit."""
    row = read_array(values, what)
    if row.shape != (count,):
        raise OptionError(f"{what} must be {rule}, {count} here; got shape {row.shape}")
    return row


def read_rationale(rationale: object, count: int, what: str) -> Marks:
    """[token]: which tokens are marked, checked."""
    values = read_token_row(rationale, count, what, "0 or 1 per token")
    if not np.isin(values, (0, 1)).all():
        worst = values[~np.isin(values, (0, 1))][0]
        raise OptionError(f"{what} must be 0 or 1 per token; got {worst:g}")
    return values.astype(bool)


def read_rationales(
    rationales: Sequence[object] | None, counts: Sequence[int]
) -> list[Marks] | None:
    """One rationale per example, each with a mark per token; None if none are given."""
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


def measure_plausibility(scores: Floats, marks: Marks) -> Plausibility:
    """The measures of scores [token]; NaN if no token is marked, or a score is not finite."""
    marked = int(marks.sum())
    if not marked or not np.isfinite(scores).all():
        return Plausibility(float("nan"), float("nan"), float("nan"))
    chosen = list(order_units(scores))[:marked]
    shared = int(marks[chosen].sum())
    area = measure_area(scores, marks)
    return Plausibility(shared / marked, shared / (2 * marked - shared), area)


def measure_area(scores: Floats, marks: Marks) -> float:
    """The area under precision over recall, from precision 1 at recall 0."""
    rounded = round_scores(scores)
    order = np.argsort(-rounded, kind="stable")
    hits = np.cumsum(marks[order])  # of the tokens so far
    ends = np.flatnonzero(np.append(np.diff(rounded[order]) != 0, True))  # of runs of ties
    recall = np.concatenate([[0.0], hits[ends] / hits[-1]])
    precision = np.concatenate([[1.0], hits[ends] / (ends + 1)])
    return float(np.trapezoid(precision, recall))
