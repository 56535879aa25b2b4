"""What a corpus folder says: `read_corpus`, how far it is, whether it is whole, its correlations, its strongest words; no model runs."""

import io
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from attnflow.analysis.statistics import spearman
from attnflow.core.tables import format_markdown as markdown
from attnflow.core.files import by_ending, dump_json, write_csv
from attnflow.core.graph import Floats, check_whole
from attnflow.core.groups import list_numbers, word_groups
from attnflow.core.text import is_common
from attnflow.corpus.folder import ERRORS, Manifest, is_whole, shard_errors_path, shard_path
from attnflow.corpus.reading import check_schema, read_shards, schema_of
from attnflow.corpus.rows import require_pyarrow
from attnflow.corpus.shard import error_schema
from attnflow.errors import FileError, OptionError

if TYPE_CHECKING:
    import pyarrow

DIGITS = 6  # of a score that is stored in float32; what follows is rounding, and breaks no tie
RESAMPLES = 1000
SHOWN = 20  # shards that are named
HEADER = ["against", "method", "layer", "mean", "low", "high", "std", "examples", "undefined"]


def read_corpus(
    folder: str | os.PathLike[str], *, columns: Sequence[str] | None = None, batches: bool = False
) -> Any:
    """The table of a corpus folder, in the order of its input: a pyarrow.Table, or an iterator of record batches with batches=True.

    While a run is under way, that is what is finished so far. columns: only these.

    >>> import attnflow as af
    >>> _ = Path("texts.jsonl").write_text('{"text": "the key"}')
    >>> _ = af.explain_corpus("texts.jsonl", "out", methods=["rollout"], layers=[6])
    >>> read_corpus("out", columns=["tokens"]).to_pylist()
    [{'tokens': ['[CLS]', 'the', 'key']}]
    """
    require_pyarrow()
    import pyarrow as pa

    manifest = Manifest.read(folder)
    schema = schema_of(manifest)
    if columns is not None:
        unknown = [name for name in columns if name not in schema.names]
        if unknown:
            raise OptionError(
                f"unknown column {unknown[0]!r}; choose from {', '.join(schema.names)}"
            )
        schema = pa.schema([schema.field(name) for name in columns])
    found = read_shards(Path(folder), manifest, columns)
    return found if batches else pa.Table.from_batches(list(found), schema=schema)


# ---- how far, and how whole -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Status:
    """How far a corpus is. rows, done: of the input; rate: rows a second, of all runs together, None before the first shard."""

    rows: int
    done: int
    shards: int
    shards_done: int
    errors: dict[str, int]  # by reason
    rate: float | None
    finished: bool

    def __str__(self) -> str:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in self.errors.items())
        return "\n".join(
            [
                f"rows: {self.done:,} of {self.rows:,}",
                f"shards: {self.shards_done:,} of {self.shards:,}",
                f"errors: {sum(self.errors.values()):,}{f' ({reasons})' if reasons else ''}",
                f"rate: {'unknown' if self.rate is None else f'{self.rate:,.1f} rows a second'}",
                f"finished: {'yes' if self.finished else 'no; the same `corpus run` goes on'}",
            ]
        )


def corpus_status(folder: str | os.PathLike[str]) -> Status:
    """How far a corpus folder is, by its manifest."""
    manifest = Manifest.read(folder)
    done = sum(shard.rows + shard.errors for shard in manifest.shards.values())
    errors: Counter[str] = Counter()
    for shard in manifest.shards.values():
        errors.update(shard.reasons)
    rate = done / manifest.seconds if manifest.seconds and done else None
    return Status(
        manifest.rows,
        done,
        manifest.count,
        len(manifest.shards),
        dict(sorted(errors.items())),
        rate,
        manifest.finished,
    )


def verify_corpus(folder: str | os.PathLike[str]) -> list[str]:
    """What is wrong with a corpus folder, a line each; nothing if every row is there once, in the table or in the errors, as written."""
    require_pyarrow()
    manifest, place = Manifest.read(folder), Path(folder)
    wrong = []
    missing = manifest.missing
    if missing:
        shown = list_numbers(missing[:SHOWN]) + (" ..." if len(missing) > SHOWN else "")
        wrong.append(
            f"not finished: {len(missing)} of {manifest.count} shards are missing ({shown})"
        )
    for index, shard in sorted(manifest.shards.items()):
        path = shard_path(place, index)
        rows, problems = rows_in(path, shard.sha256, schema_of(manifest), shard.rows)
        wrong += problems
        failed: list[int] = []
        if shard.errors:
            failed, more = rows_in(
                shard_errors_path(place, index), shard.errors_sha256, error_schema(), shard.errors
            )
            problems += more
            wrong += more
        if not problems:
            wrong += gaps(path.name, manifest.span(index), [*rows, *failed])
    known = {shard_path(place, index).name for index in range(manifest.count)}
    wrong += [
        f"{path.name} belongs to no shard of the manifest"
        for path in sorted(place.glob("shard-*"))
        if path.name not in known
    ]
    if not missing:
        failed, problems = rows_in(
            place / ERRORS, manifest.errors_sha256, error_schema(), manifest.errors
        )
        wrong += problems
        if not problems and (failed != sorted(set(failed))):
            wrong.append(f"{ERRORS}: rows are repeated or out of order")
    return wrong


def rows_in(
    path: Path, sha256: str | None, schema: "pyarrow.Schema", count: int
) -> tuple[list[int], list[str]]:
    """The row numbers in a Parquet file, and what is wrong with it."""
    import pyarrow.parquet as pq

    if not path.is_file():
        return [], [f"{path.name} is missing"]
    if not is_whole(path, sha256):
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


def gaps(name: str, span: range, rows: Iterable[int]) -> Iterator[str]:
    """What keeps rows from being each number of a span once."""
    counts = Counter(rows)
    for what, found in {
        "missing": [row for row in span if row not in counts],
        "there twice": [row for row, count in counts.items() if count > 1],
        "of another shard": [row for row in counts if row not in span],
    }.items():
        if found:
            yield f"{name}: rows {list_numbers(found[:10])}{' ...' if len(found) > 10 else ''} are {what}"


# ---- what the scores say --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class CorpusReport:
    """Rank correlations of stored methods with stored importance. correlations: by (against, method): [layer, text], nan if undefined."""

    name: str
    layers: dict[str, tuple[int, ...]]  # of each method
    correlations: dict[tuple[str, str], Floats]
    special_tokens: bool = False
    seed: int = 0

    def rows(self) -> Iterator[tuple[str, str, int, float, float, float, float, int, int]]:
        """(against, method, layer, mean, low and high end of its 95 % interval, standard deviation, texts, of them undefined)."""
        for (against, method), found in self.correlations.items():
            for layer, values in zip(self.layers[method], found, strict=True):
                known = values[~np.isnan(values)]
                mean, deviation = (
                    (float(known.mean()), float(known.std()))
                    if len(known)
                    else (float("nan"), float("nan"))
                )
                yield (
                    against,
                    method,
                    layer,
                    mean,
                    *bootstrap(known, seed=self.seed),
                    deviation,
                    len(values),
                    len(values) - len(known),
                )

    def to_markdown(self) -> str:
        """One line for each importance, method and layer."""
        lines = [
            f"Spearman correlation in {self.name}; special tokens {'included' if self.special_tokens else 'left out'}",
            "",
        ]
        cells = (
            [
                against,
                method,
                str(layer),
                f"{mean:.3f}",
                f"{low:.3f} to {high:.3f}",
                f"{std:.3f}",
                str(count),
                str(undefined),
            ]
            for against, method, layer, mean, low, high, std, count, undefined in self.rows()
        )
        lines += markdown(
            ["against", "method", "layer", "mean", "95 % interval", "std", "texts", "undefined"],
            cells,
        )
        return "\n".join([*lines, ""])

    def to_csv(self) -> str:
        """The same as numbers."""
        file = io.BytesIO()
        write_csv(file, HEADER, self.rows())
        return file.getvalue().decode()

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write .md, .csv or .json, by the ending of the name."""

        def table() -> str:
            return dump_json([dict(zip(HEADER, row, strict=True)) for row in self.rows()])

        return by_ending(
            path,
            {
                ".md": lambda file: file.write(self.to_markdown().encode()),
                ".csv": lambda file: file.write(self.to_csv().encode()),
                ".json": lambda file: file.write(table().encode()),
            },
        )


def evaluate_corpus(
    folder: str | os.PathLike[str],
    *,
    methods: Sequence[str] | None = None,
    against: Sequence[str] | None = None,
    special_tokens: bool = False,
    limit: int | None = None,
    seed: int = 0,
) -> CorpusReport:
    """How well the stored methods rank tokens, by Spearman's correlation with the stored importance; no model runs."""
    require_pyarrow()
    manifest = Manifest.read(folder)
    chosen = chosen_of(methods, manifest.options["methods"], "method", folder)
    scored = chosen_of(against, manifest.options["importance"], "importance", folder)
    if not scored:
        raise OptionError(
            f"{folder} holds no importance to compare with; compute it with importance, blank_out or input_gradient"
        )
    if limit is not None:
        check_whole("limit", limit)
    found: dict[tuple[str, str], list[Floats]] = {
        (name, method): [] for name in scored for method in chosen
    }
    count = 0
    for batch in read_shards(Path(folder), manifest, ["special", *chosen, *scored]):
        for row in batch.to_pylist():
            if limit is not None and count >= limit:
                break
            count += 1
            keep = (
                np.ones(len(row["special"]), bool)
                if special_tokens
                else ~np.array(row["special"], bool)
            )
            rounded = {name: rounded_scores(row[name])[..., keep] for name in (*chosen, *scored)}
            for name, method in found:
                found[name, method].append(spearman(rounded[method], rounded[name]))
    layers = {method: tuple(manifest.options["layers"][method]) for method in chosen}
    columns = {
        key: np.stack(values, axis=1) if values else np.empty((len(layers[key[1]]), 0))
        for key, values in found.items()
    }
    return CorpusReport(os.fspath(folder), layers, columns, special_tokens, seed)


def chosen_of(
    wanted: Sequence[str] | None, known: Sequence[str], what: str, folder: Any
) -> list[str]:
    """Those that were asked for, if they are stored; else all that are."""
    for name in wanted or ():
        if name not in known:
            raise OptionError(
                f"{folder} holds no {what} {name!r}; it has {', '.join(known) or 'none'}"
            )
    return list(known if wanted is None else wanted)


def rounded_scores(values: Any) -> Floats:
    """Scores as float64, relative to the largest of each row, to as many digits as float32 holds."""
    scores = np.asarray(values, dtype=np.float64)
    largest = np.abs(scores).max(axis=-1, keepdims=True)
    return np.round(scores / np.where(largest > 0, largest, 1.0), DIGITS)


def bootstrap(values: Floats, *, seed: int = 0, resamples: int = RESAMPLES) -> tuple[float, float]:
    """The 95 % confidence interval of a mean: the middle of the means of samples drawn from the values, with replacement.

    >>> low, high = bootstrap(np.arange(100.0))
    >>> 40 < low < 49.5 < high < 60
    True
    """
    if not len(values):
        return float("nan"), float("nan")
    rng = np.random.default_rng(seed)
    means = [values[rng.integers(0, len(values), len(values))].mean() for _ in range(resamples)]
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def top_words(
    folder: str | os.PathLike[str],
    *,
    method: str = "rollout",
    k: int = 20,
    min_count: int = 5,
    common: bool = False,
) -> list[tuple[str, float, int]]:
    """The words with the highest mean token attention in the top layer stored.

    Gives (word in lower case, mean, how often it occurs). The tokens of a word are taken together
    as `TokenAttention.by_word` does; flows to them do not add up, so by flow words are ranked only
    where each is one token. Special tokens are left out, and so are common words and punctuation
    unless common=True.
    """
    require_pyarrow()
    manifest = Manifest.read(folder)
    chosen_of([method], manifest.options["methods"], "method", folder)
    check_whole("k", k)
    check_whole("min_count", min_count)
    layers = manifest.options["layers"][method]
    top = layers.index(max(layers))
    sums: dict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    for batch in read_shards(Path(folder), manifest, ["tokens", "special", "words", method]):
        for name, value in words_in(batch.to_pylist(), method, top):
            word = name.lower()
            if common or not is_common(word):
                sums[word] += value
                counts[word] += 1
    means = [
        (word, total / counts[word], counts[word])
        for word, total in sums.items()
        if counts[word] >= min_count
    ]
    return sorted(means, key=lambda each: (-each[1], each[0]))[:k]


def words_in(rows: Sequence[dict[str, Any]], method: str, top: int) -> Iterator[tuple[str, float]]:
    """The words of some rows and their values in one layer, without special tokens.

    All rows are taken as one long text, with its words numbered through.
    """
    tokens: list[str] = []
    words: list[int | None] = []
    values: list[float] = []
    shift = 0
    for row in rows:
        known = row["words"] or range(len(row["tokens"]))
        for token, special, word, value in zip(
            row["tokens"], row["special"], known, row[method][top], strict=True
        ):
            if not special:
                tokens.append(token)
                words.append(None if word is None else shift + word)
                values.append(value)
        shift += 1 + max((word for word in known if word is not None), default=-1)
    groups = word_groups(tokens, words)
    longest = max(groups, key=lambda group: len(group.positions), default=None)
    if method == "flow" and longest is not None and len(longest.positions) > 1:
        raise OptionError(
            f"flows to the pieces of a word do not add up, and {longest.name!r} has"
            f" {len(longest.positions)} pieces: rank words by rollout or raw"
        )
    for group in groups:
        yield group.name, sum(values[place] for place in group.positions)
