"""The figure that shows what edges weigh: one layer, each kind of edges a heat map."""

from collections.abc import Iterable, Mapping
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np

from attnflow.core.arrays import Floats
from attnflow.core.checks import check_integers
from attnflow.core.graph import AttentionGraph
from attnflow.errors import OptionError
from attnflow.show.drawing import (
    Drawing,
    check_axes,
    check_scale,
    describe_sources,
    find_figure,
    use_style,
)
from attnflow.show.layout import (
    LABEL,
    PAGE,
    PANEL,
    WIDEST,
    add_colour_bar,
    draw_map,
    label_tokens,
    make_panels,
    measure_labels,
    set_title,
    set_token_ticks,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIDES = 1.0  # inches beside maps: the name of the axis, the colour bar
TITLE = 0.45  # inches above a map


@use_style()
def edges(
    graphs: Mapping[str, AttentionGraph],
    layer: int | None = None,
    *,
    scale: float | None = None,
    axes: "Axes | Iterable[Any] | None" = None,
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
    own = axes is None
    columns = len(maps)
    if axes is None:
        labels = measure_labels(tokens)
        side = max(PANEL, min(WIDEST / 2, first.size * LABEL * 1.15))  # inches of a map
        fitting = max(2, int((PAGE - SIDES - labels) / side))  # two are always side by side
        rows = ceil(len(maps) / fitting)
        columns = ceil(len(maps) / rows)
        width = min(WIDEST, columns * (side + 0.1) + SIDES + labels)
        height = min(WIDEST, rows * (side + TITLE) + labels + 0.3)
        axes = make_panels(len(maps), columns, width, height)
    panels = check_axes(axes, len(maps))
    artists: dict[str, Any] = {}
    for number, (ax, (name, values)) in enumerate(zip(panels, maps.items(), strict=True)):
        artists[name] = draw_map(ax, values, [], tokens, scale, None)
        set_title(ax, label_tokens([name], 100)[0])
        if own and number % columns:
            ax.set_yticks([])  # the tokens stand at the left of a row, and below a column
        else:
            set_token_ticks(ax, tokens, along="y")
            ax.set_ylabel("query")
        if own and number + columns < len(maps):
            ax.set_xticks([])
        else:
            ax.set_xlabel("key")
    of = f"layer {layer}" if first.layer_names is None else first.layer_names[layer - 1]
    images = list(artists.values())
    artists.setdefault("bar", add_colour_bar(images, panels, label=f"edges of {of}"))
    sources = describe_sources(graphs.values())
    return Drawing(find_figure(panels[0]), tuple(panels), artists, sources)


def check_graphs(graphs: Any) -> AttentionGraph:
    """The first of several graphs; refused unless all are of one input and have as many layers."""
    listed = list(graphs.values()) if isinstance(graphs, Mapping) else []
    if not listed or not all(isinstance(graph, AttentionGraph) for graph in listed):
        kinds = sorted({type(graph).__name__ for graph in listed}) or [type(graphs).__name__]
        raise OptionError(
            "edges draws graphs by name, {'norm': attention_graph(..., edges='norm')};"
            f" got {', '.join(kinds)}"
        )
    first: AttentionGraph = listed[0]
    for name, graph in graphs.items():
        if (graph.depth, graph.size, graph.tokens) != (first.depth, first.size, first.tokens):
            raise OptionError(
                "graphs that are drawn together must be of one input and one model;"
                f" {name} has {graph.depth} layers and {graph.size} positions, or other tokens"
            )
    return first


def without_own(values: Floats) -> Floats:
    """Edges [query, key] to other positions; all where there is no other."""
    return values if len(values) == 1 else values[~np.eye(len(values), dtype=bool)]
