"""Parts of graph figures: nodes, edges as wide as their weights, and the frame."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from attnflow.core.arrays import Array, Floats
from attnflow.core.checks import check_count
from attnflow.core.groups import list_numbers
from attnflow.core.results import TokenAttention
from attnflow.errors import OptionError
from attnflow.show.colours import Line
from attnflow.show.figures.drawing import find_largest
from attnflow.show.figures.layout import (
    COLUMN,
    LABEL_SPACE,
    PAGE,
    PANEL,
    WIDEST,
    choose_width,
    measure_labels,
    set_layer_ticks,
    set_token_ticks,
)
from attnflow.show.figures.panels import Panels, choose_columns

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import LineCollection

FAINTEST = 0.01  # of the widest edge: weaker ones are invisible, and not drawn
LEGIBLE = 40  # tokens up to which a graph shows all its edges
STRONGEST = 400  # edges that it shows beyond
KEY_SHARES = (0.1, 0.5, 1.0)  # of the widest edge: the lines that the key shows
KEY_HEIGHT = 0.25  # inches of the key
KEY_PAD = 18.0  # points between the title and a graph that has a key above it
BEHIND = "0.82"  # the grey of edges behind those in colour


class EdgeLook(NamedTuple):
    """How edges look by their weights: widths in points, and opacities."""

    thickest: float
    thinnest: float
    opacity: tuple[float, float]  # of weight 0 and of the scale

    def measure(self, shares: Floats) -> tuple[Floats, Floats]:
        """The widths and the opacities of edges with these shares of the scale."""
        low, high = self.opacity
        widths = self.thinnest + (self.thickest - self.thinnest) * shares
        return widths, low + (high - low) * shares


def choose_edge_look(size: int, *, in_front: bool) -> EdgeLook:
    """The look of edges in front, or of all, in a graph of this many tokens."""
    thick = choose_thickness(size)
    if in_front:
        return EdgeLook(thick, 0.1 * thick, (0.4, 1.0))
    return EdgeLook(thick, 0.0, (0.04, 1.0))


def check_orientation(orientation: str) -> None:
    """Refuse anything but "up" and "right"."""
    if orientation not in ("up", "right"):
        raise OptionError(
            f"unknown orientation {orientation!r}; choose from up, right: where higher layers stand"
        )


def find_layers(result: TokenAttention, name: str = "this result") -> list[int]:
    """The layers whose edges have nodes at both ends.

    That is, the layer below was computed too, or is the bottom of the result.
    """
    known = set(result.layers)
    below = known | {result.bottom} if result.bottom is not None else {layer - 1 for layer in known}
    kept = [layer for layer in sorted(known) if layer - 1 in below or layer + 1 in known]
    if not kept:
        raise OptionError(
            f"a graph needs neighbouring layers; {name} has layers {list_numbers(result.layers)}"
            f" down to layer {result.bottom}: compute them with"
            f" layers=range({(result.bottom or 0) + 1}, {max(known) + 1})"
        )
    return kept


def limit_edges(strongest: int | None, size: int) -> int | None:
    """The maximum number of edges to draw; None for all."""
    if strongest is None:
        return None if size <= LEGIBLE else STRONGEST
    return check_count("strongest", strongest)


def select_edges(
    values: Floats,
    layers: Sequence[int],
    positions: Sequence[int],
    count: int | None,
    always: int | None = None,
    scale: float | None = None,
) -> tuple[Array, Floats, list[str]]:
    """The strongest edges of values [layer, query, key], the weakest first.

    Returns (layer, query, key) [edge, 3], weights [edge], and notes on what is left out. always: a
    position all of whose edges are kept. scale: the value of the widest edge; the largest if None.
    """
    widest = find_largest([values]) if scale is None else scale
    place, row, key = np.nonzero(values > FAINTEST * widest)
    edges = np.stack([np.asarray(layers, int)[place], np.asarray(positions, int)[row], key], axis=1)
    weights = values[place, row, key]
    order = np.argsort(weights, kind="stable")
    if count is None or count >= len(edges):
        return edges[order], weights[order], []
    kept = np.zeros(len(edges), bool)
    kept[order[-count:]] = True
    if always is not None:
        kept |= edges[:, 1] == always
    if kept.all():
        return edges[order], weights[order], []
    note = f"strongest {count:,} of {np.count_nonzero(values):,} edges"
    if always is not None:
        note += f", and all of position {always}"
    return edges[order[kept[order]]], weights[order[kept[order]]], [note]


def place_node(orientation: str, layer: int, position: int) -> tuple[float, float]:
    """The coordinates of a node."""
    return (position, layer) if orientation == "up" else (layer, position)


def draw_edges(
    ax: "Axes",
    edges: Array,
    weights: Floats,
    scale: float,
    colour: str,
    orientation: str,
    look: EdgeLook,
    *,
    zorder: int = 1,
    linestyle: Line = "-",
) -> "LineCollection":
    """Draw lines from (layer, query) to (layer-1, key), for edges [edge, 3].

    Weights from 0 to scale become widths and opacities.
    """
    from matplotlib.collections import LineCollection
    from matplotlib.colors import to_rgba

    widths, alphas = look.measure(np.minimum(weights / scale, 1.0))
    colours = np.tile(to_rgba(colour), (len(edges), 1))
    colours[:, 3] = alphas
    segments = [
        [place_node(orientation, layer, query), place_node(orientation, layer - 1, key)]
        for layer, query, key in edges.tolist()
    ]
    lines = LineCollection(
        segments,
        linewidths=widths,
        colors=colours,
        linestyles=[linestyle],
        capstyle="butt",
        zorder=zorder,
    )
    ax.add_collection(lines)
    return lines


def add_width_key(
    panels: Panels, scale: float, colour: str, look: EdgeLook, *, is_exceeded: bool
) -> Any:
    """Draw the key of edges' widths: below a new figure, or above the first of the given axes.

    is_exceeded: whether some edges lie beyond the scale.
    """
    from matplotlib.lines import Line2D

    widths, alphas = look.measure(np.array(KEY_SHARES))
    lines = [Line2D([], [], linewidth=0.0)]
    for width, alpha in zip(widths, alphas, strict=True):
        lines.append(Line2D([], [], color=colour, linewidth=width, alpha=alpha))
    names = ["token attention:", *(f"{share * scale:.2g}" for share in KEY_SHARES)]
    names[-1] = "≥ " * is_exceeded + names[-1]
    owner: Any = panels.figure
    options: dict[str, Any] = {"loc": "outside lower center"}
    if not panels.is_new:  # between the title and the graph
        owner = panels.axes[0]
        options = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "borderaxespad": 0.1}
    return owner.legend(
        lines,
        names,
        ncols=len(lines),
        frameon=False,
        handlelength=1.2,
        handletextpad=0.4,
        columnspacing=0.8,
        **options,
    )


def choose_thickness(size: int) -> float:
    """The width of the strongest edge in points: finer if tokens are closer together."""
    return 2.6 if size <= 16 else 1.6


def choose_graph_columns(count: int, depth: int, tokens: Sequence[str], orientation: str) -> int:
    """The number of graphs in a row."""
    panel = measure_panel(depth, tokens, orientation)
    if orientation == "up":  # a page may grow by a part of a panel, rather than lose it
        return choose_columns(count, int((PAGE - 0.6) / panel + 0.3))
    _, height = measure_graphs(depth, tokens, orientation)
    room = max(PAGE, 1.2 * height)  # a column of tall graphs would be longer than any page
    return choose_columns(count, int((room - measure_labels(tokens) - 0.3) / panel))


def measure_panel(depth: int, tokens: Sequence[str], orientation: str) -> float:
    """The width of one graph in inches, without the labels beside it."""
    size = len(tokens)
    if orientation == "up":
        return max(PANEL, size * LABEL_SPACE)
    return max(PANEL, (0.11 if size <= 16 else 0.2) * depth + 0.4)  # steep edges need more room


def measure_graphs(
    depth: int, tokens: Sequence[str], orientation: str, *, rows: int = 1, columns: int = 1
) -> tuple[float, float]:
    """The width and height in inches of a figure with rows of graphs."""
    names, size = measure_labels(tokens), len(tokens)
    panels = columns * measure_panel(depth, tokens, orientation)
    if orientation == "up":
        height = float(np.clip(3.0 / depth, 0.26, 0.6)) * depth + 0.5 + names
        width = choose_width(size) if columns == 1 else max(PAGE, panels + 0.6)
        return min(WIDEST, width), rows * height
    needed = names + 0.3 + panels
    width = COLUMN if needed <= COLUMN and columns == 1 else max(PAGE, needed)
    return width, rows * min(WIDEST, max(1.6, size * LABEL_SPACE * 1.25 + 0.6))


def draw_frame(
    ax: "Axes",
    layers: Sequence[int],
    tokens: Sequence[str],
    orientation: str,
    position: int | None,
    excluded: Sequence[int] = (),
) -> Any:
    """Draw the nodes, the tokens at the input, and the numbers of the layers.

    Nodes that are excluded, to which no edges lead, are pale.
    """
    rows = sorted({*layers, *(layer - 1 for layer in layers)})
    nodes = np.array(
        [place_node(orientation, row, place) for row in rows for place in range(len(tokens))],
        dtype=float,
    )
    chosen = np.array([place == position for _ in rows for place in range(len(tokens))])
    ends = ((rows[0] - 0.2, rows[-1] + 0.2), (-0.6, len(tokens) - 0.4))
    along, across, ground = ("x", "y", "input") if orientation == "up" else ("y", "x", "0")
    if orientation == "up":
        ax.set(xlim=ends[1], ylim=ends[0], ylabel="layer")
    else:
        ax.set(xlim=ends[0], ylim=ends[1][::-1], xlabel="layer")
    every = range(rows[0], rows[-1] + 1)
    set_token_ticks(ax, tokens, along=along, chosen=position)
    set_layer_ticks(ax, every, every, along=across, ground=ground)
    ax.spines[:].set_visible(False)
    dot = 9 if len(tokens) <= 16 else 4
    pale = np.isin(np.tile(range(len(tokens)), len(rows)), excluded)
    return ax.scatter(
        nodes[:, 0],
        nodes[:, 1],
        s=np.where(chosen, 1.8 * dot, dot),
        c=np.where(chosen, "black", np.where(pale, "0.8", "0.35")),
        linewidth=0,
        zorder=3,
    )
