"""Segments of a long input: named groups of positions that do not overlap."""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, pairwise

import numpy as np

from attnflow.core.checks import check_integers
from attnflow.core.groups import Group, word_groups
from attnflow.core.text import shorten
from attnflow.errors import OptionError
from attnflow.models.chats import Range, Turn
from attnflow.models.encoded import Encoded

REST = "(rest)"  # the name of the positions in no segment
KINDS = ("sentences", "lines", "words", "turns")
SEGMENT_UNITS = ("positions", "characters")
# a sentence ends where such a sign, and perhaps a quote or bracket, is followed by white space, or
# by anything in scripts that put no space there; and at an empty line
SENTENCE_END = re.compile(r"[.!?…]+[\"'”’»)\]]*\s+|[。！？]+[”’」』）]*\s*|[।؟]\s*|\n\s*\n\s*")
LINE_END = re.compile(r"\n\s*")
Named = tuple[str, Range]
Segment = Sequence[int | None] | str | Group  # a span, a passage of the text, or positions
Segments = str | Mapping[str, Segment] | Iterable[object]


def read_segments(
    encoded: Encoded, segments: Segments, unit: str, removed: Sequence[int]
) -> tuple[Group, ...]:
    """The segments of an input; the positions that are left form the last one.

    removed: positions that were taken out of the graph; they are in no segment.
    """
    if unit not in SEGMENT_UNITS:
        raise OptionError(f"unknown unit {unit!r}; choose from {', '.join(SEGMENT_UNITS)}")
    if isinstance(segments, str):
        groups = cut_input(encoded, segments)
    else:
        groups = place_named(encoded, segments, unit)
        if REST in {group.name for group in groups}:
            raise OptionError(
                f"{REST!r} is the name of the positions in no segment: give another one"
            )
    check_apart(groups)
    gone = set(removed)
    kept = []
    for group in groups:
        if left := tuple(place for place in group.positions if place not in gone):
            kept.append(Group(group.name, left))
        elif not isinstance(segments, str):
            raise OptionError(f"segment {group.name!r} has no position left: all were taken out")
    taken = gone.union(*(group.positions for group in kept))
    rest = tuple(place for place in range(len(encoded.tokens)) if place not in taken)
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


# ---- segments that are given ---------------------------------------------------------------------


def place_named(encoded: Encoded, segments: object, unit: str) -> list[Group]:
    """The positions of given segments; those in a list are named by their span or text."""
    if not isinstance(segments, Iterable):
        raise OptionError(
            f"segments must be one of {', '.join(KINDS)}, or {{name: (start, end)}};"
            f" got {segments!r}"
        )
    if isinstance(segments, Mapping):
        named = list(segments.items())
    else:
        named = [(describe_span(given), given) for given in segments]
    if not named:
        raise OptionError("at least one segment must be given; got none")
    for name, _ in named:
        if not isinstance(name, str):
            raise OptionError(f"the names of segments must be strings; got {name!r}")
    return [place_segment(encoded, name, given, unit) for name, given in named]


def describe_span(given: object) -> str:
    """A name for a segment that has none."""
    if isinstance(given, Group):
        return given.name
    if isinstance(given, str):
        return shorten(given)
    if isinstance(given, Sequence) and len(given) == 2:
        return f"{given[0]}:{given[1]}"
    return str(given)


def place_segment(encoded: Encoded, name: str, given: object, unit: str) -> Group:
    """One segment as positions: of a span, a passage of the text, or a group."""
    size = len(encoded.tokens)
    if isinstance(given, Group):
        outside = [place for place in given.positions if not 0 <= place < size]
        if outside:
            raise OptionError(
                f"segment {name!r} must lie within the {size} positions; got {outside[0]}"
            )
        positions = given.positions
    elif isinstance(given, str):
        positions = place_span(encoded, find_passage(encoded, name, given))
    elif unit == "characters":
        span = read_span(name, given, len(find_text(encoded)), "characters")
        positions = place_span(encoded, span)
    else:
        start, end = read_span(name, given, size, "positions")
        positions = tuple(range(start, end))
    if not positions:
        raise OptionError(f"segment {name!r} must hold at least one token; got {given!r}")
    return Group(name, positions)


def read_span(name: str, given: object, size: int, what: str) -> Range:
    """A span (start, end) from 0; negative numbers count from the end, and None is the end."""
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


def find_passage(encoded: Encoded, name: str, passage: str) -> Range:
    """The span of a passage that occurs once in the text."""
    text, wanted = find_text(encoded), passage.strip()
    count = text.count(wanted) if wanted else 0
    if count != 1:
        raise OptionError(
            f"the passage of segment {name!r} must stand in the text once; got {shorten(wanted)!r},"
            f" which stands there {count} times"
        )
    start = text.index(wanted)
    return start, start + len(wanted)


# ---- segments of the text itself -----------------------------------------------------------------


def cut_input(encoded: Encoded, kind: str) -> list[Group]:
    """All sentences, lines, words or turns of an input."""
    if kind not in KINDS:
        raise OptionError(
            f"unknown segments {kind!r}; choose from {', '.join(KINDS)}, or give {{name: (start,"
            " end)}"
        )
    if kind == "words":
        if encoded.words is None:
            raise OptionError("segments='words' needs a text and a fast tokenizer")
        words = word_groups(encoded.tokens, encoded.words)
        named = {place for place, word in enumerate(encoded.words) if word is not None}
        return [word for word in words if named >= set(word.positions)]
    text = find_text(encoded)
    if kind == "turns":
        parts = [(turn.name, turn.spans) for turn in read_turns(encoded)]
    else:
        cut = cut_sentences(text) if kind == "sentences" else cut_lines(text)
        parts = [(name, (span,)) for name, span in cut]
    groups = [
        Group(name, tuple(chain.from_iterable(place_span(encoded, span) for span in spans)))
        for name, spans in parts
    ]
    return [group for group in groups if group.positions]  # parts that were cut off have none


def read_turns(encoded: Encoded) -> tuple[Turn, ...]:
    """The turns of a chat."""
    if encoded.chat is None:
        raise OptionError(
            "segments='turns' needs the messages of a chat, as [{'role': ..., 'content':"
            " ...}]; got another input"
        )
    if encoded.chat.problem:
        raise OptionError(encoded.chat.problem)
    return encoded.turns


def cut_sentences(text: str) -> tuple[Named, ...]:
    """The sentences of a text, each with its span.

    >>> [name for name, _ in cut_sentences("Dr. No came, e.g. by sea. Who? He.")]
    ['Dr.', 'No came, e.g. by sea.', 'Who?', 'He.']
    """
    ends = [
        match.end()
        for match in SENTENCE_END.finditer(text)
        if match[0].count("\n") > 1  # an empty line ends a sentence in any case
        or not text[match.end() : match.end() + 1].islower()  # "e.g. this" goes on
    ]
    return cut_text(text, ends)


def cut_lines(text: str) -> tuple[Named, ...]:
    """The lines of a text that are not empty, each with its span."""
    return cut_text(text, [match.end() for match in LINE_END.finditer(text)])


def cut_marker(text: str, marker: str) -> tuple[Named, ...]:
    """The parts of a text that begin with a marker, and the part before the first marker.

    They are named by their first lines; a name that occurs twice gets a number.
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
    """The parts of a text between these places that are not blank, named by their words."""
    bounds = [0, *ends, len(text)]
    return tuple(
        (" ".join(text[start:end].split()), (start, end))
        for start, end in pairwise(bounds)
        if text[start:end].strip()
    )


# ---- from characters to positions ---------------------------------------------------------------


def find_text(encoded: Encoded) -> str:
    """The text of an input, if the places of its tokens are known."""
    if encoded.text is None or encoded.offsets is None:
        raise OptionError(
            "segments of a text need a text and a fast tokenizer, which knows where its tokens"
            " are; give spans of positions, as {name: (start, end)}"
        )
    return encoded.text


def place_span(encoded: Encoded, span: Range) -> tuple[int, ...]:
    """The positions of the tokens whose first character, after spaces, lies in a span."""
    start, end = span
    (positions,) = np.nonzero((encoded.starts >= start) & (encoded.starts < end))
    return tuple(positions.tolist())
