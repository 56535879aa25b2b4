"""Heat maps in HTML for notebooks: of a matrix, and of the weights of an `Attention`."""

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from attnflow.core.io.formatting import format_html_rows, format_number, format_paragraph
from attnflow.core.provenance import Source
from attnflow.core.text import shorten, show_token

if TYPE_CHECKING:
    from attnflow.core.attention import Attention

VIEW_SIDE = 24  # rows and columns of a heat map in a notebook
VIEW_NAME = 16  # characters of a token beside it
UPRIGHT = "writing-mode:vertical-rl;transform:rotate(180deg);text-align:left;font-weight:normal"


def format_attention(attention: "Attention") -> str:
    """A heat map of the top layer's weights, averaged over heads, with a caption."""
    side = slice(0, VIEW_SIDE)
    weights = attention.weights[-1, :, side, side].mean(axis=0, dtype=np.float64)  # [query, key]
    tokens = attention.tokens or tuple(map(str, range(attention.size)))
    fused = "" if attention.heads == 1 else ", the mean of its heads"
    return format_heat_map(
        weights,
        tokens,
        tokens,
        caption=f"{repr(attention)[1:-1]}; below, the weights of the top layer{fused}",
        source=attention.source,
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
    largest = float(corner.max(initial=0.0)) or 1.0
    down, across = (
        [shorten(show_token(name), VIEW_NAME) for name in names]
        for names in (rows[:height], columns[:width])
    )

    def format_one(row: int, column: int) -> str:
        value = float(corner[row, column])
        label = html.escape(f"{down[row]} → {across[column]}: {format_number(value)}")
        colour = f"rgba(66,146,198,{value / largest:.3f})"
        return f'<td title="{label}" style="background:{colour};min-width:1.2em"></td>'

    names = "".join(f'<th style="{UPRIGHT}"><bdi>{html.escape(name)}</bdi></th>' for name in across)
    lines = (
        f'<tr><th style="text-align:right;font-weight:normal"><bdi>{html.escape(name)}</bdi></th>'
        f"{''.join(format_one(row, column) for column in range(width))}</tr>"
        for row, name in enumerate(down)
    )
    cuts = {"rows": (height, len(rows)), "columns": (width, len(columns))}
    notes = [f"the first {n} of {of:,} {what}" for what, (n, of) in cuts.items() if n < of]
    parts = [
        format_paragraph(caption, "margin:.5em 0"),
        format_html_rows(f"<th></th>{names}", lines),
        format_paragraph(", ".join(notes)),
        format_paragraph(str(source or "")),
    ]
    return f"<div>{''.join(parts)}</div>"
