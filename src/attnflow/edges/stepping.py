"""Edges while a model generates: each step gives the rows of its new positions.

With its cache a model runs over the prompt once, and then over one token at a time. What a step's
queries took from all keys before them is known then, and rows of one layer's edges depend on their
own query alone: so the rows of all steps, one below another, are those of one pass over everything.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from attnflow.capturing.following import Pending, trace_model
from attnflow.capturing.mixing import ModuleReader, Span, make_mix
from attnflow.core.arrays import Array
from attnflow.core.graph import AttentionGraph
from attnflow.edges.building import drop_attention, make_graphs, run_edges, weigh_layer
from attnflow.edges.choosing import EdgeWeight
from attnflow.errors import OptionError
from attnflow.models.model import Model


class Block(NamedTuple):
    """Some rows of one layer's edges, and where they stand among those of all steps."""

    row: int
    column: int
    edges: Array  # [query, key]


class StepEdges:
    """The edges of every layer, collected over the steps of a generation.

    Parameters
    ----------
    weights
        Those that are not attention, and need no gradient.
    pads
        How many positions stand before each prompt.
    longest
        The positions of the prompts, with those.
    heads
        How heads are fused; by their mean if None.
    """

    def __init__(
        self,
        model: Model,
        weights: Mapping[str, EdgeWeight],
        pads: Sequence[int],
        longest: int,
        heads: str | None,
    ) -> None:
        self.model, self.weights, self.heads = model, weights, heads
        self.pads, self.longest = pads, longest
        self.fused: dict[str, str] = {}  # how heads were fused, by edge weight
        self.depth = len(trace_model(model))
        self.reader = ModuleReader(model.model)
        # by sequence and edge weight, the blocks of each layer
        self.blocks: list[dict[str, list[list[Block]]]] = [
            {name: [[] for _ in range(self.depth)] for name in weights} for _ in pads
        ]

    def finish(self, number: int, layer: Pending) -> None:
        """Take the edges of one layer in one step; numbers count on over the steps."""
        step, place_in_stack = divmod(number, self.depth)
        queries, keys = layer.weights.shape[2:]
        end = self.longest + step  # the first position that this step does not have
        known = min(keys, end)  # a cache with a window holds the last keys only
        top, left = end - queries, end - known
        for place, pad in enumerate(self.pads):
            row, column = max(pad, top), max(pad, left)
            span = Span(slice(row - top, queries), slice(column - left, known), row - column)
            mix = make_mix(self.reader, layer, place, span)
            for name, matrix in weigh_layer(mix, self.weights, self.heads, self.fused).items():
                block = Block(row - pad, column - pad, matrix)
                self.blocks[place][name][place_in_stack].append(block)

    def make_graphs(
        self, place: int, size: int, tokens: Sequence[str]
    ) -> dict[str, AttentionGraph]:
        """The graphs of one sequence, by the name of their edges, over its first positions."""
        stacks = {}
        for name, layers in self.blocks[place].items():
            stacks[name] = np.zeros((self.depth, size, size), np.float32)
            for whole, blocks in zip(stacks[name], layers, strict=True):
                for row, column, edges in blocks:
                    part = edges[: max(0, size - row), : size - column]
                    whole[row : row + len(part), column : column + part.shape[1]] = part
        known: dict[str, Any] = {"tokens": tokens, "causal": True}
        return make_graphs(self.model, self.weights, stacks, None, self.fused, **known)


def split_edges(
    weights: Mapping[str, EdgeWeight],
) -> tuple[dict[str, EdgeWeight], dict[str, EdgeWeight]]:
    """The edge weights that a step gives, and those that watch each generated token."""
    others = drop_attention(weights)
    steps = {name: weight for name, weight in others.items() if not weight.gradient}
    return steps, {name: weight for name, weight in others.items() if weight.gradient}


def watch_tokens(
    model: Model, ids: Sequence[int], prompt: int, weights: Mapping[str, EdgeWeight]
) -> dict[str, Callable[[int], AttentionGraph]]:
    """By edge weight, a function that gives the graph of the i-th generated token.

    ids: the prompt, of so many tokens, and what was generated. Each graph takes a pass over what
    stood before the token, and the way back from it, when it is asked for.
    """

    def watch(name: str, number: int) -> AttentionGraph:
        encoded = model.encode(list(ids[: prompt + number]))
        _, (graphs,) = run_edges(
            model, [encoded], {name: weights[name]}, target=[ids[prompt + number]]
        )
        return graphs[name]

    return {name: partial(watch, name) for name in weights}


def refuse_reruns(weights: Mapping[str, EdgeWeight]) -> None:
    """Refuse edges that run layers again: a step has no whole layer to run."""
    for name, weight in weights.items():
        if weight.rerun:
            raise OptionError(
                f"edges {name!r} run each layer again for every token, which a cache does not"
                " allow; use them in explain, or edges='contribution' here"
            )
