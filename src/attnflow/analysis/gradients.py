"""`input_gradient`: how steeply a prediction changes with the embeddings of tokens."""

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from attnflow.analysis.token_importance import Importance
from attnflow.analysis.watching import Targets, choose_targets, prepare
from attnflow.capturing.assembly import find_source
from attnflow.core.arrays import Floats
from attnflow.errors import CaptureError, OptionError, RoundingWarning
from attnflow.models.execution import evaluating
from attnflow.models.inputs import AnInput, OneInput, batches
from attnflow.models.model import Model

if TYPE_CHECKING:
    import torch

# a sum of numbers this small beside their length is zero but for rounding: of random signs it would
# be about 1
GRADIENT_ROUNDING = 1e-4
# from gradient and state [sequence, position, width] to [sequence, position]
REDUCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda gradient, state: gradient.sum(dim=-1).abs(),
    "norm": lambda gradient, state: gradient.norm(dim=-1),
    "times_input": lambda gradient, state: (gradient * state).sum(dim=-1).abs(),
}


@overload
def input_gradient(
    model: Any,
    inputs: OneInput,
    target: Targets = None,
    *,
    of: str = "probability",
    reduce: str = "norm",
    position: int | None = None,
    batch_tokens: int | None = None,
) -> Importance: ...
@overload
def input_gradient(
    model: Any,
    inputs: list[AnInput],
    target: Targets = None,
    *,
    of: str = "probability",
    reduce: str = "norm",
    position: int | None = None,
    batch_tokens: int | None = None,
) -> list[Importance]: ...
def input_gradient(
    model: Any,
    inputs: Any,
    target: Targets = None,
    *,
    of: str = "probability",
    reduce: str = "norm",
    position: int | None = None,
    batch_tokens: int | None = None,
) -> Importance | list[Importance]:
    """How steeply the target's probability changes with the tokens' embeddings.

    Parameters
    ----------
    model, inputs, target, position, batch_tokens
        As in `blank_out`.
    of
        "probability" or "logit".
    reduce
        "norm": the length of the gradient at the word embedding. "times_input": the absolute sum of
        gradient times input, both where the first block begins (word plus position, where a model
        has both). "sum": the absolute sum of the gradient over the embedding axis, as in the
        paper's Table 3. Where a layer norm reads the embedding (BERT, GPT-2, the model that ships
        with attnflow), that sum is zero for every token, since a layer norm does not see a number
        that is added to the whole vector; a `RoundingWarning` says so.

    >>> from attnflow import load
    >>> input_gradient(load("verb-number"), "the key to the cabinets").tokens
    ('[CLS]', 'the', 'key', 'to', 'the', 'cabinets/NNS')
    """
    import torch

    if of not in ("probability", "logit"):
        raise OptionError(f"unknown of={of!r}; choose from probability, logit")
    if reduce not in REDUCTIONS:
        raise OptionError(f"unknown reduce={reduce!r}; choose from {', '.join(REDUCTIONS)}")
    model, many, encoded, numbers = prepare(model, inputs, target, "input_gradient")
    at_block = reduce == "times_input"
    results: dict[int, Importance] = {}
    source = replace(find_source(model), method="input_gradient")
    for batch in batches(encoded, model.batch_tokens if batch_tokens is None else batch_tokens):
        chosen = [encoded[place] for place in batch]
        places = [model.logit_position(value, position) for value in chosen]
        with (
            torch.inference_mode(False),
            evaluating(model.model),
            torch.enable_grad(),
            keep_state(model, at_block) as states,
        ):
            logits = model.logits(model.batch(chosen), places)  # [sequence, class]
            probabilities = model.probabilities(logits)
            targets = choose_targets(model, probabilities, [numbers[place] for place in batch])
            scores = probabilities if of == "probability" else logits
            watched = scores[torch.arange(len(batch)), torch.tensor(targets)]
            (gradient,) = torch.autograd.grad(watched.sum(), states[0])  # [sequence, token, width]
        gradient, state = gradient.double(), states[0].detach().double()
        values = REDUCTIONS[reduce](gradient, state).cpu().numpy()
        if reduce == "sum":
            warn_of_rounding(model, values, gradient, states[0].dtype)
        for row, place in enumerate(batch):
            label = model.label(targets[row])
            results[place] = Importance(
                values[row, : len(encoded[place].ids)].copy(),
                "input_gradient",
                encoded[place].tokens,
                label,
                float(probabilities[row, targets[row]].detach()),
                encoded[place].words,
                source=replace(source, target=label),
            )
    return [results[place] for place in range(len(encoded))] if many else results[0]


@contextmanager
def keep_state(model: Model, at_block: bool) -> "Iterator[list[torch.Tensor]]":
    """A list for the state that the next pass of this thread begins with, to take gradients of.

    That is what the word embedding gives, or, with at_block, what enters the first block.
    """
    import torch

    kept: list[torch.Tensor] = []
    thread = threading.get_ident()  # hooks are the module's: another thread's passes call them too

    def keep(state: "torch.Tensor") -> "torch.Tensor":
        kept.append(state.detach().requires_grad_())
        return kept[-1]

    def after(module: Any, given: Any, output: "torch.Tensor") -> "torch.Tensor | None":
        return keep(output) if threading.get_ident() == thread else None

    def before(module: Any, given: Any, named: dict[str, Any]) -> Any:
        if threading.get_ident() != thread:
            return None
        if given:
            return (keep(given[0]), *given[1:]), named
        return given, named | {"hidden_states": keep(named["hidden_states"])}

    handle = (
        find_first_block(model).register_forward_pre_hook(before, with_kwargs=True)
        if at_block
        else model.embedding.register_forward_hook(after)
    )
    try:
        yield kept
    finally:
        handle.remove()


def find_first_block(model: Model) -> Any:
    """The module that computes the first layer: the first of the first list of modules."""
    import torch

    for module in model.model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module):
            return module[0]
    raise CaptureError(f"{model.name} has no list of layers; use reduce='norm'")


def warn_of_rounding(model: Model, sums: Floats, gradient: "torch.Tensor", dtype: Any) -> None:
    """Say so if sums [sequence, token] of gradients are zero but for rounding."""
    import torch

    coarse = torch.finfo(dtype).eps / torch.finfo(torch.float32).eps
    lengths = REDUCTIONS["norm"](gradient, None).cpu().numpy()
    if (np.abs(sums) <= GRADIENT_ROUNDING * max(1.0, coarse / 100) * lengths).all():
        warnings.warn(
            f"the gradient of {model.name} sums to zero over the embedding axis, because a layer"
            " norm reads the embedding: what reduce='sum' gives is rounding error;"
            " use reduce='norm'",
            RoundingWarning,
            stacklevel=3,
        )
