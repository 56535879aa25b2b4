"""The colours of figures: positions left out, the scale, and comparisons."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from attnflow.analysis.explain.summary import format_percent
from attnflow.core.arrays import Floats
from attnflow.core.evenness import find_even_spread
from attnflow.core.groups import Group
from attnflow.core.results import TokenAttention
from attnflow.core.sinks import BoolArray
from attnflow.errors import OptionError
from attnflow.show.figures.drawing import check_scale, find_largest
from attnflow.show.figures.layout import label_tokens

Scale = float | str | None
# references, and the label of the colour bar for each
COMPARISONS: dict[str | None, str] = {
    None: "token attention",
    "even": "times even attention",
    "others": "times the mean of the others",
}
LITTLE_LEFT = 0.01  # where less of a row is left, the note says how much
NAMED_EXCLUDED = 3  # excluded tokens that are named, with their shares; more are counted


@dataclass(frozen=True)
class Shading:
    """How maps are coloured: on which scale, and compared with what."""

    scale: Scale
    compared_with: str | None = None

    def __post_init__(self) -> None:
        check_comparison(self.compared_with, self.scale)

    @property
    def is_signed(self) -> bool:
        """Whether colours go both ways, from -1 to 1."""
        return self.compared_with is not None

    @property
    def label(self) -> str:
        """The label of the colour bar."""
        label = COMPARISONS[self.compared_with]
        return f"{label},\nby the largest of its row" if self.scale == "row" else label

    def scale_maps(
        self, maps: Sequence[Floats], even: Sequence[BoolArray] | None = None
    ) -> tuple[list[Floats], float]:
        """Maps [row, column] as they are coloured, and the value of their darkest colour.

        even: for each map, which rows say nothing.
        """
        if self.is_signed:
            return list(maps), 1.0
        if self.scale == "row":
            flags = [None] * len(maps) if even is None else even
            return list(map(divide_rows, maps, flags)), 1.0
        if self.scale == "common":
            return list(maps), find_largest(maps)
        if isinstance(self.scale, str):
            raise OptionError(
                f"unknown scale {self.scale!r}; choose 'common', 'row', or the value of the darkest"
                " colour"
            )
        return list(maps), check_scale(self.scale, *maps)


def check_comparison(compared_with: str | None, scale: Scale) -> None:
    """Refuse an unknown comparison, and a scale beside one, which has its own."""
    if compared_with not in COMPARISONS:
        known = ", ".join(repr(name) for name in COMPARISONS)
        raise OptionError(f"unknown compared_with {compared_with!r}; choose from {known}")
    if compared_with is not None and scale not in (None, "common"):
        raise OptionError(
            "comparisons are coloured from -1 to 1, so scale does not apply; got"
            f" scale={scale!r} and compared_with={compared_with!r}: leave one out"
        )


def stack_rows(
    result: TokenAttention,
    position: int,
    excluded: Sequence[int] = (),
    compared_with: str | None = None,
) -> tuple[list[int], Floats]:
    """The layers in ascending order, and [layer, token] of one position, masked where excluded.

    The values; or, where they are compared, how far they are from what was expected, -1 to 1.
    """
    layers = sorted(set(result.layers))
    if compared_with is not None:
        scaled = result.compared_with(compared_with, exclude=excluded).scaled
        result = replace(result, values=scaled)
    values = np.stack([result.at(position, layer) for layer in layers])
    return layers, mask_columns(values, find_columns(result.groups, excluded))


def find_columns(groups: Sequence[Group] | None, excluded: Sequence[int]) -> tuple[int, ...]:
    """The columns of positions; of groups, those that hold one of the positions, unless all do."""
    if groups is None:
        return tuple(excluded)
    held = [not {*group.positions}.isdisjoint(excluded) for group in groups]
    return tuple(place for place, one in enumerate(held) if one and not all(held))


def mask_columns(values: Floats, excluded: Sequence[int]) -> Floats:
    """[row, column], masked in some columns."""
    if not excluded:
        return values
    masked = np.ma.masked_array(values, mask=np.zeros(values.shape, bool))
    masked[:, list(excluded)] = np.ma.masked
    return masked


def divide_rows(values: Floats, even: BoolArray | None = None) -> Floats:
    """Each row of [row, column] as shares of its largest value.

    even: rows that say nothing, which would be dark all over; they are masked.
    """
    largest = np.abs(values).max(axis=1, keepdims=True)
    shares: Floats = values / np.where(largest > 0, largest, 1.0)
    if even is not None and even.any():
        shares = np.ma.masked_array(shares)
        shares[even] = np.ma.masked
    return shares


def note_excluded(
    tokens: Sequence[str],
    row: Floats,
    excluded: Sequence[int],
    form: str = "{} left\u00a0out",
) -> tuple[str, ...]:
    """The note on tokens that are not coloured, or not drawn: their shares of a row [token].

    form: the text around the shares; what comes first stays where a title has room for less.
    """
    whole = float(row.sum())
    if not excluded:
        return ()
    shares = [float(row[place]) / whole if whole > 0 else 0.0 for place in excluded]
    if len(excluded) > NAMED_EXCLUDED:
        said = f"{len(excluded)} tokens {keep_together(format_percent(sum(shares)))}"
    else:
        names = label_tokens([tokens[place] for place in excluded])
        named = zip(names, map(format_percent, shares), strict=True)
        said = ", ".join(keep_together(f"{name} {share}") for name, share in named)
    rest = 1 - sum(shares)
    little = f" (the rest: {keep_together(format_percent(rest))})" if 0 < rest < LITTLE_LEFT else ""
    return (form.format(said) + little,)


def keep_together(text: str) -> str:
    """The text in one line, wherever a title is wrapped."""
    return text.replace(" ", "\u00a0")


def find_spread(row: TokenAttention, excluded: Sequence[int]) -> float | None:
    """The spread of a row if it hardly differs between the keys that are left; None of others."""
    return find_even_spread(row.compared_with("even", exclude=excluded))
