"""Interventions: bars of token attention before and after a change, side by side."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from attnflow.analysis.exclude import Exclusion, find_excluded
from attnflow.analysis.intervene.intervention import Intervention, RunOutcome, share_rest
from attnflow.core.choices import Method
from attnflow.core.text import show_token
from attnflow.errors import OptionError
from attnflow.show.colours import AGAINST
from attnflow.show.figures.bars import draw_bars
from attnflow.show.figures.drawing import Drawing, use_style
from attnflow.show.figures.layout import (
    LABEL_SPACE,
    LINE,
    PAGE,
    WIDEST,
    measure_labels,
    set_title,
    set_token_ticks,
    title_method,
)
from attnflow.show.figures.panels import open_panels
from attnflow.show.figures.score_rows import ScoreRow
from attnflow.show.figures.shading import note_excluded

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLANKED = AGAINST[6]  # the ink of tokens that were blanked out


@use_style()
def intervention(
    result: Intervention,
    method: str | Method = "rollout",
    *,
    layer: int | None = None,
    exclude: Exclusion = ("sinks", "special"),
    axes: "Axes | Iterable[Axes] | None" = None,
) -> Drawing:
    """Draw token attention before and after a change as bars, side by side, on one scale.

    Shares are of the tokens that have bars. The titles have the prediction of each run; tokens that
    were blanked out have orange names.

    Parameters
    ----------
    result
        What `intervene` returned.
    method
        "raw", "rollout", "flow" or a user-defined method.
    layer
        The layer that is explained; the top one if None.
    exclude
        "sinks", "special" (CLS, SEP and the like), "explained" (the position) or positions: tokens
        without a bar, whose shares are written below the titles.
    axes
        Axes to draw into, two; a new figure if None.

    Returns
    -------
    Drawing
        Artists: {"before": the bars, "after": the bars}.

    >>> from attnflow import intervene
    >>> drawn = intervention(intervene("verb-number", "the keys to the house", blank="keys"))
    >>> [len(bars) for bars in drawn.artists.values()]
    [5, 5]
    """
    if not isinstance(result, Intervention):
        raise OptionError(
            f"intervention draws what intervene returned; got {type(result).__name__}"
        )
    rows = make_rows(result, method, layer, exclude)
    first = rows["before"]
    kept = [place for place in range(len(first.tokens)) if place not in first.excluded]
    names = [first.tokens[place] for place in kept]
    width = min(PAGE, measure_labels(names) + 2 * 2.4)
    height = min(WIDEST, max(0.6, len(kept) * LABEL_SPACE * 1.2) + 0.8 + 5 * LINE)
    panels = open_panels(axes, 2, 2, width, height)
    artists: dict[str, Any] = {}
    for ax, (name, row) in zip(panels.axes, rows.items(), strict=True):
        artists[name] = draw_bars(ax, row, kept)
        set_title(ax, row.title, row.notes)
    widest = max(ax.get_xlim()[1] for ax in panels.axes)
    for place, ax in enumerate(panels.axes):
        ax.set_xlim(0, widest)
        if panels.starts_row(place):
            set_token_ticks(ax, names, along="y")
            for label, at in zip(ax.get_yticklabels(), kept, strict=False):
                if at in result.change.blanked:
                    label.set_color(BLANKED)
        else:
            ax.set_yticks([])
    return panels.finish(artists, [result])


def make_rows(
    result: Intervention, method: str | Method, layer: int | None, exclude: Exclusion
) -> dict[str, ScoreRow]:
    """The rows before and after."""
    shown = result.by(method, layer=layer)
    excluded = find_excluded(exclude, len(result.tokens), result)
    outcomes = {"before": result.before, "after": result.after}
    changes = {"before": "nothing changed", "after": result.change.describe(result.tokens)}
    rows = {}
    shares = share_rest(shown, excluded)
    for (name, outcome), row, values in zip(outcomes.items(), shown, shares, strict=True):
        notes = note_excluded(result.tokens, row.values[0, 0], excluded)
        meaning = f"{title_method(row.method)}, layer {row.layers[0]}"
        if excluded:
            meaning += ", of the rest"
        title = title_outcome(name, outcome)
        rows[name] = ScoreRow(
            title, result.tokens, values, excluded, meaning, (changes[name], *notes)
        )
    return rows


def title_outcome(name: str, outcome: RunOutcome) -> str:
    """One run with its prediction: "before: plural 0.98"."""
    prediction = outcome.prediction
    if prediction is None:
        return name
    label, target = prediction.label, prediction.target
    said = f"{name}: {show_token(label)} {prediction.probability:.2f}"
    if target.label != label:
        said += f" ({show_token(target.label)} {target.probability:.2f})"
    return said
