"""A corpus folder: the manifest, the shards it vouches for, the errors, and the lock; everything is written beside and renamed."""

import hashlib
import io
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnflow.corpus_input import fingerprint
from attnflow.corpus_shard import error_schema, reasons_of
from attnflow.errors import FileError
from attnflow.files import write_file

if TYPE_CHECKING:
    import pyarrow

FORMAT = 1
MANIFEST, ERRORS, LOCK = "manifest.json", "errors.parquet", ".lock"


@dataclass(frozen=True)
class Shard:
    """What the manifest says of a shard that is written."""

    rows: int  # in its table
    errors: int
    sha256: str
    errors_sha256: str | None = None  # of the file with its errors, if there are any
    reasons: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Packed:
    """A shard that is computed and not yet written: the files' bytes, which may travel from one machine to another."""

    rows: int  # in its table
    table: bytes
    errors: bytes | None
    reasons: dict[str, int]  # how many rows failed for which reason


@dataclass
class Manifest:
    """What a corpus folder holds, and what it was computed from."""

    versions: dict[str, str]
    model: dict[str, str]  # name, class, task, fingerprint
    inputs: list[dict[str, Any]]  # file, bytes, sha256
    options: dict[str, Any]
    rows: int  # of the input, up to the limit
    shard_rows: int
    shards: dict[int, Shard] = field(default_factory=dict)
    errors_sha256: str | None = None  # of errors.parquet, written at the end
    seconds: float = 0.0  # of all runs together
    format: int = FORMAT

    @property
    def count(self) -> int:
        """How many shards there will be."""
        return -(-self.rows // self.shard_rows)

    @property
    def missing(self) -> list[int]:
        """The shards that are not written yet."""
        return [index for index in range(self.count) if index not in self.shards]

    @property
    def errors(self) -> int:
        """How many rows have no result, so far."""
        return sum(shard.errors for shard in self.shards.values())

    @property
    def finished(self) -> bool:
        """Whether every shard is written, and the errors are brought together."""
        return not self.missing and self.errors_sha256 is not None

    def span(self, index: int) -> range:
        """The numbers of a shard's rows."""
        return range(index * self.shard_rows, min((index + 1) * self.shard_rows, self.rows))

    def write(self, folder: Path) -> None:
        """Beside, then renamed."""
        content = json.dumps(
            {
                **asdict(self),
                "shards": {
                    str(index): asdict(shard) for index, shard in sorted(self.shards.items())
                },
            },
            indent=1,
        )
        write_file(folder / MANIFEST, lambda file: file.write(content.encode()))

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> "Manifest":
        """The manifest of a folder, or an error that says why it is no corpus."""
        path = Path(folder) / MANIFEST
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["format"] != FORMAT:
                raise FileError(
                    f"{path} has format {content['format']}; this attnflow reads format {FORMAT}"
                )
            content["shards"] = {
                int(index): Shard(**shard) for index, shard in content["shards"].items()
            }
            return cls(**content)
        except OSError as error:
            raise FileError(
                f"{folder} is no corpus folder: cannot read {path}: {error.strerror or error}"
            ) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, FileError):
                raise
            raise FileError(
                f"{path} is no manifest of a corpus ({type(error).__name__}: {error}); compute it anew in another folder"
            ) from error


def shard_path(folder: Path, index: int) -> Path:
    """Where a shard's table is."""
    return folder / f"shard-{index:05d}.parquet"


def shard_errors_path(folder: Path, index: int) -> Path:
    """Where a shard's errors are; readers of folders leave out what begins with an underscore."""
    return folder / f"_errors-{index:05d}.parquet"


def pack(table: "pyarrow.Table", errors: "pyarrow.Table") -> Packed:
    """A shard's table, and its errors if there are any, as Parquet."""

    def parquet(content: "pyarrow.Table") -> bytes:
        write_parquet(file := io.BytesIO(), [content], content.schema)
        return file.getvalue()

    return Packed(
        len(table), parquet(table), parquet(errors) if len(errors) else None, reasons_of(errors)
    )


def write_shard(folder: Path, index: int, packed: Packed) -> Shard:
    """Write a shard's files, each beside and then renamed; what the manifest is to say of them."""

    def written(path: Path, content: bytes) -> str:
        write_file(path, lambda file: file.write(content))
        return hashlib.sha256(content).hexdigest()

    sha = written(shard_path(folder, index), packed.table)
    of_errors = (
        None if packed.errors is None else written(shard_errors_path(folder, index), packed.errors)
    )
    return Shard(packed.rows, sum(packed.reasons.values()), sha, of_errors, packed.reasons)


def write_parquet(file: Any, tables: "Iterable[pyarrow.Table]", schema: "pyarrow.Schema") -> None:
    """Write tables, one after the other, to an open file."""
    import pyarrow.parquet as pq

    with pq.ParquetWriter(file, schema, compression="zstd") as writer:
        for table in tables:
            writer.write_table(table)


def merge_errors(folder: Path, manifest: Manifest) -> str:
    """Write errors.parquet from the errors of all shards; its SHA-256."""
    import pyarrow.parquet as pq

    paths = (
        shard_errors_path(folder, index)
        for index, shard in sorted(manifest.shards.items())
        if shard.errors
    )
    write_file(
        folder / ERRORS,
        lambda file: write_parquet(file, (pq.read_table(path) for path in paths), error_schema()),
    )
    return fingerprint(folder / ERRORS)[1]


def made(out: str | os.PathLike[str]) -> Path:
    """The folder of a corpus, made if it is not there."""
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"cannot make the folder {folder}: {error.strerror or error}") from error
    return folder


def sweep(folder: Path) -> None:
    """Remove what processes that were killed had begun to write."""
    for leftover in folder.glob(".attnflow-*"):
        leftover.unlink(missing_ok=True)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """A block in which no other run may use the folder; the lock goes with the process, however it ends."""
    import fcntl

    try:
        file = open(folder / LOCK, "a+")  # noqa: SIM115  # closed below
    except OSError as error:
        raise FileError(f"cannot write {folder / LOCK}: {error.strerror or error}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise FileError(
                f"another run is at work in {folder}: wait until it ends, or give another folder"
            ) from error
        except OSError as error:
            raise FileError(
                f"cannot lock {folder / LOCK}: {error.strerror or error}; give a folder on another disk"
            ) from error
        yield


def is_whole(path: Path, sha256: str | None) -> bool:
    """Whether a file is there, and is the one that was written."""
    return path.is_file() and fingerprint(path)[1] == sha256
