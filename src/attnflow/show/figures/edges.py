"""Heat maps of the edges of one layer, one map per kind of edges."""

from collections.abc import Iterable, Mapping
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np

from attnflow.core.arrays import Floats
from attnflow.core.checks import check_integers
from attnflow.core.graph import AttentionGraph
from attnflow.errors import OptionError
from attnflow.show.figures.drawing import Drawing, check_scale, use_style
from attnflow.show.figures.layout import (
    LABEL_SPACE,
    PAGE,
    PANEL,
    WIDEST,
    add_colour_bar,
    draw_map,
    label_tokens,
    measure_labels,
    set_title,
    set_token_ticks,
)
from attnflow.show.figures.panels import open_panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIDE_SPACE = 1.0  # inches beside maps: the name of the axis, the colour bar
TITLE = 0.45  # inches above a map


@use_style()
def edges(
    graphs: Mapping[str, AttentionGraph],
    layer: int | None = None,
    *,
    scale: float | None = None,
    axes: "Axes | Iterable[Axes] | None" = None,
) -> Drawing:
    """Draw the edges of one layer side by side, of several graphs: queries down, keys across.

    Parameters
    ----------
    graphs
        Graphs of one input by the name of their edges, as `attention_graph` makes them.
    layer
        The layer whose edges are drawn, which lead to the layer below; the top one if None.
    scale
        The value of the darkest colour, for all maps. The largest edge to another position if
        None: edges to the position itself hold the residual, and may lie beyond it.
    axes
        Axes to draw into, one per graph; a new figure if None.

    Returns
    -------
    Drawing
        Artists: by the name of each graph its map [query, key], and "bar".

    >>> from attnflow import attention_graph, load
    >>> model, kinds = load("verb-number"), ("attention", "contribution")
    >>> drawn = {kind: attention_graph(model, "the old keys", edges=kind) for kind in kinds}
    >>> edges(drawn, layer=3).artists["contribution"].get_array().shape
    (4, 4)
    """
    first = check_graphs(graphs)
    (layer,) = check_integers([first.depth if layer is None else layer], "layer")
    if not 1 <= layer <= first.depth:
        raise OptionError(f"layer must be from 1 to {first.depth}; got {layer}")
    tokens = first.tokens or tuple(map(str, range(first.size)))
    maps = {name: graph.layer_edges(layer) for name, graph in graphs.items()}
    scale = check_scale(scale, *(without_own(values) for values in maps.values()))
    labels = measure_labels(tokens)
    side = max(PANEL, min(WIDEST / 2, first.size * LABEL_SPACE * 1.15))  # inches of a map
    fitting = max(2, int((PAGE - SIDE_SPACE - labels) / side))  # two are always side by side
    rows = ceil(len(maps) / fitting)
    columns = ceil(len(maps) / rows)
    width = min(WIDEST, columns * (side + 0.1) + SIDE_SPACE + labels)
    height = min(WIDEST, rows * (side + TITLE) + labels + 0.3)
    panels = open_panels(axes, len(maps), columns, width, height)
    artists: dict[str, Any] = {}
    for place, (ax, (name, values)) in enumerate(zip(panels.axes, maps.items(), strict=True)):
        artists[name] = draw_map(ax, values, [], tokens, scale, None)
        set_title(ax, label_tokens([name], 100)[0])
        if panels.starts_row(place):
            set_token_ticks(ax, tokens, along="y")
            ax.set_ylabel("query")
        else:
            ax.set_yticks([])  # the tokens stand at the left of a row, and below a column
        if panels.ends_column(place):
            ax.set_xlabel("key")
        else:
            ax.set_xticks([])
    of = f"layer {layer}" if first.layer_names is None else first.layer_names[layer - 1]
    images = list(artists.values())
    artists.setdefault("bar", add_colour_bar(images, panels.axes, label=f"edges of {of}"))
    return panels.finish(artists, graphs.values())


def check_graphs(graphs: object) -> AttentionGraph:
    """The first of several graphs; refused unless all are of one input and have as many layers."""
    named = dict(graphs) if isinstance(graphs, Mapping) else {}
    if not named or not all(isinstance(graph, AttentionGraph) for graph in named.values()):
        kinds = sorted({type(graph).__name__ for graph in named.values()})
        kinds = kinds or [type(graphs).__name__]
        raise OptionError(
            "edges draws graphs by name, {'norm': attention_graph(..., edges='norm')};"
            f" got {', '.join(kinds)}"
        )
    first: AttentionGraph = next(iter(named.values()))
    for name, graph in named.items():
        if (graph.depth, graph.size, graph.tokens) != (first.depth, first.size, first.tokens):
            raise OptionError(
                "graphs that are drawn together must be of one input and one model;"
                f" {name} has {graph.depth} layers and {graph.size} positions, or other tokens"
            )
    return first


def without_own(values: Floats) -> Floats:
    """Edges [query, key] to other positions; all of them if there is one position only."""
    return values if len(values) == 1 else values[~np.eye(len(values), dtype=bool)]
