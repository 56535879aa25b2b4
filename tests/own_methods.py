"""Methods, importances and graphs of a user's own, in a module that workers can import."""

from typing import Any

import numpy as np

import attnflow as af

squared = af.token_attention("squared", lambda graph: graph.weights**2)


def last_layer(
    graph: Any,
    *,
    layers: Any = None,
    positions: Any = None,
    bottom: int = 0,
    normalize: Any = "sum",
) -> af.TokenAttention:
    """A method written out in full: raw attention under another name, with its own options."""
    return af.raw(graph, layers=layers, positions=positions, normalize=normalize)


def token_length(model: af.Model, inputs: list[Any], target: Any) -> list[Any]:
    """An importance: how many characters a token has."""
    return [np.array([float(len(token)) for token in model.encode(text).tokens]) for text in inputs]


def without_first(attention: af.Attention) -> af.AttentionGraph:
    """A graph without its first position."""
    return attention.graph(without=[0])


def only_first(attention: af.Attention) -> af.AttentionGraph:
    """A graph without its second position, and with little residual."""
    return attention.graph(without=[1], residual=0.1)


strongest = af.edge_weight("strongest", lambda mix: mix.attention.amax(dim=0), residual="mixed")


def lengths(mix: af.LayerMix) -> Any:
    """An edge weight written as a function: the lengths of the parts, the residual inside."""
    return af.EDGES["norm"](mix)
