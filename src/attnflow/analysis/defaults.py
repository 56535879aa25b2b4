"""What is computed where nobody asks for anything: the paper's three, and before them what serves.

The edges and method that come first were chosen by measurement (docs/edges.md): on half of the
texts of `benchmarks/edges.py`, and reported on the other half, by kind of model. Faithfulness, in
`benchmarks/which.py`, chooses the same (docs/which-method.md).
"""

from collections.abc import Iterable, Mapping
from typing import Any

from attnflow.core.custom import Choices, Method, read_methods
from attnflow.core.methods import METHODS
from attnflow.edges.choosing import read_edges
from attnflow.models.model import Model

# by kind of model; what predicts nothing has no target for gradients, and was not measured
FIRST = {
    "decoder": ("gradient", "rollout"),
    "encoder": ("gradient", "flow"),
    "no prediction": ("contribution", "rollout"),
}
# while generating, gradients take a pass and its way back for every token; this comes along
FIRST_OF_STORIES = ("contribution", "rollout")
Plan = Mapping[str, Mapping[str, Method]]  # by kind of edges, the methods that run on it


def choose_first(model: Model) -> tuple[str, str]:
    """The edges and the method that come first for a kind of model."""
    if not model.predicts:
        return FIRST["no prediction"]
    return FIRST["decoder" if model.is_causal else "encoder"]


def plan_first(edges: str, method: str) -> Plan:
    """What is computed if neither methods nor edges are named: this first, then the paper's."""
    return {edges: {method: METHODS[method]}, "attention": dict(METHODS)}


def plan_methods(methods: Choices | None, edges: Any) -> Plan:
    """What is computed if methods or edges are named: every method on every kind of edges.

    All of attnflow's methods if None; attention if edges is None.
    """
    functions = read_methods(tuple(METHODS) if methods is None else methods)
    return dict.fromkeys(read_edges("attention" if edges is None else edges), functions)


def describe_lack(edges: Iterable[str], error: Exception) -> str:
    """Why results on edges that come first are missing."""
    names = ", ".join(name for name in edges if name != "attention")
    return f"{names} edges cannot be had of this model, so attention is shown alone: {error}"
