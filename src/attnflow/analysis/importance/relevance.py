"""`relevance`: the signed share of each token in the logit of a target."""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import overload

from attnflow.analysis.importance.importance import Importance
from attnflow.analysis.importance.watch import Foils, Targets, read_watched
from attnflow.capturing.answers import run_answer
from attnflow.capturing.backward import (
    BackwardPass,
    TargetOrPair,
    Watch,
    pair_aims,
    run_backward,
)
from attnflow.capturing.backward_rule import LINEARISED
from attnflow.capturing.capture import find_source
from attnflow.models.answers import (
    AnswerText,
    check_answer,
    check_answer_foil,
    pair_answers,
    refuse_beside,
)
from attnflow.models.encoded import AnInput, Encoded, OneInput, are_many
from attnflow.models.load import ModelLike, open_model
from attnflow.models.model import Model

RELEVANCE_KEY = "relevance"  # of its watch in a `BackwardPass`


@overload
def relevance(
    model: ModelLike,
    inputs: OneInput,
    target: Targets = None,
    *,
    foil: Foils = None,
    answer: AnswerText | None = None,
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
    answer: AnswerText | None = None,
    position: int | None = None,
    batch_tokens: int | None = None,
) -> list[Importance]: ...
def relevance(
    model: ModelLike,
    inputs: object,
    target: Targets = None,
    *,
    foil: Foils = None,
    answer: AnswerText | None = None,
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
        difference. `RUNNER_UP` is the most probable class other than the target. With an answer:
        another answer.
    answer
        Of causal language models: a text that continues each input as it stands, or token ids.
        Shares are then of the sum of the logits of all its tokens, and tokens are those of the
        input and of the answer but its last, which nothing reads. With a foil, shares of the input
        are the difference and those of the answer its own; those of the foil's own tokens, which
        are the rest of `score`, are left out.
    batch_tokens
        Unused: inputs run one by one, so that biases are known for each.

    >>> from attnflow import load
    >>> shares = relevance(load("verb-number"), "the keys to the old house")
    >>> missing = shares.values.sum() + shares.biases - shares.score
    >>> shares.top(1)[0][:2], bool(abs(missing) < 1e-4)
    ((2, 'keys'), True)
    """
    if answer is not None:
        return relate_answers(model, inputs, answer, target, foil, position)
    watched = read_watched(model, inputs, target, "relevance", foil)
    results = []
    aims = pair_aims(watched.targets, watched.foils)
    for encoded, aim in zip(watched.encoded, aims, strict=True):
        watch = watch_relevance([aim])
        found = run_backward(watched.model, [encoded], {RELEVANCE_KEY: watch}, position=position)
        results.append(read_relevance(watched.model, encoded, found))
    return watched.unwrap(results)


def relate_answers(
    model: ModelLike,
    inputs: object,
    answer: AnswerText,
    target: Targets,
    foil: Foils,
    position: int | None,
) -> Importance | list[Importance]:
    """The relevance of each input for an answer, one for all inputs, and its foil."""
    refuse_beside("answer", target=target, position=position)
    check_answer(answer)
    against = check_answer_foil(foil)
    model = open_model(model)
    several = are_many(inputs)
    values: list[OneInput] = (
        list(inputs)  # type: ignore[call-overload]
        if several
        else [inputs]  # type: ignore[list-item]
    )
    results = []
    for value in values:
        said, other = pair_answers(model, value, answer, against)
        found = run_answer(model, said, {RELEVANCE_KEY: watch_relevance([None])}, other)
        results.append(read_relevance(model, said.encoded, found))
    return results if several else results[0]


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
    rows = [numbers[0] for numbers in watched.targets]  # one, or those of an answer's tokens
    return Importance(
        values,
        "relevance",
        encoded.tokens,
        watched.names[0],
        float(probabilities[range(len(rows)), rows].prod()),
        encoded.words,
        signed=True,
        source=replace(find_source(model), method="relevance", target=watched.names[0]),
        score=sum(watched.scores),
        biases=watched.biases,
    )
