"""Edges while a model generates: each step gives the rows of its new positions.

With its cache a model runs over the prompt once, and then over one token at a time. A step knows
what its queries take from all keys before them, and rows of one layer's edges depend on their own
query only: so the rows of all steps, one below another, are those of one pass over all positions.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from attnflow.capturing.follow import ObservedLayer
from attnflow.capturing.mix import SequenceSlice, make_mix
from attnflow.core.arrays import Array
from attnflow.core.graph import AttentionGraph
from attnflow.edges.edge_weight import EdgeWeight
from attnflow.edges.graphs import (
    drop_attention,
    make_graphs,
    weigh_mixes,
)
from attnflow.errors import CaptureError, OptionError
from attnflow.models.model import Model
from attnflow.models.wiring.find import find_wirings
from attnflow.models.wiring.linear_maps import ModuleReader


class EdgeRows(NamedTuple):
    """Some rows of one layer's edges, and their place among those of all steps."""

    row: int
    column: int
    edges: Array  # [query, key]


class StepEdges:
    """The edges of every layer, collected over the steps of a generation.

    Parameters
    ----------
    model
        The model that generates.
    weights
        Edge weights other than attention that need no backward pass.
    pads
        The number of padded positions before each prompt.
    length
        The number of positions of the longest prompt, which is that of all with their padding.
    heads
        How heads are fused; by their mean if None.
    """

    def __init__(
        self,
        model: Model,
        weights: Mapping[str, EdgeWeight],
        pads: Sequence[int],
        length: int,
        heads: str | None,
    ) -> None:
        self.model, self.weights, self.heads = model, weights, heads
        self.pads, self.length = pads, length
        self.failure: CaptureError | None = None
        self.fused: dict[str, str] = {}  # how heads were fused, by edge weight
        self.depth = len(find_wirings(model))
        self.reader = ModuleReader(model.model)
        # by sequence and edge weight, the blocks of each layer
        self.blocks: list[dict[str, list[list[EdgeRows]]]] = [
            {name: [[] for _ in range(self.depth)] for name in weights} for _ in pads
        ]

    def give_up(self, error: CaptureError) -> None:
        """Note why the edges are not available, and forget them."""
        self.failure = error
        self.blocks.clear()

    def add_layer(self, number: int, layer: ObservedLayer) -> None:
        """Weigh the edges of one layer in one step; numbers continue over the steps."""
        step, depth = divmod(number, self.depth)
        queries, keys = layer.weights.shape[2:]
        end = self.length + step  # the first position that this step does not have
        known = min(keys, end)  # a cache with a window holds the last keys only
        top, left = end - queries, end - known
        for place, pad in enumerate(self.pads):
            row, column = max(pad, top), max(pad, left)
            part = SequenceSlice(
                slice(row - top, queries), slice(column - left, known), row - column
            )
            mix = make_mix(self.reader, layer, place, part)
            edges = weigh_mixes({None: mix}, self.weights, self.heads, self.fused)
            for name, matrix in edges.items():
                block = EdgeRows(row - pad, column - pad, matrix)
                self.blocks[place][name][depth].append(block)

    def make_graphs(
        self, place: int, size: int, tokens: Sequence[str]
    ) -> dict[str, AttentionGraph]:
        """The graphs of one sequence, by the name of their edges, over its first positions."""
        stacks = {}
        for name, layers in self.blocks[place].items():
            kinds = {block.edges.dtype for blocks in layers for block in blocks}
            stacks[name] = np.zeros((self.depth, size, size), np.result_type(np.float32, *kinds))
            for whole, blocks in zip(stacks[name], layers, strict=True):
                for row, column, edges in blocks:
                    part = edges[: max(0, size - row), : size - column]
                    whole[row : row + len(part), column : column + part.shape[1]] = part
        return make_graphs(self.model, self.weights, stacks, self.fused, tokens=tokens, causal=True)


def split_edges(
    weights: Mapping[str, EdgeWeight],
) -> tuple[dict[str, EdgeWeight], dict[str, EdgeWeight]]:
    """The edge weights that a step gives, and those that watch each generated token."""
    others = drop_attention(weights)
    steps = {name: weight for name, weight in others.items() if not weight.rules}
    return steps, {name: weight for name, weight in others.items() if name not in steps}


def refuse_reruns(weights: Mapping[str, EdgeWeight]) -> None:
    """Refuse edges that run layers again: a step has no whole layer to run."""
    for name, weight in weights.items():
        if weight.rerun:
            raise OptionError(
                f"edges {name!r} run each layer again for every token, which a cache does not"
                " allow; use them in explain, or contribution edges here"
            )
