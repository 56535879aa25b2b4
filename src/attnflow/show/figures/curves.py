"""Curves: how well methods agree with importance, layer by layer."""

from collections.abc import Iterable, Sequence
from math import ceil
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from attnflow.analysis.evaluate.report import Report
from attnflow.analysis.statistics import STATISTIC_NAMES
from attnflow.core.arrays import Floats
from attnflow.errors import OptionError
from attnflow.show.colours import Look, choose_look
from attnflow.show.figures.drawing import Drawing, use_style
from attnflow.show.figures.layout import (
    COLUMN,
    NAME_LENGTH,
    PAGE,
    label_tokens,
    measure_text,
    set_title,
)
from attnflow.show.figures.panels import Panels, choose_columns, open_panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BAND_NAMES = {"error": "standard error", "std": "standard deviation"}
LEGEND_ROW = 0.17  # inches of one row of the legend
LEGEND_LENGTH = 36  # characters of a method's name


class Curve(NamedTuple):
    """What is drawn of one method, against one importance."""

    layers: tuple[float, ...]
    mean: Floats  # [layer]
    spread: Floats  # [layer], half of the band


@use_style()
def layer_curves(
    report: Report, *, band: str = "error", axes: "Axes | Iterable[Axes] | None" = None
) -> Drawing:
    """Plot rank correlations of methods with importance by layer, one panel per importance.

    A scorer, which has no layers, is a horizontal line.

    Parameters
    ----------
    report
        What `evaluate` returned, with any number of methods.
    band
        The band around a mean: its standard error ("error"), or the standard deviation over
        examples ("std").
    axes
        Axes to draw into, one per importance; a new figure if None.

    Returns
    -------
    Drawing
        Artists: {importance: {method: (line, band)}}.

    >>> from attnflow import evaluate, load
    >>> texts = ["the key to the cabinets", "the old keys"]
    >>> report = evaluate(load("verb-number"), texts, against="blank_out")
    >>> layer_curves(report).save("curves.pdf").name
    'curves.pdf'
    """
    check_report("layer_curves", report, band)
    curves = read_curves(report, band)
    methods = list(dict.fromkeys(method for _, method in curves))
    looks = {method: choose_look(method, methods) for method in methods}
    count = len(report.against)
    width = COLUMN if count == 1 else PAGE
    legend = MethodLegend.fit(methods, width)
    columns = choose_columns(count, 3)
    height = 2.2 * ceil(count / columns) + LEGEND_ROW * (legend.rows + 1)
    panels = open_panels(axes, count, columns, width, height, sharey=True)
    artists: dict[str, Any] = {}
    for ax, against in zip(panels.axes, report.against, strict=True):
        artists[against] = {
            method: draw_curve(ax, curves[against, method], looks[method]) for method in methods
        }
        frame_curves(ax, report.layers)
        set_title(ax, label_tokens([against.replace("_", " ")], NAME_LENGTH)[0])
    for ax in panels.axes[::columns] if panels.is_new else panels.axes[:1]:
        ax.set_ylabel(STATISTIC_NAMES[report.statistic])
    lines = [line for line, _ in artists[report.against[0]].values()]
    title = f"mean ± {BAND_NAMES[band]}, n = {len(report.examples)}"
    legend.draw(panels, lines, title)
    return panels.finish(artists, [report])


def check_report(figure: str, report: object, band: str) -> None:
    """Refuse anything but a report, and an unknown band."""
    if not isinstance(report, Report):
        raise OptionError(f"{figure} draws what evaluate gives; got {type(report).__name__}")
    if band not in BAND_NAMES:
        raise OptionError(f"unknown band {band!r}; choose from {', '.join(BAND_NAMES)}")


class MethodLegend(NamedTuple):
    """The legend of methods, below a new figure, or in the last axes that the caller gave."""

    names: list[str]
    columns: int

    @classmethod
    def fit(cls, methods: Sequence[str], width: float) -> "MethodLegend":
        """The legend in as many columns as a width in inches has room for."""
        names = label_tokens(methods, LEGEND_LENGTH)
        return cls(names, choose_columns(len(names), int(width / (measure_text(names) + 0.65))))

    @property
    def rows(self) -> int:
        """The number of rows."""
        return ceil(len(self.names) / self.columns)

    def draw(self, panels: Panels, lines: Sequence[Any], title: str) -> None:
        """Draw the legend of one line per method."""
        owner: Any = panels.figure if panels.is_new else panels.axes[-1]
        options: dict[str, Any] = {"frameon": False, "handlelength": 3.0, "title": title}
        if panels.is_new:
            options |= {"loc": "outside lower center", "ncols": self.columns}
        legend = owner.legend(lines, [""] * len(lines), **options)
        legend.get_title().set_parse_math(False)
        for text, name in zip(legend.get_texts(), self.names, strict=True):
            text.set(text=name, parse_math=False)  # legend would hide a name that starts with _


def read_curves(report: Report, band: str) -> dict[tuple[str, str], Curve]:
    """The curves by (importance, method), in the order of the report."""
    table: dict[tuple[str, str], list[tuple[int | None, float, float]]] = {}
    for against, method, layer, mean, deviation, examples, undefined, *_ in report.rows():
        if against not in report.against:
            continue
        half = deviation / max(examples - undefined, 1) ** 0.5 if band == "error" else deviation
        table.setdefault((against, method), []).append((layer, mean, half))
    layered = list(dict.fromkeys(key[1] for key, rows in table.items() if rows[0][0] is not None))
    return {
        (against, method): place_curve(rows, report.layers, layered, method)
        for (against, method), rows in table.items()
    }


def place_curve(
    rows: Sequence[tuple[int | None, float, float]],
    layers: Sequence[int],
    layered: Sequence[str],
    method: str,
) -> Curve:
    """The coordinates of the rows (layer, mean, half of the band) of one method.

    layered: the methods that have layers; in a report of one layer they are drawn side by side, or
    they would cover each other.
    """
    if rows[0][0] is None:  # a scorer: one number for all layers
        (_, mean, half), *_ = rows
        start, end = (min(layers), max(layers)) if layers else (1, 1)
        margin = 0.0 if start < end else 0.5
        level = np.full(2, mean), np.full(2, half)
        return Curve((start - margin, end + margin), *level)
    ordered = sorted(rows, key=lambda row: row[0] or 0)
    places, means, halves = zip(*ordered, strict=True)
    if len(layers) == 1:
        step = min(0.1, 0.9 / len(layered))
        places = (layers[0] + step * (layered.index(method) - (len(layered) - 1) / 2),)
    return Curve(places, np.array(means), np.array(halves))


def draw_curve(ax: "Axes", curve: Curve, look: Look) -> tuple[Any, Any]:
    """Draw the line of a curve, and its band: an area, or the error bar of a single point."""
    layers, mean, half = curve
    (line,) = ax.plot(
        layers, mean, color=look.colour, marker=look.marker, ls=look.line, ms=4, lw=1.3
    )
    if len(layers) == 1:
        return line, ax.errorbar(layers, mean, half, color=look.colour, capsize=3, ls="")
    shade = ax.fill_between(
        layers, mean - half, mean + half, color=look.colour, alpha=0.18, linewidth=0
    )
    return line, shade


def frame_curves(ax: "Axes", layers: Sequence[int]) -> None:
    """Draw a line at zero and the ticks of the layers, only some of them if there are many."""
    ax.axhline(0, color="0.6", lw=0.6, zorder=0)
    ax.set_xlabel("layer")
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_xticks(sorted(layers)[:: ceil(len(layers) / 12) or 1])
    if len(layers) == 1:
        ax.set_xlim(layers[0] - 0.5, layers[0] + 0.5)
