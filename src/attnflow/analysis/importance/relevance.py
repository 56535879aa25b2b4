"""`relevance`: the signed share of each token in the logit of a target."""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import overload

from attnflow.analysis.importance.importance import Importance
from attnflow.analysis.importance.watch import Foils, Targets, read_watched
from attnflow.capturing.backward import (
    BackwardPass,
    TargetOrPair,
    Watch,
    pair_aims,
    run_backward,
)
from attnflow.capturing.backward_rule import LINEARISED
from attnflow.capturing.capture import find_source
from attnflow.models.encoded import AnInput, Encoded, OneInput
from attnflow.models.load import ModelLike
from attnflow.models.model import Model

RELEVANCE_KEY = "relevance"  # of its watch in a `BackwardPass`


@overload
def relevance(
    model: ModelLike,
    inputs: OneInput,
    target: Targets = None,
    *,
    foil: Foils = None,
    position: int | None = None,
    batch_tokens: int | None = None,
) -> Importance: ...
@overload
def relevance(
    model: ModelLike,
    inputs: list[AnInput],
    target: Targets = None,
    *,
    foil: Foils = None,
    position: int | None = None,
    batch_tokens: int | None = None,
) -> list[Importance]: ...
def relevance(
    model: ModelLike,
    inputs: object,
    target: Targets = None,
    *,
    foil: Foils = None,
    position: int | None = None,
    batch_tokens: int | None = None,
) -> Importance | list[Importance]:
    """The signed share of each token in the target's logit, by one backward pass.

    The backward pass is linearised (docs/edges.md), so the shares of all tokens and `biases`, the
    share of the model's biases, add up to `score`, the logit; anything else is an error. A share
    is the state of a token before the first layer (word, position and type together) times the
    gradient there.

    Parameters
    ----------
    model, inputs, position
        As in `blank_out`.
    target
        A class by name or number (for language models a token), one for all inputs or a list with
        one per input; the predicted one if None.
    foil
        A class whose logit is subtracted, one for all inputs or a list: shares are then of the
        difference. `RUNNER_UP` is the most probable class other than the target.
    batch_tokens
        Unused: inputs run one by one, so that biases are known for each.

    >>> from attnflow import load
    >>> shares = relevance(load("verb-number"), "the keys to the old house")
    >>> missing = shares.values.sum() + shares.biases - shares.score
    >>> shares.top(1)[0][:2], bool(abs(missing) < 1e-4)
    ((2, 'keys'), True)
    """
    watched = read_watched(model, inputs, target, "relevance", foil)
    results = []
    aims = pair_aims(watched.targets, watched.foils)
    for encoded, aim in zip(watched.encoded, aims, strict=True):
        watch = watch_relevance([aim])
        found = run_backward(watched.model, [encoded], {RELEVANCE_KEY: watch}, position=position)
        results.append(read_relevance(watched.model, encoded, found))
    return watched.unwrap(results)


def watch_relevance(targets: Sequence[TargetOrPair]) -> Watch:
    """What `run_backward` watches, under `RELEVANCE_KEY`, for `read_relevance`."""
    return Watch(list(targets), "logit", LINEARISED, ("blocks",))


def read_relevance(
    model: Model, encoded: Encoded, found: BackwardPass, key: Hashable = RELEVANCE_KEY
) -> Importance:
    """The relevance of one input, from a backward pass over it alone. key: of its watch."""
    watched = found.gradients[key]
    state, gradient = found.states["blocks"].double(), watched.states["blocks"].double()
    values = (state * gradient).sum(dim=-1)[0].cpu().numpy()  # [token]
    probabilities = model.probabilities(found.logits)
    return Importance(
        values,
        "relevance",
        encoded.tokens,
        watched.names[0],
        float(probabilities[0, watched.targets[0][0]]),
        encoded.words,
        signed=True,
        source=replace(find_source(model), method="relevance", target=watched.names[0]),
        score=watched.scores[0],
        biases=watched.biases,
    )
