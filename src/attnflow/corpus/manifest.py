"""The manifest of a corpus: what its folder holds, and what that was computed from.

A manifest is data that anybody may have written: it is checked in full when it is read, and no
code that it alone names is ever imported.
"""

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from attnflow.analysis.pipeline import QUERIES
from attnflow.core.files import write_file
from attnflow.corpus.rows import is_decodable
from attnflow.corpus.shard_tables import name_results, result_schema
from attnflow.corpus.shares import TEXT_KINDS
from attnflow.errors import FileError

FORMAT = 1
MOST_SHARD_ROWS = 100_000  # a shard is in memory as a whole
MOST_SHARDS = 10**7  # what the manifest says of each is in memory, too
MANIFEST = "manifest.json"
WAY_OUT = "compute it anew in another folder"
# options that older versions did not know, and what they did
LATER_OPTIONS: dict[str, Any] = {
    "keep": [],
    "functions": {},
    "graph": None,
    "without": [],
    "edges": ["attention"],
    "own_edges": {},
    "segments": None,
}


@dataclass(frozen=True)
class ShardRecord:
    """What the manifest says of a shard that is written."""

    rows: int  # in its table
    errors: int
    sha256: str
    errors_sha256: str | None = None  # of the file with its errors, if there are any
    reasons: dict[str, int] = field(default_factory=dict)


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
        The options of the run that began the folder. functions, own_edges: by name, where methods
        and importances, and edge weights, of the user's own are imported from.
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

    versions: dict[str, str]
    model: dict[str, str]
    inputs: list[dict[str, Any]]
    options: dict[str, Any]
    rows: int
    shard_rows: int
    shards: dict[int, ShardRecord] = field(default_factory=dict)
    errors_sha256: str | None = None
    seconds: float = 0.0
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
    def results(self) -> tuple[str, ...]:
        """The columns of scores, each with its layers."""
        return name_results(self.options["edges"], self.options["methods"])

    @property
    def errors(self) -> int:
        """How many rows have no result, so far."""
        return sum(shard.errors for shard in self.shards.values())

    @property
    def finished(self) -> bool:
        """Whether every shard is written, and the errors are merged."""
        return not self.missing and self.errors_sha256 is not None

    def span(self, index: int) -> range:
        """The numbers of a shard's rows."""
        return range(index * self.shard_rows, min((index + 1) * self.shard_rows, self.rows))

    def write(self, folder: Path) -> None:
        """Write it into a folder; nothing is ever half-written."""
        shards = {str(index): asdict(shard) for index, shard in sorted(self.shards.items())}
        content = json.dumps({**asdict(self), "shards": shards}, indent=1)
        write_file(folder / MANIFEST, lambda file: file.write(content.encode()))

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> "Manifest":
        """The manifest of a folder, or an error that says why the folder is no corpus."""
        path = Path(folder) / MANIFEST
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise FileError(
                f"{folder} is no corpus folder: cannot read {path}: {error.strerror or error}"
            ) from error
        except (ValueError, RecursionError) as error:
            raise FileError(f"{path} is no manifest of a corpus: {error}; {WAY_OUT}") from error
        try:
            return parse_manifest(content)
        except FileError as error:
            raise FileError(f"{path} is no manifest of a corpus: {error}; {WAY_OUT}") from error


def parse_manifest(content: Any) -> Manifest:
    """The manifest that a file holds, checked in full, so that no user of it need look again."""
    if isinstance(content, dict) and content.get("format", FORMAT) != FORMAT:
        raise FileError(
            f"it has format {content['format']!r}, and this attnflow reads format {FORMAT}"
        )
    options = content.get("options") if isinstance(content, dict) else None
    if isinstance(options, dict):
        content["options"] = LATER_OPTIONS | options
    check_fields("it", content, MANIFEST_RULES)
    manifest = Manifest(**{**content, "shards": {}})
    if manifest.count > MOST_SHARDS:
        raise FileError(f"rows must fill at most {MOST_SHARDS} shards; got {manifest.rows}")
    check_column_names(manifest.options)
    for key, shard in content["shards"].items():
        if not re.fullmatch("0|[1-9][0-9]{0,7}", key) or int(key) >= manifest.count:
            raise FileError(f"shards must be numbered from 0 to {manifest.count - 1}; got {key!r}")
        index, name = int(key), f"shard {key}"
        check_fields(name, shard, SHARD_RULES)
        manifest.shards[index] = ShardRecord(**shard)
        check_shard(name, manifest.shards[index], len(manifest.span(index)))
    return manifest


def check_column_names(options: Mapping[str, Any]) -> None:
    """Every result has its layers, every function its column, and no two columns have one name."""
    methods, layers = options["methods"], options["layers"]
    results = name_results(options["edges"], methods)
    if set(layers) != set(results):
        raise FileError(
            f"layers must be given for each result; got {sorted(layers)} for {sorted(results)}"
        )
    segments = options["segments"] is not None
    facts = result_schema((), (), removed=removes_positions(options), segments=segments).names
    names = [*facts, *results, *options["importance"], *options["keep"]]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise FileError(f"columns must have different names; got {twice!r} twice")
    for name in options["functions"]:
        if name not in methods and name not in options["importance"]:
            raise FileError(f"functions must be those of methods and importances; got {name!r}")
    for name in options["own_edges"]:
        if name not in options["edges"]:
            raise FileError(f"own_edges must be among edges; got {name!r}")


def removes_positions(options: Mapping[str, Any]) -> bool:
    """Whether positions may have been taken out of graphs."""
    return bool(options["without"]) or options["graph"] is not None


def check_shard(name: str, shard: ShardRecord, count: int) -> None:
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


# ---- rules --------------------------------------------------------------------------------------
#
# A rule is a function that takes the name of a value, for the message, and the value.

Rule = Callable[[str, Any], None]


def check_fields(name: str, value: Any, rules: dict[str, Rule]) -> None:
    """Refuse what is no object with exactly these keys, or breaks one of their rules."""
    if not isinstance(value, dict):
        raise FileError(f"{name} must be an object; got {quote(value)}")
    for key in rules:
        if key not in value:
            raise FileError(f"{name} must have {key!r}, and has not")
    for key, content in value.items():
        if key not in rules:
            raise FileError(f"{name} must have none but {', '.join(rules)}; got {quote(key)}")
        rules[key](f"{key} of {name}" if name != "it" else key, content)


def quote(value: Any) -> str:
    """A value for a message: what should be a number may be a book, or have a thousand digits."""
    return repr(value)[:80] if isinstance(value, str | int | float) else type(value).__name__


def rule_that(what: str, holds: Callable[[Any], bool]) -> Rule:
    """The rule that a value is what the words say."""

    def check(name: str, value: Any) -> None:
        if not holds(value):
            raise FileError(f"{name} must be {what}; got {quote(value)}")

    return check


def whole(least: int, most: int = 2**53) -> Rule:
    """A whole number, which JSON's other readers know exactly."""
    return rule_that(
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
    """The same rule, or null."""

    def check(name: str, value: Any) -> None:
        if value is not None:
            other(name, value)

    return check


def list_of(item: Rule, least: int = 0) -> Rule:
    """A list whose values follow a rule."""

    def check(name: str, value: Any) -> None:
        if not isinstance(value, list) or len(value) < least:
            raise FileError(f"{name} must be a list of at least {least}; got {quote(value)}")
        for place, content in enumerate(value):
            item(f"number {place} of {name}", content)

    return check


def dict_of(item: Rule) -> Rule:
    """An object with any names as keys, whose values follow a rule."""

    def check(name: str, value: Any) -> None:
        if not isinstance(value, dict):
            raise FileError(f"{name} must be an object; got {quote(value)}")
        for key, content in value.items():
            if not is_text(key):
                raise FileError(f"{name} must have texts as keys; got {quote(key)}")
            item(f"{key} of {name}", content)

    return check


def object_of(rules: dict[str, Rule]) -> Rule:
    """An object with exactly these keys."""
    return lambda name, value: check_fields(name, value, rules)


TEXT = rule_that("a text", is_text)
NAME = rule_that(
    "a text that can be seen",
    lambda value: is_text(value) and value.isprintable() and bool(value.strip()),
)
SHA256 = rule_that(
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
    "methods": list_of(NAME, least=1),
    "edges": list_of(NAME, least=1),
    "own_edges": dict_of(NAME),
    "layers": dict_of(list_of(whole(1), least=1)),
    "position": rule_that(
        f"{', '.join(QUERIES)}, or a position from 0 on",
        lambda value: value in QUERIES if isinstance(value, str) else is_whole_number(value, 0),
    ),
    "normalize": or_null(TEXT),
    "residual": or_null(
        rule_that("a number from 0 up to 1", lambda value: is_number(value, 0.0, 1.0))
    ),
    "without": list_of(whole(0)),
    "graph": or_null(NAME),
    "importance": list_of(NAME),
    "functions": dict_of(NAME),
    "batch_tokens": whole(1),
    "keep": list_of(TEXT),
    "segments": or_null(rule_that("sentences, lines or words", lambda value: value in TEXT_KINDS)),
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
    "shards": dict_of(rule_that("an object", lambda value: isinstance(value, dict))),
    "errors_sha256": or_null(SHA256),
    "seconds": rule_that("a number of seconds", lambda value: is_number(value, 0.0, 1e15)),
    "format": whole(FORMAT, FORMAT),
}
