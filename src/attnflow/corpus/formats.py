"""The file formats of a corpus's input: Parquet, CSV, TSV and JSON lines, compressed or not.

A reader yields one `FileRow` per row and never holds the whole file in memory. Decompression and
Parquet are pyarrow's. CSV, TSV and JSON lines are read by Python's own `csv` and `json`:
`pyarrow.csv` reads `"the" key` as `the key`, and takes a quote that is never closed for the rest of
the file, without its line; `pyarrow.json` gives up a whole file for one bad line. Here such a row
is an error with its text and the reason.
"""

import csv
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from attnflow.errors import FileError

if TYPE_CHECKING:
    import pyarrow

COMPRESSED = (".gz", ".zst", ".bz2", ".lz4")  # what pyarrow decompresses while it reads
TEXT_COLUMNS = ("text", "sentence")  # where texts are looked for if no column is named
ROWS_AHEAD = 256  # of a Parquet file, at a time; of JSON lines, those that tell the columns
LONGEST_CELL = 2**28  # characters of one cell of a CSV file; beyond that, a quote was not closed
UTF16 = ("\udcff\udcfe", "\udcfe\udcff")  # byte order marks, read with surrogateescape

TellUser = Callable[[str], object]  # called with what the user should know


@dataclass(frozen=True)
class Columns:
    """Which columns of the input are meant; text: inferred if None; keep: passed on as they are."""

    text: str | None = None
    id: str | None = None
    label: str | None = None
    keep: tuple[str, ...] = ()

    def choose(self, path: str, names: Sequence[str], notify: TellUser) -> list[str | None]:
        """The columns of text, id and label, then those to keep, among those that a file has."""
        if not names:
            raise FileError(f"{path} has no columns: give a file with a text per row")
        text = self.text or find_text_column(path, names)
        wanted = [("text_column", text), ("id_column", self.id), ("label_column", self.label)]
        wanted += [("keep", name) for name in self.keep]
        for option, name in wanted:
            count = 1 if name is None else names.count(name)
            if count == 0:
                raise FileError(
                    f"{path} has no column {name!r} ({option}); {list_columns(names)}",
                    options=[option],
                )
            if count > 1:
                raise FileError(
                    f"{path} has {count} columns {name!r} ({option}): rename all but one",
                    options=[option],
                )
        for name in dict.fromkeys(name for name in names if names.count(name) > 1):
            notify(f"{path} has {names.count(name)} columns {name!r}; none of them is used")
        return [name for _, name in wanted]


def find_text_column(path: str, names: Sequence[str]) -> str:
    """The column of the texts by its usual name, or the only one."""
    for name in TEXT_COLUMNS:
        if name in names:
            return name
    if len(names) > 1:
        raise FileError(
            f"{path}: which column holds the texts? {list_columns(names)}: name it by text_column",
            options=["text_column"],
        )
    return names[0]


def list_columns(names: Sequence[str]) -> str:
    """The columns of a file, for messages."""
    return f"it has {', '.join(map(repr, names[:20]))}"


class FileRow(NamedTuple):
    """One row of a file; of a row with a problem only the text is known."""

    text: object
    id: str | None = None
    label: str | None = None
    kept: tuple[str | None, ...] = ()
    problem: str | None = None


def read_file_rows(path: str, columns: Columns, notify: TellUser) -> Iterator[FileRow]:
    """The rows of one file, read as its ending says."""
    import pyarrow as pa

    read = FORMAT_READERS[find_format(path)]
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
    if ending not in FORMAT_READERS or (compressed and ending == ".parquet"):
        raise FileError(
            f"cannot read {path}: the ending must be one of {', '.join(FORMAT_READERS)},"
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


def make_row(values: Sequence[object]) -> FileRow:
    """A row from its values in the chosen columns."""
    text, row_id, label, *kept = values
    return FileRow(text, escape(row_id), escape(label), tuple(map(escape, kept)))


def escape(value: object) -> str | None:
    """An id or a label as a string that can be written: what UTF-8 cannot encode is escaped."""
    return None if value is None else str(value).encode("utf-8", "backslashreplace").decode()


# ---- CSV and TSV --------------------------------------------------------------------------------


def read_delimited(
    path: str, file: "pyarrow.NativeFile", columns: Columns, notify: TellUser
) -> Iterator[FileRow]:
    """The rows of a table with a header."""
    records = parse_records(path, file)
    first = next(records, [])
    assert not isinstance(first, FileRow)  # a header that is not CSV is refused
    header = [name.strip() for name in first]
    chosen = columns.choose(path, header, notify)
    places = [None if name is None else header.index(name) for name in chosen]
    for cells in records:
        if isinstance(cells, FileRow):
            yield cells
        elif len(cells) == len(header):
            yield make_row([None if place is None else cells[place] for place in places])
        elif cells:
            problem = f"{len(header)} columns are needed, as in the header; got {len(cells)}"
            yield FileRow("\t".join(cells), problem=problem)
        elif len(header) == 1:  # a blank line is an empty text
            yield make_row([None] * len(places))


def parse_records(path: str, file: "pyarrow.NativeFile") -> Iterator[list[str] | FileRow]:
    """The cells of each row, or the row that is not CSV; in .tsv files quotes have no meaning.

    A quote that is never closed would take the rest of the file into one cell. csv's strict mode
    notices at the end of the file, or where the next quote comes and no comma after it. If that is
    in the line where the row began, no other row is concerned; else the file is refused.
    """
    text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
    latest = ""

    def remember_latest() -> Iterator[str]:
        nonlocal latest
        for line in refuse_utf16(path, text):
            latest = line
            yield line

    if find_format(path) == ".csv":
        records = csv.reader(remember_latest(), strict=True)
    else:
        records = csv.reader(remember_latest(), delimiter="\t", quoting=csv.QUOTE_NONE)
    before, first = csv.field_size_limit(LONGEST_CELL), True
    try:
        while True:
            began = records.line_num + 1
            try:
                yield next(records)
            except StopIteration:
                return
            except csv.Error as error:
                if first or records.line_num > began or "end of data" in str(error):
                    raise FileError(
                        f"{path}, line {began}: a quote that is opened in the row that begins here"
                        f" is not closed, or closed within a cell ({error}); double the quotes"
                        " within a cell, or save the file as .tsv without any"
                    ) from error
                problem = f"line {began} is not CSV: {error}"
                yield FileRow(latest.rstrip("\r\n"), problem=problem)
            first = False
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


class JsonLine(NamedTuple):
    """A line of a file, from 1, and the object that it holds, or why it holds none."""

    number: int
    text: str
    content: dict[str, object]
    problem: str | None = None


def read_json_lines(
    path: str, file: "pyarrow.NativeFile", columns: Columns, notify: TellUser
) -> Iterator[FileRow]:
    """One JSON object per line; blank lines are left out.

    Not every line need have every key: the columns are those of the first ROWS_AHEAD objects
    together.
    """
    lines = parse_lines(path, file)
    chosen: list[str | None] = []
    while ahead := list(islice(lines, ROWS_AHEAD)):
        if not chosen and any(line.problem is None for line in ahead):
            names = dict.fromkeys(name for line in ahead for name in line.content)
            chosen = columns.choose(path, list(names), notify)
        for line in ahead:
            if line.problem is not None:
                yield FileRow(line.text, problem=line.problem)
                continue
            if columns.text is None:
                refuse_late_column(path, line, chosen[0])
            if chosen[0] in line.content:
                yield make_row(
                    [None if name is None else line.content.get(name) for name in chosen]
                )
            else:
                yield FileRow(line.text, problem=f"this line has no {chosen[0]!r}")


def refuse_late_column(path: str, line: JsonLine, chosen: str | None) -> None:
    """Refuse a usual name of texts that comes after another column was taken for the only one."""
    if chosen in TEXT_COLUMNS:
        return
    for name in TEXT_COLUMNS:
        if name in line.content:
            raise FileError(
                f"{path}, line {line.number}: here is a column {name!r}, and the texts were taken"
                f" from {chosen!r}, the only column before: name it by text_column",
                options=["text_column"],
            )


def parse_lines(path: str, file: "pyarrow.NativeFile") -> Iterator[JsonLine]:
    """The lines that are not blank."""
    decode = json.JSONDecoder(object_pairs_hook=refuse_repeated_keys).decode
    for number, encoded in enumerate(io.BufferedReader(file), start=1):
        if number == 1 and (encoded.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in encoded[:2]):
            raise FileError(f"{path} is not UTF-8 but, it seems, UTF-16: save it as UTF-8")
        line = encoded.decode("utf-8", "surrogateescape").removeprefix("\ufeff").strip()
        if not line:
            continue
        try:
            content = decode(line)
        except FileError as error:
            yield JsonLine(number, line, {}, str(error))
        except (ValueError, RecursionError) as error:
            yield JsonLine(number, line, {}, f"this line is not JSON: {error}")
        else:
            if isinstance(content, dict):
                yield JsonLine(number, line, content)
            else:
                problem = f"a line must be a JSON object; got {type(content).__name__}"
                yield JsonLine(number, line, {}, problem)


def refuse_repeated_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
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


def read_parquet(
    path: str, file: "pyarrow.NativeFile", columns: Columns, notify: TellUser
) -> Iterator[FileRow]:
    """A Parquet file, a few rows at a time."""
    import pyarrow.parquet as pq

    table = pq.ParquetFile(file)
    chosen = columns.choose(path, table.schema_arrow.names, notify)
    wanted = list(dict.fromkeys(name for name in chosen if name is not None))
    for batch in table.iter_batches(batch_size=ROWS_AHEAD, columns=wanted):
        values: dict[str | None, list[object]] = {
            name: convert_column(name, batch.column(name)) for name in wanted
        }
        values[None] = [None] * len(batch)
        for row in zip(*(values[name] for name in chosen), strict=True):
            wrong = next((value for value in row if isinstance(value, Unconvertible)), None)
            yield make_row(row) if wrong is None else FileRow("", problem=wrong.reason)


def convert_column(name: str, column: "pyarrow.Array") -> list[object]:
    """A column as Python's values, with an `Unconvertible` where there is none.

    Strings are taken as bytes first, since those of a file need not be UTF-8.
    """
    import pyarrow as pa

    column = column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
    kind = column.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        column = column.cast(pa.large_binary())

    def convert(value: "pyarrow.Scalar") -> object:
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


FORMAT_READERS: dict[
    str, Callable[[str, "pyarrow.NativeFile", Columns, TellUser], Iterator[FileRow]]
] = {
    ".csv": read_delimited,
    ".tsv": read_delimited,
    ".jsonl": read_json_lines,
    ".ndjson": read_json_lines,
    ".parquet": read_parquet,
}
