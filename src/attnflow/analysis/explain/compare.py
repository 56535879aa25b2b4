"""`compare`: two explanations, of two inputs, models or methods, aligned, with the difference."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import IO, ClassVar, NamedTuple

import numpy as np

from attnflow.analysis.explain.explanation import Explanation
from attnflow.analysis.explain.summary import (
    find_asides,
    find_row_spread,
    list_key_positions,
)
from attnflow.core.arrays import Floats
from attnflow.core.io.files import Writer
from attnflow.core.io.formatting import Panel
from attnflow.core.io.tables import Table
from attnflow.core.provenance import Source
from attnflow.core.text import shorten, show_token
from attnflow.errors import OptionError, printable

COMPARED_UNITS = ("token", "word")
LEAST_CHANGE = 0.01  # a change of a share that is worth a word
Places = tuple[int | None, int | None]  # of a unit on the left and on the right; None: not there


class PairRow(NamedTuple):
    """A token (word) of both sides with its shares; None where a side does not have it."""

    key: int | None
    token: str | None
    value: float | None
    other_key: int | None
    other_token: str | None
    other_value: float | None
    difference: float | None

    def name(self, by: str = " / ") -> str:
        """Both tokens as they are shown; one if they are equal."""
        tokens = [token for token in (self.token, self.other_token) if token is not None]
        return by.join(dict.fromkeys(map(show_token, tokens)))


@dataclass(frozen=True, eq=False)
class Side:
    """One of two explanations that are compared.

    Parameters
    ----------
    explanation
        The explanation.
    name
        The text, the model or the method that differs from the other side.
    method, layer
        The result that is compared, at the explained position of this layer.
    tokens
        The names of its tokens or words.
    shares
        [token or word]: their shares, those left out taken out and the rest summing to 1. NaN
        where left out: special tokens, sinks and the explained position.
    left_out
        The share that was taken out.
    even
        The spread of the row if it hardly differs between tokens (words), so that it says nothing;
        None of others.
    """

    explanation: Explanation
    name: str
    method: str
    layer: int
    tokens: tuple[str, ...]
    shares: Floats  # [token or word]; NaN where left out
    left_out: float
    even: float | None = None

    def find(self, key: int | None) -> tuple[str | None, float | None]:
        """The name and share of a token (word); None for what this side lacks or leaves out."""
        if key is None:
            return None, None
        share = float(self.shares[key])
        return self.tokens[key], None if math.isnan(share) else share


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

    columns: ClassVar = PairRow._fields

    left: Side
    right: Side
    unit: str
    pairs: tuple[Places, ...]
    source: Source
    other_source: Source

    @property
    def difference(self) -> Floats:
        """[pair]: the share on the right minus that on the left; NaN where a side has none."""
        return np.array([row.difference for row in self.rows()], dtype=np.float64)

    def summary(self) -> str:
        """What differs, in a sentence or two: predictions, and what is read more and less.

        >>> import attnflow as af
        >>> explanations = [af.explain(f"the {word} to the house") for word in ("keys", "key")]
        >>> print(af.compare(*explanations, methods="rollout").summary())
        Left plural 0.98, right singular 0.97. Right reads more house (+6 %), less keys/key (-6 %).
        """
        left, right = self.left.explanation, self.right.explanation
        predicted = ""
        if left is not right and left.prediction is not None and right.prediction is not None:
            (label, chance), (other, other_chance) = left.prediction, right.prediction
            predicted = (
                f"Left {show_token(label)} {chance:.2f},"
                f" right {show_token(other)} {other_chance:.2f}. "
            )
        changes = [
            (row.difference, f"{row.name('/')} ({100 * row.difference:+.0f} %)")
            for row in self.rows()
            if row.difference is not None
        ]
        changes.sort(key=lambda change: change[0])
        more = [name for change, name in changes[::-1][:2] if change >= LEAST_CHANGE]
        less = [name for change, name in changes[:2] if change <= -LEAST_CHANGE]
        read = [
            f"{how} {' and '.join(names)}"
            for how, names in (("more", more), ("less", less))
            if names
        ]
        even = self.phrase_even()
        if self.left.even is not None and self.right.even is not None:
            return predicted + even
        told = f"Right reads {', '.join(read)}." if read else "Both read the same."
        return predicted + told + (f" {even}" if even else "")

    def phrase_even(self) -> str:
        """Which sides say nothing, as they read all tokens (words) alike; empty if none does.

        >>> import attnflow as af
        >>> left, right = map(af.explain, ("the keys to the old red house here", "the keys here"))
        >>> af.compare(left, right, methods="flow").phrase_even()
        'Left says nothing: its flow reads all tokens alike.'
        """
        sides = {"left": self.left, "right": self.right}
        even = [name for name, side in sides.items() if side.even is not None]
        if len(even) == 2:
            return f"Both say nothing: they read all {self.unit}s alike."
        phrases = [
            f"{name.capitalize()} says nothing: its {sides[name].method} reads all"
            f" {self.unit}s alike."
            for name in even
        ]
        return "".join(phrases)

    def rows(self) -> Iterator[PairRow]:
        """One (key, token, value, other_key, other_token, other_value, difference) per pair."""
        for key, other_key in self.pairs:
            token, value = self.left.find(key)
            other, other_value = self.right.find(other_key)
            difference = None
            if value is not None and other_value is not None:
                difference = other_value - value
            yield PairRow(key, token, value, other_key, other, other_value, difference)

    def _content(self) -> dict[str, object]:
        return super()._content() | {"other_source": self.other_source.to_dict()}

    def _panels(self) -> Iterator[Panel]:
        """For people: a token once, and its shares on both sides."""
        rows = [
            (
                row.name(),
                format_share(row.value),
                format_share(row.other_value),
                format_share(row.difference, "+"),
            )
            for row in self.rows()
        ]
        notes = [
            f"{side.name}: {side.method}, layer {side.layer}"
            + (f", {side.left_out:.0%} on tokens left out" if side.left_out >= 0.005 else "")
            + ("" if side.even is None else f", even (spread {side.even:.1g}): says nothing")
            for side in (self.left, self.right)
        ]
        if str(self.other_source) != str(self.source):
            notes.append(f"source of {self.right.name}: {self.other_source}")
        header = (self.unit, self.left.name, self.right.name, "difference")
        yield Panel(header, rows, note="; ".join(notes))

    def _writers(self) -> dict[str, Writer]:
        return {".html": self._write_page, **super()._writers()}

    def _write_page(self, file: IO[bytes]) -> None:
        from attnflow.analysis.page.strips import describe_pair
        from attnflow.show.page.page import fill_strips

        file.write(fill_strips(describe_pair(self)).encode(errors="backslashreplace"))

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

    Tokens in both texts are aligned, and so are replaced ones; a token in one text alone has no
    counterpart. Shares are compared without special tokens, sinks and the explained position.

    Parameters
    ----------
    left, right
        Results of `explain`; if right is None, left is compared with itself, by two methods.
    methods
        The name of a result of both, or a pair of names, one for each. If None, the first result of
        the left one if the right one has it, else the first result of each.
    layer
        The layer; the top one of each if None.
    unit
        "token" or "word"; if None, words if the models differ, as their tokenizers may then.

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
    if unit not in COMPARED_UNITS:
        raise OptionError(f"unknown unit {unit!r}; choose from {', '.join(COMPARED_UNITS)}")
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
    """Whether the words of all explanations are known."""
    rows = [next(iter(explanation.results.values())) for explanation in explanations]
    return all(row.words is not None for row in rows)


def name_sides(left: Explanation, right: Explanation, methods: tuple[str, str]) -> tuple[str, str]:
    """Names of the sides: their texts, models and methods as far as these differ."""
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
    out = np.array([asides.issuperset(positions) for positions in list_key_positions(row)])
    if out.all():  # only these are there
        out[:] = False
    kept, whole = float(values[~out].sum()), float(values.sum())
    shares = np.where(out, np.nan, values / kept if kept > 0 else 0.0)
    left_out = 1 - kept / whole if whole > 0 else 0.0
    even = find_row_spread(
        explanation, method, layer, by_word=unit == "word", exclude=sorted(asides)
    )
    return Side(explanation, name, method, row.layers[0], row.tokens, shares, left_out, even)


def align_sides(left: Side, right: Side) -> tuple[Places, ...]:
    """Places of units on both sides, aligned by the longest common runs."""
    names = [[show_token(token).casefold() for token in side.tokens] for side in (left, right)]
    grids = [find_grid(side.explanation) for side in (left, right)]
    if grids[0] != grids[1]:
        raise OptionError(
            "images are compared patch by patch, so their grids must be the same; got"
            f" {grids[0] or 'a text'} and {grids[1] or 'a text'}"
        )
    pairs = tuple(align(*names))
    compared = [
        {name for name, share in zip(found, side.shares, strict=True) if not np.isnan(share)}
        for found, side in zip(names, (left, right), strict=True)
    ]
    if not compared[0] & compared[1]:
        raise OptionError(
            f"texts that are compared must have words in common; got {shorten(left.name)!r} and"
            f" {shorten(right.name)!r}, which have none: give other texts"
        )
    return pairs


def find_grid(explanation: Explanation) -> tuple[int, int] | None:
    """Rows and columns of an image's patches; None for a text."""
    return None if explanation.captured is None else explanation.captured.grid


def align(left: Sequence[str], right: Sequence[str]) -> Iterator[Places]:
    """Places of names on both sides: equal ones and replaced ones in pairs, others alone.

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


def format_share(number: float | None, sign: str = "") -> str:
    """A number for a table; a dash for None."""
    return "–" if number is None else format(number, f"{sign}.3f")
