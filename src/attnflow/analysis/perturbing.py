"""Perturbed inputs: some units of an input taken away, and what the model then says.

A unit is a token or a group of tokens. Sets of units are whole numbers: bit i is unit i, in the
order of the text. No input runs twice, and inputs of many questions run together.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from attnflow.analysis.blanking import (
    find_replacement,
    gives_unknown,
    list_units,
    replace_tokens,
)
from attnflow.analysis.watching import Variant, run_variants
from attnflow.core.arrays import Floats
from attnflow.core.checks import is_integer
from attnflow.core.groups import Group, Groups
from attnflow.errors import OptionError
from attnflow.models.inputs import Encoded
from attnflow.models.model import Model

if TYPE_CHECKING:
    import torch

REPLACEMENTS = ("unknown", "mask", "removal", "attention")
VALUES = ("probability", "log_probability", "logit")  # what is read of a target, in this order
LEAST = 1e-300  # a probability below this counts as this, so that its logarithm is a number

Result = TypeVar("Result")
# asks for the values of sets of units, is sent them as [set, value], and ends with a result
Inquiry = Generator[Sequence[int], Floats, Result]


# ---- what stands for a token ---------------------------------------------------------------------


@dataclass(frozen=True)
class Replacement:
    """What is done to tokens that are taken away."""

    name: str  # as tables call it
    token: int | None = None  # what stands in their place; None: nothing does

    @property
    def removes(self) -> bool:
        """Whether the tokens leave the input, so that those behind them move up."""
        return self.name == "removal"


def read_replacement(model: Model, replacement: Any) -> Replacement:
    """What stands for tokens that are taken away, checked against the tokenizer.

    replacement: one of `REPLACEMENTS`, a token, its id; as `blank_out` chooses if None.
    """
    unknown = find_special(model, "unk")
    mask = find_special(model, "mask")
    if replacement is None:
        token = find_replacement(model, None)
        return Replacement("attention") if token is None else name_token(token, unknown, mask)
    if isinstance(replacement, str) and replacement in ("removal", "attention"):
        return Replacement(replacement)
    if isinstance(replacement, str) and replacement in ("unknown", "mask"):
        token = unknown if replacement == "unknown" else mask
        unused = replacement == "unknown" and not gives_unknown(model.tokenizer)
        if token is None or token in model.marks or unused:
            lacks = "uses the same token to end texts" if token in model.marks else "never gives it"
            lacks = "has no token for it" if token is None else lacks
            raise OptionError(
                f"replacement={replacement!r} needs a token of its own, and the tokenizer of"
                f" {model.name} {lacks}; choose removal, attention or a token"
            )
        return Replacement(replacement, token)
    if not isinstance(replacement, str) and not is_integer(replacement):
        raise OptionError(
            f"replacement must be one of {', '.join(REPLACEMENTS)}, a token or its id;"
            f" got {replacement!r}"
        )
    try:
        token = find_replacement(model, replacement)
    except OptionError as error:
        raise OptionError(
            f"replacement must be one of {', '.join(REPLACEMENTS)}, or a token that the tokenizer"
            f" of {model.name} has, or its id; got {replacement!r}"
        ) from error
    assert token is not None  # only "attention" has none
    return Replacement(model.names([token])[0], token)


def find_special(model: Model, name: str) -> int | None:
    """The id of a tokenizer's special token; None if it has none."""
    number = getattr(model.tokenizer, f"{name}_token_id", None)
    return None if number is None else int(number)


def name_token(token: int, unknown: int | None, mask: int | None) -> Replacement:
    """A replacement that `blank_out` chose, by its name."""
    return Replacement({mask: "mask", unknown: "unknown"}[token], token)


# ---- questions -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Question:
    """One input of which units can be taken away, and the class that is watched."""

    encoded: Encoded
    position: int  # where its prediction is read
    target: int
    units: tuple[Group, ...]  # positions that are taken away together
    replacement: Replacement
    known: dict[int, tuple[float, ...]] = field(default_factory=dict)  # values by set of units

    @property
    def everything(self) -> int:
        """The set of all units."""
        return (1 << len(self.units)) - 1

    def perturb(self, taken: int) -> Variant:
        """The input without a set of units."""
        replacement = self.replacement
        gone = tuple(
            position
            for place, unit in enumerate(self.units)
            if taken >> place & 1
            for position in unit.positions
        )
        if replacement.removes:
            return Variant(
                remove_tokens(self.encoded, gone),
                self.position - sum(position < self.position for position in gone),
                self.target,
            )
        encoded = replace_tokens(self.encoded, gone, replacement.token)
        hidden = tuple(sorted(gone)) if replacement.token is None else ()
        return Variant(encoded, self.position, self.target, hidden)


def list_perturbed(
    model: Model,
    encoded: Encoded,
    groups: Groups | None = None,
    position: int | None = None,
    left: Sequence[int] = (),
) -> tuple[tuple[Group, ...], tuple[int, ...], int]:
    """The units that can be taken away, their places, and how many tokens or groups there are.

    Special tokens stay, and so does the token where the prediction is read: without it the model
    would be asked another question. left: positions that stay as well.
    """
    read_at = model.focal(encoded)
    if model.task != "sequence classification":
        read_at = model.locate(encoded, position)
    fixed = {read_at, *left} | {place for place, mark in enumerate(encoded.special) if mark}
    parts = list_units(encoded, groups)
    free = [
        (place, Group(part.name, tuple(at for at in part.positions if at not in fixed)))
        for place, part in enumerate(parts)
    ]
    units = [(place, unit) for place, unit in free if unit.positions]
    return tuple(unit for _, unit in units), tuple(place for place, _ in units), len(parts)


def remove_tokens(encoded: Encoded, positions: Sequence[int]) -> Encoded:
    """The input without some tokens."""
    gone = set(positions)
    kept = [place for place in range(len(encoded.ids)) if place not in gone]

    def pick(values: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(values[place] for place in kept) if values else ()

    return replace(
        encoded,
        ids=pick(encoded.ids),
        tokens=pick(encoded.tokens),
        words=None,
        special=pick(encoded.special),
        segments=pick(encoded.segments),
    )


# ---- answers -------------------------------------------------------------------------------------


@dataclass
class Perturber:
    """Runs a model on inputs without some of their units: each input once."""

    model: Model
    batch_tokens: int | None = None
    runs: int = 0  # inputs that ran so far
    found: dict[Any, tuple[float, ...]] = field(default_factory=dict)  # values by what ran

    def answer(self, inquiries: "Sequence[tuple[Question, Inquiry[Result]]]") -> list[Result]:
        """The result of each inquiry; what they ask for at the same time runs together."""
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
        """Find the values of sets of units, of those that are not known yet."""
        missing: dict[Any, Variant] = {}
        owners: list[tuple[Question, int, Any]] = []
        for question, sets in asked:
            for taken in dict.fromkeys(sets):
                if taken in question.known:
                    continue
                variant = question.perturb(taken)
                inputs = variant.encoded
                key = (
                    (inputs.ids, inputs.segments),
                    (variant.position, variant.target, variant.hidden),
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
    ) -> list[tuple[float, ...]]:
        """Probability, log-probability and logit of each variant's target."""
        targets = [int(variant.target or 0) for variant in variants]
        rows = list(range(len(targets)))
        chosen = self.model.probabilities(logits)[rows, targets]
        logs = chosen.clamp_min(LEAST).log()
        scores = logits.double()[rows, targets]
        return list(zip(chosen.tolist(), logs.tolist(), scores.tolist(), strict=True))
