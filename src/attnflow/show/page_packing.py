"""Arrays of a page: 16-bit floats in base64, deflated where that pays, and graphs as they fit.

16 bits keep 3 digits, as many as the page shows. Of a graph with many layers the page draws bands
of them, which are merged here; of one that is too large for a page, the bands are all it gets.
"""

import base64
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from attnflow.core.arrays import Array, Floats
from attnflow.core.attention import Attention
from attnflow.core.graph import AttentionGraph
from attnflow.core.methods import rollout
from attnflow.core.requests import MOSTLY
from attnflow.core.single_flow import MaxFlow
from attnflow.errors import printable

GRAPH_BYTES = 32_000_000  # graphs that are larger, as float16, come as bands of layers only
BAND_BYTES = 32_000_000  # ... and not at all if those are larger
HEAD_BYTES = 20_000_000  # the same for the weights of every head
WORTH_DEFLATING = 16_000  # bytes
LAYERS = 12  # a graph with more of them is drawn as bands
BANDS = 8
FLOW_EDGES = 3_000  # the strongest edges of a maximum flow travel in a page
TILES = 128  # more positions than these are pooled into so many tiles

Data = dict[str, Any]


def pack_array(array: Array) -> Data:
    """An array as base64 of float16, little endian, with its shape; deflated where that pays."""
    halves = np.ascontiguousarray(array, dtype="<f2")
    plain, kind = halves.tobytes(), "float16"
    if len(plain) > WORTH_DEFLATING:
        # all high bytes before all low ones: neighbours are alike then
        planes = np.frombuffer(plain, np.uint8).reshape(-1, 2).T.tobytes()
        small = zlib.compress(planes, 4)
        if len(small) < 0.9 * len(plain):
            plain, kind = small, "deflated"
    return {"shape": list(array.shape), kind: base64.b64encode(plain).decode()}


def pack_rows(values: Array, positions: Iterable[int]) -> Data:
    """Rows that the page does not compute: values [layer, query, key] of some positions."""
    return {"positions": list(positions), "values": pack_array(values)}


def round_numbers(values: Iterable[float]) -> list[float]:
    """Numbers rounded to 5 digits: importance may be too small, or too large, for float16."""
    return [float(f"{value:.4e}") for value in values]


def pack_flags(values: Array) -> list[list[int]]:
    """[layer, query] as 0 and 1."""
    return [[int(flag) for flag in row] for row in values]


def flag_saturated(saturated: Array) -> list[list[int]]:
    """[layer, query]: 1 where most of a row [layer, query, key] is saturated.

    Such a row says nothing about its source.
    """
    return pack_flags(saturated.mean(axis=-1) > MOSTLY)


def pack_graphs(
    attention: Attention | None, graphs: Sequence[AttentionGraph]
) -> tuple[Data, list[str]]:
    """The graphs, and the weights of every head, as far as they fit; and notes."""
    packed: Data = {}
    notes: list[str] = []
    if not graphs:
        return packed, notes
    graph = graphs[0]
    whole = 2 * sum(network.weights.size for network in graphs) <= GRAPH_BYTES
    bands = [choose_bands(network.depth) for network in graphs]
    size = 2 * sum(len(tops) * network.size**2 for tops, network in zip(bands, graphs, strict=True))
    if whole or (all(bands) and size <= BAND_BYTES):
        packed["graphs"] = [pack_graph(network, whole=whole) for network in graphs]
    if not whole:
        left = "bands of layers" if "graphs" in packed else "the rows asked for"
        notes.append(
            f"The graph of {graph.depth} layers and {graph.size:,} tokens is too large for a page;"
            f" only {left} are here."
        )
    if attention is None or attention.heads == 1 or attention.depth != graph.depth:
        return packed, notes
    if 2 * attention.weights.size <= HEAD_BYTES:
        packed["heads"] = pack_array(attention.weights)
    else:
        notes.append(
            f"The weights of all {attention.heads} heads are too large for a page;"
            " their mean is shown."
        )
    return packed, notes


def choose_bands(depth: int) -> list[int]:
    """The top layer of every band; none where a graph has few layers.

    >>> choose_bands(24), choose_bands(6)
    ([3, 6, 9, 12, 15, 18, 21, 24], [])
    """
    return [] if depth <= LAYERS else [round(depth * (at + 1) / BANDS) for at in range(BANDS)]


def pack_graph(graph: AttentionGraph, *, whole: bool) -> Data:
    """The weights of a graph, or its edges where they hold the residual; and its bands.

    Edges with the residual inside are divided by their largest row sum: the page draws shares.
    """
    packed: Data = {"edges": printable(graph.edge_name), "residual": graph.residual}
    if whole:
        scale = 1.0
        if graph.residual is None:
            scale = float(graph.weights.sum(axis=-1).max()) or 1.0
        packed["weights"] = pack_array(graph.weights / scale)
    tops = choose_bands(graph.depth)
    if tops:
        packed |= {"tops": tops, "bands": pack_array(merge_bands(graph, tops))}
    return packed


def merge_bands(graph: AttentionGraph, tops: Sequence[int]) -> Array:
    """[band, query, key]: the shares that travel from the top of a band to that of the next."""
    bands = np.zeros((len(tops), graph.size, graph.size), np.float32)
    for place, (bottom, top) in enumerate(zip((0, *tops), tops, strict=False)):
        merged = rollout(graph, layers=[top], bottom=bottom, normalize=None).values[0]
        bands[place][list(graph.kept)] = merged / (merged.sum(axis=-1).max() or 1.0)
    return bands


def pool_tiles(values: Floats, positions: Sequence[int]) -> Data | None:
    """Rows [layer, query, key] of all positions as tiles: means over queries of sums over keys.

    None where there are few positions, which need none.
    """
    size = values.shape[-1]
    if size <= TILES or list(positions) != list(range(size)):
        return None
    starts = [size * at // TILES for at in range(TILES)]
    pooled = np.add.reduceat(np.add.reduceat(values, starts, axis=1), starts, axis=2)
    counts = np.diff([*starts, size])
    return {"starts": starts, "values": pack_array(pooled / counts[None, :, None])}


def pack_flow(flow: MaxFlow) -> Data:
    """A maximum flow for JSON: its strongest edges as [layer, query, key, flow, in the cut]."""
    lowest, cut = flow.target[0] + 1, set(flow.cut)
    places = np.argwhere(flow.edges > 0)
    amounts = flow.edges[tuple(places.T)]
    strongest = places[np.argsort(-amounts, kind="stable")[:FLOW_EDGES]].tolist()
    carrying = {(layer + lowest, query, key) for layer, query, key in strongest}
    rows = [
        (*edge, float(f"{flow.edges[edge[0] - lowest, edge[1], edge[2]]:.4e}"), int(edge in cut))
        for edge in carrying | cut
    ]
    rows.sort(key=lambda edge: (-edge[4], -edge[3], edge))
    return {
        "target": list(flow.targets),
        "value": float(f"{flow.value:.5e}"),
        "edges": rows,
    }
