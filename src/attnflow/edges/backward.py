"""The way back from a target: its gradient by what each attention gave.

The model keeps its fused kernels: what attention gives is all that is kept, and the gradient of a
weight follows from that output's (capturing/mixing.py).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from attnflow.capturing.assembly import read_arguments
from attnflow.capturing.recomputing import save_memory
from attnflow.errors import OptionError
from attnflow.models.execution import evaluating, running
from attnflow.models.inputs import Encoded
from attnflow.models.listening import Attend, intercepting
from attnflow.models.model import Model
from attnflow.models.predicting import keep_logits

if TYPE_CHECKING:
    import torch

WATCHED = ("logit", "log_probability", "probability")
# a class or token by name or number, or a pair of them, whose difference is watched
OneTarget = int | str | tuple[int | str, int | str] | None
Target = OneTarget | list[int | None]  # one for all inputs, or a class per input


def find_gradients(
    model: Model,
    inputs: Sequence[Encoded],
    target: Target,
    target_of: str,
    position: int | None,
) -> "tuple[list[torch.Tensor], list[str]]":
    """Of the target, by what each attention gave: [sequence, query, head, width] per call.

    And what was watched of each sequence.
    """
    import torch

    if not model.predicts:
        raise OptionError(
            f"gradient edges watch a prediction, and {model.name} has no head that predicts; use"
            " edges='contribution'"
        )
    if target_of not in WATCHED:
        raise OptionError(f"unknown target_of {target_of!r}; choose from {', '.join(WATCHED)}")
    outputs: list[torch.Tensor] = []
    goes_on = True

    def listen(attend: Attend, module: Any, *given: Any, **options: Any) -> Any:
        output = attend.function(module, *given, **options)
        if goes_on:  # else a block is computed again, on the way back
            outputs.append(output[0])
        return output

    places = [model.logit_position(encoded, model.locate(encoded, position)) for encoded in inputs]
    with (
        torch.inference_mode(False),
        evaluating(model.model),
        torch.enable_grad(),
        running(model),
        follow_gradients(model) as arguments_of,
        save_memory(model, len(inputs) * max(len(encoded.tokens) for encoded in inputs)),
        intercepting(listen),
    ):
        arguments, kept = keep_logits(model, read_arguments(model, inputs), places)
        output = model.model(**arguments_of(arguments))
        goes_on = False
        logits = model.read_logits(output, kept)  # [sequence, class]
        watched, names = watch_target(model, logits, target, target_of)
        return list(torch.autograd.grad(watched.sum(), outputs)), names


@contextmanager
def follow_gradients(model: Model) -> Iterator[Any]:
    """While this lasts, the model's first states need gradients, whatever its parameters need.

    Gives a function that prepares the model's arguments.
    """
    if model.is_vision:

        def prepare(arguments: dict[str, Any]) -> dict[str, Any]:
            pixels = arguments["pixel_values"].detach().requires_grad_()
            return arguments | {"pixel_values": pixels}

        yield prepare
        return

    def after(module: Any, given: Any, output: "torch.Tensor") -> "torch.Tensor":
        return output if output.requires_grad else output.detach().requires_grad_()

    handle = model.embedding.register_forward_hook(after)
    try:
        yield lambda arguments: arguments
    finally:
        handle.remove()


def watch_target(
    model: Model, logits: "torch.Tensor", target: Target, target_of: str
) -> "tuple[torch.Tensor, list[str]]":
    """[sequence]: what is watched of the logits [sequence, class]; and what that is called."""
    import torch

    scores = {
        "logit": lambda: logits,
        "log_probability": lambda: logits.log_softmax(dim=-1),
        "probability": lambda: logits.softmax(dim=-1),
    }[target_of]()
    if isinstance(target, tuple):
        if len(target) != 2:
            raise OptionError(f"a contrast is between two targets; got {len(target)}")
        first, second = (model.target(each) for each in target)
        if first == second:
            raise OptionError(f"a contrast is between two different targets; got {target!r}")
        name = f"{model.label(first)} - {model.label(second)}"
        return scores[:, first] - scores[:, second], [name] * len(scores)
    if not isinstance(target, list):
        target = [None if target is None else model.target(target)] * len(scores)
    if len(target) != len(scores):
        raise OptionError(
            f"a list of targets has one for each of {len(scores)} inputs; got {len(target)}"
            " (a contrast is a tuple of two)"
        )
    best = logits.argmax(dim=-1).tolist()  # what is predicted, where no class is named
    chosen = [best[row] if aim is None else aim for row, aim in enumerate(target)]
    watched = scores.gather(1, torch.tensor(chosen, device=scores.device)[:, None])[:, 0]
    return watched, [model.label(aim) for aim in chosen]
