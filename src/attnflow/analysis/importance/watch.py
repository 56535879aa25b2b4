"""Watched predictions: the probability of a class on inputs and on their variants."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from attnflow.errors import OptionError
from attnflow.models.encode import encode_inputs
from attnflow.models.encoded import Encoded, batches
from attnflow.models.execution import evaluating
from attnflow.models.load import ModelLike, open_model
from attnflow.models.model import Model
from attnflow.models.predict import choose_targets

if TYPE_CHECKING:
    import torch

Result = TypeVar("Result")
TargetName = int | str | np.integer[Any]  # a class by number or name; for language models, a token
# for all inputs, or per input
Targets = TargetName | Sequence[TargetName | None] | npt.NDArray[np.generic] | None


class WatchedInputs(NamedTuple):
    """Inputs whose predictions are watched."""

    model: Model
    encoded: list[Encoded]
    targets: list[int | None]  # the class to watch per input; None: the predicted one
    several: bool  # whether a list of inputs was given

    def unwrap(self, results: list[Result]) -> Result | list[Result]:
        """One result per input as a list, if a list of inputs was given; else the only one."""
        return results if self.several else results[0]

    def find_targets(self, positions: Sequence[int], batch_tokens: int | None) -> list[int]:
        """The target of each input: the predicted class where it is None."""
        known = [target for target in self.targets if target is not None]
        if len(known) == len(self.encoded):
            return known
        intact = list(map(Variant, self.encoded, positions, self.targets))
        return [target for target, _ in watch(self.model, intact, batch_tokens)]


def read_watched(model: ModelLike, inputs: object, target: Targets, method: str) -> WatchedInputs:
    """The inputs of a method that watches predictions, validated and encoded."""
    model = open_model(model)
    check_scorable(model, method)
    encoded, several = encode_inputs(model, inputs)
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
    return WatchedInputs(model, encoded, [numbers[name] for name in targets], several)


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


@dataclass(frozen=True)
class Variant:
    """An input with some tokens blanked out, or none."""

    encoded: Encoded
    position: int  # where its prediction is read
    target: int | None  # the class to watch; None: the predicted one
    hidden: tuple[int, ...] = ()  # positions that attention masks out


def watch(
    model: Model, variants: Sequence[Variant], batch_tokens: int | None
) -> list[tuple[int, float]]:
    """The watched class of each variant, and its probability."""

    def read(logits: "torch.Tensor", chosen: Sequence[Variant]) -> list[tuple[int, float]]:
        probabilities = model.probabilities(logits)
        targets = choose_targets(model, probabilities, [each.target for each in chosen])
        values = probabilities[list(range(len(targets))), targets].tolist()
        return list(zip(targets, values, strict=True))

    return run_variants(model, variants, read, batch_tokens)


def run_variants(
    model: Model,
    variants: Sequence[Variant],
    read: Callable[["torch.Tensor", Sequence[Variant]], Sequence[Result]],
    batch_tokens: int | None,
) -> list[Result]:
    """Run a model on variants, in batches of similar length, and read one result of each.

    read: called with the logits [sequence, class] of a batch, and its variants.
    """
    import torch

    most = model.batch_tokens if batch_tokens is None else batch_tokens
    results: dict[int, Result] = {}
    with evaluating(model.model), torch.no_grad():
        for batch in batches([variant.encoded for variant in variants], most):
            chosen = [variants[place] for place in batch]
            arguments = model.batch([variant.encoded for variant in chosen])
            if "attention_mask" not in arguments and any(each.hidden for each in chosen):
                raise OptionError(
                    f"replacement='attention' needs an attention mask, and {model.name} takes none;"
                    " give a token to put in place of others",
                    options=["replacement='attention'"],
                )
            for row, variant in enumerate(chosen):
                if variant.hidden:
                    arguments["attention_mask"][row, list(variant.hidden)] = 0
            logits = model.logits(arguments, [variant.position for variant in chosen])
            results |= dict(zip(batch, read(logits, chosen), strict=True))
    return [results[place] for place in range(len(variants))]
