"""The rows of a corpus: texts from Parquet, CSV, TSV and JSON lines, one after the other, never all in memory."""

import csv
import hashlib
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from attnflow.errors import FileError, MissingExtraError, OptionError

PACKED = (".gz", ".zst", ".bz2", ".lz4")  # what pyarrow unpacks while it reads
TEXT_COLUMNS = ("text", "sentence")  # where texts are looked for, if no column is named
READ_ROWS = 256  # of a Parquet file, at a time; of JSON lines, those that tell the columns
LONGEST_CELL = 2**28  # characters of one cell of a CSV file; beyond that, a quote was not closed
UTF16 = ("\udcff\udcfe", "\udcfe\udcff")  # byte order marks, read with surrogateescape

Report = Callable[[str], object]


def ignore(note: str) -> None:
    """A report that nobody reads: rows are read several times, and remarked upon once."""


@dataclass(frozen=True)
class Row:
    """One text of the input, or what stands in its place."""

    number: int  # over all files, from 0
    id: str
    text: str
    label: str | None = None
    problem: str | None = None  # why there is no text
    kept: tuple[str | None, ...] = ()  # the columns that are kept, in their order


class Cell(NamedTuple):
    """What a file says of one row; nothing but the text is known of a row with a problem."""

    text: Any
    id: str | None = None
    label: str | None = None
    kept: tuple[str | None, ...] = ()
    problem: str | None = None


@dataclass(frozen=True)
class Source:
    """The files of a corpus, and which of their columns are meant; text: inferred if None.

    id: if None, the name of the file and the number of the row in it, from 0. keep: columns that
    are passed on as they are.
    """

    paths: tuple[str, ...]
    text: str | None = None
    id: str | None = None
    label: str | None = None
    limit: int | None = None
    keep: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """What the files are called in ids: without their folders, unless two would be called alike."""
        short = [Path(path).name for path in self.paths]
        return tuple(short) if len(set(short)) == len(short) else self.paths

    @property
    def stamps(self) -> tuple[tuple[int, int, int] | None, ...]:
        """Size, time and place of each file: as long as they stay, so does the content."""
        found = [os.stat(path) if os.path.exists(path) else None for path in self.paths]
        return tuple(
            None if each is None else (each.st_size, each.st_mtime_ns, each.st_ino)
            for each in found
        )

    def rows(self, report: Report = ignore) -> Iterator[Row]:
        """All rows of all files, in their order; report: told what is odd about the files."""
        cells = (
            (name, place, cell)
            for name, path in zip(self.names, self.paths, strict=True)
            for place, cell in self._file(path, report)
        )
        for number, (name, place, cell) in enumerate(islice(cells, self.limit)):
            text, id_, label, kept, problem = cell
            if problem is None and text is not None and not isinstance(text, str):
                text, problem = repr(text), f"the text must be a string; got {type(text).__name__}"
            yield Row(
                number,
                f"{name}:{place}" if self.id is None or id_ is None else id_,
                text or "",
                label,
                problem,
                kept,
            )

    def _file(self, path: str, report: Report) -> Iterator[tuple[int, Cell]]:
        import pyarrow as pa

        kind = kind_of(path)
        try:
            with unpacked(path) as file:
                yield from enumerate(READERS[kind](self, path, file, report))
        except FileError:
            raise
        except (OSError, EOFError, ValueError, csv.Error, pa.ArrowException) as error:
            raise FileError(
                f"cannot read {path}: {getattr(error, 'strerror', None) or error}"
            ) from error

    def columns(self, path: str, found: Sequence[str], report: Report) -> list[str | None]:
        """The columns of text, id and label, then those that are kept, if the file has them."""
        text = self.text or next(
            (name for name in TEXT_COLUMNS if name in found), found[0] if len(found) == 1 else None
        )
        known = f"it has {', '.join(map(repr, found[:20])) or 'none'}"
        if text is None:
            raise FileError(
                f"{path}: which column holds the texts? {known}: name it by text_column"
            )
        wanted = [("text_column", text), ("id_column", self.id), ("label_column", self.label)]
        wanted += [("keep", name) for name in self.keep]
        for option, name in wanted:
            if name is not None and name not in found:
                raise FileError(f"{path} has no column {name!r} ({option}); {known}")
            if name is not None and found.count(name) > 1:
                raise FileError(
                    f"{path} has {found.count(name)} columns {name!r} ({option}):"
                    " rename all but one"
                )
        for name in dict.fromkeys(name for name in found if found.count(name) > 1):
            report(f"{path} has {found.count(name)} columns {name!r}; none of them is used")
        return [name for _, name in wanted]


def read_delimited(source: Source, path: str, file: Any, report: Report) -> Iterator[Cell]:
    """A table with a header; in .tsv files a quote is a character like any other.

    A quote that is never closed would take the rest of the file into one cell. csv's strict mode
    sees it at the end of the file, or where the next quote comes and no comma after it. If that is
    in the line where the row began, no other row is concerned; else the file is refused.
    """
    text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
    before = csv.field_size_limit(LONGEST_CELL)
    latest = ""

    def watched() -> Iterator[str]:
        nonlocal latest
        for line in utf8_lines(path, text):
            latest = line
            yield line

    try:
        lines = (
            csv.reader(watched(), strict=True)
            if kind_of(path) == ".csv"
            else csv.reader(watched(), delimiter="\t", quoting=csv.QUOTE_NONE)
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
                places = [
                    None if name is None else header.index(name)
                    for name in source.columns(path, header, report)
                ]
            elif not cells and len(header) > 1:
                continue  # a blank line; with one column it is an empty text
            elif len(cells) != len(header) and cells:
                yield Cell(
                    "\t".join(cells),
                    problem=f"{len(header)} columns are needed, as in the header; got {len(cells)}",
                )
            else:
                found = [None if place is None or not cells else cells[place] for place in places]
                yield cell_of(found)
        if header is None:
            source.columns(path, [], report)
    finally:
        csv.field_size_limit(before)


def utf8_lines(path: str, text: Iterable[str]) -> Iterator[str]:
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


def read_json_lines(source: Source, path: str, file: Any, report: Report) -> Iterator[Cell]:
    """One JSON object per line; blank lines are no rows.

    Not every line need have every key: the columns are those of the first READ_ROWS rows together.
    """
    lines = parsed_lines(path, file)
    columns: list[str | None] = []
    while ahead := list(islice(lines, READ_ROWS)):
        objects = [found for _, _, found in ahead if isinstance(found, dict)]
        if not columns and objects:
            names = list(dict.fromkeys(name for found in objects for name in found))
            columns = source.columns(path, names, report)
        only = source.text is None and columns and columns[0] not in TEXT_COLUMNS
        for number, written, found in ahead:
            if isinstance(found, str):
                yield Cell(written, problem=found)
                continue
            if only and not found.keys().isdisjoint(TEXT_COLUMNS):
                other = next(name for name in TEXT_COLUMNS if name in found)
                raise FileError(
                    f"{path}, line {number}: here is a column {other!r}, and the texts were taken"
                    f" from {columns[0]!r}, the only column before: name it by text_column"
                )
            if columns[0] not in found:
                yield Cell(written, problem=f"this line has no {columns[0]!r}")
            else:
                yield cell_of([None if name is None else found.get(name) for name in columns])


def parsed_lines(path: str, file: Any) -> Iterator[tuple[int, str, dict[str, Any] | str]]:
    """Of each line that is not blank: number, content, and the object; or why there is none."""
    decode = json.JSONDecoder(object_pairs_hook=unrepeated).decode
    for number, line in enumerate(io.BufferedReader(file), start=1):
        if number == 1 and (line.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in line[:2]):
            raise FileError(f"{path} is not UTF-8 but, it seems, UTF-16: save it as UTF-8")
        written = line.decode("utf-8", "surrogateescape").removeprefix("\ufeff").strip()
        if not written:
            continue
        found: Any
        try:
            found = decode(written)
        except FileError as error:
            found = str(error)
        except (ValueError, RecursionError) as error:
            found = f"this line is no JSON: {error}"
        else:
            if not isinstance(found, dict):
                found = f"a line must be a JSON object; got {type(found).__name__}"
        yield number, written, found


def unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, unless a key stands in it twice: then nobody knows which of them is meant."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise FileError(f"the key {twice!r} stands twice in one JSON object")
    return found


def read_parquet(source: Source, path: str, file: Any, report: Report) -> Iterator[Cell]:
    """A Parquet file, a few rows at a time; strings come as bytes, since they need not be UTF-8."""
    import pyarrow.parquet as pq

    table = pq.ParquetFile(file)
    columns = source.columns(path, table.schema_arrow.names, report)
    wanted = list(dict.fromkeys(name for name in columns if name is not None))
    for batch in table.iter_batches(batch_size=READ_ROWS, columns=wanted):
        cells: dict[str | None, list[Any]] = {name: values_of(batch, name) for name in wanted}
        cells[None] = [None] * len(batch)
        for found in zip(*(cells[name] for name in columns), strict=True):
            wrong = next((each for each in found if isinstance(each, Unconvertible)), None)
            yield cell_of(found) if wrong is None else Cell("", problem=wrong.reason)


@dataclass(frozen=True)
class Unconvertible:
    """A value of a Parquet file that Python has no word for."""

    reason: str


def values_of(batch: Any, name: str) -> list[Any]:
    """A column as Python's values, with an `Unconvertible` where there is none."""
    import pyarrow as pa

    column = batch.column(name)
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
        each.decode("utf-8", "surrogateescape") if isinstance(each, bytes) else each
        for each in values
    ]


def cell_of(found: Sequence[Any]) -> Cell:
    """A row from the values of `Source.columns`."""
    kept = tuple(map(clean, found[3:])) if len(found) > 3 else ()
    return Cell(found[0], clean(found[1]), clean(found[2]), kept)


READERS = {
    ".csv": read_delimited,
    ".tsv": read_delimited,
    ".jsonl": read_json_lines,
    ".ndjson": read_json_lines,
    ".parquet": read_parquet,
}


def kind_of(path: str | os.PathLike[str]) -> str:
    """The ending that says how a file is read, without that of its compression."""
    name = Path(path)
    packed = name.suffix.lower() in PACKED
    ending = (name.with_suffix("") if packed else name).suffix.lower()
    if ending not in READERS or (packed and ending == ".parquet"):
        raise FileError(
            f"cannot read {path}: the ending must be one of {', '.join(READERS)}, all but the last with or without .gz or .zst"
        )
    return ending


def unpacked(path: str) -> Any:
    """A file as a stream of bytes, unpacked if its ending says that it is packed."""
    import pyarrow as pa

    if Path(path).is_dir():
        raise FileError(f"cannot read {path}: it is a folder; name the files in it")
    if kind_of(path) == ".parquet":
        return pa.OSFile(path)  # Parquet is read from its end
    return pa.input_stream(path, compression="detect")


def clean(value: Any) -> str | None:
    """An id or a label as a string that can be written: what UTF-8 cannot say is escaped."""
    return None if value is None else str(value).encode("utf-8", "backslashreplace").decode()


def is_decodable(text: str) -> bool:
    """Whether a text is one: bytes that were not UTF-8, and lone surrogates, cannot be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def fingerprint(path: str | os.PathLike[str]) -> tuple[int, str]:
    """The size of a file and the SHA-256 of its bytes, read piece by piece."""
    digest, size = hashlib.sha256(), 0
    try:
        with open(path, "rb") as file:
            while piece := file.read(2**20):
                digest.update(piece)
                size += len(piece)
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror or error}") from error
    return size, digest.hexdigest()


def source_of(inputs: Any, **columns: Any) -> Source:
    """The files that were given, one or several, and the columns; or an error before anything is read."""
    require_pyarrow()
    paths: Iterable[Any] = [inputs] if isinstance(inputs, str | os.PathLike) else inputs
    found = tuple(os.fspath(path) for path in paths)
    if not found:
        raise OptionError("a corpus needs at least one input file; got none")
    for path in found:
        kind_of(path)
        if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
            raise FileError(f"cannot read {path}: it is no ordinary file; save it as one")
    return Source(found, **columns)


def require_pyarrow() -> None:
    """Refuse early, and by the extra's name, when pyarrow is not there."""
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("corpora need pyarrow: pip install 'attnflow[corpus]'") from error
