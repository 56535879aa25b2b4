"""Watching a prediction: which class, on which inputs, and how probable it is on their variants."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from attnflow.errors import OptionError
from attnflow.models.execution import evaluating
from attnflow.models.inputs import Encoded, are_many, batches
from attnflow.models.model import Model

if TYPE_CHECKING:
    import torch

Reading = TypeVar("Reading")
Target = int | str | np.integer[Any]  # a class by number or name; for language models, a token
Targets = Target | Sequence[Target | None] | npt.NDArray[Any] | None  # for all inputs, or per input


def prepare(
    model: Any, inputs: Any, target: Targets, method: str
) -> tuple[Model, bool, list[Encoded], list[int | None]]:
    """The model, whether a list was given, the encoded inputs, and the number of each target."""
    model = model if isinstance(model, Model) else Model(model)
    check_scorable(model, method)
    many = are_many(inputs)
    encoded = [model.encode(value) for value in (inputs if many else [inputs])]
    targets: list[Any] = [target] * len(encoded)
    if isinstance(target, list | tuple | np.ndarray):
        targets = list(target)
    if len(targets) != len(encoded):
        raise OptionError(
            "targets must be one for all inputs, or one per input;"
            f" got {len(targets)} for {len(encoded)} inputs"
        )
    numbers = {
        name: None if name is None else model.target(name) for name in dict.fromkeys(targets)
    }
    return model, many, encoded, [numbers[name] for name in targets]


def check_scorable(model: Model, method: str) -> None:
    """Refuse a model that has no importance of this kind."""
    if model.is_vision or model.is_encoder_decoder:
        kind = "images" if model.is_vision else "encoder-decoders"
        raise OptionError(
            f"{method} is for models that read one sequence of tokens, not for {kind};"
            f" got {model.name}"
        )
    if not model.predicts:
        raise OptionError(
            f"{method} watches a prediction, and {model.name} has no head that predicts; load the"
            " model with one, as AutoModelForSequenceClassification does"
        )


def choose_targets(
    model: Model, probabilities: "torch.Tensor", targets: Sequence[int | None]
) -> list[int]:
    """Each target, or the most probable class where it is None.

    probabilities: [sequence, class].
    """
    best = probabilities.argmax(dim=-1).tolist()
    chosen = [int(best[row]) if target is None else target for row, target in enumerate(targets)]
    if max(chosen) >= probabilities.shape[-1]:
        raise OptionError(
            f"target must be from 0 to {probabilities.shape[-1] - 1} for {model.name};"
            f" got {max(chosen)}"
        )
    return chosen


@dataclass(frozen=True)
class Variant:
    """An input with some tokens blanked out, or none."""

    encoded: Encoded
    position: int  # where its prediction is read
    target: int | None  # the class to watch; None: the predicted one
    hidden: tuple[int, ...] = ()  # positions that attention does not see


def watch(
    model: Model, variants: Sequence[Variant], batch_tokens: int | None
) -> list[tuple[int, float]]:
    """The class that is watched per variant, and its probability."""

    def read(logits: "torch.Tensor", chosen: Sequence[Variant]) -> list[tuple[int, float]]:
        probabilities = model.probabilities(logits)
        targets = choose_targets(model, probabilities, [each.target for each in chosen])
        values = probabilities[list(range(len(targets))), targets].tolist()
        return list(zip(targets, values, strict=True))

    return run_variants(model, variants, read, batch_tokens)


def run_variants(
    model: Model,
    variants: Sequence[Variant],
    read: Callable[["torch.Tensor", Sequence[Variant]], Sequence[Reading]],
    batch_tokens: int | None,
) -> list[Reading]:
    """What is read of each variant's logits, [sequence, class], some of similar length at a time.

    read: from the logits of a few variants to one reading of each.
    """
    import torch

    most = model.batch_tokens if batch_tokens is None else batch_tokens
    readings: dict[int, Reading] = {}
    with evaluating(model.model), torch.no_grad():
        for batch in batches([variant.encoded for variant in variants], most):
            chosen = [variants[place] for place in batch]
            arguments = model.batch([variant.encoded for variant in chosen])
            if "attention_mask" not in arguments and any(each.hidden for each in chosen):
                raise OptionError(
                    f"replacement='attention' needs an attention mask, and {model.name} takes none;"
                    " give a token to put in place of others"
                )
            for row, variant in enumerate(chosen):
                if variant.hidden:
                    arguments["attention_mask"][row, list(variant.hidden)] = 0
            logits = model.logits(arguments, [variant.position for variant in chosen])
            readings |= dict(zip(batch, read(logits, chosen), strict=True))
    return [readings[place] for place in range(len(variants))]
