"""`compare`: two explanations, of two inputs, models or methods, aligned, with the difference."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import IO, Any, ClassVar

import numpy as np

from attnflow.analysis.explanation import Explanation
from attnflow.analysis.summaries import find_asides, list_positions
from attnflow.capturing.spans import shorten
from attnflow.core.arrays import Floats
from attnflow.core.files import Writer
from attnflow.core.formatting import Panel
from attnflow.core.provenance import Source
from attnflow.core.tables import Table
from attnflow.core.text import show_token
from attnflow.errors import OptionError, printable

UNITS = ("token", "word")
LEAST = 0.01  # a change of a share that is worth a word
Places = tuple[int | None, int | None]  # of a unit on the left and on the right; None: not there


@dataclass(frozen=True, eq=False)
class Side:
    """One of two explanations that are compared.

    Parameters
    ----------
    explanation
        The explanation.
    name
        What tells it from the other: its text, its model or its method.
    method, layer
        The result that is compared, at the explained position of this layer.
    tokens
        The names of its tokens or words.
    shares
        [token or word]: their shares, those left out taken out and the rest summing to 1. NaN
        where left out: special tokens, sinks and the explained position.
    left_out
        The share that was taken out.
    """

    explanation: Explanation
    name: str
    method: str
    layer: int
    tokens: tuple[str, ...]
    shares: Floats  # [token or word]; NaN where left out
    left_out: float


@dataclass(frozen=True, eq=False)
class SideBySide(Table):
    """Two explanations, aligned by token or word.

    Parameters
    ----------
    left, right
        The two sides.
    unit
        What is aligned: "token" or "word".
    pairs
        Places of tokens (words) on the left and on the right, in the order of both texts; None
        where one side has none.
    source, other_source
        Where the numbers of the left and of the right side came from.

    >>> import attnflow as af
    >>> pair = af.compare(af.explain("the keys to the house"), af.explain("the key to the house"))
    >>> pair
    <SideBySide: 'the keys to the house' and 'the key to the house', 6 tokens, 6 aligned>
    """

    columns: ClassVar = (
        "key",
        "token",
        "value",
        "other_key",
        "other_token",
        "other_value",
        "difference",
    )

    left: Side
    right: Side
    unit: str
    pairs: tuple[Places, ...]
    source: Source
    other_source: Source

    @property
    def difference(self) -> Floats:
        """[pair]: the share on the right minus that on the left; NaN where one has none."""
        return self._shares(1) - self._shares(0)

    def summary(self) -> str:
        """What differs, in a sentence or two: predictions, and what is read more and less.

        >>> import attnflow as af
        >>> explanations = [af.explain(f"the {word} to the house") for word in ("keys", "key")]
        >>> print(af.compare(*explanations, methods="rollout").summary())
        Left plural 0.98, right singular 0.97. Right reads more house (+6 %), less keys/key (-6 %).
        """
        sides = (self.left, self.right)
        told = [side.explanation.prediction for side in sides]
        parts = []
        if None not in told and self.left.explanation is not self.right.explanation:
            labels = [f"{show_token(label)} {chance:.2f}" for label, chance in filter(None, told)]
            parts.append(f"Left {labels[0]}, right {labels[1]}.")
        order = np.argsort(np.nan_to_num(self.difference), kind="stable")
        more = [self._tell_change(at) for at in order[::-1][:2] if self.difference[at] >= LEAST]
        less = [self._tell_change(at) for at in order[:2] if self.difference[at] <= -LEAST]
        read = [
            f"{how} {' and '.join(names)}"
            for how, names in (("more", more), ("less", less))
            if names
        ]
        told_apart = f"Right reads {', '.join(read)}." if read else "Both read the same."
        return " ".join([*parts, told_apart])

    def _tell_change(self, at: int) -> str:
        """A token (word) with the change of its share."""
        left, right = self.pairs[at]
        names = [] if left is None else [self.left.tokens[left]]
        names += [] if right is None else [self.right.tokens[right]]
        shown = "/".join(dict.fromkeys(map(show_token, names)))
        return f"{shown} ({100 * self.difference[at]:+.0f} %)"

    def _shares(self, side: int) -> Floats:
        """[pair]: the shares of one side; NaN where it has none."""
        shares = (self.left, self.right)[side].shares
        return np.array([np.nan if at[side] is None else shares[at[side]] for at in self.pairs])

    def rows(self) -> Iterator[tuple[Any, ...]]:
        """One (key, token, value, other_key, other_token, other_value, difference) per pair."""
        sides = (self.left, self.right)
        numbers = zip(self._shares(0), self._shares(1), self.difference, strict=True)
        for places, (*shares, difference) in zip(self.pairs, numbers, strict=True):
            cells: list[Any] = []
            for side, place, share in zip(sides, places, shares, strict=True):
                token = None if place is None else side.tokens[place]
                cells += [place, token, None if np.isnan(share) else float(share)]
            yield (*cells, None if np.isnan(difference) else float(difference))

    def _content(self) -> dict[str, Any]:
        return super()._content() | {"other_source": self.other_source.to_dict()}

    def _panels(self) -> Iterator[Panel]:
        """For people: a token once, and what is on either side."""
        rows = []
        for _, token, value, _, other, other_value, difference in self.rows():
            names = [show_token(name) for name in (token, other) if name is not None]
            cells = [fill_cell(number) for number in (value, other_value)]
            rows.append((" / ".join(dict.fromkeys(names)), *cells, fill_cell(difference, "+")))
        notes = [
            f"{side.name}: {side.method}, layer {side.layer}"
            + (f", {side.left_out:.0%} on tokens left out" if side.left_out >= 0.005 else "")
            for side in (self.left, self.right)
        ]
        if str(self.other_source) != str(self.source):
            notes.append(f"source of {self.right.name}: {self.other_source}")
        header = (self.unit, self.left.name, self.right.name, "difference")
        yield Panel(header, rows, note="; ".join(notes))

    def _writers(self) -> dict[str, Writer]:
        return {".html": self._write_page, **super()._writers()}

    def _write_page(self, file: IO[bytes]) -> None:
        from attnflow.show.strip_pages import pair_page

        file.write(pair_page(self).encode(errors="backslashreplace"))

    def __repr__(self) -> str:
        shared = sum(None not in places for places in self.pairs)
        names = f"{printable(self.left.name)!r} and {printable(self.right.name)!r}"
        return f"<SideBySide: {names}, {len(self.pairs)} {self.unit}s, {shared} aligned>"


def compare(
    left: Explanation,
    right: Explanation | None = None,
    *,
    methods: str | tuple[str, str] | None = None,
    layer: int | None = None,
    unit: str | None = None,
) -> SideBySide:
    """Set two explanations side by side: two inputs, two models, or two methods.

    Tokens that both texts have stand beside each other; what was replaced stands in one place, what
    one text alone has is opposite nothing. Shares are compared without special tokens, sinks and
    the explained position.

    Parameters
    ----------
    left, right
        What `explain` returned; if right is None, left is compared with itself, by two methods.
    methods
        The name of a result of both, or a pair, one for each; if None, what the left one shows
        first if the right one has it, else what each shows first.
    layer
        The layer; the top one of each if None.
    unit
        "token" or "word"; if None, words where the two models differ, and so their tokenizers may.

    >>> from attnflow import explain
    >>> explanation = explain("the keys to the old house")
    >>> pair = compare(explanation, methods=("rollout", "flow"))
    >>> pair.left.method, pair.right.method, pair.difference.round(2).shape
    ('rollout', 'flow', (7,))
    """
    other = left if right is None else right
    for side, given in (("left", left), ("right", other)):
        if not isinstance(given, Explanation):
            raise OptionError(
                f"compare takes what explain returned; got {type(given).__name__} as {side}"
            )
    chosen = choose_methods(left, right, methods)
    if unit is None:
        unit = "token" if left.model == other.model or not words_known(left, other) else "word"
    if unit not in UNITS:
        raise OptionError(f"unknown unit {unit!r}; choose from {', '.join(UNITS)}")
    names = name_sides(left, other, chosen)
    sides = [
        take_side(explanation, name, method, layer, unit)
        for explanation, name, method in zip((left, other), names, chosen, strict=True)
    ]
    pairs = align_sides(*sides)
    sources = [
        explanation.results[method].source or explanation.source
        for explanation, method in zip((left, other), chosen, strict=True)
    ]
    return SideBySide(sides[0], sides[1], unit, pairs, *sources)


def choose_methods(
    left: Explanation, right: Explanation | None, methods: str | tuple[str, str] | None
) -> tuple[str, str]:
    """The name of the result of each side."""
    other = left if right is None else right
    if methods is None:
        if right is None:
            raise OptionError(
                "an explanation is compared with another one, or by two methods: give right, or"
                f" methods=(one, other) of {', '.join(left.results)}"
            )
        common = left.first in other.results
        return left.first, left.first if common else other.first
    pair = (methods, methods) if isinstance(methods, str) else tuple(methods)
    if len(pair) != 2:
        raise OptionError(f"methods must be one name or a pair of them; got {len(pair)}")
    for name, explanation in zip(pair, (left, other), strict=True):
        if name not in explanation.results:
            raise OptionError(
                f"unknown result {name!r}; choose from {', '.join(explanation.results)}"
            )
    return pair[0], pair[1]


def words_known(*explanations: Explanation) -> bool:
    """Whether tokens are known to belong to words, in all of them."""
    rows = [next(iter(explanation.results.values())) for explanation in explanations]
    return all(row.words is not None for row in rows)


def name_sides(left: Explanation, right: Explanation, methods: tuple[str, str]) -> tuple[str, str]:
    """What tells the two apart: all of text, model and method that differ."""
    sides = (left, right)
    texts = [" ‖ ".join(explanation.texts) for explanation in sides]
    models = [explanation.source.model or explanation.model for explanation in sides]
    parts = [pair for pair in (texts, models, methods) if pair[0] != pair[1] and all(pair)]
    names = [" | ".join(part) for part in zip(*parts, strict=True)]
    return (names[0], names[1]) if names else ("left", "right")


def take_side(
    explanation: Explanation, name: str, method: str, layer: int | None, unit: str
) -> Side:
    """The row of one explanation, without special tokens and sinks."""
    row = explanation.row(method, layer, by_word=unit == "word")
    values = row.values[0, 0]
    asides = set(find_asides(explanation))
    out = np.array([asides.issuperset(positions) for positions in list_positions(row)])
    if out.all():  # nothing else is there
        out[:] = False
    kept, whole = float(values[~out].sum()), float(values.sum())
    shares = np.where(out, np.nan, values / kept if kept > 0 else 0.0)
    left_out = 1 - kept / whole if whole > 0 else 0.0
    return Side(explanation, name, method, row.layers[0], row.tokens, shares, left_out)


def align_sides(left: Side, right: Side) -> tuple[Places, ...]:
    """Places of units on both sides, by the longest runs that they have in common."""
    names = [[show_token(token).casefold() for token in side.tokens] for side in (left, right)]
    grids = [find_grid(side.explanation) for side in (left, right)]
    if grids[0] != grids[1]:
        raise OptionError(
            "images are compared patch by patch, so their grids must be the same; got"
            f" {grids[0] or 'a text'} and {grids[1] or 'a text'}"
        )
    pairs = tuple(align(*names))
    told = [
        {name for name, share in zip(found, side.shares, strict=True) if not np.isnan(share)}
        for found, side in zip(names, (left, right), strict=True)
    ]
    if not told[0] & told[1]:
        raise OptionError(
            f"what is compared must have words in common; got {shorten(left.name)!r} and"
            f" {shorten(right.name)!r}, which have none: give other texts"
        )
    return pairs


def find_grid(explanation: Explanation) -> tuple[int, int] | None:
    """Rows and columns of an image's patches; None for a text."""
    return None if explanation.captured is None else explanation.captured.grid


def align(left: Sequence[str], right: Sequence[str]) -> Iterator[Places]:
    """Places of names on both sides: equal ones together, replaced ones in turn, others alone.

    >>> list(align(["the", "key", "turns"], ["the", "old", "keys", "turns"]))
    [(0, 0), (1, 1), (None, 2), (2, 3)]
    """
    for _, start, end, begin, stop in SequenceMatcher(None, left, right, False).get_opcodes():
        count = max(end - start, stop - begin)
        for step in range(count):
            yield (
                start + step if start + step < end else None,
                begin + step if begin + step < stop else None,
            )


def fill_cell(number: float | None, sign: str = "") -> str:
    """A number for a table; a dash where there is none."""
    return "–" if number is None else format(number, f"{sign}.3f")
