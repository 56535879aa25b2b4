"""Backward passes from a whole answer: the sum of the logits of its tokens, in one pass."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from attnflow.capturing.backward import BackwardPass, Gradients, Watch, run_backward
from attnflow.models.answers import Answer
from attnflow.models.model import Model


def run_answer(
    model: Model, answer: Answer, watches: Mapping[Any, Watch], foil: Answer | None = None
) -> BackwardPass:
    """The backward passes of an answer, each from the summed scalars of all its tokens.

    watches: as for `run_backward`, with any target. foil: another answer to the same prompt, which
    takes passes of its own. On the prompt, which both share, gradients are then the difference of
    both; on the tokens of the answer they are its own.
    """
    found = watch_answer(model, answer, watches)
    if foil is None:
        return found
    against = watch_answer(model, foil, watches)
    gradients = {
        key: subtract_gradients(each, against.gradients[key], answer.prompt)
        for key, each in found.gradients.items()
    }
    return replace(found, gradients=gradients)


def watch_answer(model: Model, answer: Answer, watches: Mapping[Any, Watch]) -> BackwardPass:
    """The backward passes of one answer."""
    watched = {key: replace(watch, target=list(answer.ids)) for key, watch in watches.items()}
    found = run_backward(model, [answer.encoded], watched, position=answer.span)
    gradients = {key: replace(each, names=(answer.text,)) for key, each in found.gradients.items()}
    return replace(found, gradients=gradients)


def subtract_gradients(found: Gradients, against: Gradients, prompt: int) -> Gradients:
    """The gradients of an answer minus those of its foil, on the tokens of the prompt.

    In a causal model the states of the prompt are the same before both answers, so that a
    difference of gradients there is the gradient of the difference.
    """
    for number, gradient in found.attention.items():
        gradient[:, :prompt] -= against.attention[number][:, :prompt]
    for name, gradient in found.states.items():
        gradient[:, :prompt] -= against.states[name][:, :prompt]
    return replace(
        found,
        names=(f"{found.names[0]} - {against.names[0]}",),
        scores=(*found.scores, *(-score for score in against.scores)),
        positions=(*found.positions, *against.positions),
        biases=found.biases - against.biases,
    )
