"""A long text on the terminal, folded: a bar per sentence, turn or strong token."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from rich.console import Console

from attnflow.analysis.explanation import Explanation, sum_segments
from attnflow.capturing.spans import shorten
from attnflow.core.results import TokenAttention
from attnflow.show.terminal import print_table

SHOWN = 40  # sentences, turns or tokens


def print_segments(
    console: Console, explanation: Explanation, layer: int, asides: Sequence[int]
) -> None:
    """Print a bar per segment and method; per token where there are no segments.

    asides: positions that have no part in the shares of a long text. Of a chat with a graph, flow
    to a turn is no sum of parts, and the marks that hold most belong to no turn.
    """
    normalizations = {result.normalize for result in explanation.results.values()}
    folds = bool(explanation.segments) and "receptive_field" not in normalizations
    rows = []
    for name in explanation.results:
        if explanation.graph is not None:
            row = explanation.row(name, layer, by_segment=folds)
        else:
            row = leave_out(explanation.row(name, layer), asides)
            row = sum_segments(row, explanation.segments) if folds else row
        rows.append(replace(row, method=name, tokens=tuple(map(shorten, row.tokens))))
    print_table(console, rows, SHOWN)


def leave_out(row: TokenAttention, asides: Sequence[int]) -> TokenAttention:
    """A row without some positions; shares are of the rest."""
    values = row.values.copy()
    values[..., asides] = 0.0
    if row.normalize == "sum":
        sums = values.sum(axis=-1, keepdims=True)
        np.divide(values, sums, out=values, where=sums > 0)
    return replace(row, values=values)
