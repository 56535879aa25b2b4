"""Checks of options: whole numbers, positions, names, words."""

from collections.abc import Iterable
from numbers import Real
from typing import Any, TypeGuard

import numpy as np

from attnflow.core.provenance import Source
from attnflow.errors import OptionError, WeightsError

LARGE = 2**31  # every layer, head and position has a smaller number

Numbers = Iterable[int] | int  # positions or layers, or one of them


def check_integers(values: object, what: str) -> list[int]:
    """Whole numbers, one or several, as a list.

    >>> check_integers(np.arange(3), "layers")
    [0, 1, 2]
    """
    several = isinstance(values, Iterable)
    given: list[Any] = list(check_list(values, what)) if several else [values]
    for value in given:
        if not is_integer(value) or not -LARGE < value < LARGE:
            raise OptionError(f"{what} must be whole numbers; got {value!r}", options=[what])
    return [int(value) for value in given]


def check_flag(name: str, value: object) -> bool:
    """True or False, of Python or numpy."""
    if not isinstance(value, bool | np.bool_):
        raise OptionError(f"{name} must be True or False; got {value!r}", options=[name])
    return bool(value)


def check_count(name: str, value: object, most: int | None = None) -> int:
    """A whole number, at least 1.

    >>> check_count("workers", np.int64(2))
    2
    """
    if not is_integer(value) or value < 1 or (most is not None and value > most):
        bound = "" if most is None else f" and at most {most}"
        raise OptionError(
            f"{name} must be a whole number, at least 1{bound}; got {value!r}", options=[name]
        )
    return int(value)


def is_integer(value: object) -> TypeGuard[int]:
    """Whether a value is a whole number of Python or numpy, and not a bool."""
    return type(value) is int or (
        isinstance(value, int | np.integer) and not isinstance(value, bool)
    )


def check_list(values: object, what: str) -> Iterable[Any]:
    """Several values to iterate over; refuse a single one."""
    if isinstance(values, np.ndarray) and values.ndim == 0:
        return [values[()]]
    if not isinstance(values, Iterable):
        raise OptionError(f"{what} must be a list; got {values!r}")
    return values


def check_positions(positions: object, size: int, what: str = "positions") -> tuple[int, ...]:
    """Positions as numbers from 0 to size - 1; a negative one counts from the end.

    >>> check_positions([0, -1], 7)
    (0, 6)
    """
    given = check_integers(positions, what)
    for position in given:
        if not -size <= position < size:
            raise OptionError(
                f"{what} must be from {-size} to {size - 1}; got {position}", options=[what]
            )
    return tuple(position % size for position in given)


def check_position(position: object, size: int, what: str = "position") -> int:
    """One position as a number from 0 to size - 1; a negative one counts from the end.

    >>> check_position(-1, 7)
    6
    """
    return check_positions([position], size, what)[0]


def check_residual(residual: object) -> float:
    """The weight of the residual connection."""
    if isinstance(residual, bool) or not isinstance(residual, Real) or not 0 <= float(residual) < 1:
        raise OptionError(
            "residual must be a number from 0 up to, but not including, 1;"
            f" got {residual!r} (0.5 is the paper's)",
            options=["residual"],
        )
    return float(residual)


def check_source(source: object) -> Source | None:
    """The source of weights, or None if it is unknown."""
    if not isinstance(source, Source | None):
        raise OptionError(
            f"source must be a Source, the origin of the weights, or None; got {source!r}"
        )
    return source


def check_names(names: object, size: int, what: str) -> tuple[str, ...] | None:
    """One name per position."""
    if names is None:
        return None
    if isinstance(names, str):
        raise WeightsError(
            f"{what} must be a list of {size} names, one per position; got one string {names!r}:"
            " split it first"
        )
    given = tuple(check_list(names, what))
    for name in given:
        if not isinstance(name, str):
            raise WeightsError(f"{what} must be strings; got {name!r}")
    if len(given) != size:
        raise WeightsError(
            f"{what} must be one name per position, here {size}; got {len(given)} names"
        )
    return given


def check_layer_names(names: object, depth: int) -> tuple[str, ...] | None:
    """One name per layer."""
    if names is None:
        return None
    given = tuple(str(name) for name in check_list(names, "layer_names"))
    if len(given) != depth:
        raise WeightsError(
            f"layer_names must be one name per layer, here {depth}; got {len(given)} names"
        )
    return given


def check_words(words: object, size: int) -> tuple[int | None, ...] | None:
    """The number of the word per position; None, or a negative number, means no word."""
    if words is None:
        return None
    given = list(check_list(words, "words"))
    check_integers([word for word in given if word is not None], "words")
    if len(given) != size:
        raise WeightsError(
            f"words must be one number (or None) per position, here {size}; got {len(given)}"
        )
    return tuple(None if word is None or word < 0 else int(word) for word in given)


def check_grid(grid: object) -> tuple[int, int] | None:
    """The number of patches down and across."""
    if grid is None:
        return None
    sides = check_integers(grid, "grid")
    if len(sides) != 2 or min(sides) < 1:
        raise OptionError(f"grid must be (down, across), both at least 1; got {grid!r}")
    return sides[0], sides[1]
