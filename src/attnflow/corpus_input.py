"""The rows of a corpus: texts from Parquet, CSV, TSV and JSON lines, one after the other, never all in memory."""

import csv
import hashlib
import io
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from attnflow.errors import FileError, MissingExtraError, OptionError

PACKED = (".gz", ".zst", ".bz2", ".lz4")  # what pyarrow unpacks while it reads
TEXT_COLUMNS = ("text", "sentence")  # where texts are looked for, if no column is named
READ_ROWS = 256  # of a Parquet file, at a time
LONGEST_CELL = 2**28  # characters of one cell of a CSV file; beyond that, a quote was not closed


@dataclass(frozen=True)
class Row:
    """One text of the input, or what stands in its place."""

    number: int  # over all files, from 0
    id: str
    text: str
    label: str | None = None
    problem: str | None = None  # why there is no text


@dataclass(frozen=True)
class Source:
    """The files of a corpus, and which of their columns are meant; text: None looks for the column."""

    paths: tuple[str, ...]
    text: str | None = None
    id: str | None = (
        None  # None: an id is the name of the file and the number of the row in it, from 0
    )
    label: str | None = None
    limit: int | None = None

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

    def rows(self) -> Iterator[Row]:
        """All rows of all files, in their order."""
        cells = (
            (name, place, cell)
            for name, path in zip(self.names, self.paths, strict=True)
            for place, cell in self._file(path)
        )
        for number, (name, place, cell) in enumerate(islice(cells, self.limit)):
            text, id_, label, problem = cell
            if problem is None and text is not None and not isinstance(text, str):
                text, problem = repr(text), f"the text must be a string; got {type(text).__name__}"
            yield Row(
                number,
                f"{name}:{place}" if self.id is None or id_ is None else id_,
                text or "",
                label,
                problem,
            )

    def _file(self, path: str) -> Iterator[tuple[int, "Cell"]]:
        kind = kind_of(path)
        try:
            with unpacked(path) as file:
                yield from enumerate(READERS[kind](self, path, file))
        except FileError:
            raise
        except (
            OSError,
            EOFError,
            ValueError,
            csv.Error,
        ) as error:  # pyarrow's errors are among them
            raise FileError(
                f"cannot read {path}: {getattr(error, 'strerror', None) or error}"
            ) from error

    def columns(self, path: str, found: Sequence[str]) -> tuple[str, str | None, str | None]:
        """The columns of text, id and label, if the file has them."""
        text = self.text or next(
            (name for name in TEXT_COLUMNS if name in found), found[0] if len(found) == 1 else None
        )
        known = f"it has {', '.join(map(repr, found[:20])) or 'none'}"
        if text is None:
            raise FileError(
                f"{path}: which column holds the texts? {known}: name it by text_column"
            )
        for option, name in {
            "text_column": text,
            "id_column": self.id,
            "label_column": self.label,
        }.items():
            if name is not None and name not in found:
                raise FileError(f"{path} has no column {name!r} ({option}); {known}")
        return text, self.id, self.label


Cell = tuple[
    Any, str | None, str | None, str | None
]  # text, id, label, and what is wrong with them


def read_delimited(source: Source, path: str, file: Any) -> Iterator[Cell]:
    """A table with a header; in .tsv files a quote is a character like any other."""
    text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
    before = csv.field_size_limit(LONGEST_CELL)
    try:
        lines = (
            csv.reader(text)
            if kind_of(path) == ".csv"
            else csv.reader(text, delimiter="\t", quoting=csv.QUOTE_NONE)
        )
        header = [name.strip() for name in next(lines, [])]
        places = [
            None if name is None else header.index(name) for name in source.columns(path, header)
        ]
        for cells in lines:
            if not cells and len(header) > 1:
                continue  # a blank line; with one column it is an empty text
            if len(cells) != len(header) and cells:
                yield (
                    "\t".join(cells),
                    None,
                    None,
                    f"{len(header)} columns are needed, as in the header; got {len(cells)}",
                )
            else:
                found = [None if place is None or not cells else cells[place] for place in places]
                yield found[0], clean(found[1]), clean(found[2]), None
    finally:
        csv.field_size_limit(before)


def read_json_lines(source: Source, path: str, file: Any) -> Iterator[Cell]:
    """One JSON object a line; blank lines are no rows."""
    columns: tuple[str, str | None, str | None] | None = None
    for line in io.BufferedReader(file):
        written = line.decode("utf-8", "surrogateescape").removeprefix("\ufeff").strip()
        if not written:
            continue
        try:
            found = json.loads(written)
        except (ValueError, RecursionError) as error:
            yield written, None, None, f"this line is no JSON: {error}"
            continue
        if not isinstance(found, dict):
            yield written, None, None, f"a line must be a JSON object; got {type(found).__name__}"
            continue
        if columns is None:
            columns = source.columns(path, list(found))
        text, id_, label = (None if name is None else found.get(name) for name in columns)
        problem = None if columns[0] in found else f"this line has no {columns[0]!r}"
        yield written if problem else text, clean(id_), clean(label), problem


def read_parquet(source: Source, path: str, file: Any) -> Iterator[Cell]:
    """A Parquet file, a few rows at a time; strings come as bytes, since they need not be UTF-8."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.ParquetFile(file)
    columns = source.columns(path, table.schema_arrow.names)
    wanted = list(dict.fromkeys(name for name in columns if name is not None))
    for batch in table.iter_batches(batch_size=READ_ROWS, columns=wanted):
        cells: dict[str | None, list[Any]] = {None: [None] * len(batch)}
        for name in wanted:
            column = batch.column(name)
            column = column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
            kind = column.type
            if (
                pa.types.is_string(kind)
                or pa.types.is_large_string(kind)
                or pa.types.is_string_view(kind)
            ):
                column = column.cast(pa.large_binary())
            cells[name] = [
                each.decode("utf-8", "surrogateescape") if isinstance(each, bytes) else each
                for each in column.to_pylist()
            ]
        for text, id_, label in zip(*(cells[name] for name in columns), strict=True):
            yield text, clean(id_), clean(label), None


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
