"""Predictions of a model, and the classes or tokens that they are about."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from inspect import signature
from typing import TYPE_CHECKING, Final

from attnflow.core.checks import LARGE, is_integer
from attnflow.errors import OptionError, TargetWarning
from attnflow.models.families import LANGUAGE
from attnflow.notices import give_notice

if TYPE_CHECKING:
    import torch

    from attnflow.models.model import Model


class RunnerUp(Enum):
    """The automatic foil: the most probable class, or token, other than the target."""

    RUNNER_UP = "runner-up"

    def __repr__(self) -> str:
        return "attnflow.RUNNER_UP"


RUNNER_UP: Final = RunnerUp.RUNNER_UP
SPACE_MARKS = ("Ġ", "▁")  # how vocabularies write a space before a token
Foil = int | str | RunnerUp  # a class by number or name; for language models, a token
FoilNumber = int | RunnerUp  # the same, resolved


@dataclass(frozen=True)
class Target:
    """A class (for language models: a token) that is watched, with its probability."""

    number: int
    label: str
    probability: float


class SpelledToken(int):
    """A token given by its exact name, which is also the name of a token after a space.

    Parameters
    ----------
    number
        The id of the token of that name.
    text
        The name.
    spaced
        The id of the token of the same text after a space.
    """

    text: str
    spaced: int

    def __new__(cls, number: int, text: str, spaced: int) -> "SpelledToken":
        token = super().__new__(cls, number)
        token.text, token.spaced = text, spaced
        return token

    def __getnewargs__(self) -> tuple[int, str, int]:  # type: ignore[override]
        return int(self), self.text, self.spaced


class Prediction(tuple[str, float]):
    """The prediction of a model: a pair (label, probability), and the class that is watched.

    Parameters
    ----------
    label, probability
        Of the most probable class.
    target
        The class that importance and gradients watch: the predicted one by default.
    foil
        The class that the target is contrasted with; None if only the target is watched.
    difference
        The logit of the target minus that of the foil; None without a foil.

    >>> prediction = Prediction("plural", 0.9, Target(0, "singular", 0.1))
    >>> label, probability = prediction
    >>> label, prediction.label, prediction.target.label
    ('plural', 'plural', 'singular')
    """

    target: Target
    foil: Target | None
    difference: float | None

    def __new__(
        cls,
        label: str,
        probability: float,
        target: Target,
        foil: Target | None = None,
        difference: float | None = None,
    ) -> "Prediction":
        pair = super().__new__(cls, (label, probability))
        pair.target, pair.foil, pair.difference = target, foil, difference
        return pair

    def __getnewargs__(self) -> tuple[str, float, Target, Target | None, float | None]:
        return (*self, self.target, self.foil, self.difference)

    @property
    def label(self) -> str:
        """The most probable class."""
        return self[0]

    @property
    def probability(self) -> float:
        """Its probability."""
        return self[1]


# ---- predictions --------------------------------------------------------------------------------


def predict_targets(
    model: "Model",
    logits: "torch.Tensor",
    targets: Sequence[int | None],
    foils: Sequence[FoilNumber | None] = (),
) -> list[Prediction]:
    """The prediction of each row of logits [sequence, class], with the target that is watched.

    targets: classes; the predicted one where None. foils: of each target, or none at all.
    """
    probabilities = model.probabilities(logits)
    chosen = choose_targets(model, probabilities, targets)
    against = choose_foils(model, logits, chosen, foils)
    differences = subtract_logits(logits, chosen, against)

    def describe(row: int, number: int) -> Target:
        return Target(number, model.label(number), float(probabilities[row, number]))

    said = model.read_predictions(logits)
    rows = zip(said, chosen, against, differences, strict=True)
    return [
        Prediction(
            *best, describe(row, aim), None if foil is None else describe(row, foil), difference
        )
        for row, (best, aim, foil, difference) in enumerate(rows)
    ]


def subtract_logits(
    logits: "torch.Tensor", targets: Sequence[int], foils: Sequence[int | None]
) -> list[float | None]:
    """The logit [sequence, class] of each target minus that of its foil; None without a foil."""
    return [
        None if foil is None else float(logits[row, target].double() - logits[row, foil].double())
        for row, (target, foil) in enumerate(zip(targets, foils, strict=True))
    ]


def name_watched(model: "Model", numbers: Sequence[int | None]) -> str:
    """The name of a target, or of a target and its foil: "plural - singular"."""
    return " - ".join(model.label(number) for number in numbers if number is not None)


def keep_logits(
    model: "Model", arguments: "dict[str, torch.Tensor]", places: Sequence[int]
) -> "tuple[dict[str, torch.Tensor], Sequence[int]]":
    """Arguments for the logits at these places alone, and where these logits are in the output.

    Both are unchanged if the model cannot do so. A language model has one logit per position and
    token of its vocabulary, which costs time and memory.
    """
    import torch

    # a classifier of a decoder picks its own position among all of them
    if (
        model.task == "sequence classification"
        or "logits_to_keep" not in signature(model.model.forward).parameters
    ):
        return arguments, places
    kept = sorted(set(places))
    chosen = torch.tensor(kept, device=model.device)
    return arguments | {"logits_to_keep": chosen}, [kept.index(place) for place in places]


# ---- classes ------------------------------------------------------------------------------------


def choose_targets(
    model: "Model", scores: "torch.Tensor", targets: Sequence[int | None]
) -> list[int]:
    """Each target, or the class with the best score where it is None; checked.

    Warns of a token whose name after a space is another token with a better score.
    scores: [sequence, class], logits or probabilities.
    """
    best = scores.argmax(dim=-1).tolist()
    chosen = [int(best[row]) if target is None else target for row, target in enumerate(targets)]
    if max(chosen) >= scores.shape[-1]:
        raise OptionError(
            f"target must be from 0 to {scores.shape[-1] - 1} for {model.name}; got {max(chosen)}",
            options=["target"],
        )
    for row, number in enumerate(chosen):
        if isinstance(number, SpelledToken) and scores[row, number.spaced] > scores[row, number]:
            warn_of_spelling(number)
    return list(map(int, chosen))


def warn_of_spelling(token: SpelledToken) -> None:
    """Warn that a target or foil lacks the space that its text has in a running text."""
    name, other = repr(token.text), repr(f" {token.text}")
    give_notice(
        f"{name} is a token without a space before it, and {other} is more probable here: give"
        f" {other} if that is meant",
        TargetWarning,
        stacklevel=2,
    )


def choose_foils(
    model: "Model",
    scores: "torch.Tensor",
    targets: Sequence[int],
    foils: Sequence[FoilNumber | None],
) -> list[int | None]:
    """The class that each target is contrasted with, which differs from it; None without a foil.

    scores: [sequence, class], logits or probabilities. foils: one per target, or none at all.
    """
    if all(foil is None for foil in foils):
        return [None] * len(targets)
    check_foils(foils)
    chosen: list[int | None] = []
    for row, (target, foil) in enumerate(zip(targets, foils, strict=True)):
        if isinstance(foil, RunnerUp):
            if scores.shape[-1] < 2:
                raise OptionError(f"a foil is another class, and {model.name} has only one")
            first, second = scores[row].topk(2).indices.tolist()
            foil = second if first == target else first
        check_contrast(model, target, foil)
        chosen.append(foil)
    return [*choose_targets(model, scores, chosen)]


def check_contrast(model: "Model", target: int | None, foil: FoilNumber | None) -> None:
    """Refuse a foil that is the target itself."""
    if target is not None and target == foil:
        raise OptionError(
            f"a contrast is between two different targets; got {model.label(target)!r} twice"
        )


def check_foils(foils: Sequence[Foil | None]) -> None:
    """Refuse inputs of which some have a foil and others none: their numbers do not compare."""
    if None in foils and any(foil is not None for foil in foils):
        raise OptionError(
            f"foils are of all inputs or of none; got None for input {list(foils).index(None)}:"
            " name a class, or give attnflow.RUNNER_UP, the most probable other one"
        )


def number_foil(model: "Model", foil: Foil | None) -> FoilNumber | None:
    """The number of the class that a foil names; the runner-up is known with the logits only."""
    return foil if foil is None or isinstance(foil, RunnerUp) else number_class(model, foil, "foil")


def number_class(model: "Model", named: int | str, what: str) -> int:
    """The number of a class, or for language models of a token. what: "target" or "foil"."""
    if isinstance(named, SpelledToken):  # already the number of one
        return named
    labels = model.labels
    if isinstance(named, str):
        numbers = find_label(labels, named) or find_token(model, named)
        if len(numbers) == 1:
            return numbers[0]
        if named.isdecimal() and len(named) < 10:  # not a name, so a number
            return number_class(model, int(named), what)
        choices = (
            f"choose from {', '.join(labels.values())}"
            if labels
            else "it must be one token of the model's vocabulary"
        )
        raise OptionError(f"unknown {what} {named!r}; {choices}", options=[what])
    if not is_integer(named) or not -LARGE < named < LARGE:
        raise OptionError(f"a {what} is a class by name or number; got {named!r}", options=[what])
    number = int(named)
    size = len(labels) or (model.vocabulary_size if model.task in LANGUAGE else None)
    if number < 0 or (size is not None and number >= size):
        most = "" if size is None else f" to {size - 1}"
        raise OptionError(
            f"{what} must be from 0{most} for {model.name}; got {named}", options=[what]
        )
    return number


def find_label(labels: dict[int, str], target: str) -> list[int]:
    """The numbers of the classes with this name; in any case of letters, if none is exact."""
    exact = [number for number, name in labels.items() if name == target]
    return exact or [number for number, name in labels.items() if name.lower() == target.lower()]


def find_token(model: "Model", named: str) -> list[int]:
    """The id of a token by its name, or of a word as it stands in a text; empty if unknown.

    A leading space belongs to the token: " Paris" is the token after a space.
    """
    if model.task not in LANGUAGE or model.tokenizer is None or not named:
        return []  # an empty text is not a token, though a tokenizer may make one of a space
    vocabulary = model.tokenizer.get_vocab()
    if named in vocabulary:
        number = int(vocabulary[named])
        spaced = find_spaced(model, vocabulary, named)
        return [number if spaced in (None, number) else SpelledToken(number, named, spaced)]
    if named.startswith(" "):
        spaced = find_spaced(model, vocabulary, named[1:])
        return [] if spaced is None else [spaced]
    spaced = find_spaced(model, vocabulary, named)
    found = tokenize_alone(model, named) if spaced is None else spaced
    return [] if found is None else [found]


def find_spaced(model: "Model", vocabulary: Mapping[str, int], text: str) -> int | None:
    """The id of a text after a space, if it is one token then."""
    for space in SPACE_MARKS:
        if space + text in vocabulary:
            return int(vocabulary[space + text])
    return tokenize_alone(model, f" {text}")


def tokenize_alone(model: "Model", text: str) -> int | None:
    """The id of a text that is one token; None if it is several, or unknown."""
    ids = list(model.tokenizer(text, add_special_tokens=False)["input_ids"])
    unknown = getattr(model.tokenizer, "unk_token_id", None)
    return int(ids[0]) if len(ids) == 1 and ids[0] != unknown else None
