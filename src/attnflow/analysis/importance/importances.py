"""Importances by name: how much a prediction depends on each token.

They are measured on the model itself, and are the paper's references: token attention is good if it
ranks tokens as they do.
"""

from collections.abc import Callable

from attnflow.analysis.importance.blank_out import blank_out
from attnflow.analysis.importance.importance import Importance
from attnflow.analysis.importance.input_gradient import input_gradient
from attnflow.analysis.importance.relevance import relevance

# called as f(model, inputs, target)
IMPORTANCES: dict[str, Callable[..., list[Importance]]] = {
    "blank_out": blank_out,
    "input_gradient": input_gradient,
    "relevance": relevance,
}
# the paper's references, which are computed where none is named
PAPER_IMPORTANCES = {name: IMPORTANCES[name] for name in ("blank_out", "input_gradient")}
