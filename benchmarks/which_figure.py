"""The figure of benchmarks/which.py: models across, one row of panels per yardstick, edges down, methods by colour and marker."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attnflow.show.colours import METHOD_COLOURS, METHOD_LINES
from attnflow.show.figures.drawing import save, use_style
from attnflow.show.figures.layout import PAGE
from edge_scores import METHODS
from which_scores import (
    ALL_EDGES,
    BEST,
    BLANK,
    GRADIENT,
    LATER,
    PRECISION,
    RANDOM,
    SPEARMAN,
)

TITLES = {
    "smollm2": "SmolLM2, next word",
    "verb-number": "verb-number",
    "sentiment": "MiniLM, SST-2",
    "planted": "planted models",
}
LABELS = {
    SPEARMAN: "Spearman, blank-out",
    PRECISION: "precision at k",
    "faithfulness": "faithfulness",
}
OTHERS = (GRADIENT, BLANK, LATER)
SPREAD = 0.24  # between the methods of one kind of edges
HEIGHT = 5.0  # inches


@use_style()
def draw(panels: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Draw all panels, [{model, yardstick, rows: {row: {mean, low, high}}}], into a file."""
    from matplotlib.figure import Figure

    models = list(dict.fromkeys(panel["model"] for panel in panels))
    figure = Figure(figsize=(PAGE, HEIGHT), layout="constrained")
    grid = figure.subplots(2, len(models), sharey=True, squeeze=False)
    handles: dict[str, Any] = {}
    for panel in panels:
        faithful = panel["yardstick"] == "faithfulness"
        ax = grid[int(faithful)][models.index(panel["model"])]
        handles |= draw_panel(ax, panel)
        if not faithful:
            ax.set_title(TITLES[panel["model"]])
        ax.set_xlabel(LABELS[panel["yardstick"]])
    for ax in grid[:, 0]:
        ax.set_yticks(range(len(ALL_EDGES) + len(OTHERS)), [*ALL_EDGES, *OTHERS])
        ax.set_ylim(len(ALL_EDGES) + len(OTHERS) - 0.5, -0.5)
    figure.legend(
        list(handles.values()), list(handles), loc="outside lower center", ncols=6, frameon=False
    )
    return save(figure, path)


def draw_panel(ax: Any, panel: Mapping[str, Any]) -> dict[str, Any]:
    """Draw one model by one yardstick; returns the artists of the legend by name."""
    rows = panel["rows"]
    handles = {}
    for place, edges in enumerate(ALL_EDGES):
        for number, method in enumerate(METHODS):
            name = f"{edges} {method}"
            if name in rows:
                look = {"color": METHOD_COLOURS[method], "marker": METHOD_LINES[method][0]}
                at = place + (number - 1) * SPREAD
                handles[method] = draw_point(ax, rows[name], at, **look)
    for number, name in enumerate(OTHERS):
        if name in rows:
            handles["no token attention"] = draw_point(
                ax, rows[name], len(ALL_EDGES) + number, color="0.25", marker="D"
            )
    for name, line in ((RANDOM, "--"), (BEST, ":")):
        if (panel["yardstick"], name) != (SPEARMAN, BEST):  # nothing else is near 1
            at = rows[name]["mean"]
            handles[name] = ax.axvline(at, color="0.35", ls=line, lw=0.9, zorder=0)
    for place in range(1, len(ALL_EDGES) + len(OTHERS)):
        ax.axhline(place - 0.5, color="0.9", lw=0.5, zorder=0)
    ax.axhline(len(ALL_EDGES) - 0.5, color="0.4", lw=0.6, zorder=0)
    ax.tick_params(axis="y", length=0)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    return handles


def draw_point(ax: Any, value: Mapping[str, float], at: float, **look: Any) -> Any:
    """Draw a mean with its interval; the larger marker keeps the shape readable."""
    ax.plot([value["low"], value["high"]], [at, at], color=look["color"], lw=1.2, zorder=2)
    (point,) = ax.plot([value["mean"]], [at], ls="", ms=4, zorder=3, **look)
    return point
