"""Perturbed inputs: predictions without some units of an input.

A unit is a token or a group of tokens. Sets of units are bit masks: bit i is unit i, in the order
of the text. No input runs twice, and the inputs of many questions are batched together.
"""

from collections.abc import Generator, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from attnflow.analysis.importance.blank_out import (
    blank_tokens,
    find_replacement,
    gives_unknown,
    list_blanked,
)
from attnflow.analysis.importance.variant import Variant
from attnflow.analysis.importance.watch import Result, run_variants
from attnflow.core.arrays import Floats
from attnflow.core.checks import is_integer
from attnflow.core.groups import Group, Groups
from attnflow.errors import OptionError
from attnflow.models.encoded import Encoded
from attnflow.models.model import Model
from attnflow.models.predict import choose_foils, choose_targets, subtract_logits

if TYPE_CHECKING:
    import torch

REPLACEMENTS = ("unknown", "mask", "removal", "attention")
LEAST_PROBABILITY = 1e-300  # smaller ones count as this, so that their logarithm is finite


class TargetValues(NamedTuple):
    """The values of a target that can be watched.

    With a foil, `logit` is the difference of both logits, and so is `log_probability`, which is
    then the logarithm of the odds of the target against the foil.
    """

    probability: float
    log_probability: float
    logit: float


VALUES = TargetValues._fields
# yields sets of units, is sent their values as [set, value], and returns a result
Inquiry = Generator[Sequence[int], Floats, Result]


# ---- replacements --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Replacement:
    """How tokens are taken away."""

    name: str  # in tables
    token: int | None = None  # the id that replaces them; None: they leave the input or the mask


def read_replacement(model: Model, replacement: object) -> Replacement:
    """How tokens are taken away, validated against the model's tokenizer.

    replacement: one of `REPLACEMENTS`, a token or its id; the default of `blank_out` if None.
    """
    if replacement is None:
        return choose_default(model)
    if isinstance(replacement, str) and replacement in REPLACEMENTS:
        if replacement in ("removal", "attention"):
            return Replacement(replacement)
        return Replacement(replacement, require_special(model, replacement))
    choices = f"replacement must be one of {', '.join(REPLACEMENTS)}"
    if not isinstance(replacement, str) and not is_integer(replacement):
        raise OptionError(f"{choices}, a token or its id; got {replacement!r}")
    try:
        token = find_replacement(model, replacement)
    except OptionError as error:
        raise OptionError(
            f"{choices}, or a token that the tokenizer of {model.name} has, or its id;"
            f" got {replacement!r}"
        ) from error
    assert token is not None  # only "attention" has none
    return Replacement(model.names([token])[0], token)


def choose_default(model: Model) -> Replacement:
    """The replacement that `blank_out` chooses."""
    token = find_replacement(model, None)
    if token is None:
        return Replacement("attention")
    return Replacement("mask" if token == find_special(model, "mask") else "unknown", token)


def require_special(model: Model, name: str) -> int:
    """The id of the unknown token or the mask, which must not have another purpose."""
    token = find_special(model, {"unknown": "unk"}.get(name, name))
    lack = None
    if token is None:
        lack = "has no token for it"
    elif token in model.marks:
        lack = "uses the same token to end texts"
    elif name == "unknown" and not gives_unknown(model.tokenizer):
        lack = "never gives it"
    if token is None or lack is not None:
        option = f"replacement={name!r}"
        raise OptionError(
            f"{option} needs a token of its own, and the tokenizer of {model.name} {lack};"
            " choose removal, attention or a token",
            options=[option],
        )
    return token


def find_special(model: Model, name: str) -> int | None:
    """The id of a tokenizer's special token; None if it has none."""
    number = getattr(model.tokenizer, f"{name}_token_id", None)
    return None if number is None else int(number)


# ---- questions -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Question:
    """One input, the units that can be taken away, and the class to watch, with its foil."""

    encoded: Encoded
    position: int  # where its prediction is read
    target: int
    units: tuple[Group, ...]  # positions that are taken away together
    replacement: Replacement
    foil: int | None = None
    known: dict[int, TargetValues] = field(default_factory=dict)  # by set of units

    @property
    def everything(self) -> int:
        """The set of all units."""
        return (1 << len(self.units)) - 1

    def perturb(self, taken: int) -> Variant:
        """The input without a set of units."""
        intact = Variant(self.encoded, self.position, self.target, self.foil)
        gone = sorted(
            position
            for place, unit in enumerate(self.units)
            if taken >> place & 1
            for position in unit.positions
        )
        if self.replacement.name != "removal":
            return blank_tokens(intact, gone, self.replacement.token)
        moved = self.position - sum(position < self.position for position in gone)
        return replace(intact, encoded=remove_tokens(self.encoded, gone), position=moved)


class Perturbable(NamedTuple):
    """The units of an input that can be taken away."""

    units: tuple[Group, ...]
    places: tuple[int, ...]  # of each among all tokens or groups
    total: int  # of tokens or groups


def list_perturbed(
    model: Model,
    encoded: Encoded,
    groups: Groups | None = None,
    position: int | None = None,
    left: Sequence[int] = (),
) -> Perturbable:
    """The units of an input that can be taken away.

    Special tokens stay, and so does the token where the prediction is read: without it the model
    would answer another question. left: positions that stay as well.
    """
    read_at = model.focal(encoded)
    if model.task != "sequence classification":
        read_at = model.locate(encoded, position)
    fixed = {read_at, *left} | {place for place, mark in enumerate(encoded.special) if mark}
    parts = list_blanked(encoded, groups)
    free = [
        (place, Group(part.name, tuple(at for at in part.positions if at not in fixed)))
        for place, part in enumerate(parts)
    ]
    left_over = [(place, unit) for place, unit in free if unit.positions]
    places, units = zip(*left_over, strict=True) if left_over else ((), ())
    return Perturbable(units, places, len(parts))


def remove_tokens(encoded: Encoded, positions: Sequence[int]) -> Encoded:
    """The input without some tokens."""
    gone = set(positions)
    kept = [place for place in range(len(encoded.ids)) if place not in gone]

    def pick(values: Sequence[Result]) -> tuple[Result, ...]:
        return tuple(values[place] for place in kept) if values else ()

    return replace(
        encoded,
        ids=pick(encoded.ids),
        tokens=pick(encoded.tokens),
        words=None,
        special=pick(encoded.special),
        token_types=pick(encoded.token_types),
        text=None,
        offsets=None,
        chat=None,
    )


# ---- answers -------------------------------------------------------------------------------------


@dataclass
class Perturber:
    """Runs a model on inputs without some of their units: each input once."""

    model: Model
    batch_tokens: int | None = None
    runs: int = 0  # inputs that ran so far
    found: dict[Hashable, TargetValues] = field(default_factory=dict)  # by input

    def answer(self, inquiries: "Sequence[tuple[Question, Inquiry[Result]]]") -> list[Result]:
        """The result of each inquiry; what several ask for at the same time is batched."""
        results: dict[int, Result] = {}
        waiting: list[tuple[int, Sequence[int]]] = []

        def proceed(place: int, values: Floats | None) -> None:
            try:
                inquiry = inquiries[place][1]
                asked = next(inquiry) if values is None else inquiry.send(values)
                waiting.append((place, asked))
            except StopIteration as end:
                results[place] = end.value

        for place in range(len(inquiries)):
            proceed(place, None)
        while waiting:
            asked, waiting = waiting, []
            self.run([(inquiries[place][0], sets) for place, sets in asked])
            for place, sets in asked:
                known = inquiries[place][0].known
                rows = [known[taken] for taken in sets]
                proceed(place, np.array(rows, dtype=np.float64).reshape(-1, len(VALUES)))
        return [results[place] for place in range(len(inquiries))]

    def run(self, asked: Sequence[tuple[Question, Sequence[int]]]) -> None:
        """Compute the values of sets of units that are not known yet."""
        missing: dict[Hashable, Variant] = {}
        owners: list[tuple[Question, int, Hashable]] = []
        for question, sets in asked:
            for taken in dict.fromkeys(sets):
                if taken in question.known:
                    continue
                variant = question.perturb(taken)
                inputs = variant.encoded
                key: Hashable = (
                    (inputs.ids, inputs.token_types),
                    (variant.position, variant.target, variant.foil, variant.hidden),
                )
                owners.append((question, taken, key))
                if key not in self.found:
                    missing.setdefault(key, variant)
        rows = run_variants(self.model, list(missing.values()), self.read_values, self.batch_tokens)
        self.runs += len(missing)
        self.found |= dict(zip(missing, rows, strict=True))
        for question, taken, key in owners:
            question.known[taken] = self.found[key]

    def read_values(
        self, logits: "torch.Tensor", variants: Sequence[Variant]
    ) -> list[TargetValues]:
        """The values of each variant's target, from logits [sequence, class]."""
        targets = choose_targets(self.model, logits, [variant.target for variant in variants])
        rows = list(range(len(targets)))
        chosen = self.model.probabilities(logits)[rows, targets]
        foils = choose_foils(self.model, logits, targets, [variant.foil for variant in variants])
        differences = subtract_logits(logits, targets, foils)
        logs = chosen.clamp_min(LEAST_PROBABILITY).log()
        scores = logits.double()[rows, targets]
        plain = map(TargetValues, chosen.tolist(), logs.tolist(), scores.tolist())
        return [
            values
            if difference is None
            else TargetValues(values.probability, difference, difference)
            for values, difference in zip(plain, differences, strict=True)
        ]
