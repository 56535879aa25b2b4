"""The figure of faithfulness: how far a prediction falls as tokens go, and rises as they come."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from attnflow.analysis.evaluate.differences import SHARES, MeanCurve, average_curves
from attnflow.analysis.evaluate.report import Report
from attnflow.analysis.evaluate.yardsticks import BEST, RANDOM
from attnflow.errors import OptionError
from attnflow.show.colours import Look, choose_look
from attnflow.show.figures.curves import BAND_NAMES, LEGEND_ROW, MethodLegend, check_report
from attnflow.show.figures.drawing import Drawing, use_style
from attnflow.show.figures.layout import COLUMN, PAGE, set_title
from attnflow.show.figures.panels import open_panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CURVE_NAMES = ("deletion", "insertion")
AXIS_LABELS = {
    "deletion": "tokens taken away, highest scores first (%)",
    "insertion": "tokens kept, highest scores first (%)",
}
BASELINE_LOOKS = {RANDOM: Look("0.55", "", "--"), BEST: Look("0.25", "", ":")}


@use_style()
def deletion_curves(
    report: Report,
    *,
    layer: int | None = None,
    replacement: str | None = None,
    band: str = "error",
    axes: "Axes | Iterable[Axes] | None" = None,
) -> Drawing:
    """Draw the value of the target as the tokens of the highest scores go, and as they alone stay.

    One panel for what is deleted, and one for what is inserted if a metric looked at that; a random
    order, and the best one if it was searched, are drawn with the methods. Texts of any length meet
    at shares of their tokens, between which their curves are straight.

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
    check_report("deletion_curves", report, band)
    named = zip(CURVE_NAMES, average_curves(report, layer, replacement), strict=True)
    sides = {name: curves for name, curves in named if curves}
    if not sides:
        raise OptionError("no curve can be drawn: every example is undefined")
    methods = list(dict.fromkeys(method for curves in sides.values() for method in curves))
    looks = {
        method: BASELINE_LOOKS.get(method) or choose_look(method, report.methods)
        for method in methods
    }
    width = COLUMN if len(sides) == 1 else PAGE
    legend = MethodLegend.fit(methods, width)
    height = 2.4 + LEGEND_ROW * (legend.rows + 2)
    panels = open_panels(axes, len(sides), len(sides), width, height, sharey=True)
    artists: dict[str, Any] = {}
    for ax, (name, curves) in zip(panels.axes, sides.items(), strict=True):
        artists[name] = draw_side(ax, curves, looks, band)
        ax.set_xlabel(AXIS_LABELS[name])
        set_title(ax, name)
    panels.axes[0].set_ylabel(report.describe_value())
    lines = {name: line for drawn in artists.values() for name, (line, _) in drawn.items()}
    examples = max(curve.examples for curves in sides.values() for curve in curves.values())
    where = describe_where(report, layer, replacement)
    between = "; " if len(sides) > 1 else "\n"
    title = f"mean ± {BAND_NAMES[band]}, n = {examples}{between}{where}"
    legend.draw(panels, [lines[method] for method in methods], title)
    return panels.finish(artists, [report])


def describe_where(report: Report, layer: int | None, replacement: str | None) -> str:
    """The layer and the replacement that are drawn."""
    way = f"replacement: {replacement or report.replacements[0]}"
    return f"layer {layer or max(report.layers)}; {way}" if report.layers else way


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
