"""Rows of scores, one number per token or word, for the figures of bars and of text."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from attnflow.analysis.exclude import Exclusion, find_excluded
from attnflow.analysis.explain.explanation import Explanation
from attnflow.analysis.explain.summary import find_row_spread
from attnflow.core.arrays import Floats
from attnflow.core.groups import word_groups
from attnflow.core.text import show_watched
from attnflow.errors import OptionError
from attnflow.show.figures.layout import NAME_LENGTH, label_tokens, title_method
from attnflow.show.figures.shading import check_comparison, find_columns, note_excluded

# the meaning of values, by the reference that they are compared with
DIFFERENCES: dict[str | None, str] = {
    None: "token attention",
    "even": "more than even attention",
    "others": "more than other positions",
}
Scores = Mapping[str, tuple[Sequence[str], Sequence[float] | Floats]]


class ScoreRow(NamedTuple):
    """The scores of one method, or of one importance."""

    title: str
    tokens: tuple[str, ...]
    values: Floats  # [token]
    excluded: tuple[int, ...]  # places of tokens that are not shown as the others are
    meaning: str  # of the values
    notes: tuple[str, ...]
    is_even: bool = False  # hardly differs between tokens, and says nothing
    scaled: Floats | None = None  # [token]: `Comparison.scaled`, where values are differences


def read_score_rows(
    scores: Explanation | Scores,
    names: Sequence[str] | None,
    layer: int | None,
    by_word: bool,
    exclude: Exclusion,
    compared_with: str | None,
) -> dict[str, ScoreRow]:
    """The rows by name: of an explanation, or of {name: (tokens, values)}; checked."""
    check_comparison(compared_with, None)
    if isinstance(scores, Explanation):
        rows = explained_rows(scores, names, layer, by_word, exclude, compared_with)
    else:
        refuse_explained(layer, by_word, compared_with)
        rows = given_rows(scores, names, exclude)
    if not rows:
        raise OptionError(
            "an explanation must hold a method or an importance to be drawn; this one holds none"
        )
    return rows


def refuse_explained(layer: int | None, by_word: bool, compared_with: str | None) -> None:
    """Refuse options that require an explanation."""
    given = {"layer": layer, "by_word": by_word or None, "compared_with": compared_with}
    for option, value in given.items():
        if value is not None:
            raise OptionError(
                f"{option} requires an explanation, not scores alone; got {value!r}: leave it out"
            )


def given_rows(
    scores: object, names: Sequence[str] | None, exclude: Exclusion
) -> dict[str, ScoreRow]:
    """The rows of {name: (tokens, values)}, all of the same tokens."""
    if not isinstance(scores, Mapping) or not scores:
        raise OptionError(
            "scores must be what explain gives, or {name: (tokens, values)}, one value per token;"
            f" got {type(scores).__name__}"
        )
    rows: dict[str, ScoreRow] = {}
    for name in choose_names(names, list(scores)):
        tokens, values = check_score_row(name, scores[name])
        excluded = find_excluded(exclude, len(tokens))
        notes = note_excluded(tokens, np.abs(values), excluded)
        rows[name] = ScoreRow(title_row(name), tokens, values, excluded, "score", notes)
    lists = {row.tokens for row in rows.values()}
    if len(lists) > 1:
        counts = ", ".join(f"{name}: {len(row.tokens)}" for name, row in rows.items())
        raise OptionError(
            f"scores that are drawn together must have the same tokens; these differ ({counts})"
        )
    return rows


def check_score_row(name: str, given: Any) -> tuple[tuple[str, ...], Floats]:
    """The tokens and values of one score: as many, and finite."""
    try:
        tokens, values = given
        tokens, values = tuple(map(str, tokens)), np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise OptionError(
            f"scores must be (tokens, values), one number per token; {name} has {given!r:.60}"
        ) from error
    if values.shape != (len(tokens),) or not tokens or not np.isfinite(values).all():
        raise OptionError(
            f"scores must have one finite number per token; {name} has {len(tokens)} tokens and"
            f" values of shape {values.shape}"
        )
    return tokens, values


def explained_rows(
    explanation: Explanation,
    names: Sequence[str] | None,
    layer: int | None,
    by_word: bool,
    exclude: Exclusion,
    compared_with: str | None,
) -> dict[str, ScoreRow]:
    """The rows of an explanation: its methods at the explained position, and its importances."""
    if compared_with is not None and by_word:
        raise OptionError(
            "comparisons are per token, not per word; got by_word=True and"
            f" compared_with={compared_with!r}: leave one out"
        )
    importances = explanation.word_importance if by_word else explanation.importance
    positions = find_excluded(exclude, len(explanation.tokens), explanation)
    rows: dict[str, ScoreRow] = {}
    for name in choose_names(names, [*explanation.results, *explanation.importance]):
        even: tuple[str, ...] = ()
        if name in explanation.results:
            shown = explanation.row(name, layer, by_word=by_word)
            spread = find_row_spread(explanation, name, layer, by_word=by_word, exclude=positions)
            if spread is not None:
                unit = "words" if by_word else "tokens"
                even = (f"hardly differs between {unit} (spread {spread:.1g}): says nothing",)
            tokens, values = shown.tokens, shown.at(explanation.position)
            groups, meaning = shown.groups, DIFFERENCES[compared_with]
        else:
            found = importances[name]
            tokens, values, groups = found.tokens, found.values, found.groups
            meaning = f"for {label_tokens([show_watched(found.target)])[0]}"
        if by_word and groups is None:
            groups = word_groups(explanation.tokens, explanation.words)
        excluded = find_columns(groups, positions)
        notes = note_excluded(tokens, np.abs(values), excluded)
        row = ScoreRow(
            title_row(name), tokens, values, excluded, meaning, (*notes, *even), bool(even)
        )
        if compared_with is not None and name in explanation.results:
            compared = explanation.results[name].compared_with(compared_with, exclude=positions)
            there = compared.select(explanation.position, layer)
            row = row._replace(values=there.difference[0, 0], scaled=there.scaled[0, 0])
        rows[name] = row
    return rows


def choose_names(names: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    """The names of the scores that are drawn; all if None."""
    if names is None:
        return list(known)
    asked = [names] if isinstance(names, str) else list(names)
    for name in asked:
        if name not in known:
            raise OptionError(f"unknown score {name!r}; choose from {', '.join(map(str, known))}")
    if not asked:
        raise OptionError("names must be at least one; got none")
    return asked


def title_row(name: str) -> str:
    """The name of a method or of an importance as a title."""
    if name in ("blank_out", "input_gradient"):
        return {"blank_out": "blank-out", "input_gradient": "input gradient"}[name]
    return label_tokens([title_method(name)], NAME_LENGTH)[0]
