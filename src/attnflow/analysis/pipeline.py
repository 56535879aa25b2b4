"""The one pipeline: an input runs once through a model, for its attention and its prediction.

`explain`, `evaluate` and the shards of a corpus all ask it. What importance needs comes on top: the
variants of blank-out, and the pass of a gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from attnflow.analysis.importance import (
    IMPORTANCES,
    Importance,
    check_scorable,
    choose_targets,
    find_replacement,
    measure_blank_out,
)
from attnflow.capturing.assembly import run_batch
from attnflow.core.attention import Attention
from attnflow.models.inputs import Encoded, batches
from attnflow.models.model import Model


@dataclass(frozen=True, eq=False)
class Reading:
    """What one forward pass told of one input."""

    encoded: Encoded
    position: int  # in the attention graph: where the prediction comes from, or the one asked for
    attention: Attention
    prediction: tuple[str, float] | None  # None for a model that predicts nothing
    target: int | None = None  # the class that importance watches
    probability: float | None = None  # of the target


def read_batch(
    model: Model,
    inputs: Sequence[Encoded],
    *,
    targets: Sequence[int | None] | None = None,
    position: int | None = None,
    heads: str | None = "mean",
) -> list[Reading]:
    """Run a model once on a batch. targets: a class per input; what is predicted where None."""
    places = [model.locate(encoded, position) for encoded in inputs]
    run = run_batch(model, inputs, heads)
    if not model.predicts:
        bare = zip(inputs, places, run.attentions, strict=True)
        return [Reading(encoded, at, attention, None) for encoded, at, attention in bare]
    logits = model.read_logits(run.output, list(map(model.logit_position, inputs, places)))
    probabilities = model.probabilities(logits)
    aims = choose_targets(model, probabilities, targets or [None] * len(inputs))
    watched = [float(probabilities[row, aim]) for row, aim in enumerate(aims)]
    predictions = model.read_predictions(logits)
    parts = zip(inputs, places, run.attentions, predictions, aims, watched, strict=True)
    return [Reading(*each) for each in parts]


def read_inputs(
    model: Model,
    inputs: Sequence[Encoded],
    *,
    targets: Sequence[int | None] | None = None,
    position: int | None = None,
) -> list[Reading]:
    """The same for any number of inputs, some of similar length at a time."""
    aims = targets or [None] * len(inputs)
    found: dict[int, Reading] = {}
    for batch in batches(inputs, model.batch_tokens):
        chosen = [inputs[place] for place in batch]
        watched = [aims[place] for place in batch]
        readings = read_batch(model, chosen, targets=watched, position=position)
        found |= dict(zip(batch, readings, strict=True))
    return [found[place] for place in range(len(inputs))]


def score_importance(
    model: Model,
    readings: Sequence[Reading],
    name: str,
    *,
    position: int | None = None,
    batch_tokens: int | None = None,
    **options: Any,
) -> list[Importance]:
    """One importance of each input, at the position that was read; options are the importance's."""
    check_scorable(model, name)
    inputs = [reading.encoded for reading in readings]
    if name == "blank_out":
        return measure_blank_out(
            model,
            inputs,
            [model.logit_position(each.encoded, each.position) for each in readings],
            [(int(each.target or 0), float(each.probability or 0.0)) for each in readings],
            blank=find_replacement(model, None),
            batch_tokens=batch_tokens,
            **options,
        )
    found: list[Importance] = IMPORTANCES[name](
        model,
        inputs,
        [reading.target for reading in readings],
        position=position,
        batch_tokens=batch_tokens,
        **options,
    )
    return found
