"""Segments of a long input: what a user calls them, as groups of positions that do not overlap."""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from attnflow.capturing.prompts import Prompt, Span
from attnflow.core.checks import check_integers
from attnflow.core.groups import Group, word_groups
from attnflow.errors import OptionError

REST = "(rest)"  # the name of what no segment holds
KINDS = ("sentences", "lines", "words", "turns")
UNITS = ("positions", "characters")
# a sentence ends where such a sign, and perhaps a quote or bracket, is followed by white space, or
# by anything in scripts that put no space there; and at an empty line
SENTENCE_END = re.compile(r"[.!?…]+[\"'”’»)\]]*\s+|[。！？]+[”’」』）]*\s*|[।؟]\s*|\n\s*\n\s*")
LINE_END = re.compile(r"\n\s*")
Named = tuple[str, Span]
Segments = str | Mapping[str, Any] | Iterable[Any]


def read_segments(
    prompt: Prompt, segments: Segments, unit: str, removed: Sequence[int]
) -> tuple[Group, ...]:
    """The segments of an input, and last what is left, if anything is.

    removed: positions that were taken out; they are in no segment.
    """
    if unit not in UNITS:
        raise OptionError(f"unknown unit {unit!r}; choose from {', '.join(UNITS)}")
    if isinstance(segments, str):
        groups = cut_input(prompt, segments)
    else:
        groups = [
            place_segment(prompt, name, given, unit) for name, given in name_segments(segments)
        ]
        if not groups:
            raise OptionError("at least one segment must be given; got none")
    check_apart(groups)
    gone = set(removed)
    kept = [
        Group(group.name, tuple(place for place in group.positions if place not in gone))
        for group in groups
    ]
    for group in kept:
        if not group.positions and not isinstance(segments, str):
            raise OptionError(f"segment {group.name!r} has no position left: all were taken out")
    kept = [group for group in kept if group.positions]
    taken = {place for group in kept for place in group.positions} | gone
    rest = tuple(place for place in range(len(prompt.encoded.tokens)) if place not in taken)
    return (*kept, Group(REST, rest)) if rest else tuple(kept)


def check_apart(groups: Sequence[Group]) -> None:
    """Refuse a position that is in two segments."""
    owners: dict[int, str] = {}
    for group in groups:
        for place in group.positions:
            if place in owners:
                raise OptionError(
                    f"segments must not overlap; got position {place} in {owners[place]!r} and in"
                    f" {group.name!r}"
                )
            owners[place] = group.name


# ---- segments that a user names -----------------------------------------------------------------


def name_segments(segments: Any) -> list[tuple[str, Any]]:
    """Segments with their names; spans in a list are named by their numbers."""
    if isinstance(segments, Mapping):
        for name in segments:
            if not isinstance(name, str):
                raise OptionError(f"the names of segments must be strings; got {name!r}")
        return list(segments.items())
    if not isinstance(segments, Iterable):
        raise OptionError(
            f"segments must be one of {', '.join(KINDS)}, or {{name: (start, end)}};"
            f" got {segments!r}"
        )
    return [(describe_span(given), given) for given in segments]


def describe_span(given: Any) -> str:
    """A name for a segment that has none."""
    if isinstance(given, Group):
        return given.name
    if isinstance(given, str):
        return shorten(given)
    pair = isinstance(given, Sequence) and len(given) == 2
    return f"{given[0]}:{given[1]}" if pair else str(given)


def place_segment(prompt: Prompt, name: str, given: Any, unit: str) -> Group:
    """One segment as positions: of a span, a passage of the text, or a group."""
    size = len(prompt.encoded.tokens)
    if isinstance(given, Group):
        outside = [place for place in given.positions if not 0 <= place < size]
        if outside:
            raise OptionError(
                f"segment {name!r} must lie within the {size} positions; got {outside[0]}"
            )
        positions = given.positions
    elif isinstance(given, str):
        positions = place_span(prompt, find_passage(prompt, name, given))
    elif unit == "characters":
        span = read_span(name, given, len(read_text(prompt)), "characters")
        positions = place_span(prompt, span)
    else:
        start, end = read_span(name, given, size, "positions")
        positions = tuple(range(start, end))
    if not positions:
        raise OptionError(f"segment {name!r} must hold at least one token; got {given!r}")
    return Group(name, positions)


def read_span(name: str, given: Any, size: int, what: str) -> Span:
    """A span (start, end), from 0; negative numbers count from the end, and None is the end."""
    if not isinstance(given, Sequence) or len(given) != 2:
        raise OptionError(
            f"segment {name!r} must be a span (start, end) of {what}, or a passage of the text;"
            f" got {given!r}"
        )
    bounds = (given[0], size if given[1] is None else given[1])
    start, end = check_integers(bounds, f"the span of segment {name!r}")
    first, last = (place + size if place < 0 else place for place in (start, end))
    if not 0 <= first < size or not 0 < last <= size:
        raise OptionError(f"segment {name!r} must lie within the {size} {what}; got {given!r}")
    if first >= last:
        raise OptionError(f"segment {name!r} must end after it starts; got {given!r}")
    return first, last


def find_passage(prompt: Prompt, name: str, passage: str) -> Span:
    """Where a passage stands in the text: once."""
    text, wanted = read_text(prompt), passage.strip()
    count = text.count(wanted) if wanted else 0
    if count != 1:
        raise OptionError(
            f"the passage of segment {name!r} must stand in the text once; got {shorten(wanted)!r},"
            f" which stands there {count} times"
        )
    start = text.index(wanted)
    return start, start + len(wanted)


# ---- segments that the text has -----------------------------------------------------------------


def cut_input(prompt: Prompt, kind: str) -> list[Group]:
    """All sentences, lines, words or turns of an input."""
    if kind not in KINDS:
        raise OptionError(
            f"unknown segments {kind!r}; choose from {', '.join(KINDS)}, or give {{name: (start,"
            " end)}"
        )
    if kind == "words":
        if prompt.encoded.words is None:
            raise OptionError("segments='words' needs a text and a fast tokenizer")
        tokens, words = prompt.encoded.tokens, prompt.encoded.words
        named = {place for place, word in enumerate(words) if word is not None}
        return [group for group in word_groups(tokens, words) if named >= set(group.positions)]
    if kind == "turns":
        if prompt.turns is None:
            raise OptionError(
                "segments='turns' needs the messages of a chat, as [{'role': ..., 'content':"
                " ...}]; got another input"
            )
        spans = prompt.turns
    else:
        text = read_text(prompt)
        spans = cut_sentences(text) if kind == "sentences" else cut_lines(text)
    groups = [Group(name, place_span(prompt, span)) for name, span in spans]
    return [group for group in groups if group.positions]  # what was cut off has none


def cut_sentences(text: str) -> tuple[Named, ...]:
    """The sentences of a text, each with its span.

    >>> [name for name, _ in cut_sentences("Dr. No came, e.g. by sea. Who? Nobody.")]
    ['Dr.', 'No came, e.g. by sea.', 'Who?', 'Nobody.']
    """
    ends = [
        match.end()
        for match in SENTENCE_END.finditer(text)
        if not text[match.end() : match.end() + 1].islower()  # "e.g. this" goes on
    ]
    return cut_text(text, ends)


def cut_lines(text: str) -> tuple[Named, ...]:
    """The lines of a text that are not empty, each with its span."""
    return cut_text(text, [match.end() for match in LINE_END.finditer(text)])


def cut_marker(text: str, marker: str) -> tuple[Named, ...]:
    """The parts of a text that begin with a marker, and what stands before the first of them.

    Named by their first lines; a name that stands twice gets a number.
    """
    starts = [match.start() for match in re.finditer(re.escape(marker), text)] if marker else []
    if not starts:
        raise OptionError(f"the marker must stand in the text; got {marker!r}, which does not")
    parts, counts = [], dict[str, int]()
    for whole, span in cut_text(text, starts):
        lines = text[slice(*span)].strip().splitlines()
        name = shorten(lines[0] if lines else whole)
        counts[name] = counts.get(name, 0) + 1
        parts.append((name if counts[name] == 1 else f"{name} ({counts[name]})", span))
    return tuple(parts)


def cut_text(text: str, ends: Sequence[int]) -> tuple[Named, ...]:
    """The parts of a text between these places, white space apart, named by their words."""
    bounds = [0, *ends, len(text)]
    return tuple(
        (" ".join(text[start:end].split()), (start, end))
        for start, end in pairwise(bounds)
        if text[start:end].strip()
    )


def shorten(text: str, most: int = 60) -> str:
    """A text in one line, cut off after so many characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 1]}…"


# ---- from characters to positions ---------------------------------------------------------------


def read_text(prompt: Prompt) -> str:
    """The text of an input, if its tokens' places in it are known."""
    if prompt.text is None or prompt.places is None:
        raise OptionError(
            "segments of a text need a text and a fast tokenizer, which says where its tokens"
            " stand; give spans of positions, as {name: (start, end)}"
        )
    return prompt.text


def place_span(prompt: Prompt, span: Span) -> tuple[int, ...]:
    """The positions of the tokens whose first character, spaces apart, lies in a span."""
    start, end = span
    (positions,) = np.nonzero((prompt.starts >= start) & (prompt.starts < end))
    return tuple(positions.tolist())
