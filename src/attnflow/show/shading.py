"""What figures colour: the positions that they leave out, the scale, and what is compared."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from attnflow.analysis.explanation import Explanation
from attnflow.analysis.generation import Generation
from attnflow.analysis.prompt_attention import PromptAttention
from attnflow.analysis.summaries import format_percent
from attnflow.core.arrays import Floats
from attnflow.core.checks import check_positions
from attnflow.core.groups import Group
from attnflow.core.requests import are_even
from attnflow.core.results import TokenAttention, measure_spread
from attnflow.errors import OptionError
from attnflow.show.drawing import check_scale
from attnflow.show.layout import label_tokens

Exclusion = str | Sequence[int | str] | None
EXCLUSIONS = ("sinks", "special", "explained", "none")  # and positions
ASIDES = EXCLUSIONS[:3]  # what a sentence leaves out
Scale = float | str | None
Explained = Explanation | Generation | PromptAttention
# what values are compared with, and what the colour bar says of it
COMPARISONS: dict[str | None, str] = {
    None: "token attention",
    "even": "times even attention",
    "others": "times the mean of the others",
}
LITTLE = 0.01  # where less is left of a row, it is told how much
NAMED = 3  # excluded tokens that are named, with their shares; more are counted


def find_excluded(exclude: Exclusion, size: int, of: Explained | None = None) -> tuple[int, ...]:
    """The positions, of `size`, that are not coloured.

    "sinks", "special" (tokens) and "explained" (the position) stand for those that `of` knows,
    unless they are all that there is; "none", as None, for none.
    """
    if exclude is None:
        return ()
    if not isinstance(exclude, Iterable):
        raise OptionError(
            f"exclude must be {', '.join(map(repr, EXCLUSIONS))} or a list of positions;"
            f" got {exclude!r}"
        )
    names = [exclude] if isinstance(exclude, str) else [x for x in exclude if isinstance(x, str)]
    numbers = [] if isinstance(exclude, str) else [x for x in exclude if not isinstance(x, str)]
    excluded = set(check_positions(numbers, size, "exclude"))
    if len(excluded) == size:
        raise OptionError(f"exclude must leave at least one of {size} tokens; got all of them")
    named = {place for name in names for place in list_named(name, of) if place < size}
    return tuple(sorted(excluded | named if len(excluded | named) < size else excluded))


def list_named(name: str, of: Explained | None) -> Iterable[int]:
    """The positions of sinks; of special tokens, CLS, SEP and the like; the explained one."""
    if name not in EXCLUSIONS:
        raise OptionError(
            f"unknown exclude {name!r}; choose from {', '.join(EXCLUSIONS)}, positions"
        )
    if name == "none":
        return ()
    if name == "explained" and of is not None:  # a generation explains none of its prompt
        return [of.position] if isinstance(of, Explanation) else ()
    if name == "sinks" and isinstance(of, Explanation | Generation):
        return [sink.position for sink in of.sinks]
    if of is None or name == "sinks":
        raise OptionError(
            f"a result alone does not know which tokens are {name}; give their positions, as"
            " exclude=[sink.position for sink in sinks(attention)]"
        )
    marks = of.special if isinstance(of, Explanation) else [t in of.special for t in of.prompt]
    return [place for place, special in enumerate(marks) if special]


def check_comparison(compared_with: str | None, scale: Scale) -> None:
    """Refuse comparisons that there are not, and a scale beside one, which has its own."""
    if compared_with not in COMPARISONS:
        known = ", ".join(repr(name) for name in COMPARISONS)
        raise OptionError(f"unknown compared_with {compared_with!r}; choose from {known}")
    if compared_with is not None and scale not in (None, "common"):
        raise OptionError(
            "what is compared has colours from -1 to 1, so scale has no say; got"
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


def scale_maps(maps: Sequence[Floats], scale: Scale) -> tuple[list[Floats], float]:
    """Maps [row, column] as they are coloured, and the value of their darkest colour."""
    if scale == "row":
        return [divide_rows(values) for values in maps], 1.0
    if isinstance(scale, str) and scale != "common":
        raise OptionError(
            f"unknown scale {scale!r}; choose 'common', 'row', or the value of the darkest colour"
        )
    return list(maps), check_scale(None if isinstance(scale, str) else scale, *maps)


def divide_rows(values: Floats) -> Floats:
    """Each row of [row, column] as shares of its largest value."""
    largest = np.abs(values).max(axis=1, keepdims=True)
    shares: Floats = values / np.where(largest > 0, largest, 1.0)
    return shares


def label_colours(scale: Scale, compared_with: str | None) -> str:
    """What a colour bar says."""
    label = COMPARISONS[compared_with]
    return f"{label},\nby the largest of its row" if scale == "row" else label


def note_excluded(
    tokens: Sequence[str],
    row: Floats,
    excluded: Sequence[int],
    form: str = "{} left\u00a0out",
) -> tuple[str, ...]:
    """What is said of the tokens that are not coloured, or drawn: their shares of a row [token].

    form: what is said of the shares, which come first where they can be seen to be left out, and
    stay where there is no room for all of it.
    """
    whole = float(row.sum())
    if not excluded:
        return ()
    shares = [float(row[place]) / whole if whole > 0 else 0.0 for place in excluded]
    if len(excluded) > NAMED:
        said = f"{len(excluded)} tokens {keep_together(format_percent(sum(shares)))}"
    else:
        names = label_tokens([tokens[place] for place in excluded])
        named = zip(names, map(format_percent, shares), strict=True)
        said = ", ".join(keep_together(f"{name} {share}") for name, share in named)
    rest = 1 - sum(shares)
    little = f" (the rest: {keep_together(format_percent(rest))})" if 0 < rest < LITTLE else ""
    return (form.format(said) + little,)


def keep_together(text: str) -> str:
    """The text in one line, wherever a title is wrapped."""
    return text.replace(" ", "\u00a0")


def find_spread(row: TokenAttention, excluded: Sequence[int]) -> float | None:
    """The spread of one row that hardly tells apart the keys that are left, if it is one."""
    compared = row.compared_with("even", exclude=excluded)
    seen = compared.expected > 0  # [layer, query, key]
    spread = measure_spread(compared.shares, seen)
    if max(row.layers) < 2 or not are_even(spread, seen.sum(axis=-1)).all():
        return None
    return float(spread[0, 0])
