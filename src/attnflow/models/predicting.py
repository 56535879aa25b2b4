"""What a model predicts, and at which position: focal positions, logits, classes."""

from collections.abc import Callable, Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any

from attnflow.core.checks import check_integers
from attnflow.errors import CaptureError, OptionError
from attnflow.models.execution import evaluating
from attnflow.models.families import LANGUAGE
from attnflow.models.inputs import Encoded, batches, list_special_ids

if TYPE_CHECKING:
    import torch

    from attnflow.models.model import Model


# ---- positions ----------------------------------------------------------------------------------


def find_focal(model: "Model", encoded: Encoded) -> int:
    """The position that the prediction comes from, in the graph of `capture`."""
    if model.position is not None:
        return locate(encoded, model.position)
    if model.task == "masked LM":
        mask = getattr(model.tokenizer, "mask_token_id", None)
        if mask is None or mask not in encoded.ids:
            token = getattr(model.tokenizer, "mask_token", None) or "a mask token"
            raise OptionError(
                f"a masked LM is explained at its mask, and this text has none; put {token} in it"
            )
        return encoded.ids.index(mask)
    if model.is_encoder_decoder:
        last = len(encoded.decoder_ids) - 1
        if model.task == "sequence classification":
            # BART-like classifiers read the decoder where the *input* has its last end token; the
            # decoder reads the same input, shifted by one
            ends = list_special_ids(model.config, "eos")
            last = find_last(encoded.ids, lambda number: number in ends, last)
        return len(encoded.ids) + last
    if model.is_vision or not model.is_causal:
        return 0
    last = len(encoded.ids) - 1
    if model.task == "sequence classification":  # reads the last token that is no padding
        padding = getattr(model.config, "pad_token_id", None)
        return find_last(encoded.ids, lambda number: number != padding, last)
    return last


def find_last(ids: Sequence[int], fits: Callable[[int], bool], default: int) -> int:
    """The last place of an id that fits; the default if none does."""
    return max((place for place, number in enumerate(ids) if fits(number)), default=default)


def locate(encoded: Encoded, position: int) -> int:
    """A position of the graph of `capture`, checked; negative ones count from the end."""
    (position,) = check_integers([position], "position")
    size = len(encoded.tokens) + len(encoded.decoder_tokens)
    if not -size <= position < size:
        raise OptionError(
            f"position must be from 0 to {size - 1}; got {position} (negative: from the end)"
        )
    return position % size


def find_logit_position(model: "Model", encoded: Encoded, position: int | None) -> int:
    """Where the logits of a position of the graph are, in a model that has several."""
    if position is not None:
        position = locate(encoded, position)
    if model.task == "sequence classification" or model.is_vision:
        return 0
    place = find_focal(model, encoded) if position is None else position
    if not model.is_encoder_decoder:
        return place
    source = len(encoded.ids)
    # a position of the source predicts nothing: then the focal one counts
    return (place if place >= source else find_focal(model, encoded)) - source


# ---- predictions --------------------------------------------------------------------------------


def predict_inputs(
    model: "Model", encoded: Sequence[Encoded], position: int | None
) -> list[tuple[str, float]]:
    """The most probable class of each input, with its probability."""
    import torch

    predictions: dict[int, tuple[str, float]] = {}
    with evaluating(model.model), torch.no_grad():
        for batch in batches(encoded, model.batch_tokens):
            chosen = [encoded[place] for place in batch]
            positions = [find_logit_position(model, item, position) for item in chosen]
            logits = model.logits(model.batch(chosen), positions)
            predictions |= dict(zip(batch, model.read_predictions(logits), strict=True))
    return [predictions[place] for place in range(len(encoded))]


def keep_logits(
    model: "Model", arguments: dict[str, Any], places: Sequence[int]
) -> tuple[dict[str, Any], Sequence[int]]:
    """Arguments that ask for the logits at these places alone, and where they are then.

    Where a model cannot do so, both are as they were. A language model has as many logits at every
    position as its vocabulary has tokens, which costs time and memory.
    """
    import torch

    if "logits_to_keep" not in signature(model.model.forward).parameters:
        return arguments, places
    kept = sorted(set(places))
    chosen = torch.tensor(kept, device=model.device)
    return arguments | {"logits_to_keep": chosen}, [kept.index(place) for place in places]


def read_logits(model: "Model", output: Any, positions: Sequence[int]) -> "torch.Tensor":
    """[sequence, class]: the scores in a model's output, each at its position if there are many."""
    import torch

    logits = getattr(output, "logits", None)
    if logits is None and model.predicts:  # a user's module may give a tensor, or several
        first = output[0] if isinstance(output, tuple | list) and output else output
        logits = first if isinstance(first, torch.Tensor) else None
    if logits is None:
        raise OptionError(
            f"{model.name} has no head that predicts; load the model with one,"
            " as AutoModelForSequenceClassification does"
        )
    scores: torch.Tensor = logits if logits.dtype == torch.float64 else logits.float()
    if scores.ndim == 3:
        scores = scores[torch.arange(len(scores)), torch.tensor(positions)]
    if not torch.isfinite(scores).all():
        worst = float(scores.detach()[~torch.isfinite(scores)][0])
        raise CaptureError(
            f"the scores of {model.name} must be finite; got {worst}:"
            " look for NaN or infinity in its weights, or use more than 16 bits"
        )
    return scores


# ---- classes ------------------------------------------------------------------------------------


def find_target(model: "Model", target: int | str) -> int:
    """The number of a class by its number or name; for language models, of a token."""
    labels = model.labels
    if isinstance(target, str):
        numbers = find_label(labels, target) or find_token(model, target)
        if len(numbers) == 1:
            return numbers[0]
        if target.isdecimal() and len(target) < 10:  # no name, so a number
            return find_target(model, int(target))
        choices = (
            f"choose from {', '.join(labels.values())}"
            if labels
            else "it must be one token of the model's vocabulary"
        )
        raise OptionError(f"unknown target {target!r}; {choices}")
    (number,) = check_integers([target], "target")
    size = len(labels) or (model.vocabulary_size if model.task in LANGUAGE else None)
    if number < 0 or (size is not None and number >= size):
        most = "" if size is None else f" to {size - 1}"
        raise OptionError(f"target must be from 0{most} for {model.name}; got {target}")
    return number


def find_label(labels: dict[int, str], target: str) -> list[int]:
    """The numbers of the classes with this name; in any case of letters, if none is exact."""
    exact = [number for number, name in labels.items() if name == target]
    return exact or [number for number, name in labels.items() if name.lower() == target.lower()]


def find_token(model: "Model", target: str) -> list[int]:
    """The id of a token by its name, or of a word as it stands in a text; empty if none fits."""
    if model.task not in LANGUAGE or model.tokenizer is None or not target:
        return []  # no text is no token, though a tokenizer may make one of the space before it
    vocabulary = model.tokenizer.get_vocab()
    if target in vocabulary:
        return [int(vocabulary[target])]
    ways = [
        list(model.tokenizer(text, add_special_tokens=False)["input_ids"])
        for text in (f" {target}", target)
    ]
    unknown = getattr(model.tokenizer, "unk_token_id", None)
    return next((way for way in ways if len(way) == 1 and way[0] != unknown), [])
