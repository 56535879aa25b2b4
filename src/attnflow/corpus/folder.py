"""The files of a corpus folder: shards, errors and the lock; each is written beside and renamed."""

import hashlib
import io
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from attnflow.core.io.files import write_file
from attnflow.corpus.manifest import MANIFEST, Manifest, ShardRecord
from attnflow.corpus.rows import hash_file
from attnflow.corpus.shard_tables import count_reasons, error_schema
from attnflow.errors import FileError

if TYPE_CHECKING:
    import pyarrow

ERRORS, LOCK = "errors.parquet", ".lock"


@dataclass(frozen=True)
class PackedShard:
    """A shard that is computed and not yet written: bytes that may travel between machines."""

    rows: int  # in its table
    table: bytes
    errors: bytes | None
    reasons: dict[str, int]  # how many rows failed for which reason


def shard_path(folder: Path, index: int) -> Path:
    """Where a shard's table is."""
    return folder / f"shard-{index:05d}.parquet"


def shard_errors_path(folder: Path, index: int) -> Path:
    """Where a shard's errors are; readers of folders leave out what begins with an underscore."""
    return folder / f"_errors-{index:05d}.parquet"


def pack_shard(table: "pyarrow.Table", errors: "pyarrow.Table") -> PackedShard:
    """A shard's table, and its errors if there are any, as Parquet."""

    def encode(content: "pyarrow.Table") -> bytes:
        write_parquet(file := io.BytesIO(), [content], content.schema)
        return file.getvalue()

    return PackedShard(
        len(table), encode(table), encode(errors) if len(errors) else None, count_reasons(errors)
    )


def write_shard(folder: Path, index: int, packed: PackedShard) -> ShardRecord:
    """Write a shard's files; return their record for the manifest."""

    def write(path: Path, content: bytes) -> str:
        write_file(path, lambda file: file.write(content))
        return hashlib.sha256(content).hexdigest()

    sha256 = write(shard_path(folder, index), packed.table)
    errors_sha256 = (
        None if packed.errors is None else write(shard_errors_path(folder, index), packed.errors)
    )
    errors = sum(packed.reasons.values())
    return ShardRecord(packed.rows, errors, sha256, errors_sha256, packed.reasons)


def write_parquet(
    file: IO[bytes], tables: "Iterable[pyarrow.Table]", schema: "pyarrow.Schema"
) -> None:
    """Write tables, one after the other, to an open file."""
    import pyarrow.parquet as pq

    with pq.ParquetWriter(file, schema, compression="zstd") as writer:
        for table in tables:
            writer.write_table(table)


def merge_errors(folder: Path, manifest: Manifest) -> str:
    """Write errors.parquet from the errors of all shards; returns its SHA-256."""
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
    return hash_file(folder / ERRORS)[1]


def matches(path: Path, sha256: str | None) -> bool:
    """Whether a file exists and is the one that was written."""
    return path.is_file() and hash_file(path)[1] == sha256


@contextmanager
def open_folder(out: str | os.PathLike[str]) -> Iterator[Path]:
    """A block in which a run has the folder to itself; it is made if it does not exist.

    If no run begins there, which is when a manifest is written, the folder is left as it was.
    """
    made = [each for each in (Path(out), *Path(out).parents) if not each.exists()]
    folder = make_folder(out)
    with lock_folder(folder):
        try:
            yield folder
        finally:
            if not (folder / MANIFEST).exists():
                (folder / LOCK).unlink(missing_ok=True)
                with suppress(OSError):  # a folder that holds other files
                    for each in made:
                        each.rmdir()


def make_folder(out: str | os.PathLike[str]) -> Path:
    """The folder of a corpus, made if it does not exist."""
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"cannot make the folder {folder}: {error.strerror or error}") from error
    return folder


def remove_leftovers(folder: Path) -> None:
    """Remove what killed processes had begun to write."""
    for leftover in folder.glob(".attnflow-*"):
        leftover.unlink(missing_ok=True)


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """A block in which no other run may use the folder.

    The lock ends with the process, however that ends.
    """
    import fcntl

    try:
        file = open(folder / LOCK, "a+")  # noqa: SIM115  # closed below
    except OSError as error:
        raise FileError(f"cannot write {folder / LOCK}: {error.strerror or error}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(file.fileno()), os.stat(folder / LOCK)):
                raise FileNotFoundError  # the run that held it has removed it
        except (BlockingIOError, FileNotFoundError) as error:
            raise FileError(
                f"another run is at work in {folder}: wait until it ends, or give another folder"
            ) from error
        except OSError as error:
            raise FileError(
                f"cannot lock {folder / LOCK}: {error.strerror or error};"
                " give a folder on another disk"
            ) from error
        yield
