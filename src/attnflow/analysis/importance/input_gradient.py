"""`input_gradient`: how steeply a prediction changes with the embeddings of tokens."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, overload

import numpy as np

from attnflow.analysis.importance.importance import Importance
from attnflow.analysis.importance.watch import Foils, Targets, read_watched
from attnflow.capturing.backward import BackwardPass, Watch, pair_aims, run_backward
from attnflow.capturing.capture import find_source
from attnflow.core.arrays import Floats
from attnflow.errors import OptionError, RoundingWarning
from attnflow.models.encoded import AnInput, Encoded, OneInput, batches
from attnflow.models.load import ModelLike
from attnflow.models.model import Model
from attnflow.models.predict import FoilNumber

if TYPE_CHECKING:
    import torch

WATCH_KEY = "input_gradient"  # of its watch in a `BackwardPass`
# a sum this small relative to the length of its vector is zero but for rounding: with random signs
# the ratio would be about 1
GRADIENT_ROUNDING = 1e-4
# from gradient and state [sequence, position, width] to [sequence, position]
REDUCTIONS: "dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]" = {
    "sum": lambda gradient, state: gradient.sum(dim=-1).abs(),
    "norm": lambda gradient, state: gradient.norm(dim=-1),
    "times_input": lambda gradient, state: (gradient * state).sum(dim=-1).abs(),
}


@overload
def input_gradient(
    model: ModelLike,
    inputs: OneInput,
    target: Targets = None,
    *,
    foil: Foils = None,
    of: str | None = None,
    reduce: str = "norm",
    position: int | None = None,
    batch_tokens: int | None = None,
) -> Importance: ...
@overload
def input_gradient(
    model: ModelLike,
    inputs: list[AnInput],
    target: Targets = None,
    *,
    foil: Foils = None,
    of: str | None = None,
    reduce: str = "norm",
    position: int | None = None,
    batch_tokens: int | None = None,
) -> list[Importance]: ...
def input_gradient(
    model: ModelLike,
    inputs: object,
    target: Targets = None,
    *,
    foil: Foils = None,
    of: str | None = None,
    reduce: str = "norm",
    position: int | None = None,
    batch_tokens: int | None = None,
) -> Importance | list[Importance]:
    """How steeply the target's probability changes with the tokens' embeddings.

    With a foil, how steeply the difference of their logits changes.

    Parameters
    ----------
    model, inputs, target, foil, position, batch_tokens
        As in `blank_out`.
    of
        "probability" (default) or "logit" of the target; with a foil always the logit.
    reduce
        "norm": the length of the gradient at the word embedding. "times_input": the absolute sum of
        gradient times input, both where the first block begins (word plus position, where a model
        has both). "sum": the absolute sum of the gradient over the embedding axis, as in the
        paper's Table 3. Where a layer norm reads the embedding (BERT, GPT-2, the model that ships
        with attnflow), that sum is zero for every token, since a layer norm ignores a constant
        that is added to the whole vector; a `RoundingWarning` says so.

    >>> from attnflow import load
    >>> input_gradient(load("verb-number"), "the key to the cabinets").tokens
    ('[CLS]', 'the', 'key', 'to', 'the', 'cabinets/NNS')
    """
    watched = read_watched(model, inputs, target, "input_gradient", foil)
    of = choose_gradient_value(of, watched.contrasts)
    check_gradient_options(of, reduce)
    model, encoded = watched.model, watched.encoded
    results: dict[int, Importance] = {}
    for batch in batches(encoded, model.batch_tokens if batch_tokens is None else batch_tokens):
        chosen = [encoded[place] for place in batch]
        targets = [watched.targets[place] for place in batch]
        foils = [watched.foils[place] for place in batch]
        watch = watch_input(targets, foils, of=of, reduce=reduce)
        found = run_backward(model, chosen, {WATCH_KEY: watch}, position=position)
        scored = read_input_gradients(model, chosen, found, reduce=reduce)
        results |= dict(zip(batch, scored, strict=True))
    return watched.unwrap([results[place] for place in range(len(encoded))])


def choose_gradient_value(of: str | None, contrasts: bool) -> str:
    """The value that is differentiated. contrasts: whether the target has a foil."""
    if contrasts and of not in (None, "logit"):
        raise OptionError(
            f"with a foil the difference of two logits is watched; got of={of!r}: leave it out",
            options=[f"of={of!r}"],
        )
    return of or ("logit" if contrasts else "probability")


def check_gradient_options(of: str, reduce: str) -> None:
    """Refuse an unknown scalar or reduction."""
    if of not in ("probability", "logit"):
        raise OptionError(
            f"unknown of={of!r}; choose from probability, logit", options=[f"of={of!r}"]
        )
    if not isinstance(reduce, str) or reduce not in REDUCTIONS:
        raise OptionError(
            f"unknown reduce={reduce!r}; choose from {', '.join(REDUCTIONS)}",
            options=[f"reduce={reduce!r}"],
        )


def find_state(reduce: str) -> str:
    """The state whose gradient is reduced: the word embedding, or the input of the first block."""
    return "blocks" if reduce == "times_input" else "words"


def watch_input(
    targets: Sequence[int | None],
    foils: Sequence[FoilNumber | None] = (),
    *,
    of: str | None = None,
    reduce: str = "norm",
) -> Watch:
    """What `run_backward` watches, under the key `WATCH_KEY`, for `read_input_gradients`.

    targets: a class per input; the predicted one where None. foils: of each target, or none at all.
    of, reduce: as in `input_gradient`.
    """
    of = choose_gradient_value(of, any(foil is not None for foil in foils))
    check_gradient_options(of, reduce)
    return Watch(pair_aims(targets, foils), of, wanted=(find_state(reduce),))


def read_input_gradients(
    model: Model, inputs: Sequence[Encoded], found: BackwardPass, *, reduce: str = "norm"
) -> list[Importance]:
    """The input gradient of each input, from a backward pass that watched `watch_input`."""
    where = find_state(reduce)
    watched, state = found.gradients[WATCH_KEY], found.states[where]
    gradient = watched.states[where].double()  # [sequence, token, width]
    values = REDUCTIONS[reduce](gradient, state.double()).cpu().numpy()
    if reduce == "sum":
        warn_of_rounding(model, values, gradient, state.dtype)
    probabilities = model.probabilities(found.logits)
    source = replace(find_source(model), method="input_gradient")
    return [
        Importance(
            values[row, : len(encoded.ids)].copy(),
            "input_gradient",
            encoded.tokens,
            watched.names[row],
            float(probabilities[row, numbers[0]]),
            encoded.words,
            source=replace(source, target=watched.names[row]),
            score=watched.scores[row] if len(numbers) > 1 else None,
        )
        for row, (encoded, numbers) in enumerate(zip(inputs, watched.targets, strict=True))
    ]


def warn_of_rounding(
    model: Model, sums: Floats, gradient: "torch.Tensor", dtype: "torch.dtype"
) -> None:
    """Warn if the sums [sequence, token] of gradients are zero but for rounding."""
    import torch

    coarse = torch.finfo(dtype).eps / torch.finfo(torch.float32).eps
    lengths = gradient.norm(dim=-1).cpu().numpy()
    if (np.abs(sums) <= GRADIENT_ROUNDING * max(1.0, coarse / 100) * lengths).all():
        warnings.warn(
            f"the gradient of {model.name} sums to zero over the embedding axis, because a layer"
            " norm reads the embedding: what reduce='sum' gives is rounding error;"
            " use reduce='norm'",
            RoundingWarning,
            stacklevel=4,
        )
