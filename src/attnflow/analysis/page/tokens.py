"""The tokens of a page, and their words and sentences."""

from collections.abc import Collection, Sequence

from attnflow.analysis.page.schema import Positions, Tokens, Units
from attnflow.core.groups import Group, list_words
from attnflow.core.text import number_marked, number_sentences, show_tokens
from attnflow.errors import printable


def describe_tokens(
    tokens: Sequence[str],
    special: Sequence[bool],
    words: Sequence[int | None] | None,
    asides: Sequence[int],
    segments: Sequence[Group] = (),
    breaks: Sequence[int] = (),
) -> Tokens:
    """The tokens of a page.

    words: the number of each token's word; inferred from the tokens if None. asides: positions
    outside of words and sentences. segments: used as sentences. breaks: where words and sentences
    begin anew.
    """
    numbers = number_marked(tokens) if words is None else words
    firsts = {word[0] for word in list_words(numbers)} | set(breaks)
    starts = [place in firsts for place in range(len(tokens))]
    ends = {place + after for place in asides for after in (0, 1)} | {0, *breaks}
    numbers = number_sentences(tokens, starts)
    turns = {place for place in range(1, len(tokens)) if numbers[place] != numbers[place - 1]}
    sentences = cut(len(tokens), ends | turns)
    names: tuple[str, ...] | None = None
    if segments:
        sentences, names = place_segments(sentences, segments, asides)
    return Tokens(
        tokens=tuple(tokens),
        names=tuple(show_tokens(tokens)),
        special=tuple(map(int, special)),
        starts=tuple(map(int, starts)),
        units=Units(word=cut(len(tokens), ends | firsts), sentence=sentences),
        asides=tuple(asides),
        segments=names,
    )


def cut(size: int, firsts: Collection[int]) -> tuple[Positions, ...]:
    """The positions below `size`, cut before each of `firsts`.

    >>> cut(5, {0, 2, 3})
    ((0, 1), (2,), (3, 4))
    """
    groups: list[list[int]] = []
    for place in range(size):
        if place in firsts:
            groups.append([])
        groups[-1].append(place)
    return tuple(map(tuple, groups))


def place_segments(
    sentences: Sequence[Positions], segments: Sequence[Group], asides: Sequence[int]
) -> tuple[tuple[Positions, ...], tuple[str, ...]]:
    """Segments, such as the turns of a chat, as sentences; and their names."""
    apart = set(asides)
    groups = [
        (tuple(place for place in segment.positions if place not in apart), segment.name)
        for segment in segments
    ]
    groups += [((place,), "") for place in asides]
    held = {place for group, _ in groups for place in group}
    groups += [(group, "") for group in sentences if not held.intersection(group)]
    groups = sorted((group, printable(name)) for group, name in groups if group)
    return tuple(group for group, _ in groups), tuple(name for _, name in groups)


def group_units(units: Units) -> dict[str, tuple[Group, ...]]:
    """Words and sentences as groups, by the name of the unit."""
    return {
        "word": tuple(Group("", places) for places in units.word),
        "sentence": tuple(Group("", places) for places in units.sentence),
    }
