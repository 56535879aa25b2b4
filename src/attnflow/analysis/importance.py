"""Importances by name, how much a prediction depends on tokens: blank-out, input gradients.

Both ask the model itself, and are the yardsticks of the paper: token attention is good if it ranks
tokens as these do.
"""

from collections.abc import Callable

from attnflow.analysis.blanking import blank_out, find_replacement, measure_blank_out
from attnflow.analysis.gradients import input_gradient
from attnflow.analysis.token_importance import Importance
from attnflow.analysis.watching import check_scorable, choose_targets

__all__ = [
    "IMPORTANCES",
    "Importance",
    "blank_out",
    "check_scorable",
    "choose_targets",
    "find_replacement",
    "input_gradient",
    "measure_blank_out",
]

# of a model, inputs and their targets
IMPORTANCES: dict[str, Callable[..., list[Importance]]] = {
    "blank_out": blank_out,
    "input_gradient": input_gradient,
}
