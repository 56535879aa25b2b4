"""`MaxFlow`: one maximum flow, with its edges and its cut."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from attnflow.core.arrays import Floats
from attnflow.core.groups import name_places
from attnflow.core.io.formatting import VIEW_ROWS, Panel, format_number
from attnflow.core.io.tables import ArrayTable
from attnflow.core.provenance import Source
from attnflow.core.text import show_token


@dataclass(frozen=True, eq=False)
class MaxFlow(ArrayTable):
    """One maximum flow: its value, the flow on every edge, and the edges that limit it.

    The rows of its table are the edges that carry flow, and those of the cut, from the top down:
    an edge starts at `position` (the token `query`) of `layer` and ends at `key` (`token`) of the
    layer below, carries `flow`, and is in the `cut` or not.

    Parameters
    ----------
    value
        The maximum flow.
    source
        (layer, position), where it starts, or (layer, positions) that send together.
    target
        (layer, position), where it ends, or (layer, positions) of a group taken together.
    edges
        [layer, query, key]: the flow on the edge from (layer, query) to (layer - 1, key), for
        layers from the one above the target to that of the source.
    cut
        (layer, query, key) of every edge of a minimum cut. All of them are full, and their
        capacities sum to the value.
    cut_capacity
        The sum of the capacities of the cut.
    tokens
        The names of the positions.
    provenance
        Where the result came from; `source` is the first node of the flow.

    >>> import attnflow as af
    >>> attention = af.Attention([[[0.5, 0.5], [1.0, 0.0]]] * 2, tokens=["the", "key"])
    >>> best = af.max_flow(attention, source=(2, 0), target=(0, 1))
    >>> best.to_pandas()[["layer", "query", "token", "flow", "cut"]].values.tolist()[0]
    [2, 'the', 'the', 0.25, False]
    """

    columns = ("layer", "position", "query", "key", "token", "flow", "cut")
    _source_field = "provenance"

    value: float
    source: tuple[int, int | tuple[int, ...]]
    target: tuple[int, int | tuple[int, ...]]
    edges: Floats  # [layer, query, key]
    cut: tuple[tuple[int, int, int], ...]
    cut_capacity: float
    tokens: tuple[str, ...]
    provenance: Source | None = None  # where it came from; `source` is a node

    @property
    def sources(self) -> tuple[int, ...]:
        """The positions of the source: one, or those that send together."""
        start = self.source[1]
        return start if isinstance(start, tuple) else (start,)

    @property
    def targets(self) -> tuple[int, ...]:
        """The positions of the target: one, or those of a group."""
        end = self.target[1]
        return end if isinstance(end, tuple) else (end,)

    def rows(self) -> Iterator[tuple[int, int, str, int, str, float, bool]]:
        """One (layer, position, query, key, token, flow, cut) per edge with flow or in the cut."""
        lowest = self.target[0] + 1
        limiting = set(self.cut)
        carrying = {(int(at) + lowest, int(q), int(k)) for at, q, k in np.argwhere(self.edges > 0)}
        for layer, query, key in sorted(
            carrying | limiting, key=lambda edge: (-edge[0], *edge[1:])
        ):
            flow = float(self.edges[layer - lowest, query, key])
            names = self.tokens[query], self.tokens[key]
            yield layer, query, names[0], key, names[1], flow, (layer, query, key) in limiting

    def _view(self) -> Iterator[Panel]:
        """The value, and the edges with the largest flow in their order."""
        rows = list(self.rows())
        places = sorted(range(len(rows)), key=lambda place: -rows[place][5])[:VIEW_ROWS]
        starts, ends = (
            ", ".join(show_token(self.tokens[position]) for position in positions)
            for positions in (self.sources, self.targets)
        )
        caption = (
            f"maximum flow {format_number(self.value)} from layer {self.source[0]},"
            f" {name_places(self.sources)} ({starts}) to layer {self.target[0]} ({ends}),"
            f" limited by {len(self.cut)} edges"
        )
        cut_off = f"the {len(places)} strongest of {len(rows):,} edges"
        yield Panel(
            self.columns,
            [rows[place] for place in sorted(places)],
            caption=caption,
            note=cut_off if len(places) < len(rows) else "",
            bar="flow",
        )

    def _content(self) -> dict[str, object]:
        """The edges are those that carry flow, as [layer, query, key, flow]."""
        names = ("value", "source", "target", "tokens", "cut", "cut_capacity")
        edges = [(layer, query, key, flow) for layer, query, _, key, _, flow, _ in self.rows()]
        return {**{name: getattr(self, name) for name in names}, "edges": edges}

    def _arrays(self) -> dict[str, object]:
        """The edges are all of them, [layer, query, key]."""
        content = self._content()
        del content["target"]
        if isinstance(self.source[1], tuple):
            del content["source"]
        return content | {
            "source_layer": self.source[0],
            "source_positions": self.sources,
            "target_layer": self.target[0],
            "target_positions": self.targets,
            "edges": self.edges,
            "cut": np.array(self.cut, dtype=np.int64).reshape(-1, 3),
        }

    def __repr__(self) -> str:
        ends = f"from {self.source} to {self.target}"
        return f"<MaxFlow: {self.value:.6g} {ends}, limited by {len(self.cut)} edges>"
