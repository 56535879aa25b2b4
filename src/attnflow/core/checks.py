"""Checks of options: whole numbers, positions, names, words; errors in one line."""

from collections.abc import Iterable
from numbers import Real
from typing import Any

import numpy as np

from attnflow.core.provenance import Source
from attnflow.errors import OptionError, WeightsError

LARGE = 2**31  # no layer, head or position has a number beyond this


def check_integers(values: Any, what: str) -> list[int]:
    """Whole numbers, one or several, as a list.

    >>> check_integers(np.arange(3), "layers")
    [0, 1, 2]
    """
    one = isinstance(values, int) or not isinstance(values, Iterable)
    given = [values] if one else list(check_list(values, what))
    for value in given:
        if not is_integer(value) or not -LARGE < value < LARGE:
            raise OptionError(f"{what} must be whole numbers; got {value!r}")
    return [int(value) for value in given]


def check_count(name: str, value: Any, most: int | None = None) -> int:
    """A whole number, at least 1.

    >>> check_count("workers", np.int64(2))
    2
    """
    if not is_integer(value) or value < 1 or (most is not None and value > most):
        bound = "" if most is None else f" and at most {most}"
        raise OptionError(f"{name} must be a whole number, at least 1{bound}; got {value!r}")
    return int(value)


def is_integer(value: Any) -> bool:
    """Whether a value is one whole number, of Python or numpy; True and False are not."""
    return type(value) is int or (
        isinstance(value, int | np.integer) and not isinstance(value, bool)
    )


def check_list(values: Any, what: str) -> Iterable[Any]:
    """Several values, to iterate over; a single one is refused."""
    if isinstance(values, np.ndarray) and values.ndim == 0:
        return [values[()]]
    if not isinstance(values, list | tuple | Iterable):
        raise OptionError(f"{what} must be a list; got {values!r}")
    return values


def check_positions(positions: Any, size: int, what: str = "positions") -> tuple[int, ...]:
    """Positions as numbers from 0 to size - 1; a negative one counts from the end.

    >>> check_positions([0, -1], 7)
    (0, 6)
    """
    given = check_integers(positions, what)
    for position in given:
        if not -size <= position < size:
            raise OptionError(f"{what} must be from {-size} to {size - 1}; got {position}")
    return tuple(position % size for position in given)


def check_position(position: Any, size: int, what: str = "position") -> int:
    """One position as a number from 0 to size - 1; a negative one counts from the end.

    >>> check_position(-1, 7)
    6
    """
    return check_positions([position], size, what)[0]


def check_residual(residual: Any) -> float:
    """The weight of the residual connection."""
    if isinstance(residual, bool) or not isinstance(residual, Real) or not 0 <= float(residual) < 1:
        raise OptionError(
            "residual must be a number from 0 up to, but not including, 1;"
            f" got {residual!r} (0.5 is the paper's)"
        )
    return float(residual)


def check_source(source: Any) -> Source | None:
    """Where weights came from, if that is known."""
    if not isinstance(source, Source | None):
        raise OptionError(
            f"source must be a Source, which says where weights came from, or None; got {source!r}"
        )
    return source


def check_names(names: Any, size: int, what: str) -> tuple[str, ...] | None:
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


def check_layer_names(names: Any, depth: int) -> tuple[str, ...] | None:
    """One name per layer."""
    if names is None:
        return None
    given = tuple(str(name) for name in check_list(names, "layer_names"))
    if len(given) != depth:
        raise WeightsError(
            f"layer_names must be one name per layer, here {depth}; got {len(given)} names"
        )
    return given


def check_words(words: Any, size: int) -> tuple[int | None, ...] | None:
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


def check_grid(grid: Any) -> tuple[int, int] | None:
    """The number of patches down and across."""
    if grid is None:
        return None
    sides = check_integers(grid, "grid")
    if len(sides) != 2 or min(sides) < 1:
        raise OptionError(f"grid must be (down, across), both at least 1; got {grid!r}")
    return sides[0], sides[1]
