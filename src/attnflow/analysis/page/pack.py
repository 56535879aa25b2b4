"""Arrays of a page: 16-bit floats in base64, deflated if that pays, and graphs if they fit.

16 bits keep 3 digits, as the page shows. Many layers are drawn as bands, which are merged here; a
graph that is too large for a page comes as bands only.
"""

import base64
import zlib
from collections.abc import Iterable, Sequence

import numpy as np

from attnflow.analysis.page.schema import (
    Flow,
    Graphs,
    NumberTuple,
    Packed,
    PageGraph,
    Rows,
    Switches,
    Tiles,
)
from attnflow.core.arrays import Array, Floats
from attnflow.core.attention import Attention
from attnflow.core.evenness import MOSTLY
from attnflow.core.flow.max_flow import MaxFlow
from attnflow.core.graph import AttentionGraph
from attnflow.core.methods import rollout
from attnflow.errors import printable

GRAPH_BYTES = 32_000_000  # larger graphs, as float16, come as bands of layers only
BAND_BYTES = 32_000_000  # ... and are left out if the bands are larger
HEAD_BYTES = 20_000_000  # the same for the weights of every head
WORTH_DEFLATING = 16_000  # bytes
MOST_DRAWN_LAYERS = 12  # a graph with more of them is drawn as bands
BANDS = 8
FLOW_EDGES = 3_000  # the strongest edges of a maximum flow travel in a page
TILES = 128  # more positions are pooled into this many tiles


def pack_array(array: Array) -> Packed:
    """An array as base64 of float16, little endian, with its shape; deflated if that pays."""
    halves = np.ascontiguousarray(array, dtype="<f2")
    plain = halves.tobytes()
    if len(plain) > WORTH_DEFLATING:
        # all high bytes before all low ones: neighbours are alike then
        planes = np.frombuffer(plain, np.uint8).reshape(-1, 2).T.tobytes()
        small = zlib.compress(planes, 4)
        if len(small) < 0.9 * len(plain):
            return Packed(shape=array.shape, deflated=base64.b64encode(small).decode())
    return Packed(shape=array.shape, float16=base64.b64encode(plain).decode())


def pack_rows(values: Array, positions: Iterable[int]) -> Rows:
    """Rows [layer, query, key] of some positions."""
    return Rows(positions=tuple(positions), values=pack_array(values))


def round_numbers(values: Iterable[float]) -> NumberTuple:
    """Numbers rounded to 5 digits: importance may be too small, or too large, for float16."""
    return tuple(float(f"{value:.4e}") for value in values)


def pack_flags(values: Array) -> tuple[Switches, ...]:
    """[layer, query] as 0 and 1."""
    return tuple(tuple(int(flag) for flag in row) for row in values)


def flag_saturated(saturated: Array) -> tuple[Switches, ...]:
    """[layer, query]: 1 where most of a row [layer, query, key] is saturated, and says nothing."""
    return pack_flags(saturated.mean(axis=-1) > MOSTLY)


def pack_graphs(
    attention: Attention | None, graphs: Sequence[AttentionGraph]
) -> tuple[Graphs, list[str]]:
    """The graphs and the weights of every head, if they fit; and notes on what does not."""
    if not graphs:
        return Graphs(), []
    packed: tuple[PageGraph, ...] | None = None
    heads: Packed | None = None
    notes: list[str] = []
    graph = graphs[0]
    whole = 2 * sum(network.weights.size for network in graphs) <= GRAPH_BYTES
    bands = [choose_bands(network.depth) for network in graphs]
    size = 2 * sum(len(tops) * network.size**2 for tops, network in zip(bands, graphs, strict=True))
    if whole or (all(bands) and size <= BAND_BYTES):
        packed = tuple(pack_graph(network, whole=whole) for network in graphs)
    if not whole:
        left = "the rows asked for" if packed is None else "bands of layers"
        notes.append(
            f"The graph of {graph.depth} layers and {graph.size:,} tokens is too large for a page;"
            f" only {left} are here."
        )
    if attention is not None and attention.heads > 1 and attention.depth == graph.depth:
        if 2 * attention.weights.size <= HEAD_BYTES:
            heads = pack_array(attention.weights)
        else:
            notes.append(
                f"The weights of all {attention.heads} heads are too large for a page;"
                " their mean is shown."
            )
    return Graphs(graphs=packed, heads=heads), notes


def choose_bands(depth: int) -> list[int]:
    """The top layer of every band; empty for few layers.

    >>> choose_bands(24), choose_bands(6)
    ([3, 6, 9, 12, 15, 18, 21, 24], [])
    """
    return (
        []
        if depth <= MOST_DRAWN_LAYERS
        else [round(depth * (at + 1) / BANDS) for at in range(BANDS)]
    )


def pack_graph(graph: AttentionGraph, *, whole: bool) -> PageGraph:
    """The weights of a graph, or its edges if they include the residual; and its bands."""
    tops = choose_bands(graph.depth)
    return PageGraph(
        edges=printable(graph.edge_name),
        residual=graph.residual,
        weights=pack_array(scale_weights(graph)) if whole else None,
        tops=tuple(tops) if tops else None,
        bands=pack_array(merge_bands(graph, tops)) if tops else None,
    )


def scale_weights(graph: AttentionGraph) -> Array:
    """[layer, query, key]; edges that include the residual are divided by their largest row sum."""
    if graph.residual is not None:
        return graph.weights
    return graph.weights / (float(graph.weights.sum(axis=-1).max()) or 1.0)


def merge_bands(graph: AttentionGraph, tops: Sequence[int]) -> Array:
    """[band, query, key]: the shares that travel from the top of a band to that of the next."""
    bands = np.zeros((len(tops), graph.size, graph.size), np.float32)
    for place, (bottom, top) in enumerate(zip((0, *tops), tops, strict=False)):
        merged = rollout(graph, layers=[top], bottom=bottom, normalize=None).values[0]
        bands[place][list(graph.kept)] = merged / (merged.sum(axis=-1).max() or 1.0)
    return bands


def pool_tiles(values: Floats, positions: Sequence[int]) -> Tiles | None:
    """Rows [layer, query, key] of all positions as tiles: means over queries of sums over keys.

    None for few positions.
    """
    size = values.shape[-1]
    if size <= TILES or list(positions) != list(range(size)):
        return None
    starts = [size * at // TILES for at in range(TILES)]
    pooled = np.add.reduceat(np.add.reduceat(values, starts, axis=1), starts, axis=2)
    counts = np.diff([*starts, size])
    return Tiles(starts=tuple(starts), values=pack_array(pooled / counts[None, :, None]))


def pack_flow(flow: MaxFlow) -> Flow:
    """A maximum flow: its strongest edges and its cut, those of the cut first."""
    lowest, cut = flow.target[0] + 1, set(flow.cut)
    places = np.argwhere(flow.edges > 0)
    amounts = flow.edges[tuple(places.T)]
    strongest = places[np.argsort(-amounts, kind="stable")[:FLOW_EDGES]].tolist()
    carrying = {(layer + lowest, query, key) for layer, query, key in strongest}
    edges = [
        (*edge, float(f"{flow.edges[edge[0] - lowest, edge[1], edge[2]]:.4e}"), int(edge in cut))
        for edge in carrying | cut
    ]
    edges.sort(key=lambda edge: (-edge[4], -edge[3], edge))
    return Flow(target=flow.targets, value=float(f"{flow.value:.5e}"), edges=tuple(edges))
