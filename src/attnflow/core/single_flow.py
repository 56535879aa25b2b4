"""What `max_flow` returns: `MaxFlow`, one maximum flow with its edges and its cut."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from attnflow.core.arrays import Floats
from attnflow.core.files import dump_json, write_by_ending
from attnflow.core.provenance import Source
from attnflow.core.tables import VIEW_ROWS, Panel, Table, format_number
from attnflow.core.text import show_token


@dataclass(frozen=True, eq=False)
class MaxFlow(Table):
    """One maximum flow: its value, the flow on every edge, and the edges that limit it.

    As a table it has the edges that carry flow, and those of the cut, from the top down: `layer`,
    `position` and `query` say where an edge starts, `key` and `token` where in the layer below it
    ends, `flow` what it carries, and `cut` whether it is one of those that limit the whole.

    Parameters
    ----------
    value
        The maximum flow.
    source
        (layer, position), where it starts.
    target
        (layer, position), where it ends, or (layer, positions) of a group taken together.
    edges
        [layer, query, key]: the flow on the edge from (layer, query) to (layer - 1, key), for
        layers from the one above the target to that of the source.
    cut
        (layer, query, key) of every edge of a minimum cut. All of them are full, and their
        capacities sum to the value.
    cut_capacity
        That sum.
    tokens
        The names of the positions.
    provenance
        Where the result came from; `source` is the name of the flow's first node.

    >>> import attnflow as af
    >>> attention = af.Attention([[[0.5, 0.5], [1.0, 0.0]]] * 2, tokens=["the", "key"])
    >>> best = af.max_flow(attention, source=(2, 0), target=(0, 1))
    >>> best.to_pandas()[["layer", "query", "token", "flow", "cut"]].values.tolist()[0]
    [2, 'the', 'the', 0.25, False]
    """

    columns = ("layer", "position", "query", "key", "token", "flow", "cut")

    value: float
    source: tuple[int, int]
    target: tuple[int, int | tuple[int, ...]]
    edges: Floats  # [layer, query, key]
    cut: tuple[tuple[int, int, int], ...]
    cut_capacity: float
    tokens: tuple[str, ...]
    provenance: Source | None = None  # where it came from; `source` is a node

    @property
    def targets(self) -> tuple[int, ...]:
        """The positions of the target: one, or those of a group."""
        end = self.target[1]
        return end if isinstance(end, tuple) else (end,)

    def rows(self) -> Iterator[tuple[int, int, str, int, str, float, bool]]:
        """(layer, position, query, key, token, flow, cut) of each edge with flow or in the cut."""
        lowest = self.target[0] + 1
        limiting = set(self.cut)
        carrying = {(int(at) + lowest, int(q), int(k)) for at, q, k in np.argwhere(self.edges > 0)}
        for layer, query, key in sorted(
            carrying | limiting, key=lambda edge: (-edge[0], *edge[1:])
        ):
            flow = float(self.edges[layer - lowest, query, key])
            names = self.tokens[query], self.tokens[key]
            yield layer, query, names[0], key, names[1], flow, (layer, query, key) in limiting

    @property
    def _provenance(self) -> Source | None:
        return self.provenance

    def _view(self) -> Iterator[Panel]:
        """The value, and the edges with the largest flow in their order."""
        rows = list(self.rows())
        places = sorted(range(len(rows)), key=lambda place: -rows[place][5])[:VIEW_ROWS]
        ends = ", ".join(show_token(self.tokens[position]) for position in self.targets)
        upper, start = self.source
        caption = (
            f"maximum flow {format_number(self.value)} from layer {upper}, position {start}"
            f" ({show_token(self.tokens[start])}) to layer {self.target[0]} ({ends}),"
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

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the flow, and where it came from; the ending of the name says how.

        Parameters
        ----------
        path
            A file that ends in .csv (the table), .json (the edges that carry flow as [layer,
            query, key, flow]) or .npz (all edges).
        """
        return write_by_ending(
            path, {".csv": self._write_csv, ".json": self._write_json, ".npz": self._write_npz}
        )

    def _write_json(self, file: IO[bytes]) -> None:
        content: dict[str, Any] = {
            "value": self.value,
            "source": self.source,
            "target": self.target,
            "tokens": self.tokens,
            "edges": [
                (layer, query, key, flow) for layer, query, _, key, _, flow, _ in self.rows()
            ],
            "cut": self.cut,
            "cut_capacity": self.cut_capacity,
        }
        if self.provenance is not None:
            content["provenance"] = self.provenance.to_dict()
        file.write(dump_json(content).encode())

    def _write_npz(self, file: IO[bytes]) -> None:
        arrays: dict[str, npt.NDArray[Any]] = {
            "value": np.array(self.value),
            "source": np.array(self.source),
            "target_layer": np.array(self.target[0]),
            "target_positions": np.array(self.targets),
            "tokens": np.array(self.tokens),
            "edges": self.edges,
            "cut": np.array(self.cut, dtype=np.int64).reshape(-1, 3),
            "cut_capacity": np.array(self.cut_capacity),
        }
        if self.provenance is not None:
            arrays["provenance"] = np.array(self.provenance.to_json())
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        ends = f"from {self.source} to {self.target}"
        return f"<MaxFlow: {self.value:.6g} {ends}, limited by {len(self.cut)} edges>"
