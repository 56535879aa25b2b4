"""Graphs: token attention between layers, of one method or of several."""

from collections.abc import Iterable, Sequence
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np

from attnflow.analysis.explanation import Explanation
from attnflow.core.arrays import Floats
from attnflow.core.groups import list_numbers
from attnflow.core.results import TokenAttention
from attnflow.errors import OptionError
from attnflow.show.colours import choose_look, darken
from attnflow.show.drawing import (
    Drawing,
    check_axes,
    check_drawable,
    check_explanations,
    check_scale,
    describe_sources,
    find_figure,
    has_token_keys,
    make_figure,
    use_style,
)
from attnflow.show.graph_parts import (
    BEHIND,
    KEY,
    KEY_PAD,
    add_width_key,
    check_orientation,
    choose_graph_columns,
    choose_thickness,
    draw_edges,
    draw_frame,
    find_layers,
    limit_edges,
    measure_graphs,
    select_edges,
)
from attnflow.show.layout import make_panels, set_title, title_method
from attnflow.show.shading import Exclusion, find_excluded, note_excluded

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
    >>> attention_graph(result, position=1).save("graph.svg").name
    'graph.svg'
    """
    check_drawable(token_attention)
    check_orientation(orientation)
    result = token_attention
    layers = find_layers(result)
    if position is not None:
        position = result.select(position, layer).positions[0]  # says what was not computed
    if layer is not None and (position is None or layer not in layers):
        raise OptionError(
            "layer chooses a node together with position, in the layers drawn"
            f" ({list_numbers(layers)}); got {layer=}, {position=}"
        )
    excluded = find_excluded(exclude, len(result.tokens))
    own = ax is None
    if ax is None:
        depth = max(layers) - min(layers) + 1
        width, height = measure_graphs(depth, result.tokens, orientation)
        ax = make_figure(width, height + KEY).subplots()
    (ax,) = check_axes(ax, 1)
    colour = darken(choose_look(result.method, [result.method]).colour)
    scale = check_scale(scale, *list_front([result], position, layer, excluded))
    artists = draw_graph(
        ax,
        result,
        result.method,
        colour=colour,
        layers=layers,
        front=None if position is None else (layer, position),
        orientation=orientation,
        strongest=strongest,
        excluded=excluded,
        scale=scale,
        pad=None if own else KEY_PAD,
    )
    sizes = size_widths(len(result.tokens), in_front=position is not None)
    sizes["is_exceeded"] = bool((without_keys(result.values, excluded) > scale).any())
    artists["key"] = add_width_key(find_figure(ax) if own else ax, scale, colour, **sizes)
    return Drawing(find_figure(ax), (ax,), artists, describe_sources([result]))


@use_style()
def compare_graphs(
    explanation: Explanation,
    *,
    position: int | None = None,
    orientation: str = "right",
    strongest: int | None = None,
    exclude: Exclusion = None,
    scale: float | None = None,
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
        Artists: {method: the artists of `attention_graph`}, and "key", the legend of widths.

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
        axes = make_panels(len(names), columns, size[0], size[1] + KEY)
    panels = check_axes(axes, len(names))
    excluded = find_excluded(exclude, len(explanation.tokens), explanation)
    if position is None:
        position = explanation.position
    elif position < 0:
        position += len(explanation.tokens)  # counts from the end
    scale = check_scale(scale, *list_front(results.values(), position, None, excluded))
    artists: dict[str, Any] = {}
    for place, (ax, name) in enumerate(zip(panels, names, strict=True)):
        artists[name] = draw_graph(
            ax,
            results[name],
            name,
            colour=darken(choose_look(name, names).colour),
            layers=layers,
            front=(None, position),
            orientation=orientation,
            strongest=strongest,
            excluded=excluded,
            scale=scale,
            pad=None if own else KEY_PAD,
        )
        if own and place % columns:  # the tokens, or the layers, stand once at the left of a row
            ax.set_ylabel("")
            ax.set_yticks([])
    owner = find_figure(panels[0]) if own else panels[0]
    sizes = size_widths(len(explanation.tokens), in_front=True)
    sizes["is_exceeded"] = any(
        bool((without_keys(result.values, excluded) > scale).any()) for result in results.values()
    )
    artists.setdefault("key", add_width_key(owner, scale, "0.2", **sizes))
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
    excluded: Sequence[int],
    scale: float,
    pad: float | None,
) -> dict[str, Any]:
    """Draw one result into axes that show these layers; returns the artists.

    front: (layer, or None for all, and position) whose edges stand in front. pad: points between
    the title and the graph.
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
        without_keys(values, excluded),
        computed,
        result.positions,
        limit_edges(strongest, size),
        position,
        scale,
    )
    parts = (("layer", computed, len(layers)), ("position", result.positions, size))
    for what, numbers, count in parts:
        if len(numbers) < count:
            notes.append(f"{what}{'s' * (len(numbers) != 1)} {list_numbers(numbers)} only")
    row = values[-1].mean(axis=0) if position is None else result.at(position)
    notes += note_excluded(result.tokens, row, excluded, f"not drawn: {{}} of layer {computed[-1]}")
    in_front = np.zeros(len(edges), bool) if position is None else edges[:, 1] == position
    if layer is not None:
        in_front &= edges[:, 0] == layer
    behind = colour if position is None else BEHIND
    clear = size_widths(size, in_front=False)
    clear |= {"opacity": (0.04, 1.0 if position is None else 0.6)}
    bold: dict[str, Any] = size_widths(size, in_front=True) | {"zorder": 2}
    back = ~in_front
    artists = {
        "edges": draw_edges(ax, edges[back], weights[back], scale, behind, orientation, **clear),
        "front": draw_edges(
            ax, edges[in_front], weights[in_front], scale, colour, orientation, **bold
        ),
        "nodes": draw_frame(ax, layers, result.tokens, orientation, position, excluded),
    }
    set_title(ax, title_method(name), notes, pad=pad)
    return artists


def size_widths(size: int, *, in_front: bool) -> dict[str, Any]:
    """How widths and opacities of edges grow, in a graph of so many tokens."""
    thick = choose_thickness(size)
    if in_front:
        return {"thickest": thick, "thinnest": 0.1 * thick, "opacity": (0.4, 1.0)}
    return {"thickest": thick, "thinnest": 0.0, "opacity": (0.04, 1.0)}


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
            result.at(position, layer)  # says what was not computed
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
