"""Bars: the words of a text and their scores, by several methods side by side."""

from collections.abc import Iterable, Sequence
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np

from attnflow.analysis.exclude import Exclusion
from attnflow.analysis.explain.explanation import Explanation
from attnflow.core.checks import check_count
from attnflow.show.colours import AGAINST, RAMP
from attnflow.show.figures.drawing import FONT, Drawing, use_style
from attnflow.show.figures.layout import (
    COLUMN,
    LABEL_SPACE,
    LINE,
    PAGE,
    WIDEST,
    measure_labels,
    measure_room,
    set_title,
    set_token_ticks,
)
from attnflow.show.figures.panels import choose_columns, open_panels
from attnflow.show.figures.score_rows import ScoreRow, Scores, read_score_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BAR_COLOURS_FOR, COUNTER = RAMP[5], AGAINST[5]  # the colours of positive and of negative bars
BAR_GREY = "0.75"  # the colour of a row that says nothing
NUMBERED = 60  # words up to which every bar has its number
NARROWEST_PANEL = 1.4  # inches of a panel
NUMBER_WIDTH = 0.45  # inches of the number beside a bar
MOST_OF_AXIS = 0.75  # of an axis that numbers may take


@use_style()
def bars(
    scores: Explanation | Scores,
    *,
    names: Sequence[str] | None = None,
    layer: int | None = None,
    by_word: bool = False,
    strongest: int | None = None,
    exclude: Exclusion = None,
    compared_with: str | None = None,
    axes: "Axes | Iterable[Axes] | None" = None,
) -> Drawing:
    """Draw the scores of all words as bars, one panel per method or importance, each on its scale.

    The first word stands on top. What speaks against the target, or is less than expected, goes to
    the left and is orange.

    Parameters
    ----------
    scores
        What `explain` returned; or scores from elsewhere, {name: (tokens, values)}, all of the same
        tokens, as `Explanation.scores` returns them.
    names
        Of the methods and importances that are drawn, in this order; all if None.
    layer
        The layer of methods; the top one if None.
    by_word
        Bars of whole words, and not of tokens.
    strongest
        The number of words drawn, those with the largest scores by the first name; all if None.
    exclude
        "sinks", "special" (CLS, SEP and the like), "explained" (the position) or positions: tokens
        without a bar, whose shares are written below the titles.
    compared_with
        None: the scores. "even" or "others": the share of each token less what
        `TokenAttention.compared_with` expects; importances stay as they are.
    axes
        Axes to draw into, one per name; a new figure if None.

    Returns
    -------
    Drawing
        Artists: {name: the bars, from the first word on}.

    >>> from attnflow import explain
    >>> drawn = bars(explain("the key to the cabinets"), names=["rollout", "blank_out"])
    >>> [len(drawn.artists[name]) for name in ("rollout", "blank_out")]
    [6, 6]
    """
    rows = read_score_rows(scores, names, layer, by_word, exclude, compared_with)
    first = next(iter(rows.values()))
    kept = choose_words(first, strongest)
    tokens = [first.tokens[place] for place in kept]
    labels = measure_labels(tokens)
    columns = choose_columns(len(rows), int((PAGE - labels) / NARROWEST_PANEL))
    width = COLUMN if columns == 1 else min(PAGE, labels + columns * 2.2)
    notes = max(len(row.notes) for row in rows.values()) * 2 + (strongest is not None)
    tall = max(0.6, len(kept) * LABEL_SPACE * 1.2) + 0.65 + min(notes, 5) * LINE
    height = min(WIDEST, ceil(len(rows) / columns) * tall)
    panels = open_panels(axes, len(rows), columns, width, height)
    artists: dict[str, Any] = {}
    for place, (ax, (name, row)) in enumerate(zip(panels.axes, rows.items(), strict=True)):
        artists[name] = draw_bars(ax, row, kept)
        left_out = [f"strongest {len(kept)} of {len(row.tokens)}"]
        more = left_out if len(kept) < len(row.tokens) - len(row.excluded) else []
        set_title(ax, row.title, [*row.notes, *more])
        if panels.starts_row(place):
            set_token_ticks(ax, tokens, along="y")
        else:
            ax.set_yticks([])
    return panels.finish(artists, [scores])


def choose_words(row: ScoreRow, strongest: int | None) -> list[int]:
    """The places of the words that are drawn, in the order of the text."""
    shown = [place for place in range(len(row.tokens)) if place not in row.excluded]
    if strongest is None:
        return shown
    count = check_count("strongest", strongest)
    order = np.argsort(-np.abs(row.values[shown]), kind="stable")[:count]
    return sorted(shown[place] for place in order)


def draw_bars(ax: "Axes", row: ScoreRow, kept: Sequence[int]) -> Any:
    """Horizontal bars of some places of a row, with their numbers; returns the bars."""
    values = row.values[list(kept)]
    colours = [COUNTER if value < 0 else BAR_COLOURS_FOR for value in values]
    if row.is_even:
        colours = [BAR_GREY] * len(values)
    drawn = ax.barh(range(len(kept)), values, color=colours, height=0.72)
    low, high = min(0.0, float(values.min())), max(0.0, float(values.max()))
    sides = (low < 0) + (high > 0 or low == 0)
    part = NUMBER_WIDTH / measure_room(ax, "x")  # of the axis, for the numbers at one side
    room = 0.05 * ((high - low) or 1.0)
    if len(kept) <= NUMBERED and sides * part < MOST_OF_AXIS:
        ax.bar_label(drawn, fmt=format_score, padding=2, fontsize=FONT - 1.5, color="0.25")
        room = part / (1 - sides * part) * ((high - low) or 1.0)
    ax.set_xlim(low - room * (low < 0), high + room * (high > 0 or low == 0))
    ax.set(ylim=(len(kept) - 0.4, -0.6))
    ax.axvline(0, color="0.3", linewidth=0.6)
    ax.locator_params(axis="x", nbins=3)
    ax.set_xlabel(row.meaning, parse_math=False)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)
    return drawn


def format_score(value: float) -> str:
    """A number beside a bar: three decimals, or one digit of what is smaller."""
    return f"{value:.3f}" if abs(value) >= 0.0005 or value == 0 else f"{value:.0e}"
