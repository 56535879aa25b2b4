"""Watched predictions: the probability of a class on inputs and on their variants."""

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from attnflow.analysis.importance.shared_prefix import run_shared
from attnflow.analysis.importance.variant import Variant, batch_variants
from attnflow.errors import OptionError
from attnflow.models.encode import encode_inputs
from attnflow.models.encoded import Encoded, batches
from attnflow.models.execution import evaluating
from attnflow.models.load import ModelLike, open_model
from attnflow.models.model import Model
from attnflow.models.predict import (
    Foil,
    FoilNumber,
    check_foils,
    choose_foils,
    choose_targets,
    name_watched,
    number_foil,
    subtract_logits,
)

if TYPE_CHECKING:
    import torch

Result = TypeVar("Result")
TargetName = int | str | np.integer[Any]  # a class by number or name; for language models, a token
# for all inputs, or per input
Targets = TargetName | Sequence[TargetName | None] | npt.NDArray[np.generic] | None
Foils = Foil | Sequence[Foil | None] | None  # for all inputs, or per input


class WatchedInputs(NamedTuple):
    """Inputs whose predictions are watched."""

    model: Model
    encoded: list[Encoded]
    targets: list[int | None]  # the class to watch per input; None: the predicted one
    several: bool  # whether a list of inputs was given
    foils: list[FoilNumber | None]  # what each target is contrasted with; None without foils

    def unwrap(self, results: list[Result]) -> Result | list[Result]:
        """One result per input as a list, if a list of inputs was given; else the only one."""
        return results if self.several else results[0]

    @property
    def contrasts(self) -> bool:
        """Whether targets have foils."""
        return any(foil is not None for foil in self.foils)

    def watch(self, positions: Sequence[int], batch_tokens: int | None) -> "list[WatchedClass]":
        """What is watched of each unchanged input; target and foil are then known by number."""
        columns = (self.encoded, positions, self.targets, self.foils)
        return watch(self.model, list(map(Variant, *columns)), batch_tokens)


def read_watched(
    model: ModelLike, inputs: object, target: Targets, method: str, foil: Foils = None
) -> WatchedInputs:
    """The inputs of a method that watches predictions, validated and encoded."""
    model = open_model(model)
    check_scorable(model, method)
    encoded, several = encode_inputs(model, inputs)
    targets = list_classes(target, len(encoded), "target")
    foils = list_classes(foil, len(encoded), "foil")
    numbers = {
        name: None if name is None else model.target(name) for name in dict.fromkeys(targets)
    }
    against = {name: number_foil(model, name) for name in dict.fromkeys(foils)}
    check_foils(foils)
    return WatchedInputs(
        model,
        encoded,
        [numbers[name] for name in targets],
        several,
        [against[name] for name in foils],
    )


def list_classes(given: object, count: int, what: str) -> list[Any]:
    """One class for each of several inputs, from one for all, or a list of one per input."""
    is_list = isinstance(given, list | tuple | np.ndarray)
    classes: list[Any] = list(given) if is_list else [given] * count  # type: ignore[call-overload]
    if len(classes) != count:
        raise OptionError(
            f"{what}s must be one for all inputs, or one per input;"
            f" got {len(classes)} for {count} inputs"
        )
    for name in classes:
        if not isinstance(name, Hashable):
            raise OptionError(f"a {what} must be the name or the number of a class; got {name!r}")
    return classes


def check_scorable(model: Model, method: str) -> None:
    """Refuse a model without a prediction from one sequence of tokens."""
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


class WatchedClass(NamedTuple):
    """What is watched of an input or variant: a class, by its probability or against a foil."""

    target: int
    probability: float
    foil: int | None = None
    difference: float | None = None  # the logit of the target minus that of the foil, if any

    @property
    def value(self) -> float:
        """What is watched: the probability, or with a foil the difference of the logits."""
        return self.probability if self.difference is None else self.difference

    def name(self, model: Model) -> str:
        """The name of the target, with that of the foil."""
        return name_watched(model, (self.target, self.foil))


def watch(
    model: Model, variants: Sequence[Variant], batch_tokens: int | None
) -> list[WatchedClass]:
    """The watched class of each variant, and its values."""

    def read(logits: "torch.Tensor", chosen: Sequence[Variant]) -> list[WatchedClass]:
        probabilities = model.probabilities(logits)
        targets = choose_targets(model, probabilities, [each.target for each in chosen])
        foils = choose_foils(model, logits, targets, [each.foil for each in chosen])
        values = probabilities[list(range(len(targets))), targets].tolist()
        differences = subtract_logits(logits, targets, foils)
        return list(map(WatchedClass, targets, values, foils, differences))

    return run_variants(model, variants, read, batch_tokens)


def run_variants(
    model: Model,
    variants: Sequence[Variant],
    read: Callable[["torch.Tensor", Sequence[Variant]], Sequence[Result]],
    batch_tokens: int | None,
) -> list[Result]:
    """Run a model on variants, in batches of similar length, and read one result of each.

    In causal models, variants of one input share the positions before their changes.

    read: called with the logits [sequence, class] of a batch, and its variants.
    """
    import torch

    most = model.batch_tokens if batch_tokens is None else batch_tokens
    results: dict[int, Result] = {}
    with evaluating(model.model), torch.no_grad():
        for places, logits in run_shared(model, variants, most):
            chosen = [variants[place] for place in places]
            results |= dict(zip(places, read(logits, chosen), strict=True))
        rest = [place for place in range(len(variants)) if place not in results]
        for batch in batches([variants[place].encoded for place in rest], most):
            places = [rest[number] for number in batch]
            chosen = [variants[place] for place in places]
            positions = [variant.position for variant in chosen]
            logits = model.logits(batch_variants(model, chosen), positions)
            results |= dict(zip(places, read(logits, chosen), strict=True))
    return [results[place] for place in range(len(variants))]
