"""What is shown first where nobody asks for anything: the edges and method that serve best.

Chosen by measurement (docs/edges.md): on half of the texts of `benchmarks/edges.py`, reported on
the other half, for classifiers and for decoders.
"""

from collections.abc import Iterable

from attnflow.models.model import Model

FIRST = {"classifier": ("contribution", "rollout"), "decoder": ("contribution", "rollout")}


def choose_first(model: Model) -> tuple[str, str]:
    """The edges and the method that come first for a kind of model."""
    return FIRST["decoder" if model.is_causal else "classifier"]


def first_edges(model: Model) -> list[str]:
    """The kinds of edges that are computed if none is asked for."""
    return [choose_first(model)[0], "attention"]


def describe_lack(edges: Iterable[str], error: Exception) -> str:
    """Why results on edges that come first are missing."""
    names = ", ".join(name for name in edges if name != "attention")
    return f"{names} edges cannot be had of this model, so attention is shown: {error}"
