"""The file formats of a corpus's input: Parquet, CSV, TSV and JSON lines, compressed or not.

A reader yields one `Cell` per row and never holds the whole file in memory.
"""

import csv
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from attnflow.errors import FileError

if TYPE_CHECKING:
    import pyarrow

COMPRESSED = (".gz", ".zst", ".bz2", ".lz4")  # what pyarrow decompresses while it reads
TEXT_COLUMNS = ("text", "sentence")  # where texts are looked for if no column is named
READ_ROWS = 256  # of a Parquet file, at a time; of JSON lines, those that tell the columns
LONGEST_CELL = 2**28  # characters of one cell of a CSV file; beyond that, a quote was not closed
UTF16 = ("\udcff\udcfe", "\udcfe\udcff")  # byte order marks, read with surrogateescape

Notify = Callable[[str], object]  # is told what the user should know


@dataclass(frozen=True)
class Columns:
    """Which columns of the input are meant; text: inferred if None; keep: passed on as they are."""

    text: str | None = None
    id: str | None = None
    label: str | None = None
    keep: tuple[str, ...] = ()

    def choose(self, path: str, names: Sequence[str], notify: Notify) -> list[str | None]:
        """The columns of text, id and label, then those to keep, among those that a file has."""
        text = self.text or next(
            (name for name in TEXT_COLUMNS if name in names), names[0] if len(names) == 1 else None
        )
        if not names:
            raise FileError(f"{path} has no columns: give a file with a text per row")
        known = f"it has {', '.join(map(repr, names[:20]))}"
        if text is None:
            raise FileError(
                f"{path}: which column holds the texts? {known}: name it by text_column"
            )
        wanted = [("text_column", text), ("id_column", self.id), ("label_column", self.label)]
        wanted += [("keep", name) for name in self.keep]
        for option, name in wanted:
            if name is not None and name not in names:
                raise FileError(f"{path} has no column {name!r} ({option}); {known}")
            if name is not None and names.count(name) > 1:
                raise FileError(
                    f"{path} has {names.count(name)} columns {name!r} ({option}):"
                    " rename all but one"
                )
        for name in dict.fromkeys(name for name in names if names.count(name) > 1):
            notify(f"{path} has {names.count(name)} columns {name!r}; none of them is used")
        return [name for _, name in wanted]


class Cell(NamedTuple):
    """What a file says of one row; of a row with a problem nothing but the text is known."""

    text: Any
    id: str | None = None
    label: str | None = None
    kept: tuple[str | None, ...] = ()
    problem: str | None = None


def read_file_rows(path: str, columns: Columns, notify: Notify) -> Iterator[Cell]:
    """The rows of one file, read as its ending says."""
    import pyarrow as pa

    read = READERS[find_format(path)]
    try:
        with open_stream(path) as file:
            yield from read(path, file, columns, notify)
    except FileError:
        raise
    except (OSError, EOFError, ValueError, csv.Error, pa.ArrowException) as error:
        raise FileError(
            f"cannot read {path}: {getattr(error, 'strerror', None) or error}"
        ) from error


def find_format(path: str | os.PathLike[str]) -> str:
    """The ending that says how a file is read, without that of its compression."""
    name = Path(path)
    compressed = name.suffix.lower() in COMPRESSED
    ending = (name.with_suffix("") if compressed else name).suffix.lower()
    if ending not in READERS or (compressed and ending == ".parquet"):
        raise FileError(
            f"cannot read {path}: the ending must be one of {', '.join(READERS)},"
            " all but the last with or without .gz or .zst"
        )
    return ending


def open_stream(path: str) -> "pyarrow.NativeFile":
    """A file as a stream of bytes, decompressed if its ending says that it is compressed."""
    import pyarrow as pa

    if Path(path).is_dir():
        raise FileError(f"cannot read {path}: it is a folder; name the files in it")
    if find_format(path) == ".parquet":
        return pa.OSFile(path)  # Parquet is read from its end
    return pa.input_stream(path, compression="detect")


def make_cell(values: Sequence[Any]) -> Cell:
    """A row from its values in the chosen columns."""
    kept = tuple(map(escape, values[3:])) if len(values) > 3 else ()
    return Cell(values[0], escape(values[1]), escape(values[2]), kept)


def escape(value: Any) -> str | None:
    """An id or a label as a string that can be written: what UTF-8 cannot encode is escaped."""
    return None if value is None else str(value).encode("utf-8", "backslashreplace").decode()


# ---- CSV and TSV --------------------------------------------------------------------------------


def read_delimited(path: str, file: Any, columns: Columns, notify: Notify) -> Iterator[Cell]:
    """A table with a header; in .tsv files a quote is a character like any other.

    A quote that is never closed would take the rest of the file into one cell. csv's strict mode
    sees it at the end of the file, or where the next quote comes and no comma after it. If that is
    in the line where the row began, no other row is concerned; else the file is refused.
    """
    text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
    before = csv.field_size_limit(LONGEST_CELL)
    latest = ""

    def remember_latest() -> Iterator[str]:
        nonlocal latest
        for line in refuse_utf16(path, text):
            latest = line
            yield line

    try:
        lines = (
            csv.reader(remember_latest(), strict=True)
            if find_format(path) == ".csv"
            else csv.reader(remember_latest(), delimiter="\t", quoting=csv.QUOTE_NONE)
        )
        header: list[str] | None = None
        places: list[int | None] = []
        while True:
            began = lines.line_num + 1
            try:
                cells = next(lines)
            except StopIteration:
                break
            except csv.Error as error:
                if header is None or lines.line_num > began or "end of data" in str(error):
                    raise FileError(
                        f"{path}, line {began}: a quote that is opened in the row that begins here"
                        f" is not closed, or closed within a cell ({error}); double the quotes"
                        " within a cell, or save the file as .tsv without any"
                    ) from error
                yield Cell(latest.rstrip("\r\n"), problem=f"line {began} is no CSV: {error}")
                continue
            if header is None:
                header = [name.strip() for name in cells]
                chosen = columns.choose(path, header, notify)
                places = [None if name is None else header.index(name) for name in chosen]
            elif not cells and len(header) > 1:
                continue  # a blank line; with one column it is an empty text
            elif len(cells) != len(header) and cells:
                yield Cell(
                    "\t".join(cells),
                    problem=f"{len(header)} columns are needed, as in the header; got {len(cells)}",
                )
            else:
                yield make_cell(
                    [None if place is None or not cells else cells[place] for place in places]
                )
        if header is None:
            columns.choose(path, [], notify)
    finally:
        csv.field_size_limit(before)


def refuse_utf16(path: str, text: Iterable[str]) -> Iterator[str]:
    """The lines of a table, unless it is UTF-16.

    That has a NUL beside each ASCII character: in the header or, where that has none, beside the
    end of its line, which leaves a NUL before the next. In the rows below, a NUL may be data.
    """
    lines = iter(text)
    ahead = list(islice(lines, 2))
    header, second = (*ahead, "", "")[:2]
    cut = second.startswith("\0") and not header.strip().isprintable()
    if header.startswith(UTF16) or "\0" in header or cut:
        raise FileError(f"{path} is not UTF-8 but, it seems, UTF-16: save it as UTF-8")
    return chain(ahead, lines)


# ---- JSON lines ---------------------------------------------------------------------------------


def read_json_lines(path: str, file: Any, columns: Columns, notify: Notify) -> Iterator[Cell]:
    """One JSON object per line; blank lines are no rows.

    Not every line need have every key: the columns are those of the first READ_ROWS rows together.
    """
    lines = parse_lines(path, file)
    chosen: list[str | None] = []
    while ahead := list(islice(lines, READ_ROWS)):
        objects = [parsed for _, _, parsed in ahead if isinstance(parsed, dict)]
        if not chosen and objects:
            names = list(dict.fromkeys(name for parsed in objects for name in parsed))
            chosen = columns.choose(path, names, notify)
        only = columns.text is None and chosen and chosen[0] not in TEXT_COLUMNS
        for number, line, parsed in ahead:
            if isinstance(parsed, str):
                yield Cell(line, problem=parsed)
                continue
            if only and not parsed.keys().isdisjoint(TEXT_COLUMNS):
                other = next(name for name in TEXT_COLUMNS if name in parsed)
                raise FileError(
                    f"{path}, line {number}: here is a column {other!r}, and the texts were taken"
                    f" from {chosen[0]!r}, the only column before: name it by text_column"
                )
            if chosen[0] not in parsed:
                yield Cell(line, problem=f"this line has no {chosen[0]!r}")
            else:
                yield make_cell([None if name is None else parsed.get(name) for name in chosen])


def parse_lines(path: str, file: Any) -> Iterator[tuple[int, str, dict[str, Any] | str]]:
    """Number, content and object of each line that is not blank; or why it holds no object."""
    decode = json.JSONDecoder(object_pairs_hook=refuse_repeated_keys).decode
    for number, encoded in enumerate(io.BufferedReader(file), start=1):
        if number == 1 and (encoded.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in encoded[:2]):
            raise FileError(f"{path} is not UTF-8 but, it seems, UTF-16: save it as UTF-8")
        line = encoded.decode("utf-8", "surrogateescape").removeprefix("\ufeff").strip()
        if not line:
            continue
        parsed: Any
        try:
            parsed = decode(line)
        except FileError as error:
            parsed = str(error)
        except (ValueError, RecursionError) as error:
            parsed = f"this line is no JSON: {error}"
        else:
            if not isinstance(parsed, dict):
                parsed = f"a line must be a JSON object; got {type(parsed).__name__}"
        yield number, line, parsed


def refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, unless it has a key twice: which of its values is meant?"""
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise FileError(f"the key {twice!r} stands twice in one JSON object")
    return content


# ---- Parquet ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unconvertible:
    """A value of a Parquet file that Python has no type for."""

    reason: str


def read_parquet(path: str, file: Any, columns: Columns, notify: Notify) -> Iterator[Cell]:
    """A Parquet file, a few rows at a time."""
    import pyarrow.parquet as pq

    table = pq.ParquetFile(file)
    chosen = columns.choose(path, table.schema_arrow.names, notify)
    wanted = list(dict.fromkeys(name for name in chosen if name is not None))
    for batch in table.iter_batches(batch_size=READ_ROWS, columns=wanted):
        values: dict[str | None, list[Any]] = {
            name: convert_column(name, batch.column(name)) for name in wanted
        }
        values[None] = [None] * len(batch)
        for row in zip(*(values[name] for name in chosen), strict=True):
            wrong = next((value for value in row if isinstance(value, Unconvertible)), None)
            yield make_cell(row) if wrong is None else Cell("", problem=wrong.reason)


def convert_column(name: str, column: "pyarrow.Array") -> list[Any]:
    """A column as Python's values, with an `Unconvertible` where there is none.

    Strings are taken as bytes first, since those of a file need not be UTF-8.
    """
    import pyarrow as pa

    column = column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        column = column.cast(pa.large_binary())

    def convert(value: Any) -> Any:
        try:
            return value.as_py()
        except Exception as error:  # by its type: years beyond 9999, unknown time zones, no UTF-8
            return Unconvertible(f"the value of {name!r} cannot be converted: {error}")

    try:
        values = column.to_pylist()
    except Exception:  # of one value: which?
        values = [convert(value) for value in column]
    return [
        value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value
        for value in values
    ]


READERS: dict[str, Callable[[str, Any, Columns, Notify], Iterator[Cell]]] = {
    ".csv": read_delimited,
    ".tsv": read_delimited,
    ".jsonl": read_json_lines,
    ".ndjson": read_json_lines,
    ".parquet": read_parquet,
}
