"""Examples: texts with or without a label, as they are given, checked, or read from a file."""

import csv
import os
from pathlib import Path
from typing import Any

from attnflow.core.files import read_lines
from attnflow.errors import AttnFlowError, FileError, OptionError
from attnflow.models.inputs import Encoded
from attnflow.models.model import Model


def split_example(example: Any) -> tuple[Any, Any]:
    """(text, label or None)."""
    if isinstance(example, tuple | list) and len(example) == 2 and not isinstance(example[0], int):
        return example[0], example[1]
    return example, None


def check_example(model: Model, place: str, text: Any, label: Any) -> Encoded:
    """An example as the model takes it, or an error that names its place."""
    try:
        encoded = model.encode(text)
        model.focal(encoded)
        if label is not None:
            model.target(label)
        return encoded
    except AttnFlowError as error:
        raise OptionError(f"{place}: {error}") from error


def split_line(path: str | os.PathLike[str], number: int, line: str) -> list[str]:
    """The cells of a line: after tabs, or as a .csv file quotes them."""
    if ".csv" not in Path(path).suffixes:
        return line.split("\t")
    try:
        return next(csv.reader([line], strict=True))
    except csv.Error as error:
        raise FileError(f"{path}, line {number}: not a line of CSV ({error})") from error


def read_examples(
    path: str | os.PathLike[str], model: Model, limit: int | None = None
) -> list[Any]:
    """Texts, or (text, label), from a file: one per line, the label after a tab (.csv: a comma).

    A header (text or sentence, and label) may name the columns. What the model cannot take is
    refused by file and line.
    """
    other = {".json", ".jsonl", ".parquet"}.intersection(Path(path).suffixes)
    if other:
        raise FileError(
            f"{path}: texts are read one per line, from .tsv, .csv or .txt; for {other.pop()} use"
            " attnflow corpus run"
        )
    text, label, width = 0, 1, None
    examples: list[Any] = []
    for number, line in read_lines(path):
        cells = split_line(path, number, line)
        if width is None:
            width = len(cells)
            names = [cell.strip().lower() for cell in cells]
            heads = [names.index(name) for name in ("text", "sentence") if name in names]
            if heads and (width == 1 or "label" in names):
                text, label = heads[0], names.index("label") if "label" in names else 1
                continue
            if width > 2:
                raise FileError(
                    f"{path}, line {number}: one or two columns are needed, or a header that names"
                    f" text and label; got {width}"
                )
        if len(cells) != width:
            raise FileError(
                f"{path}, line {number}: {width} columns are needed, as in the first line;"
                f" got {len(cells)}"
            )
        given = cells[label].strip() if width > 1 else None
        check_example(model, f"{path}, line {number}", cells[text], given)
        examples.append(cells[text] if given is None else (cells[text], given))
        if len(examples) == limit:
            break
    if not examples:
        raise FileError(
            f"{path} holds no examples: one text per line is needed, and its label after a tab, in"
            " .csv a comma, where there is one"
        )
    return examples
