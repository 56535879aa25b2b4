"""A long text on the terminal, folded: a bar per sentence, turn or strong token."""

from dataclasses import replace

from rich.console import Console

from attnflow.analysis.explanation import Explanation
from attnflow.capturing.spans import shorten
from attnflow.show.terminal import print_table

SHOWN = 40  # sentences, turns or tokens


def print_segments(console: Console, explanation: Explanation, layer: int) -> None:
    """Print a bar per segment and method; per token where there are no segments."""
    normalizations = {result.normalize for result in explanation.results.values()}
    folds = bool(explanation.segments) and "receptive_field" not in normalizations
    rows = []
    for name in explanation.results:
        row = explanation.row(name, layer, by_segment=folds)
        rows.append(replace(row, method=name, tokens=tuple(map(shorten, row.tokens))))
    print_table(console, rows, SHOWN)
