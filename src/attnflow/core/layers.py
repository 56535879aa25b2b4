"""`Layers`: the edges of a graph in their original precision, converted layer by layer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, overload

import numpy as np

from attnflow.core.arrays import Array, Floats

SUM_ROUNDING = 1e-13  # a largest row sum this close to 1 is 1
BLOCK = 2**20  # numbers converted to float64 at a time, unless a whole layer is needed


class Held(NamedTuple):
    """The fields of `Layers`, as the kernels take them."""

    weights: Array
    factors: Floats
    diagonal: Floats


@dataclass(frozen=True, eq=False)
class Layers:
    """Edges [layer, query, key] of any precision, never converted to float64 all at once.

    edges[l, q, k] = factors[l, q] * weights[l, q, k] + diagonal[l, q] * (q == k)

    So rows of float32 weights sum to 1 in float64, residual included, without copying the weights.
    Indexing follows numpy: an integer gives one layer in float64, a slice gives `Layers`.

    >>> layers = Layers(np.eye(2)[None], np.full((1, 2), 0.5), np.full((1, 2), 0.5))
    >>> layers[0].tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """

    weights: Array  # [layer, query, key], float32 or float64
    factors: Floats  # [layer, query]
    diagonal: Floats  # [layer, query]

    @classmethod
    def of_edges(cls, edges: Array) -> "Layers":
        """Edges [layer, query, key] as they are."""
        return cls(edges, np.ones(edges.shape[:2]), np.zeros(edges.shape[:2]))

    @property
    def shape(self) -> tuple[int, int, int]:
        """(layers, queries, keys)."""
        depth, queries, keys = self.weights.shape
        return depth, queries, keys

    def __len__(self) -> int:
        return len(self.weights)

    def __iter__(self) -> Iterator[Floats]:
        return map(self.__getitem__, range(len(self)))

    @overload
    def __getitem__(self, place: int) -> Floats: ...
    @overload
    def __getitem__(self, place: slice) -> "Layers": ...
    def __getitem__(self, place: int | slice) -> "Floats | Layers":
        if isinstance(place, slice):
            return Layers(self.weights[place], self.factors[place], self.diagonal[place])
        edges: Floats = self.factors[place][:, None] * self.weights[place]
        np.einsum("ii->i", edges)[:] += self.diagonal[place]  # a view of the diagonal, in any order
        return edges

    def rows(self, layer: int, queries: Sequence[int] | Array) -> Floats:
        """[query, key]: some rows of one layer, a new array."""
        rows: Floats = self.factors[layer, queries][:, None] * self.weights[layer, queries]
        rows[np.arange(len(rows)), queries] += self.diagonal[layer, queries]
        return rows

    def blocks(self) -> list[slice]:
        """The queries of a layer, cut into blocks whose rows have about BLOCK numbers."""
        _, queries, keys = self.shape
        step = max(1, BLOCK // keys)
        return [slice(start, start + step) for start in range(0, queries, step)]

    def carry_down(self, layer: int, values: Floats) -> Floats:
        """values [..., query] @ edges of a layer: [..., key]."""
        carried: Floats = values * self.diagonal[layer]
        shares = values * self.factors[layer]
        for part in self.blocks():
            carried += shares[..., part] @ self.weights[layer, part].astype(np.float64, copy=False)
        return carried

    def carry_up(self, layer: int, values: Floats) -> Floats:
        """edges of a layer @ values [key]: [query]."""
        carried: Floats = values * self.diagonal[layer]
        for part in self.blocks():
            block = self.weights[layer, part].astype(np.float64, copy=False)
            carried[part] += self.factors[layer, part] * (block @ values)
        return carried

    def sum_columns(self, layer: int) -> Floats:
        """[key]: the sum of the edges into each node of the layer below."""
        return self.carry_down(layer, np.ones(self.shape[1]))

    def largest_row_sum(self) -> float:
        """The largest sum of a row; exactly 1 if it is 1 within rounding, or if all edges are 0."""
        with np.errstate(over="ignore"):
            sums = self.factors * self.weights.sum(axis=-1, dtype=np.float64) + self.diagonal
        largest = min(float(sums.max()), np.finfo(np.float64).max)
        return 1.0 if largest == 0.0 or abs(largest - 1.0) <= SUM_ROUNDING else largest

    def scale_down(self, scale: float) -> "Layers":
        """The same edges divided by a number."""
        if scale < np.finfo(np.float64).tiny:  # one over it is infinite
            return Layers.of_edges(np.stack([layer / scale for layer in self]))
        return Layers(self.weights, self.factors / scale, self.diagonal / scale)

    @property
    def held(self) -> Held:
        """The fields as the kernels take them; always read-only, a type of its own to numba."""
        weights = self.weights.view()
        weights.setflags(write=False)
        return Held(weights, self.factors, self.diagonal)


def rescale(edges: Layers | Array, scale: float | None) -> tuple[Layers, float]:
    """Edges divided by the largest row sum of their graph, and that sum, computed if None."""
    layers = as_layers(edges)
    largest = layers.largest_row_sum() if scale is None else scale
    return layers if largest == 1.0 else layers.scale_down(largest), largest


def as_layers(edges: Layers | Array) -> Layers:
    """Edges [layer, query, key] as contiguous `Layers`."""
    if not isinstance(edges, Layers):
        return Layers.of_edges(np.ascontiguousarray(edges))
    if edges.weights.flags.c_contiguous:
        return edges
    return replace(edges, weights=np.ascontiguousarray(edges.weights))
