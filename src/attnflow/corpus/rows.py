"""The rows of a corpus: the texts of one or several files, one after the other."""

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby, islice
from pathlib import Path
from typing import NamedTuple

from attnflow.corpus.formats import Columns, TellUser, find_format, read_file_rows
from attnflow.errors import FileError, MissingExtraError, OptionError


@dataclass(frozen=True)
class CorpusRow:
    """One text of the input, or the problem with it."""

    number: int  # over all files, from 0
    id: str
    text: str
    label: str | None = None
    problem: str | None = None  # with reading its text
    kept: tuple[str | None, ...] = ()  # the columns that are kept, in their order


class FileStamp(NamedTuple):
    """The size, time and inode of a file, to notice that it changed."""

    size: int
    modified: int  # in nanoseconds
    inode: int

    @classmethod
    def read(cls, path: str) -> "FileStamp | None":
        """The stamp of a file now; None if it does not exist."""
        try:
            stat = os.stat(path)
        except OSError:
            return None
        return cls(stat.st_size, stat.st_mtime_ns, stat.st_ino)


def ignore(note: str) -> None:
    """Drop a note: of several readings of the rows, only the first one gives notes."""


@dataclass(frozen=True)
class InputFiles:
    """The files of a corpus, which of their columns are meant, and how many rows are read.

    The id of a row is that of its column; if there is none, the name of the file and the number of
    the row in it, from 0.
    """

    paths: tuple[str, ...]
    columns: Columns = field(default_factory=Columns)
    limit: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the files in ids: without folders, unless two names would be the same."""
        short = [Path(path).name for path in self.paths]
        return tuple(short) if len(set(short)) == len(short) else self.paths

    @property
    def stamps(self) -> tuple[FileStamp | None, ...]:
        """The stamp of each file; None if it does not exist."""
        return tuple(FileStamp.read(path) for path in self.paths)

    def rows(self, notify: TellUser = ignore) -> Iterator[CorpusRow]:
        """All rows of all files, in order. notify: called with notes on unusual files."""
        cells = (
            (f"{name}:{place}", cell)
            for name, path in zip(self.names, self.paths, strict=True)
            for place, cell in enumerate(read_file_rows(path, self.columns, notify))
        )
        for number, (place, cell) in enumerate(islice(cells, self.limit)):
            text, given_id, label, kept, problem = cell
            if text is None:
                text = ""
            elif not isinstance(text, str):
                text, problem = repr(text), f"the text must be a string; got {type(text).__name__}"
            row_id = place if self.columns.id is None or given_id is None else given_id
            yield CorpusRow(number, row_id, text, label, problem, kept)


@dataclass(frozen=True)
class PendingShards:
    """The rows of the shards that are missing: an iterable of (index, rows).

    One shard is in memory at a time; it may be iterated more than once.
    """

    inputs: InputFiles
    shard_rows: int
    missing: frozenset[int]

    def __iter__(self) -> Iterator[tuple[int, list[CorpusRow]]]:
        last = max(self.missing, default=-1)
        shards = groupby(self.inputs.rows(), key=lambda row: row.number // self.shard_rows)
        for index, rows in shards:
            if index in self.missing:
                yield index, list(rows)
            if index >= last:
                return


def gather_inputs(
    inputs: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    columns: Columns | None = None,
) -> InputFiles:
    """The files that were given, one or several; or an error before anything is read."""
    require_pyarrow()
    given = [inputs] if isinstance(inputs, str | os.PathLike) else inputs
    try:
        paths = tuple(os.fspath(path) for path in given)
    except TypeError as error:
        raise OptionError(
            f"a corpus needs paths of files; got {type(inputs).__name__}: {error}"
        ) from error
    if not paths:
        raise OptionError("a corpus needs at least one input file; got none")
    for path in paths:
        find_format(path)
        if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
            raise FileError(f"cannot read {path}: it is not an ordinary file; save it as one")
    return InputFiles(paths, columns or Columns())


def hash_file(path: str | os.PathLike[str]) -> tuple[int, str]:
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


def is_decodable(text: str) -> bool:
    """Whether a text can be encoded: bytes that were not UTF-8 and lone surrogates cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def require_pyarrow() -> None:
    """Refuse early, and by the extra's name, when pyarrow is not installed."""
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("corpora need pyarrow: pip install 'attnflow[corpus]'") from error
