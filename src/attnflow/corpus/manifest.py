"""The manifest of a corpus: what its folder holds, and what that was computed from.

A manifest is data that anybody may have written: it is checked in full when it is read, and no
code that it alone names is ever imported.
"""

import json
import os
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, TypedDict

from attnflow.core.io.files import write_file
from attnflow.corpus.job import StoredJob
from attnflow.corpus.typed_json import (
    NOT_EMPTY,
    AnyText,
    Count,
    Positive,
    Rule,
    Sha256,
    quote_value,
    read_typed,
    whole,
)
from attnflow.errors import FileError, OptionError

MANIFEST_FORMAT = 1
MOST_SHARD_ROWS = 100_000  # a shard is in memory as a whole
MOST_SHARDS = 10**7  # what the manifest says of each is in memory, too
MANIFEST = "manifest.json"
RECOMPUTE = "compute it anew in another folder"


class InputRecord(TypedDict):
    """The record of an input file in the manifest."""

    file: AnyText
    bytes: Count
    sha256: Sha256


ModelRecord = TypedDict(
    "ModelRecord", {"name": AnyText, "class": AnyText, "task": AnyText, "fingerprint": Sha256}
)


@dataclass(frozen=True)
class ShardRecord:
    """The record of a written shard in the manifest."""

    rows: Count  # in its table
    errors: Count
    sha256: Sha256
    errors_sha256: Sha256 | None = None  # of the file with its errors, if there are any
    reasons: dict[str, Positive] = field(default_factory=dict)


@dataclass
class Manifest:
    """What a corpus folder holds, and what it was computed from.

    Parameters
    ----------
    versions
        The versions of the libraries that made the numbers.
    model
        Name, class, task and fingerprint of the model.
    inputs
        File, bytes and SHA-256 of each input file.
    options
        The options of the run that began the folder.
    rows
        How many rows the input has, up to the limit.
    shard_rows
        How many rows a shard has.
    shards
        The shards that are written, by number.
    errors_sha256
        The SHA-256 of errors.parquet, which is written at the end.
    seconds
        How long all runs took together.
    format
        The version of this format.
    """

    versions: dict[str, AnyText]
    model: ModelRecord
    inputs: Annotated[tuple[InputRecord, ...], NOT_EMPTY]
    options: StoredJob
    rows: Positive
    shard_rows: Annotated[int, whole(1, MOST_SHARD_ROWS)]
    shards: dict[int, ShardRecord]
    errors_sha256: Sha256 | None
    seconds: Annotated[float, Rule("a number of seconds", lambda value: 0 <= value < 1e15)]
    format: Annotated[int, whole(MANIFEST_FORMAT, MANIFEST_FORMAT)]

    @property
    def count(self) -> int:
        """How many shards there will be."""
        return -(-self.rows // self.shard_rows)

    @property
    def missing(self) -> list[int]:
        """The shards that are not written yet."""
        return [index for index in range(self.count) if index not in self.shards]

    @property
    def is_of_object(self) -> bool:
        """Whether the model was given as an object: known by its class, not loaded by that."""
        name = self.model["name"]
        return name == self.model["class"] and not Path(name).is_dir()

    @property
    def errors(self) -> int:
        """How many rows have no result, so far."""
        return sum(shard.errors for shard in self.shards.values())

    @property
    def reasons(self) -> dict[str, int]:
        """How many rows have no result, so far, by reason."""
        total: Counter[str] = Counter()
        for shard in self.shards.values():
            total.update(shard.reasons)
        return dict(sorted(total.items()))

    @property
    def finished(self) -> bool:
        """Whether every shard is written, and the errors are merged."""
        return not self.missing and self.errors_sha256 is not None

    def span(self, index: int) -> range:
        """The numbers of a shard's rows."""
        return range(index * self.shard_rows, min((index + 1) * self.shard_rows, self.rows))

    def write(self, folder: Path) -> None:
        """Write the manifest into a folder, atomically."""
        self.shards = dict(sorted(self.shards.items()))
        content = json.dumps(asdict(self), indent=1)
        write_file(folder / MANIFEST, lambda file: file.write(content.encode()))

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> "Manifest":
        """The manifest of a folder, or an error that says why it has none."""
        path = Path(folder) / MANIFEST
        try:
            return parse_manifest(json.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise FileError(
                f"{folder} is not a corpus folder: cannot read {path}: {error.strerror or error}"
            ) from error
        except (ValueError, RecursionError, FileError, OptionError) as error:
            raise FileError(f"{path} is not a corpus manifest: {error}; {RECOMPUTE}") from error

    def check_shard(self, index: int) -> None:
        """Refuse more rows than a shard may have, and errors without their reasons and file.

        Whether rows are missing is for `verify_corpus` to say.
        """
        shard, most = self.shards[index], len(self.span(index))
        if index >= self.count:
            raise FileError(f"shards must be numbered from 0 to {self.count - 1}; got {index}")
        if shard.rows + shard.errors > most:
            raise FileError(
                f"shard {index} must have at most {most} rows and errors;"
                f" got {shard.rows + shard.errors}"
            )
        if sum(shard.reasons.values()) != shard.errors:
            raise FileError(
                f"the reasons of shard {index} must add up to its {shard.errors} errors;"
                f" got {sum(shard.reasons.values())}"
            )
        if (shard.errors_sha256 is None) != (shard.errors == 0):
            raise FileError(
                f"shard {index} must have an errors_sha256 if it has errors, and only then"
            )


def parse_manifest(content: object) -> Manifest:
    """The manifest that a file holds, checked in full, so that no user of it need look again."""
    if isinstance(content, dict) and content.get("format", MANIFEST_FORMAT) != MANIFEST_FORMAT:
        raise FileError(
            f"it has format {quote_value(content['format'])}, and this attnflow reads format"
            f" {MANIFEST_FORMAT}"
        )
    manifest = read_typed(Manifest, content)
    if manifest.count > MOST_SHARDS:
        raise FileError(f"rows must fill at most {MOST_SHARDS} shards; got {manifest.rows}")
    manifest.options.check()
    for index in manifest.shards:
        manifest.check_shard(index)
    return manifest
