"""The figure of faithfulness: how far a prediction falls as tokens go, and rises as they come."""

from collections.abc import Iterable, Mapping
from math import ceil
from typing import TYPE_CHECKING, Any

from attnflow.analysis.comparing import SHARES, MeanCurve, average_curves
from attnflow.analysis.report import Report
from attnflow.analysis.yardsticks import BEST, RANDOM
from attnflow.errors import OptionError
from attnflow.show.colours import Look, choose_look
from attnflow.show.drawing import Drawing, check_axes, describe_sources, find_figure, use_style
from attnflow.show.figure_curves import BANDS, LEGEND_LENGTH, LEGEND_ROW
from attnflow.show.layout import (
    COLUMN,
    PAGE,
    choose_columns,
    label_tokens,
    make_panels,
    measure_text,
    set_title,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIDES = ("deletion", "insertion")
LABELS = ("tokens taken away, highest scores first (%)", "tokens kept, highest scores first (%)")
BASELINE_LOOKS = {RANDOM: Look("0.55", "", "--"), BEST: Look("0.25", "", ":")}


@use_style()
def deletion_curves(
    report: Report,
    *,
    layer: int | None = None,
    replacement: str | None = None,
    band: str = "error",
    axes: "Axes | Iterable[Any] | None" = None,
) -> Drawing:
    """Draw the value of the target as the tokens of the highest scores go, and as they alone stay.

    One panel for what is deleted, and one for what is inserted if a metric looked at that; a random
    order and the best one found are drawn with the methods. Texts of any length meet at shares of
    their tokens, between which their curves are straight.

    Parameters
    ----------
    report
        What `evaluate(..., faithfulness=...)` returned.
    layer
        Of which layer; the top one computed if None.
    replacement
        Under which replacement; the first one if None.
    band
        The shade around a mean: its standard error ("error"), or the standard deviation over
        examples ("std").
    axes
        Axes to draw into, one per panel; a new figure if None.

    Returns
    -------
    Drawing
        Artists: by panel, "deletion" and "insertion", {method: (line, band)}.

    >>> from attnflow import evaluate, load
    >>> texts = ["the key to the cabinets", "the old keys"]
    >>> report = evaluate(load("verb-number"), texts, faithfulness=["deletion", "insertion"])
    >>> deletion_curves(report).save("deletion.png").name
    'deletion.png'
    """
    if not isinstance(report, Report):
        raise OptionError(f"deletion_curves draws what evaluate gives; got {type(report).__name__}")
    if band not in BANDS:
        raise OptionError(f"unknown band {band!r}; choose from {', '.join(BANDS)}")
    sides = average_curves(report, layer, replacement)
    shown = [place for place, curves in enumerate(sides) if curves]
    if not shown:
        raise OptionError("there is no curve to draw: every example is undefined")
    methods = list(dict.fromkeys(method for curves in sides for method in curves))
    looks = {
        method: BASELINE_LOOKS.get(method) or choose_look(method, report.methods)
        for method in methods
    }
    own, width = axes is None, COLUMN if len(shown) == 1 else PAGE
    names = label_tokens(methods, LEGEND_LENGTH)
    per_row = choose_columns(len(names), int(width / (measure_text(names) + 0.65)))
    if axes is None:
        height = 2.4 + LEGEND_ROW * (ceil(len(names) / per_row) + 2)
        axes = make_panels(len(shown), len(shown), width, height, sharey=True)
    panels = check_axes(axes, len(shown))
    artists: dict[str, Any] = {}
    for ax, side in zip(panels, shown, strict=True):
        artists[SIDES[side]] = draw_side(ax, sides[side], looks, band)
        ax.set_xlabel(LABELS[side])
        set_title(ax, SIDES[side])
    panels[0].set_ylabel(f"{report.target_of.replace('_', '-')} of the target")
    lines = {name: line for drawn in artists.values() for name, (line, _) in drawn.items()}
    owner: Any = find_figure(panels[0]) if own else panels[-1]
    options: dict[str, Any] = {"frameon": False, "handlelength": 3.0}
    if own:
        options |= {"loc": "outside lower center", "ncols": per_row}
    counts = {curve.examples for side in shown for curve in sides[side].values()}
    way = replacement or report.replacements[0]
    between = "; " if len(shown) > 1 else "\n"
    where = f"layer {layer or max(report.layers)}; " if report.layers else ""
    title = f"mean ± {BANDS[band]}, n = {max(counts)}{between}{where}replacement: {way}"
    legend = owner.legend(
        [lines[method] for method in methods], [""] * len(methods), title=title, **options
    )
    legend.get_title().set_parse_math(False)
    for text, name in zip(legend.get_texts(), names, strict=True):
        text.set(text=name, parse_math=False)  # and not by legend, which hides a name with _ first
    return Drawing(find_figure(panels[0]), tuple(panels), artists, describe_sources([report]))


def draw_side(
    ax: "Axes", curves: Mapping[str, MeanCurve], looks: Mapping[str, Look], band: str
) -> dict[str, tuple[Any, Any]]:
    """The line and the band of each method; the random order and the best one lie below."""
    drawn = {}
    for method, curve in curves.items():
        look = looks[method]
        half = curve.std / curve.examples**0.5 if band == "error" else curve.std
        place = 100 * SHARES
        behind = method in BASELINE_LOOKS
        (line,) = ax.plot(
            place,
            curve.mean,
            color=look.colour,
            marker=look.marker,
            ls=look.line,
            ms=3.5,
            lw=1.3,
            markevery=4,
            zorder=1.5 if behind else 2,
        )
        shade = ax.fill_between(
            place,
            curve.mean - half,
            curve.mean + half,
            color=look.colour,
            alpha=0.1 if behind else 0.18,
            linewidth=0,
        )
        drawn[method] = line, shade
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_xlim(0, 100)
    return drawn
