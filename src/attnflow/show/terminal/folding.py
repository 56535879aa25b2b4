"""A long text on the terminal, folded: a bar per sentence, turn or strong token."""

from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console

from attnflow.analysis.explain.explanation import Explanation
from attnflow.analysis.explain.fold import fold_rows
from attnflow.core.text import shorten
from attnflow.show.terminal.tables import print_table

SHOWN_UNITS = 40  # sentences, turns or tokens


def print_segments(
    console: Console, explanation: Explanation, layer: int, asides: Sequence[int]
) -> None:
    """Print a bar per segment and method; per token where there are no segments.

    asides: positions that have no part in the shares of a long text.
    """
    rows = fold_rows(explanation, layer, asides)
    named = [
        replace(row, method=name, tokens=tuple(map(shorten, row.tokens)))
        for name, row in rows.items()
    ]
    print_table(console, named, SHOWN_UNITS)
