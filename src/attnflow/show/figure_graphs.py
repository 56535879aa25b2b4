"""Graphs: token attention between layers, and the paths of a maximum flow."""

from collections.abc import Iterable, Sequence
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np

from attnflow.analysis.explanation import Explanation
from attnflow.core.groups import list_numbers
from attnflow.core.results import TokenAttention
from attnflow.core.single_flow import MaxFlow
from attnflow.errors import OptionError
from attnflow.show.colours import MARKED, METHOD_COLOURS, choose_look
from attnflow.show.drawing import (
    Drawing,
    check_axes,
    check_drawable,
    check_explanations,
    check_scale,
    check_shape,
    describe_sources,
    find_figure,
    find_largest,
    has_token_keys,
    make_figure,
    use_style,
)
from attnflow.show.graph_parts import (
    check_orientation,
    choose_graph_columns,
    choose_thickness,
    draw_edges,
    draw_frame,
    find_layers,
    limit_edges,
    measure_graphs,
    place_node,
    select_edges,
)
from attnflow.show.layout import label_tokens, make_panels, set_title, title_method

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@use_style()
def attention_graph(
    token_attention: TokenAttention,
    *,
    position: int | None = None,
    layer: int | None = None,
    orientation: str = "up",
    strongest: int | None = None,
    scale: float | None = None,
    ax: "Axes | None" = None,
) -> Drawing:
    """Draw the layered graph, with edges as wide and as opaque as their token attention.

    The edge from (l, k) to (l-1, j) shows values[l, k, j].

    Parameters
    ----------
    token_attention
        What a method returned, for neighbouring layers.
    position
        The query whose edges are drawn in front and in colour; none if None.
    layer
        The layer of that query; all of them if None.
    orientation
        Where higher layers are drawn: "up" or "right".
    strongest
        The number of edges drawn; if None, all of them up to 40 tokens, 400 beyond.
    scale
        The value of the widest edge; the largest value if None.
    ax
        Axes to draw into; a new figure if None.

    Returns
    -------
    Drawing
        Artists: "edges" and "front" (line collections, the weakest edge first), "nodes".

    >>> from attnflow import Attention, rollout
    >>> result = rollout(Attention([[[0.5, 0.5], [1.0, 0.0]]] * 2, tokens=["the", "key"]))
    >>> attention_graph(result, position=1).save("graph.svg").name
    'graph.svg'
    """
    check_drawable(token_attention)
    check_orientation(orientation)
    result = token_attention
    layers = find_layers(result)
    if layer is not None and position is not None:
        result.at(position, layer)  # says what was not computed
    if layer is not None and (position is None or layer not in layers):
        raise OptionError(
            "layer chooses a node together with position, in the layers drawn"
            f" ({list_numbers(layers)}); got {layer=}, {position=}"
        )
    if ax is None:
        depth = max(layers) - min(layers) + 1
        ax = make_figure(*measure_graphs(depth, result.tokens, orientation)).subplots()
    (ax,) = check_axes(ax, 1)
    artists = draw_graph(
        ax,
        result,
        result.method,
        colour=choose_look(result.method, [result.method]).colour,
        layers=layers,
        front=None if position is None else (layer, position),
        orientation=orientation,
        strongest=strongest,
        scale=check_scale(scale, result.values),
    )
    return Drawing(find_figure(ax), (ax,), artists, describe_sources([result]))


@use_style()
def compare_graphs(
    explanation: Explanation,
    *,
    position: int | None = None,
    orientation: str = "right",
    strongest: int | None = None,
    axes: "Axes | Iterable[Any] | None" = None,
) -> Drawing:
    """Draw the graphs of every method on one scale, the edges of one position in front.

    A method that was not computed for all positions, or all layers, is drawn for those it has,
    and its title says which.

    Parameters
    ----------
    explanation
        What `explain` returned, with any number of methods.
    position
        The query whose edges are drawn in front and in colour; the explained one if None.
    orientation
        Where higher layers are drawn: "up" or "right".
    strongest
        The number of edges drawn per graph; if None, all of them up to 40 tokens, 400 beyond.
    axes
        Axes to draw into, one per method; a new figure if None.

    Returns
    -------
    Drawing
        Artists: {method: the artists of `attention_graph`}.

    >>> from attnflow import explain
    >>> compare_graphs(explain("the key to the cabinets", importance=())).save("graphs.pdf").name
    'graphs.pdf'
    """
    several = check_explanations(explanation)
    if len(several) != 1:
        raise OptionError(
            f"compare_graphs draws one explanation; got {len(several)}: call it for one at a time"
        )
    (explanation,) = several
    check_orientation(orientation)
    results, names = explanation.results, list(explanation.results)
    drawn = {layer for name in names for layer in find_layers(results[name], name)}
    layers = range(min(drawn), max(drawn) + 1)
    columns = choose_graph_columns(len(names), len(layers), explanation.tokens, orientation)
    own = axes is None
    if axes is None:
        rows = ceil(len(names) / columns)
        size = measure_graphs(
            len(layers), explanation.tokens, orientation, rows=rows, columns=columns
        )
        axes = make_panels(len(names), columns, *size)
    panels = check_axes(axes, len(names))
    scale = find_largest(result.values for result in results.values())
    artists: dict[str, Any] = {}
    for place, (ax, name) in enumerate(zip(panels, names, strict=True)):
        artists[name] = draw_graph(
            ax,
            results[name],
            name,
            colour=choose_look(name, names).colour,
            layers=layers,
            front=(None, explanation.position if position is None else position),
            orientation=orientation,
            strongest=strongest,
            scale=scale,
        )
        if own and place % columns:  # the tokens, or the layers, stand once at the left of a row
            ax.set_ylabel("")
            ax.set_yticks([])
    return Drawing(find_figure(panels[0]), tuple(panels), artists, describe_sources(several))


def draw_graph(
    ax: "Axes",
    result: TokenAttention,
    name: str,
    *,
    colour: str,
    layers: Sequence[int],
    front: tuple[int | None, int] | None,
    orientation: str,
    strongest: int | None,
    scale: float,
) -> dict[str, Any]:
    """Draw one result into axes that show these layers; returns the artists.

    front: (layer, or None for all, and position) whose edges stand in front.
    """
    size = len(result.tokens)
    if not has_token_keys(result):
        raise OptionError(
            "a graph needs the same tokens as queries and as keys; got words as keys:"
            " draw it before by_word"
        )
    layer, position = front or (None, None)
    if position is not None:
        result.at(position, layer)  # says what was not computed
    computed = [layer for layer in layers if layer in result.layers]
    values = np.stack([result.values[result.layers.index(layer)] for layer in computed])
    edges, weights, notes = select_edges(
        values, computed, result.positions, limit_edges(strongest, size), position
    )
    parts = (("layer", computed, len(layers)), ("position", result.positions, size))
    for what, numbers, count in parts:
        if len(numbers) < count:
            notes.append(f"{what}{'s' * (len(numbers) != 1)} {list_numbers(numbers)} only")
    in_front = np.zeros(len(edges), bool) if position is None else edges[:, 1] == position
    if layer is not None:
        in_front &= edges[:, 0] == layer
    thick = choose_thickness(size)
    behind = colour if position is None else "0.7"
    clear: dict[str, Any] = {"thickest": thick, "opacity": (0.04, 1.0 if position is None else 0.6)}
    bold: dict[str, Any] = {
        "thickest": thick,
        "thinnest": 0.1 * thick,
        "opacity": (0.3, 1.0),
        "zorder": 2,
    }
    back = ~in_front
    artists = {
        "edges": draw_edges(ax, edges[back], weights[back], scale, behind, orientation, **clear),
        "front": draw_edges(
            ax, edges[in_front], weights[in_front], scale, colour, orientation, **bold
        ),
        "nodes": draw_frame(ax, layers, result.tokens, orientation, position),
    }
    set_title(ax, title_method(name), notes)
    return artists


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
    (upper, start), (lower, _) = max_flow.source, max_flow.target
    layers, size = list(range(lower + 1, upper + 1)), len(max_flow.tokens)
    meaning = f"layers {list_numbers(layers)} and {size} tokens"
    check_shape("edges [layer, query, key]", max_flow.edges, (len(layers), size, size), meaning)
    count = limit_edges(strongest, size)
    edges, weights, notes = select_edges(max_flow.edges, layers, range(size), count)
    flows = {edge: max_flow.edges[edge[0] - lower - 1, edge[1], edge[2]] for edge in max_flow.cut}
    limiting = max_flow.cut
    if count is not None:
        limiting = tuple(sorted(flows, key=lambda edge: -flows[edge])[:count])
    if ax is None:
        width, height = measure_graphs(len(layers), max_flow.tokens, orientation)
        ax = make_figure(width, height + 0.3).subplots()
    (ax,) = check_axes(ax, 1)
    scale, thick, dashes = find_largest([weights]), choose_thickness(size), (0, (2.2, 1.1))
    lines: dict[str, Any] = {"thickest": thick, "thinnest": 0.25 * thick}
    colour = METHOD_COLOURS["flow"]
    cut = np.array(limiting, dtype=int).reshape(-1, 3)
    full = np.array([flows[edge] for edge in limiting])
    artists: dict[str, Any] = {
        "edges": draw_edges(
            ax, edges, weights, scale, colour, orientation, opacity=(0.4, 1.0), **lines
        ),
        "cut": draw_edges(
            ax,
            cut,
            full,
            scale,
            MARKED,
            orientation,
            opacity=(0.9, 1.0),
            zorder=2,
            linestyle=dashes,
            **lines,
        ),
        "nodes": draw_frame(ax, layers, max_flow.tokens, orientation, None),
    }
    below = [place_node(orientation, lower, target) for target in max_flow.targets]
    ends = np.array([place_node(orientation, *max_flow.source), *below])
    ring: Any = {"facecolor": "white", "edgecolor": "black", "linewidth": 1.2}
    artists["ends"] = ax.scatter(ends[:, 0], ends[:, 1], s=34, zorder=4, **ring)
    ax.legend(
        [
            ax.plot([], [], color=colour, lw=2)[0],
            ax.plot([], [], color=MARKED, lw=2, ls=dashes)[0],
        ],
        ["flow", f"minimum cut ({len(max_flow.cut):,} edge{'s' * (len(max_flow.cut) != 1)})"],
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        ncols=2,
        frameon=False,
        borderaxespad=0.1,
    )
    first, *last = label_tokens([max_flow.tokens[place] for place in (start, *max_flow.targets)])
    way = f"from {first} in layer {upper} to {' '.join(last)} in layer {lower}"
    title = "\n".join([f"maximum flow {max_flow.value:.3g}", way, *notes])
    ax.set_title(title, parse_math=False, pad=18)
    return Drawing(find_figure(ax), (ax,), artists, describe_sources([max_flow]))
