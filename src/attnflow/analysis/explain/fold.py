"""`fold_rows`: the rows of an explanation by sentence, turn or segment, for long texts."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from attnflow.analysis.explain.explanation import Explanation, sum_segments
from attnflow.core.results import TokenAttention


def fold_rows(
    explanation: Explanation, layer: int, asides: Sequence[int]
) -> dict[str, TokenAttention]:
    """By method, the row [1, 1, segment] of the explained position in a layer.

    By token if there are no segments, or if values do not add up over them. asides: positions that
    shares of a long text leave out. With a graph nothing is left out: the flow to a turn is not the
    sum of its parts, and the tokens with the largest shares belong to no turn.
    """
    normalizations = {result.normalize for result in explanation.results.values()}
    folds = bool(explanation.segments) and "receptive_field" not in normalizations
    rows = {}
    for name in explanation.results:
        if explanation.graph is not None:
            row = explanation.row(name, layer, by_segment=folds)
        else:
            row = leave_out(explanation.row(name, layer), asides)
            row = sum_segments(row, explanation.segments) if folds else row
        rows[name] = row
    return rows


def leave_out(row: TokenAttention, asides: Sequence[int]) -> TokenAttention:
    """A row without some positions; shares are of the rest."""
    values = row.values.copy()
    values[..., asides] = 0.0
    if row.normalize == "sum":
        sums = values.sum(axis=-1, keepdims=True)
        np.divide(values, sums, out=values, where=sums > 0)
    return replace(row, values=values)
