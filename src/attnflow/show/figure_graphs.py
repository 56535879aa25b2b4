"""The figures that are graphs: layers of nodes with edges as wide as their weights, and the paths of one maximum flow."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from attnflow.analysis.explanation import Explanation
from attnflow.core.graph import Floats, integers
from attnflow.core.groups import list_numbers
from attnflow.core.results import TokenAttention
from attnflow.core.single_flow import MaxFlow
from attnflow.errors import OptionError
from attnflow.show.drawing import (
    COLOURS,
    COLUMN,
    FAINTEST,
    LABEL,
    MARKED,
    OTHER_COLOURS,
    PAGE,
    WIDEST,
    Drawing,
    check_result,
    check_shape,
    figure_of,
    given_axes,
    label_room,
    labels,
    largest,
    layer_ticks,
    method_title,
    paper,
    style,
    token_ticks,
    width_for,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import LineCollection

    from attnflow.show.drawing import Numbers

LEGIBLE = 40  # tokens up to which a graph shows all its edges
STRONGEST = 400  # edges that it shows beyond


@style()
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
    """The layered graph: the edge from (l, k) to (l-1, j) shows values[l, k, j] by its width and opacity.

    position: the edges that leave it, in every layer or in one, are drawn in front and in colour. orientation: layers go "up" or "right".
    strongest: how many edges are drawn; all of them up to 40 tokens if not given, 400 beyond. scale: the value of the widest edge; the
    largest one if not given. artists: "edges" and "front" (line collections, weakest edge first), "nodes".

    >>> from attnflow import Attention, rollout
    >>> result = rollout(Attention([[[0.5, 0.5], [1.0, 0.0]]] * 2, tokens=["the", "key"]))
    >>> attention_graph(result, position=1).save("graph.svg").name
    'graph.svg'
    """
    check_result(token_attention)
    check_orientation(orientation)
    result = token_attention
    layers, size = neighbouring(result), len(result.tokens)
    if not same_tokens(result):
        raise OptionError(
            "a graph needs the same tokens as queries and as keys; got words as keys: draw it before by_word"
        )
    if position is not None:
        for each in layers if layer is None else [layer]:
            result.at(position, each)  # says what was not computed
    if layer is not None and (position is None or layer not in layers):
        raise OptionError(
            f"layer chooses a node together with position, in the layers drawn ({list_numbers(layers)}); got {layer=}, {position=}"
        )
    values = np.stack(
        [result.values[result.layers.index(each)] for each in layers]
    )  # [layer, query, key]
    edges, weights, note = edges_of(
        values, layers, result.positions, chosen_count(strongest, size), position
    )
    if len(result.positions) < size:
        note += (
            f"\nposition{'s' * (len(result.positions) != 1)} {list_numbers(result.positions)} only"
        )
    depth = max(layers) - min(layers) + 1
    ax = (
        paper(*graph_size(depth, result.tokens, orientation)).subplots()
        if ax is None
        else given_axes(ax, 1)[0]
    )
    front = np.zeros(len(edges), bool) if position is None else edges[:, 1] == position
    if layer is not None:
        front &= edges[:, 0] == layer
    colour, scale, thick = (
        COLOURS.get(result.method, OTHER_COLOURS[0]),
        checked_scale(scale, values),
        thickness(size),
    )
    behind = (colour, orientation) if position is None else ("0.7", orientation)
    clear: dict[str, Any] = {"thickest": thick, "opacity": (0.04, 1.0 if position is None else 0.6)}
    bold: dict[str, Any] = {
        "thickest": thick,
        "thinnest": 0.1 * thick,
        "opacity": (0.3, 1.0),
        "zorder": 2,
    }
    artists: dict[str, Any] = {
        "edges": draw_edges(ax, edges[~front], weights[~front], scale, *behind, **clear),
        "front": draw_edges(ax, edges[front], weights[front], scale, colour, orientation, **bold),
        "nodes": graph_frame(ax, layers, result.tokens, orientation, position),
    }
    ax.set_title(method_title(result.method) + note)
    return Drawing(figure_of(ax), (ax,), artists)


@style()
def compare_graphs(
    explanation: Explanation,
    *,
    position: int | None = None,
    orientation: str = "right",
    strongest: int | None = None,
    axes: Any = None,
) -> Drawing:
    """Raw attention, rollout and flow side by side, in one scale; the edges of the explained position in front.

    artists: "raw", "rollout" and "flow", each with what `attention_graph` names.

    >>> from attnflow import explain
    >>> compare_graphs(explain("the key to the cabinets", importance=())).save("graphs.pdf").name
    'graphs.pdf'
    """
    several = explanations_of(explanation)
    if len(several) != 1:
        raise OptionError(
            f"compare_graphs draws one explanation; got {len(several)}: call it for each"
        )
    (explanation,) = several
    check_orientation(orientation)
    position = explanation.position if position is None else position
    if axes is None:
        panels = list(
            paper(
                *graph_size(len(explanation.raw.layers), explanation.tokens, orientation, panels=3)
            ).subplots(1, 3)
        )
    else:
        panels = given_axes(axes, 3)
    artists = {}
    scale = largest(result.values for result in explanation.results.values())
    options: dict[str, Any] = {
        "position": position,
        "orientation": orientation,
        "strongest": strongest,
        "scale": scale,
    }
    for place, (name, result) in enumerate(explanation.results.items()):
        panel = panels[place]
        drawn = attention_graph(result, ax=panel, **options)
        artists[name] = drawn.artists
        if place and axes is None:  # the tokens, or the layers, stand at the left once
            panel.set_ylabel("")
            panel.set_yticks([])
    return Drawing(figure_of(panels[0]), tuple(panels), artists)


@style()
def flow_paths(
    max_flow: MaxFlow,
    *,
    orientation: str = "up",
    strongest: int | None = None,
    ax: "Axes | None" = None,
) -> Drawing:
    """The edges that carry one maximum flow, as wide as the flow on them, and the edges of its minimum cut, dashed.

    artists: "edges" (a line collection, weakest first), "cut" (a line collection in the order of max_flow.cut), "nodes", "ends".

    >>> from attnflow import Attention, max_flow
    >>> best = max_flow(Attention([[[0.5, 0.5], [1.0, 0.0]]] * 2, tokens=["the", "key"]), source=(2, 0), target=(0, 1))
    >>> flow_paths(best).save("paths.png").name
    'paths.png'
    """
    if not isinstance(max_flow, MaxFlow):
        raise OptionError(f"flow_paths draws what max_flow gives; got {type(max_flow).__name__}")
    check_orientation(orientation)
    (upper, _), (lower, _) = max_flow.source, max_flow.target
    layers, size = list(range(lower + 1, upper + 1)), len(max_flow.tokens)
    check_shape(
        "edges [layer, query, key]",
        max_flow.edges,
        (len(layers), size, size),
        f"layers {list_numbers(layers)} and {size} tokens",
    )
    edges, weights, note = edges_of(
        max_flow.edges, layers, range(size), chosen_count(strongest, size)
    )
    start, *ends_named = labels(
        [max_flow.tokens[place] for place in (max_flow.source[1], *max_flow.targets)]
    )
    end = " ".join(ends_named)
    title = f"maximum flow {max_flow.value:.3g}\nfrom {start} in layer {upper} to {end} in layer {lower}"
    width, height = graph_size(len(layers), max_flow.tokens, orientation)
    ax = paper(width, height + 0.3).subplots() if ax is None else given_axes(ax, 1)[0]
    scale = largest([weights])
    count = chosen_count(strongest, size)
    limiting = (
        sorted(
            max_flow.cut, key=lambda edge: -max_flow.edges[edge[0] - lower - 1, edge[1], edge[2]]
        )[:count]
        if count
        else max_flow.cut
    )
    cut = np.array(limiting, dtype=int).reshape(-1, 3)
    full = np.array(
        [max_flow.edges[layer - lower - 1, query, key] for layer, query, key in limiting]
    )
    thick, dashes = thickness(size), (0, (2.2, 1.1))
    lines: dict[str, Any] = {"thickest": thick, "thinnest": 0.25 * thick}
    artists: dict[str, Any] = {
        "edges": draw_edges(
            ax, edges, weights, scale, COLOURS["flow"], orientation, opacity=(0.4, 1.0), **lines
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
        "nodes": graph_frame(ax, layers, max_flow.tokens, orientation, None),
    }
    ends = np.array(
        [
            at(orientation, *max_flow.source),
            *(at(orientation, lower, target) for target in max_flow.targets),
        ]
    )
    artists["ends"] = ax.scatter(
        ends[:, 0], ends[:, 1], s=34, facecolor="white", edgecolor="black", linewidth=1.2, zorder=4
    )
    names = ["flow", f"minimum cut ({len(max_flow.cut):,} edge{'s' * (len(max_flow.cut) != 1)})"]
    keys = [
        ax.plot([], [], color=COLOURS["flow"], lw=2)[0],
        ax.plot([], [], color=MARKED, lw=2, ls=dashes)[0],
    ]
    ax.legend(
        keys,
        names,
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        ncols=2,
        frameon=False,
        borderaxespad=0.1,
    )
    ax.set_title(title + note, parse_math=False, pad=18)
    return Drawing(figure_of(ax), (ax,), artists)


def chosen_count(strongest: int | None, size: int) -> int | None:
    """How many edges to draw; None for all."""
    if strongest is None:
        return None if size <= LEGIBLE else STRONGEST
    (strongest,) = integers([strongest], "strongest")
    if strongest < 1:
        raise OptionError(f"strongest must be a whole number of edges, at least 1; got {strongest}")
    return strongest


# ---- nodes and edges ---------------------------------------------------------------------------------------------------------------


def check_orientation(orientation: str) -> None:
    """One of the two."""
    if orientation not in ("up", "right"):
        raise OptionError(
            f"unknown orientation {orientation!r}; choose from up, right: where higher layers stand"
        )


def neighbouring(result: TokenAttention) -> list[int]:
    """The layers whose edges have nodes at both ends: the layer below was computed too, or is the one that the result goes down to."""
    known = set(result.layers)
    below = known | {result.bottom} if result.bottom is not None else {layer - 1 for layer in known}
    kept = [layer for layer in sorted(known) if layer - 1 in below or layer + 1 in known]
    if not kept:
        raise OptionError(
            f"a graph needs neighbouring layers; this result has layers {list_numbers(result.layers)}"
            f" down to layer {result.bottom}: compute them with layers=range({(result.bottom or 0) + 1}, {max(known) + 1})"
        )
    return kept


def edges_of(
    values: Floats,
    layers: Sequence[int],
    positions: Sequence[int],
    count: int | None,
    always: int | None = None,
) -> tuple["Numbers", Floats, str]:
    """(layer, query, key) [edge, 3] and weight [edge] of the strongest edges, the weakest first, and a note where some are left out.

    always: a position whose edges are all kept.
    """
    place, row, key = np.nonzero(values > FAINTEST * largest([values]))
    edges = np.stack([np.asarray(layers, int)[place], np.asarray(positions, int)[row], key], axis=1)
    weights = values[place, row, key]
    order = np.argsort(weights, kind="stable")
    if count is None or count >= len(edges):
        return edges[order], weights[order], ""
    kept = np.zeros(len(edges), bool)
    kept[order[-count:]] = True
    if always is not None:
        kept |= edges[:, 1] == always
    note = f"\nstrongest {count:,} of {np.count_nonzero(values):,} edges" + (
        "" if always is None else f", and all of position {always}"
    )
    return edges[order[kept[order]]], weights[order[kept[order]]], note


def at(orientation: str, layer: int, position: int) -> tuple[float, float]:
    """Where a node stands."""
    return (position, layer) if orientation == "up" else (layer, position)


def draw_edges(
    ax: "Axes",
    edges: "Numbers",
    weights: Floats,
    scale: float,
    colour: str,
    orientation: str,
    *,
    thickest: float,
    thinnest: float = 0.0,
    opacity: tuple[float, float],
    zorder: int = 1,
    **options: Any,
) -> "LineCollection":
    """Lines from (layer, query) to (layer-1, key): weights from 0 to scale are thinnest to thickest, in points, and opacity[0] to [1]."""
    from matplotlib.collections import LineCollection
    from matplotlib.colors import to_rgba

    share = np.minimum(weights / scale, 1.0)
    colours = np.tile(to_rgba(colour), (len(edges), 1))
    colours[:, 3] = opacity[0] + (opacity[1] - opacity[0]) * share
    segments = [
        [at(orientation, layer, query), at(orientation, layer - 1, key)]
        for layer, query, key in edges.tolist()
    ]
    widths = thinnest + (thickest - thinnest) * share
    lines = LineCollection(
        segments, linewidths=widths, colors=colours, capstyle="butt", zorder=zorder, **options
    )
    ax.add_collection(lines)
    return lines


def thickness(size: int) -> float:
    """Points of the strongest edge's line: finer where tokens stand closer."""
    return 2.6 if size <= 16 else 1.6


def graph_size(
    depth: int, tokens: Sequence[str], orientation: str, panels: int = 1
) -> tuple[float, float]:
    """Inches, across and down, of graphs side by side."""
    names, size = label_room(tokens), len(tokens)
    if orientation == "up":
        width = width_for(size) if panels == 1 else max(PAGE, panels * size * LABEL + 0.6)
        return min(WIDEST, width), float(np.clip(3.0 / depth, 0.26, 0.6)) * depth + 0.5 + names
    needed = (
        names + 0.3 + panels * ((0.11 if size <= 16 else 0.2) * depth + 0.4)
    )  # steep edges need more room
    width = COLUMN if needed <= COLUMN and panels == 1 else max(PAGE, needed)
    return width, min(WIDEST, max(1.6, size * LABEL * 1.25 + 0.6))


def graph_frame(
    ax: "Axes", layers: Sequence[int], tokens: Sequence[str], orientation: str, position: int | None
) -> Any:
    """The nodes, the tokens at the input, the numbers of the layers."""
    rows = sorted({*layers, *(layer - 1 for layer in layers)})
    nodes = np.array(
        [at(orientation, row, place) for row in rows for place in range(len(tokens))], dtype=float
    )
    chosen = np.array([place == position for _ in rows for place in range(len(tokens))])
    ends = ((rows[0] - 0.2, rows[-1] + 0.2), (-0.6, len(tokens) - 0.4))
    if orientation == "up":
        ax.set(xlim=ends[1], ylim=ends[0], ylabel="layer")
    else:
        ax.set(xlim=ends[0], ylim=ends[1][::-1], xlabel="layer")
    every = range(rows[0], rows[-1] + 1)
    token_ticks(ax, tokens, along="x" if orientation == "up" else "y", chosen=position)
    layer_ticks(
        ax,
        every,
        every,
        along="y" if orientation == "up" else "x",
        ground="input" if orientation == "up" else "0",
    )
    ax.spines[:].set_visible(False)
    dot = 9 if len(tokens) <= 16 else 4
    return ax.scatter(
        nodes[:, 0],
        nodes[:, 1],
        s=np.where(chosen, 1.8 * dot, dot),
        c=np.where(chosen, "black", "0.35"),
        linewidth=0,
        zorder=3,
    )


# ---- checks, of the other figures too -------------------------------------------------------------------------------------------


def explanations_of(given: Any) -> list[Explanation]:
    """One explanation or several, as a list."""
    several = (
        [given]
        if isinstance(given, Explanation)
        else list(given)
        if isinstance(given, Sequence)
        else []
    )
    if not several or not all(isinstance(each, Explanation) for each in several):
        raise OptionError(
            f"this figure draws what explain gives, one or a list; got {type(given).__name__}"
        )
    for each in several:
        for result in each.results.values():
            check_result(result)
            if len(result.tokens) != len(each.tokens):
                raise OptionError(
                    f"an explanation's results must have its {len(each.tokens)} tokens; {result.method} has {len(result.tokens)}"
                )
    return several


def same_tokens(result: TokenAttention) -> bool:
    """Whether keys are positions, and not words."""
    size = len(result.tokens)
    return all(
        at < size and result.tokens[at] == name
        for at, name in zip(result.positions, result.queries, strict=True)
    )


def checked_scale(scale: float | None, *values: Floats) -> float:
    """The value of the darkest colour."""
    if scale is None:
        return largest(values)
    if (
        isinstance(scale, bool)
        or not isinstance(scale, int | float | np.number)
        or not 0 < scale < float("inf")
    ):
        raise OptionError(
            f"scale must be a number above 0, the value of the darkest colour; got {scale!r}"
        )
    return float(scale)
