"""How far a corpus is, and whether its folder is whole."""

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from attnflow.core.groups import list_numbers
from attnflow.core.io.formatting import format_count
from attnflow.corpus.folder import ERRORS, matches, shard_errors_path, shard_path
from attnflow.corpus.manifest import Manifest
from attnflow.corpus.read_corpus import check_schema
from attnflow.corpus.rows import require_pyarrow
from attnflow.corpus.shard_tables import error_schema
from attnflow.errors import FileError

if TYPE_CHECKING:
    import pyarrow

SHOWN_SHARDS = 20  # that are named
SHOWN_ROWS = 10


@dataclass(frozen=True)
class Status:
    """How far a corpus is.

    Parameters
    ----------
    rows
        How many rows the input has, up to the limit.
    done
        How many of them are in a finished shard.
    shards
        How many shards there will be.
    shards_done
        How many of them are finished.
    errors
        How many rows have no result, by reason.
    rate
        Rows per second, of all runs together; None before the first shard.
    finished
        Whether every shard is finished, and the errors are merged.
    """

    rows: int
    done: int
    shards: int
    shards_done: int
    errors: dict[str, int]
    rate: float | None
    finished: bool

    def __str__(self) -> str:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.errors.items())
        return "\n".join(
            [
                f"rows: {self.done:,} of {self.rows:,}",
                f"shards: {self.shards_done:,} of {self.shards:,}",
                f"errors: {sum(self.errors.values()):,}{f' ({reasons})' if reasons else ''}",
                f"rate: {'unknown' if self.rate is None else f'{self.rate:,.1f} rows per second'}",
                f"finished: {'yes' if self.finished else 'no; the same `corpus run` resumes it'}",
            ]
        )


def corpus_status(folder: str | os.PathLike[str]) -> Status:
    """How far a corpus is, by its manifest.

    Parameters
    ----------
    folder
        The folder that `explain_corpus` wrote.
    """
    manifest = Manifest.read(folder)
    done = sum(shard.rows + shard.errors for shard in manifest.shards.values())
    rate = done / manifest.seconds if manifest.seconds and done else None
    return Status(
        manifest.rows,
        done,
        manifest.count,
        len(manifest.shards),
        manifest.reasons,
        rate,
        manifest.finished,
    )


def verify_corpus(folder: str | os.PathLike[str]) -> list[str]:
    """The faults of a corpus folder, one line each.

    There are none if every row is stored once, in the table or in the errors, and unchanged.

    Parameters
    ----------
    folder
        The folder that `explain_corpus` wrote.
    """
    require_pyarrow()
    manifest, place = Manifest.read(folder), Path(folder)
    schema = manifest.options.schema
    faults = []
    missing = manifest.missing
    if missing:
        shown = list_numbers(missing[:SHOWN_SHARDS]) + (
            " ..." if len(missing) > SHOWN_SHARDS else ""
        )
        faults.append(
            f"not finished: it lacks {len(missing):,} of {format_count(manifest.count, 'shard')}"
            f" ({shown})"
        )
    for index, shard in sorted(manifest.shards.items()):
        path = shard_path(place, index)
        rows, problems = read_row_numbers(path, shard.sha256, schema, shard.rows)
        failed: list[int] = []
        if shard.errors:
            errors_path = shard_errors_path(place, index)
            failed, more = read_row_numbers(
                errors_path, shard.errors_sha256, error_schema(), shard.errors
            )
            problems += more
        faults += problems or find_gaps(path.name, manifest.span(index), [*rows, *failed])
    known = {shard_path(place, index).name for index in range(manifest.count)}
    faults += [
        f"{path.name} belongs to no shard of the manifest"
        for path in sorted(place.glob("shard-*"))
        if path.name not in known
    ]
    if not missing:
        failed, problems = read_row_numbers(
            place / ERRORS, manifest.errors_sha256, error_schema(), manifest.errors
        )
        faults += problems
        if not problems and failed != sorted(set(failed)):
            faults.append(f"{ERRORS}: rows are repeated or out of order")
    return faults


def read_row_numbers(
    path: Path, sha256: str | None, schema: "pyarrow.Schema", count: int
) -> tuple[list[int], list[str]]:
    """The row numbers in a Parquet file, and what is wrong with it."""
    import pyarrow.parquet as pq

    if not path.is_file():
        return [], [f"{path.name} is missing"]
    if not matches(path, sha256):
        return [], [f"{path.name} is not what was written: its checksum differs"]
    try:
        with pq.ParquetFile(path) as file:
            check_schema(path, file.schema_arrow, schema)
            rows = file.read(columns=["row"]).column("row").to_pylist()
    except FileError as error:
        return [], [str(error)]
    except (OSError, ValueError) as error:
        return [], [f"{path.name} cannot be read: {error}"]
    return rows, [] if len(rows) == count else [
        f"{path.name} has {len(rows)} rows; the manifest says {count}"
    ]


def find_gaps(name: str, span: range, rows: Iterable[int]) -> Iterator[str]:
    """Faults of row numbers, which should be each number of a span once."""
    counts = Counter(rows)
    for fault, numbers in {
        "missing": [row for row in span if row not in counts],
        "there twice": [row for row, count in counts.items() if count > 1],
        "of another shard": [row for row in counts if row not in span],
    }.items():
        if numbers:
            more = " ..." if len(numbers) > SHOWN_ROWS else ""
            yield f"{name}: rows {list_numbers(numbers[:SHOWN_ROWS])}{more} are {fault}"
