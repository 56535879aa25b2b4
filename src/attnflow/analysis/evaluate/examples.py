"""Examples: texts with or without a label, as they are given, checked, or read from a file."""

import csv
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np

from attnflow.core.checks import check_count
from attnflow.core.io.files import read_lines
from attnflow.errors import AttnFlowError, FileError, OptionError
from attnflow.models.encoded import Encoded, OneInput, is_chat
from attnflow.models.model import Model
from attnflow.models.predict import Foil, FoilNumber, check_contrast, number_foil

Label = int | str | None
GivenExample = OneInput | tuple[OneInput, Label]


@dataclass(frozen=True, eq=False)
class Example:
    """One example as it was given, and as the model takes it.

    number: among all examples. target: the class of its label; None for the predicted one.
    foil: the class to contrast it with; None for the job's.
    """

    number: int
    text: OneInput
    label: Label
    encoded: Encoded
    target: int | None
    foil: FoilNumber | None = None


def take_examples(examples: object, limit: int | None) -> list[GivenExample]:
    """The first examples of several; a single one is refused."""
    if isinstance(examples, str) or not isinstance(examples, Iterable) or is_chat(examples):
        one: dict[type, str] = {
            str: "one text: put it in a list",
            list: "one chat: put it in a list",
        }
        got = one.get(type(examples), type(examples).__name__)
        raise OptionError(f"examples must be a list of texts, or of (text, label); got {got}")
    if limit is not None:
        limit = check_count("limit", limit)
    chosen = list(islice(examples, limit))
    if not chosen:
        raise OptionError("there must be at least one example; got none")
    return chosen


def read_example(
    model: Model,
    number: int,
    text: OneInput,
    label: Label,
    place: str | None = None,
    foil: Foil | None = None,
) -> Example:
    """An example, checked; an error names its place, by default its number counted from 1."""
    try:
        encoded = model.encode(text)
        model.focal(encoded)
        target = None if label is None else model.target(label)
        against = number_foil(model, foil)
        check_contrast(model, target, against)
    except AttnFlowError as error:
        raise OptionError(f"{place or f'example {number + 1}'}: {error}") from error
    return Example(number, text, label, encoded, target, against)


def read_foils(
    foil: "Foil | Sequence[Foil] | None", count: int
) -> "tuple[Foil | None, Sequence[Foil | None]]":
    """The foil of all examples, None if each has its own; and the foil of each."""
    if not isinstance(foil, list | tuple | np.ndarray):
        return cast("Foil | None", foil), [cast("Foil | None", foil)] * count
    if len(foil) < count:
        raise OptionError(f"a list of foils has one per example, {count} here; got {len(foil)}")
    for number, each in enumerate(foil, start=1):
        if each is None:
            raise OptionError(
                f"a list of foils has one per example; got None for example {number}: name a class,"
                " or give attnflow.RUNNER_UP, the most probable other one"
            )
    return None, list(foil)[:count]


def split_example(example: GivenExample) -> tuple[OneInput, Label]:
    """(text, label or None)."""
    if isinstance(example, tuple | list) and len(example) == 2 and not is_chat(example):
        text, label = example
        if not isinstance(text, int | np.integer):  # of token ids
            return cast(OneInput, text), cast(Label, label)
    return cast(OneInput, example), None


# ---- files --------------------------------------------------------------------------------------


def read_examples(
    path: str | os.PathLike[str], model: Model, limit: int | None = None
) -> list[str | tuple[str, str]]:
    """Texts, or (text, label), from a file, each checked for a model; errors name file and line."""
    return check_lines(model, read_text_lines(path, limit))


class TextLine(NamedTuple):
    """One text of a file, before a model has seen it."""

    place: str  # the file and the line
    text: str
    label: str | None


def read_text_lines(path: str | os.PathLike[str], limit: int | None = None) -> list[TextLine]:
    """The texts of a file: one per line, its label after a tab (.csv: a comma).

    A header (text or sentence, and label) may name the columns. Errors name the file and the line.
    """
    if limit is not None:
        check_count("limit", limit)
    other = {".json", ".jsonl", ".parquet"}.intersection(Path(path).suffixes)
    if other:
        raise FileError(
            f"{path}: texts are read one per line, from .tsv, .csv or .txt; for {other.pop()} use"
            " attnflow corpus run"
        )
    lines = [TextLine(*line) for line in islice(pick_examples(split_lines(path)), limit)]
    if not lines:
        raise FileError(
            f"{path} holds no examples: one text per line is needed, and its label after a tab, in"
            " .csv a comma, where there is one"
        )
    return lines


def check_lines(model: Model, lines: Sequence[TextLine]) -> list[str | tuple[str, str]]:
    """Texts, or (text, label), each checked for a model; errors name file and line."""
    for number, (place, text, label) in enumerate(lines):
        read_example(model, number, text, label, place)
    return [text if label is None else (text, label) for _, text, label in lines]


def split_lines(path: str | os.PathLike[str]) -> Iterator[tuple[str, list[str]]]:
    """The place of each line, and its cells: between tabs, or as a .csv file quotes them."""
    for number, line in read_lines(path):
        place = f"{path}, line {number}"
        if ".csv" not in Path(path).suffixes:
            yield place, line.split("\t")
            continue
        try:
            yield place, next(csv.reader([line], strict=True))
        except csv.Error as error:
            raise FileError(f"{place}: not a line of CSV ({error})") from error


def pick_examples(
    lines: Iterator[tuple[str, list[str]]],
) -> Iterator[tuple[str, str, str | None]]:
    """The place, the text and the label, None if there is no such column, of each example."""
    first = next(lines, None)
    if first is None:
        return
    place, cells = first
    width = len(cells)
    columns = find_text_and_label(cells)
    if columns is None:  # no header
        if width > 2:
            raise FileError(
                f"{place}: one or two columns are needed, or a header that names text and label;"
                f" got {width}"
            )
        columns, lines = (0, 1), chain([first], lines)
    text, label = columns
    for place, cells in lines:
        if len(cells) != width:
            raise FileError(
                f"{place}: {width} columns are needed, as in the first line; got {len(cells)}"
            )
        yield place, cells[text], cells[label].strip() if width > 1 else None


def find_text_and_label(cells: Sequence[str]) -> tuple[int, int] | None:
    """The columns of the text and the label, if these cells are a header."""
    names = [cell.strip().lower() for cell in cells]
    texts = [names.index(name) for name in ("text", "sentence") if name in names]
    if texts and "label" in names:
        return texts[0], names.index("label")
    return (0, 1) if texts and len(cells) == 1 else None
