"""Heat maps in HTML for notebooks: of a matrix, and of the weights of an `Attention`."""

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from attnflow.core.formatting import FAINT, TABLE, format_number
from attnflow.core.provenance import Source
from attnflow.core.text import show_token
from attnflow.errors import printable

if TYPE_CHECKING:
    from attnflow.core.attention import Attention

VIEW_SIDE = 24  # rows and columns of a heat map in a notebook
VIEW_NAME = 16  # characters of a token beside it
UPRIGHT = "writing-mode:vertical-rl;transform:rotate(180deg);text-align:left;font-weight:normal"


def format_attention(attention: "Attention") -> str:
    """A heat map of the top layer's weights, averaged over heads, with a caption."""
    side = slice(0, VIEW_SIDE)
    weights = attention.weights[-1, :, side, side].mean(axis=0, dtype=np.float64)  # [query, key]
    tokens = attention.tokens
    if tokens is None:
        tokens = tuple(map(str, range(attention.size)))
    fused = "" if attention.heads == 1 else ", the mean of its heads"
    return format_heat_map(
        weights,
        tokens,
        tokens,
        caption=f"{repr(attention)[1:-1]}; below, what the queries of the top layer look at{fused}",
        source=getattr(attention, "source", None),
    )


def format_heat_map(
    values: npt.NDArray[np.floating],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    caption: str = "",
    source: Source | None = None,
) -> str:
    """The upper left corner of values [row, column] as coloured cells, the largest the darkest.

    rows, columns: the names of all of them, as tokens; values may hold the corner alone. Hovering
    over a cell shows its number.
    """
    height, width = min(VIEW_SIDE, len(rows)), min(VIEW_SIDE, len(columns))
    corner = values[:height, :width]
    largest = float(corner.max(initial=0.0))
    down, across = ([shorten(name) for name in names] for names in (rows[:height], columns[:width]))

    def format_one(row: int, column: int) -> str:
        value = float(corner[row, column])
        share = value / largest if largest > 0 else 0.0
        label = html.escape(f"{down[row]} → {across[column]}: {format_number(value)}")
        colour = f"rgba(66,146,198,{share:.3f})"
        return f'<td title="{label}" style="background:{colour};min-width:1.2em"></td>'

    names = "".join(f'<th style="{UPRIGHT}"><bdi>{html.escape(name)}</bdi></th>' for name in across)
    lines = (
        f'<tr><th style="text-align:right;font-weight:normal"><bdi>{html.escape(name)}</bdi></th>'
        f"{''.join(format_one(row, column) for column in range(width))}</tr>"
        for row, name in enumerate(down)
    )
    notes = [f"the first {height} of {len(rows):,} rows"] if height < len(rows) else []
    notes += [f"the first {width} of {len(columns):,} columns"] if width < len(columns) else []
    below = [", ".join(notes), "" if source is None else str(source)]
    return (
        f'<div><p style="margin:.5em 0">{html.escape(printable(caption))}</p>'
        f'<table style="{TABLE}"><thead><tr><th></th>{names}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table>"
        + "".join(
            f'<p style="{FAINT}">{html.escape(printable(line))}</p>' for line in below if line
        )
        + "</div>"
    )


def shorten(token: str) -> str:
    """A token as a label of a heat map."""
    shown = show_token(token)
    return shown if len(shown) <= VIEW_NAME else f"{shown[: VIEW_NAME - 1]}…"
