"""A corpus folder: the manifest, the shards it vouches for, the errors, and the lock; everything is written beside and renamed."""

import hashlib
import io
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnflow.core.files import write_file
from attnflow.corpus.rows import fingerprint, is_decodable
from attnflow.corpus.shard import QUERIES, error_schema, reasons_of, result_schema
from attnflow.errors import FileError

if TYPE_CHECKING:
    import pyarrow

FORMAT = 1
MOST_SHARD_ROWS = 100_000  # a shard is in memory as a whole
MOST_SHARDS = 10**7  # what the manifest says of each is in memory, too
MANIFEST, ERRORS, LOCK = "manifest.json", "errors.parquet", ".lock"


ANEW = "compute it anew in another folder"


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
        except OSError as error:
            raise FileError(
                f"{folder} is no corpus folder: cannot read {path}: {error.strerror or error}"
            ) from error
        except (ValueError, RecursionError) as error:
            raise FileError(f"{path} is no manifest of a corpus: {error}; {ANEW}") from error
        try:
            return parse_manifest(content)
        except FileError as error:
            raise FileError(f"{path} is no manifest of a corpus: {error}; {ANEW}") from error


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


# ---- what a manifest may say ----------------------------------------------------------------
#
# A rule is a function that takes the name of a value, for the message, and the value.

Rule = Callable[[str, Any], None]


def parse_manifest(content: Any) -> Manifest:
    """The manifest that a file holds, checked in full, so that no user of it need look again."""
    if isinstance(content, dict) and content.get("format", FORMAT) != FORMAT:
        raise FileError(
            f"it has format {content['format']!r}, and this attnflow reads format {FORMAT}"
        )
    options = content.get("options") if isinstance(content, dict) else None
    if isinstance(options, dict):
        options.setdefault("keep", [])  # which older versions did not know
    check_fields("it", content, MANIFEST_RULES)
    found = Manifest(**{**content, "shards": {}})
    if found.count > MOST_SHARDS:
        raise FileError(f"rows must fill at most {MOST_SHARDS} shards; got {found.rows}")
    check_columns(found.options)
    for key, shard in content["shards"].items():
        if not re.fullmatch("0|[1-9][0-9]{0,7}", key) or int(key) >= found.count:
            raise FileError(f"shards must be numbered from 0 to {found.count - 1}; got {key!r}")
        index, name = int(key), f"shard {key}"
        check_fields(name, shard, SHARD_RULES)
        found.shards[index] = Shard(**shard)
        check_shard(name, found.shards[index], len(found.span(index)))
    return found


def check_columns(options: dict[str, Any]) -> None:
    """Every method has its layers, and no two columns have one name."""
    methods, layers = options["methods"], options["layers"]
    if set(layers) != set(methods):
        raise FileError(
            f"layers must be given for each method; got {sorted(layers)} for {sorted(methods)}"
        )
    asked = [*result_schema((), ()).names, *methods, *options["importance"], *options["keep"]]
    if len(set(asked)) < len(asked):
        twice = next(name for name in asked if asked.count(name) > 1)
        raise FileError(f"columns must have different names; got {twice!r} twice")


def check_shard(name: str, shard: Shard, count: int) -> None:
    """It has no more rows than it may, a reason for each error, and a file of errors if it has any.

    Whether rows are missing is for `verify_corpus` to say.
    """
    if shard.rows + shard.errors > count:
        raise FileError(
            f"{name} must have at most {count} rows and errors; got {shard.rows + shard.errors}"
        )
    if sum(shard.reasons.values()) != shard.errors:
        raise FileError(f"{name} must have reasons for its {shard.errors} errors; got others")
    if (shard.errors_sha256 is None) != (shard.errors == 0):
        raise FileError(f"{name} must have an errors_sha256 if it has errors, and only then")


def check_fields(name: str, value: Any, rules: dict[str, Rule]) -> None:
    """Refuse what is no object with exactly these keys, or breaks one of their rules."""
    if not isinstance(value, dict):
        raise FileError(f"{name} must be an object; got {brief(value)}")
    for key in rules:
        if key not in value:
            raise FileError(f"{name} must have {key!r}, and has not")
    for key, each in value.items():
        if key not in rules:
            raise FileError(f"{name} must have none but {', '.join(rules)}; got {brief(key)}")
        rules[key](f"{key} of {name}" if name != "it" else key, each)


def brief(value: Any) -> str:
    """A value for a message: what should be a number may be a book, or have a thousand digits."""
    return repr(value)[:80] if isinstance(value, str | int | float) else type(value).__name__


def rule(what: str, holds: Callable[[Any], bool]) -> Rule:
    """The rule that a value is what is named."""

    def check(name: str, value: Any) -> None:
        if not holds(value):
            raise FileError(f"{name} must be {what}; got {brief(value)}")

    return check


def whole(least: int, most: int = 2**53) -> Rule:
    """A whole number, which JSON's other readers know exactly."""
    return rule(
        f"a whole number, at least {least}", lambda value: is_whole_number(value, least, most)
    )


def is_whole_number(value: Any, least: int, most: int = 2**53) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_text(value: Any) -> bool:
    """Whether this is a string that the system takes as the name of a file."""
    return isinstance(value, str) and is_decodable(value) and "\0" not in value


def is_number(value: Any, least: float, below: float) -> bool:
    """Whether this is a number in a range; what is not a number is in none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value < below


def or_null(other: Rule) -> Rule:
    """The same, or nothing."""

    def check(name: str, value: Any) -> None:
        if value is not None:
            other(name, value)

    return check


def list_of(each: Rule, least: int = 0) -> Rule:
    """A list whose values follow a rule."""

    def check(name: str, value: Any) -> None:
        if not isinstance(value, list) or len(value) < least:
            raise FileError(f"{name} must be a list of at least {least}; got {brief(value)}")
        for place, found in enumerate(value):
            each(f"number {place} of {name}", found)

    return check


def dict_of(each: Rule) -> Rule:
    """An object with any names as keys, whose values follow a rule."""

    def check(name: str, value: Any) -> None:
        if not isinstance(value, dict):
            raise FileError(f"{name} must be an object; got {brief(value)}")
        for key, found in value.items():
            if not is_text(key):
                raise FileError(f"{name} must have texts as keys; got {brief(key)}")
            each(f"{key} of {name}", found)

    return check


def object_of(rules: dict[str, Rule]) -> Rule:
    """An object with exactly these keys."""
    return lambda name, value: check_fields(name, value, rules)


TEXT = rule("a text", is_text)
NAMES = list_of(TEXT)
SHA256 = rule(
    "64 hexadecimal digits",
    lambda value: isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None,
)
SHARD_RULES: dict[str, Rule] = {
    "rows": whole(0),
    "errors": whole(0),
    "sha256": SHA256,
    "errors_sha256": or_null(SHA256),
    "reasons": dict_of(whole(1)),
}
OPTION_RULES: dict[str, Rule] = {
    "methods": list_of(TEXT, least=1),
    "layers": dict_of(list_of(whole(1), least=1)),
    "position": rule(
        f"{', '.join(QUERIES)}, or a position from 0 on",
        lambda value: value in QUERIES if isinstance(value, str) else is_whole_number(value, 0),
    ),
    "normalize": or_null(TEXT),
    "residual": rule("a number from 0 up to 1", lambda value: is_number(value, 0.0, 1.0)),
    "importance": NAMES,
    "batch_tokens": whole(1),
    "keep": NAMES,
    "columns": object_of(dict.fromkeys(["text", "id", "label"], or_null(TEXT))),
    "limit": or_null(whole(1)),
}
MANIFEST_RULES: dict[str, Rule] = {
    "versions": dict_of(TEXT),
    "model": object_of({"name": TEXT, "class": TEXT, "task": TEXT, "fingerprint": SHA256}),
    "inputs": list_of(object_of({"file": TEXT, "bytes": whole(0), "sha256": SHA256}), least=1),
    "options": object_of(OPTION_RULES),
    "rows": whole(1),
    "shard_rows": whole(1, MOST_SHARD_ROWS),
    "shards": dict_of(rule("an object", lambda value: isinstance(value, dict))),
    "errors_sha256": or_null(SHA256),
    "seconds": rule("a number of seconds", lambda value: is_number(value, 0.0, 1e15)),
    "format": whole(FORMAT, FORMAT),
}


# ---- the folder -----------------------------------------------------------------------------


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
