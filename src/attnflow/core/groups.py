"""Groups of positions: words, spans, image regions; read, checked and named."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from attnflow.core.arrays import Floats
from attnflow.core.checks import check_list, check_positions
from attnflow.core.text import join_subwords
from attnflow.errors import OptionError


@dataclass(frozen=True)
class Group:
    """Positions taken together as one key: a word, a span, an image region.

    Parameters
    ----------
    name
        The name of the group.
    positions
        Its positions, from 0.
    """

    name: str
    positions: tuple[int, ...]


Groups = str | Iterable[Iterable[int] | Group] | Mapping[str, Iterable[int]]


def read_groups(
    groups: Groups,
    size: int,
    *,
    tokens: Sequence[str] | None = None,
    words: Sequence[int | None] | None = None,
    removed: Sequence[int] = (),
    what: str = "groups",
) -> tuple[Group, ...]:
    """Check groups of positions, and name those that have no name.

    Parameters
    ----------
    groups
        "words", lists of positions, or {name: positions}.
    size
        The number of positions.
    tokens, words
        The name and the word per position; None if unknown.
    removed
        Positions that were removed.
    what
        The name of the option, for messages.

    >>> read_groups([[0, 1], [2]], 3, tokens=["un", "##do", "it"], words=[0, 0, 1])
    (Group(name='undo', positions=(0, 1)), Group(name='it', positions=(2,)))
    """
    names = tuple(map(str, range(size))) if tokens is None else tuple(tokens)
    part = what.removesuffix("s")
    if isinstance(groups, str):
        if groups != "words":
            raise OptionError(
                f"unknown {what} {groups!r}; choose 'words', lists of positions, or"
                " {name: positions}"
            )
        if words is None:
            raise OptionError(
                f"{what}='words' needs the tokens' words, and here are none: give"
                " Attention(words=[...]), one word number per token, or lists of positions"
            )
        return word_groups(names, words, removed)
    named: list[tuple[object, Iterable[int]]] = (
        list(groups.items())
        if isinstance(groups, Mapping)
        else [
            (group.name, group.positions) if isinstance(group, Group) else (None, group)
            for group in check_list(groups, what)
        ]
    )
    if not named:
        raise OptionError(f"at least one {part} must be given; got none")
    read: list[Group] = []
    taken: dict[int, int] = {}  # {position: the number of its group}
    for number, (name, positions) in enumerate(named):
        if name is not None and not isinstance(name, str):
            raise OptionError(f"the names of {what} must be strings; got {name!r}")
        if not is_several(positions):
            raise OptionError(
                f"{what} must be lists of positions, as [[0, 1], [2]]; got {positions!r} as"
                f" {part} {number}"
            )
        checked = check_group(positions, size, removed, f"the positions of {part} {number}")
        for position in checked:
            if taken.setdefault(position, number) != number:
                raise OptionError(
                    f"a position must be in one {part} only; got {position} in {what}"
                    f" {taken[position]} and {number}"
                )
        read.append(Group(name_group(checked, tokens, words) if name is None else name, checked))
    return tuple(read)


def name_group(
    positions: Sequence[int], tokens: Sequence[str] | None, words: Sequence[int | None] | None
) -> str:
    """The words at these positions, or their numbers if tokens have no names."""
    if tokens is None:
        return list_numbers(positions)
    pieces = [[place] for place in positions] if words is None else cut_words(positions, words)
    return " ".join(join_subwords([tokens[at] for at in piece]) for piece in pieces)


def check_group(
    positions: Iterable[int], size: int, removed: Sequence[int], what: str
) -> tuple[int, ...]:
    """Positions to take together: at least one, distinct, none of them removed."""
    checked = check_positions(positions, size, what)
    if not checked:
        raise OptionError(f"{what} must be at least one; got none")
    if len(set(checked)) < len(checked):
        twice = next(position for position in checked if checked.count(position) > 1)
        raise OptionError(f"{what} must be distinct; got {twice} twice")
    refuse_removed(checked, size, removed)
    return checked


def refuse_removed(positions: Sequence[int], size: int, removed: Sequence[int]) -> None:
    """Refuse positions that were removed from the graph."""
    for position in positions:
        if position in removed:
            kept = [place for place in range(size) if place not in removed]
            raise OptionError(
                f"position {position} was taken out of this graph;"
                f" it has positions {list_numbers(kept)}"
            )


def is_several(position: object) -> bool:
    """Whether this is a list or an array of positions, and not a single one."""
    if isinstance(position, np.ndarray):
        return position.ndim > 0
    return isinstance(position, Iterable) and not isinstance(position, str)


def list_words(words: Sequence[int | None] | None) -> list[list[int]]:
    """The positions of every word, given the words of tokens; a token without one stands alone."""
    if words is None:
        raise OptionError(
            "this result has no words: give Attention(words=[...]), one word number per token"
        )
    return cut_words(range(len(words)), words)


def cut_words(positions: Sequence[int], words: Sequence[int | None]) -> list[list[int]]:
    """Positions cut into words: consecutive ones with the same word stay together."""
    pieces: list[list[int]] = []
    for place in positions:
        word = words[place]
        follows = bool(pieces) and pieces[-1][-1] == place - 1
        if follows and word is not None and word == words[place - 1]:
            pieces[-1].append(place)
        else:
            pieces.append([place])
    return pieces


def word_groups(
    tokens: Sequence[str], words: Sequence[int | None] | None, removed: Sequence[int] = ()
) -> tuple[Group, ...]:
    """Words as groups, without removed positions; a token without a word stands alone."""
    kept = [[place for place in word if place not in removed] for word in list_words(words)]
    return tuple(
        Group(join_subwords([tokens[place] for place in word]), tuple(word))
        for word in kept
        if word
    )


def sum_groups(values: Floats, groups: Sequence[Group]) -> Floats:
    """Sum values [..., key] over the keys of every group: [..., group]."""
    return np.stack([values[..., list(group.positions)].sum(axis=-1) for group in groups], axis=-1)


def name_places(positions: Sequence[int]) -> str:
    """One position or several for a message.

    >>> name_places([3]), name_places([3, 4, 5])
    ('position 3', 'positions 3..5')
    """
    return f"position{'s' * (len(positions) > 1)} {list_numbers(positions)}"


def list_numbers(numbers: Sequence[int]) -> str:
    """Numbers for a message: 1..6 if they are consecutive, else one by one."""
    ordered = sorted(set(numbers))
    if len(ordered) > 2 and ordered == list(range(ordered[0], ordered[-1] + 1)):
        return f"{ordered[0]}..{ordered[-1]}"
    return ", ".join(map(str, ordered))
