"""`RowTable`: rows of numbers over keys, one per layer and position."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import Field, replace
from typing import Any, ClassVar, Self

import numpy as np

from attnflow.core.arrays import Array, Floats
from attnflow.core.checks import check_count, check_integers
from attnflow.core.groups import Group, list_numbers, name_places
from attnflow.core.io.formatting import VIEW_ROWS
from attnflow.core.io.tables import ArrayTable, Column
from attnflow.core.provenance import Source
from attnflow.core.text import clean_text, show_token
from attnflow.errors import OptionError

KEY_COLUMNS = ("method", "layer", "position", "query", "key", "token")


class RowTable(ArrayTable):
    """A table of rows [layer, query, key]: the base of `TokenAttention` and `Comparison`."""

    # every subclass is a frozen dataclass with these fields
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]
    method: str
    layers: tuple[int, ...]
    positions: tuple[int, ...]
    tokens: tuple[str, ...]
    queries: tuple[str, ...]
    causal: bool
    groups: tuple[Group, ...] | None
    sources: tuple[Group, ...] | None
    size: int | None
    source: Source | None

    row_fields: ClassVar[tuple[str, ...]]  # arrays [layer, query, ...], or None

    @property
    @abstractmethod
    def _ranked(self) -> Floats:
        """[layer, query, key]: the numbers by which `top` ranks keys."""

    def select(self, position: int, layer: int | None = None) -> Self:
        """A copy with one position of one layer only.

        Parameters
        ----------
        position
            The position; a negative one counts from the end of the sequence. Of a generation, the
            number of the generated token.
        layer
            The layer; the top one of this result if None.
        """
        place, row = self._find_row(position, layer)
        part = (slice(place, place + 1), slice(row, row + 1))
        arrays = {name: getattr(self, name) for name in self.row_fields}
        return replace(
            self,
            **{name: array[part] for name, array in arrays.items() if array is not None},
            layers=(self.layers[place],),
            positions=(self.positions[row],),
            queries=(self.queries[row],),
            sources=None if self.sources is None else (self.sources[row],),
        )

    def top(
        self, k: int = 5, *, position: int | None = None, layer: int | None = None
    ) -> list[tuple[int, str, float]]:
        """The strongest keys of one row, as (key, token, number), the strongest first.

        Keys are ranked by their value; those of a comparison by `difference`.

        Parameters
        ----------
        k
            The maximum number of keys.
        position
            As in `select`; if None, the first position of this result, or the last if it is causal.
        layer
            As in `select`.
        """
        k = check_count("k", k)
        row = self._ranked[self._find_row(self._choose_position(position), layer)]
        order = np.argsort(-row, kind="stable")[:k]
        return [(int(key), self.tokens[key], float(row[key])) for key in order]

    def _choose_position(self, position: int | None = None) -> int:
        """The position itself; the first of this result if None, or the last if it is causal."""
        return self.positions[-1 if self.causal else 0] if position is None else position

    def _find_row(self, position: int, layer: int | None) -> tuple[int, int]:
        """The places of a layer, the top one if None, and of a position in the arrays."""
        (layer,) = check_integers([max(self.layers) if layer is None else layer], "layer")
        (asked,) = check_integers([position], "position")
        if layer not in self.layers:
            raise OptionError(
                f"layer must be one of {list_numbers(self.layers)}, those of this result;"
                f" got {layer}",
                options=["layer"],
            )
        if asked < 0 and self.size is None:
            raise OptionError(
                "a negative position counts from the end of a sequence whose size is known; got"
                f" {asked}: give one of {list_numbers(self.positions)}, or the result a size"
            )
        counted = asked + (self.size or 0) if asked < 0 else asked
        if counted not in self.positions:
            raise OptionError(
                f"position {asked} was not computed;"
                f" this result has positions {list_numbers(self.positions)}",
                options=["position"],
            )
        return self.layers.index(layer), self.positions.index(counted)

    def _list_rows(self, *arrays: Array) -> Iterator[tuple[Any, ...]]:
        """One row per key: KEY_COLUMNS, and its number in each array [layer, query, key]."""
        for layer, *matrices in zip(self.layers, *arrays, strict=True):
            asking = zip(self.positions, self.queries, *matrices, strict=True)
            for position, query, *rows in asking:
                numbers = zip(*(row.tolist() for row in rows), strict=True)
                for key, (token, cells) in enumerate(zip(self.tokens, numbers, strict=True)):
                    yield self.method, layer, position, query, key, token, *cells

    def _list_columns(self, **arrays: Floats) -> dict[str, Column]:
        """The same as columns."""
        shape = len(self.layers), len(self.positions), len(self.tokens)
        queries, tokens = (
            np.array([clean_text(name) for name in names], dtype=object)
            for names in (self.queries, self.tokens)
        )
        of_row = (slice(None), None)  # [query, key=1]
        columns = {
            "layer": np.array(self.layers)[:, None, None],
            "position": np.array(self.positions)[of_row],
            "query": queries[of_row],
            "key": np.arange(shape[-1]),
            "token": tokens,
        } | arrays
        method = np.full(np.prod(shape), self.method, dtype=object)
        wide = {name: np.broadcast_to(each, shape).ravel() for name, each in columns.items()}
        return {"method": method, **wide}

    def _group_content(self) -> dict[str, object]:
        """The groups for JSON; empty without groups."""
        if self.groups is None:
            return {}
        return {"groups": [group.positions for group in self.groups]}

    def _name_row(self) -> str:
        """The first row, for a caption."""
        members = self.positions[:1] if self.sources is None else self.sources[0].positions
        return f"layer {self.layers[0]}, {name_places(members)} ({show_token(self.queries[0])})"


def pick_largest(numbers: Floats) -> list[int]:
    """The places of the largest numbers that a notebook shows, in ascending order."""
    largest: list[int] = np.sort(np.argsort(-numbers, kind="stable")[:VIEW_ROWS]).tolist()
    return largest
