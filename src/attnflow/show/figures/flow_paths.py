"""The paths of a maximum flow, and the minimum cut that limits it."""

from typing import TYPE_CHECKING, Any

import numpy as np

from attnflow.core.flow.max_flow import MaxFlow
from attnflow.core.groups import list_numbers
from attnflow.core.io.formatting import format_count
from attnflow.errors import OptionError
from attnflow.show.colours import MARK_COLOUR, METHOD_COLOURS, Line
from attnflow.show.figures.drawing import (
    Drawing,
    check_shape,
    find_largest,
    use_style,
)
from attnflow.show.figures.graph_parts import (
    KEY_PAD,
    EdgeLook,
    check_orientation,
    choose_thickness,
    draw_edges,
    draw_frame,
    limit_edges,
    measure_graphs,
    place_node,
    select_edges,
)
from attnflow.show.figures.layout import label_tokens
from attnflow.show.figures.panels import open_panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@use_style()
def flow_paths(
    max_flow: MaxFlow,
    *,
    orientation: str = "up",
    strongest: int | None = None,
    ax: "Axes | None" = None,
) -> Drawing:
    """Draw the edges that carry one maximum flow, and those of its minimum cut, dashed.

    An edge is as wide as the flow on it.

    Parameters
    ----------
    max_flow
        What `max_flow` returned.
    orientation
        Where higher layers are drawn: "up" or "right".
    strongest
        The number of edges drawn; if None, all of them up to 40 tokens, 400 beyond.
    ax
        Axes to draw into; a new figure if None.

    Returns
    -------
    Drawing
        Artists: "edges" (a line collection, the weakest first), "cut" (a line collection in the
        order of `max_flow.cut`), "nodes", "ends".

    >>> from attnflow import Attention, max_flow
    >>> attention = Attention([[[0.5, 0.5], [1.0, 0.0]]] * 2, tokens=["the", "key"])
    >>> flow_paths(max_flow(attention, source=(2, 0), target=(0, 1))).save("paths.png").name
    'paths.png'
    """
    if not isinstance(max_flow, MaxFlow):
        raise OptionError(f"flow_paths draws what max_flow gives; got {type(max_flow).__name__}")
    check_orientation(orientation)
    upper, lower = max_flow.source[0], max_flow.target[0]
    layers, size = list(range(lower + 1, upper + 1)), len(max_flow.tokens)
    meaning = f"layers {list_numbers(layers)} and {size} tokens"
    check_shape("edges [layer, query, key]", max_flow.edges, (len(layers), size, size), meaning)
    count = limit_edges(strongest, size)
    edges, weights, notes = select_edges(max_flow.edges, layers, range(size), count)
    flows = {edge: max_flow.edges[edge[0] - lower - 1, edge[1], edge[2]] for edge in max_flow.cut}
    limiting = max_flow.cut
    if count is not None:
        limiting = tuple(sorted(flows, key=lambda edge: -flows[edge])[:count])
    width, height = measure_graphs(len(layers), max_flow.tokens, orientation)
    panels = open_panels(ax, 1, 1, width, height + 0.3)
    (ax,) = panels.axes
    scale, thick, colour = find_largest([weights]), choose_thickness(size), METHOD_COLOURS["flow"]
    dashes: Line = (0, (2.2, 1.1))
    carrying = EdgeLook(thick, 0.25 * thick, (0.4, 1.0))
    cutting = carrying._replace(opacity=(0.9, 1.0))
    cut = np.array(limiting, dtype=int).reshape(-1, 3)
    full = np.array([flows[edge] for edge in limiting])
    artists: dict[str, Any] = {
        "edges": draw_edges(ax, edges, weights, scale, colour, orientation, carrying),
        "cut": draw_edges(
            ax, cut, full, scale, MARK_COLOUR, orientation, cutting, zorder=2, linestyle=dashes
        ),
        "nodes": draw_frame(ax, layers, max_flow.tokens, orientation, None),
    }
    above = [place_node(orientation, upper, source) for source in max_flow.sources]
    below = [place_node(orientation, lower, target) for target in max_flow.targets]
    ends = np.array([*above, *below])
    ring: Any = {"facecolor": "white", "edgecolor": "black", "linewidth": 1.2}
    artists["ends"] = ax.scatter(ends[:, 0], ends[:, 1], s=34, zorder=4, **ring)
    limits = len(max_flow.cut)
    ax.legend(
        [
            ax.plot([], [], color=colour, lw=2)[0],
            ax.plot([], [], color=MARK_COLOUR, lw=2, ls=dashes)[0],
        ],
        [f"flow, widest {scale:.2g}", f"minimum cut ({format_count(limits, 'edge')})"],
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        ncols=2,
        frameon=False,
        borderaxespad=0.1,
    )
    names = label_tokens([max_flow.tokens[at] for at in (*max_flow.sources, *max_flow.targets)])
    sources = len(max_flow.sources)
    start, end = " ".join(names[:sources]), " ".join(names[sources:])
    way = f"from {start} in layer {upper} to {end} in layer {lower}"
    title = "\n".join([f"maximum flow {max_flow.value:.3g}", way, *notes])
    ax.set_title(title, parse_math=False, pad=KEY_PAD)
    return panels.finish(artists, [max_flow])
