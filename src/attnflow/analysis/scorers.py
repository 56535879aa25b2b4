"""Scores of the user's own in `evaluate`: arrays, or functions of the text."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import signature
from typing import Any

import numpy as np

from attnflow.analysis.measuring import check_tokens
from attnflow.core.arrays import Floats
from attnflow.core.custom import call_own, check_name, name_function
from attnflow.core.methods import METHODS
from attnflow.errors import OptionError

# what a user has already: one array per example, or a function of the text
Scorer = Sequence[Any] | Callable[[Any], Any]


def read_scorers(
    scorers: Mapping[str, Scorer] | Callable[[Any], Any] | None, count: int
) -> dict[str, Scorer]:
    """Scorers by name: functions, or one array per example."""
    if scorers is None:
        return {}
    if callable(scorers):
        scorers = {name_function(scorers, "scorer"): scorers}
    if not isinstance(scorers, Mapping):
        raise OptionError(
            "scorers must be {name: function of the text}, or {name: one array per example};"
            f" got {type(scorers).__name__}"
        )
    for name, scorer in scorers.items():
        check_name(name, "scorer")
        if name in METHODS:
            raise OptionError(f"a scorer must have a name of its own; got {name!r}, a method's")
        if callable(scorer):
            continue
        if not hasattr(scorer, "__getitem__") or len(scorer) != count:
            got = len(scorer) if hasattr(scorer, "__len__") else type(scorer).__name__
            raise OptionError(
                f"the scorer {name!r} must be a function of the text, or a list with one array per"
                f" example, {count} here; got {got}"
            )
    return dict(scorers)


def check_scores(
    name: str, scorer: Callable[[Any], Any], given: Any, tokens: Sequence[str]
) -> Floats:
    """[token]: what a scorer says of an example, if it is one number per token."""
    values = call_own(f"{name} on {given!r}", scorer, given)
    check_tokens(values, tokens, f"what {name} gives for {given!r}")
    try:
        scores = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise OptionError(f"{name} must give numbers; got {type(values).__name__}") from error
    if scores.shape != (len(tokens),):
        raise OptionError(
            f"{name} must give one number per token, {len(tokens)} for {given!r};"
            f" got shape {scores.shape}"
        )
    return scores


def split_older(
    chosen: Any, known: Mapping[str, Any], arguments: int, option: str, way_out: str
) -> tuple[Any, dict[str, Callable[[Any], Any]]]:
    """What is chosen, without the functions of one example that version 0.2 took there.

    They keep working for one release, with a warning that says the new way.
    """
    if callable(chosen):
        chosen = [chosen]
    if not isinstance(chosen, Mapping):
        if isinstance(chosen, str) or not isinstance(chosen, Iterable):
            return chosen, {}
        chosen = list(chosen)
    pairs = chosen.items() if isinstance(chosen, Mapping) else [(item, item) for item in chosen]
    older = {
        name if isinstance(name, str) else getattr(name, "__name__", type(name).__name__): item
        for name, item in pairs
        if callable(item) and item not in known.values() and takes_an_example(item, arguments)
    }
    for name in older:
        if name in known:
            raise OptionError(f"{option} of your own must have a name of its own; got {name!r}")
        warnings.warn(
            f"{option}: a function of one example ({name}) goes in as {way_out}; as it is, it works"
            " in this version only",
            FutureWarning,
            stacklevel=3,
        )
    if isinstance(chosen, Mapping):
        return {name: item for name, item in chosen.items() if name not in older}, older
    return [item for item in chosen if item not in older.values()], older


def takes_an_example(function: Callable[..., Any], arguments: int) -> bool:
    """Whether a function can be called with one argument, and not as methods or importances are."""
    try:
        called = signature(function)
    except (TypeError, ValueError):
        return False

    def binds(*given: Any, **named: Any) -> bool:
        try:
            called.bind(*given, **named)
        except TypeError:
            return False
        return True

    if not binds(None):
        return False
    if arguments == 1:  # a method
        return not binds(None, layers=None, positions=None, bottom=None, normalize=None)
    return not binds(*[None] * arguments)
