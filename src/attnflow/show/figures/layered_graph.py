"""Graphs: token attention between layers, of one method or of several."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np

from attnflow.analysis.exclude import Exclusion, find_excluded
from attnflow.analysis.explain.explanation import Explanation
from attnflow.core.arrays import Floats
from attnflow.core.groups import list_numbers
from attnflow.core.results import TokenAttention
from attnflow.errors import OptionError
from attnflow.show.colours import choose_look, darken
from attnflow.show.figures.drawing import (
    Drawing,
    check_drawable,
    check_explanations,
    check_scale,
    has_token_keys,
    use_style,
)
from attnflow.show.figures.graph_parts import (
    BEHIND,
    KEY_HEIGHT,
    KEY_PAD,
    add_width_key,
    check_orientation,
    choose_edge_look,
    choose_graph_columns,
    draw_edges,
    draw_frame,
    find_layers,
    limit_edges,
    measure_graphs,
    select_edges,
)
from attnflow.show.figures.layout import set_title, title_method
from attnflow.show.figures.panels import Panels, open_panels
from attnflow.show.figures.shading import note_excluded

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@use_style()
def layered_graph(
    token_attention: TokenAttention,
    *,
    position: int | None = None,
    layer: int | None = None,
    orientation: str = "up",
    strongest: int | None = None,
    exclude: Exclusion = None,
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
    exclude
        Positions to which no edges are drawn, for instance sinks: the rest sets the scale, and
        their share is written below the title.
    scale
        The value of the widest edge. If None, the largest in front that leads to another position;
        of all if none is in front.
    ax
        Axes to draw into; a new figure if None.

    Returns
    -------
    Drawing
        Artists: "edges" and "front" (line collections, the weakest edge first), "nodes", and "key",
        the legend of widths.

    >>> from attnflow import Attention, rollout
    >>> result = rollout(Attention([[[0.5, 0.5], [1.0, 0.0]]] * 2, tokens=["the", "key"]))
    >>> layered_graph(result, position=1).save("graph.svg").name
    'graph.svg'
    """
    check_drawable(token_attention)
    check_orientation(orientation)
    result = token_attention
    layers = find_layers(result)
    if position is not None:
        position = result.select(position, layer).positions[0]  # refuses what was not computed
    if layer is not None and (position is None or layer not in layers):
        raise OptionError(
            "layer chooses a node together with position, in the layers drawn"
            f" ({list_numbers(layers)}); got {layer=}, {position=}"
        )
    excluded = find_excluded(exclude, len(result.tokens))
    depth = max(layers) - min(layers) + 1
    width, height = measure_graphs(depth, result.tokens, orientation)
    panels = open_panels(ax, 1, 1, width, height + KEY_HEIGHT)
    colour = darken(choose_look(result.method, [result.method]).colour)
    scale = check_scale(scale, *list_front([result], position, layer, excluded))
    view = GraphView(layers, layer, position, orientation, strongest, excluded, scale)
    artists = draw_graph(panels, 0, result, result.method, colour, view)
    artists["key"] = view.add_key(panels, [result], colour)
    return panels.finish(artists, [result])


@use_style()
def compare_graphs(
    explanation: Explanation,
    *,
    position: int | None = None,
    orientation: str = "right",
    strongest: int | None = None,
    exclude: Exclusion = None,
    scale: float | None = None,
    axes: "Axes | Iterable[Axes] | None" = None,
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
    exclude
        "sinks", "special" (CLS, SEP and the like), "explained" (the position) or positions, to
        which no edges are drawn: the rest sets the scale, and their share is written below the
        titles.
    scale
        The value of the widest edge, in all graphs; if None, the largest in front that leads to
        another position.
    axes
        Axes to draw into, one per method; a new figure if None.

    Returns
    -------
    Drawing
        Artists: {method: the artists of `layered_graph`}, and "key", the legend of widths.

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
    rows = ceil(len(names) / columns)
    width, height = measure_graphs(
        len(layers), explanation.tokens, orientation, rows=rows, columns=columns
    )
    panels = open_panels(axes, len(names), columns, width, height + KEY_HEIGHT)
    excluded = find_excluded(exclude, len(explanation.tokens), explanation)
    if position is None:
        position = explanation.position
    elif position < 0:
        position += len(explanation.tokens)  # counts from the end
    scale = check_scale(scale, *list_front(results.values(), position, None, excluded))
    view = GraphView(layers, None, position, orientation, strongest, excluded, scale)
    artists: dict[str, Any] = {}
    for place, (ax, name) in enumerate(zip(panels.axes, names, strict=True)):
        colour = darken(choose_look(name, names).colour)
        artists[name] = draw_graph(panels, place, results[name], name, colour, view)
        if not panels.starts_row(place):  # tokens or layers are named once, left of a row
            ax.set_ylabel("")
            ax.set_yticks([])
    artists.setdefault("key", view.add_key(panels, list(results.values()), "0.2"))
    return panels.finish(artists, several)


@dataclass(frozen=True)
class GraphView:
    """The part of the edges that is drawn, and how; the same for graphs side by side."""

    layers: Sequence[int]
    layer: int | None  # of the edges in front; all if None
    position: int | None  # of the edges in front; none are if None
    orientation: str
    strongest: int | None
    excluded: tuple[int, ...]
    scale: float

    def add_key(self, panels: Panels, results: Sequence[TokenAttention], colour: str) -> Any:
        """Draw the legend of widths."""
        look = choose_edge_look(len(results[0].tokens), in_front=self.position is not None)
        is_exceeded = any(
            bool((without_keys(each.values, self.excluded) > self.scale).any()) for each in results
        )
        return add_width_key(panels, self.scale, colour, look, is_exceeded=is_exceeded)


def draw_graph(
    panels: Panels, place: int, result: TokenAttention, name: str, colour: str, view: GraphView
) -> dict[str, Any]:
    """Draw one result into one of the panels; returns the artists."""
    ax, size, scale = panels.axes[place], len(result.tokens), view.scale
    layer, position, excluded = view.layer, view.position, view.excluded
    if result.sources is not None:
        raise OptionError(
            "a graph has a row per position, and these rows are of several taken together: leave"
            " sources out, or draw max_flow with flow_paths"
        )
    if not has_token_keys(result):
        raise OptionError(
            "a graph needs the same tokens as queries and as keys; got words as keys:"
            " draw it before by_word"
        )
    if position is not None:
        result.at(position, layer)  # refuses what was not computed
    computed = [layer for layer in view.layers if layer in result.layers]
    values = np.stack([result.values[result.layers.index(layer)] for layer in computed])
    edges, weights, notes = select_edges(
        without_keys(values, excluded),
        computed,
        result.positions,
        limit_edges(view.strongest, size),
        position,
        scale,
    )
    parts = (("layer", computed, len(view.layers)), ("position", result.positions, size))
    for what, numbers, count in parts:
        if len(numbers) < count:
            notes.append(f"{what}{'s' * (len(numbers) != 1)} {list_numbers(numbers)} only")
    row = values[-1].mean(axis=0) if position is None else result.at(position)
    notes += note_excluded(result.tokens, row, excluded, f"not drawn: {{}} of layer {computed[-1]}")
    in_front = np.zeros(len(edges), bool) if position is None else edges[:, 1] == position
    if layer is not None:
        in_front &= edges[:, 0] == layer
    behind, faint = colour, choose_edge_look(size, in_front=False)
    if position is not None:
        behind, faint = BEHIND, faint._replace(opacity=(0.04, 0.6))
    bold, back = choose_edge_look(size, in_front=True), ~in_front
    artists = {
        "edges": draw_edges(ax, edges[back], weights[back], scale, behind, view.orientation, faint),
        "front": draw_edges(
            ax, edges[in_front], weights[in_front], scale, colour, view.orientation, bold, zorder=2
        ),
        "nodes": draw_frame(ax, view.layers, result.tokens, view.orientation, position, excluded),
    }
    set_title(ax, title_method(name), notes, pad=None if panels.is_new else KEY_PAD)
    return artists


def list_front(
    results: Iterable[TokenAttention],
    position: int | None,
    layer: int | None,
    excluded: Sequence[int],
) -> list[Floats]:
    """Per result the edges that set the scale: those in front, or all if none are.

    Of those in front, edges to other positions: the one to itself holds the residual.
    """
    values = []
    for result in results:
        kept = without_keys(result.values, excluded)
        if position is not None:
            result.at(position, layer)  # refuses what was not computed
            kept = kept[:, result.positions.index(position)]  # [layer, key]
            others = np.delete(kept, position, axis=1)
            kept = others if others.any() else kept
        values.append(kept if layer is None else kept[result.layers.index(layer)])
    return values


def without_keys(values: Floats, excluded: Sequence[int]) -> Floats:
    """Edges [layer, query, key] without those to some positions."""
    if not excluded:
        return values
    kept = values.copy()
    kept[..., list(excluded)] = 0.0
    return kept
