"""The tables of a shard: one row per text that has a result, one per text that has none."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from attnflow.core.arrays import Floats
from attnflow.core.groups import Group
from attnflow.corpus.formats import escape
from attnflow.corpus.rows import Row
from attnflow.edges.choosing import name_result
from attnflow.models.inputs import Encoded

if TYPE_CHECKING:
    import pyarrow

SHOWN_CHARACTERS = 200  # of a text that failed


@dataclass(frozen=True)
class Failure:
    """A row that has no result, and why."""

    row: Row
    reason: str
    detail: str


@dataclass(frozen=True, eq=False)
class ScoredRow:
    """A row with all its scores."""

    row: Row
    encoded: Encoded
    prediction: tuple[str, float] | None
    scores: dict[str, Floats]  # by result: [layer, token]; by importance: [token]
    removed: tuple[int, ...] = ()  # positions that its graph was made without
    segments: tuple[Group, ...] = ()  # what scores are of, instead of tokens


def name_results(edges: Iterable[str], methods: Iterable[str]) -> tuple[str, ...]:
    """The columns of scores: every method on every kind of edges.

    >>> name_results(["attention", "norm"], ["raw", "rollout"])
    ('raw', 'rollout', 'norm raw', 'norm rollout')
    """
    listed = tuple(methods)
    return tuple(name_result(edge_name, method) for edge_name in edges for method in listed)


def result_schema(
    results: Iterable[str],
    importance: Iterable[str],
    keep: Iterable[str] = (),
    *,
    removed: bool = False,
    segments: bool = False,
) -> "pyarrow.Schema":
    """The columns of a shard; those that were kept of the input stand last.

    removed: whether positions may have been taken out of graphs, so that a column tells which.
    segments: whether results are of segments, whose names and numbers of tokens columns tell.
    """
    import pyarrow as pa

    fields = {
        "id": pa.string(),
        "row": pa.int64(),
        "text": pa.string(),
        "tokens": pa.list_(pa.string()),
        "special": pa.list_(pa.bool_()),
        "words": pa.list_(pa.int32()),
        "label": pa.string(),
        "prediction": pa.string(),
        "probability": pa.float64(),
    }
    fields |= {"removed": pa.list_(pa.int32())} if removed else {}
    if segments:
        fields |= {"segments": pa.list_(pa.string()), "segment_tokens": pa.list_(pa.int32())}
    fields |= {name: pa.list_(pa.list_(pa.float32())) for name in results}
    fields |= {name: pa.list_(pa.float32()) for name in importance}
    fields |= {name: pa.string() for name in keep}
    return pa.schema(list(fields.items()))


def error_schema() -> "pyarrow.Schema":
    """The columns of errors.parquet."""
    import pyarrow as pa

    return pa.schema(
        [
            ("id", pa.string()),
            ("row", pa.int64()),
            ("reason", pa.string()),
            ("detail", pa.string()),
            ("text", pa.string()),
        ]
    )


def make_result_table(
    rows: Sequence[ScoredRow],
    results: Iterable[str],
    importance: Iterable[str],
    schema: "pyarrow.Schema",
) -> "pyarrow.Table":
    """One row per text, in the columns of `result_schema`."""
    import pyarrow as pa

    def list_tokens(encoded: Encoded) -> list[str | None]:
        return [escape(token) for token in (*encoded.tokens, *encoded.decoder_tokens)]

    def list_special(encoded: Encoded) -> list[bool]:
        return [*encoded.special, *[False] * len(encoded.decoder_tokens)]

    def list_words(encoded: Encoded) -> list[int | None] | None:
        if encoded.words is None:
            return None
        return [*encoded.words, *[None] * len(encoded.decoder_tokens)]

    predictions = [row.prediction or (None, None) for row in rows]
    columns: dict[str, Any] = {
        "id": [row.row.id for row in rows],
        "row": [row.row.number for row in rows],
        "text": [row.row.text for row in rows],
        "tokens": [list_tokens(row.encoded) for row in rows],
        "special": [list_special(row.encoded) for row in rows],
        "words": [list_words(row.encoded) for row in rows],
        "label": [row.row.label for row in rows],
        "prediction": [escape(label) for label, _ in predictions],
        "probability": [probability for _, probability in predictions],
        "removed": [row.removed for row in rows],
        "segments": [[escape(group.name) for group in row.segments] for row in rows],
        "segment_tokens": [[len(group.positions) for group in row.segments] for row in rows],
    }
    for name in results:
        layers = [layer for row in rows for layer in row.scores[name]]  # [token] each
        depths = (len(row.scores[name]) for row in rows)
        columns[name] = nest(nest(join(layers), map(len, layers)), depths)
    for name in importance:
        scores = [row.scores[name] for row in rows]
        columns[name] = nest(join(scores), map(len, scores))
    kept = [row.row.kept for row in rows]
    columns |= {
        name: [values[place] for values in kept]
        for place, name in enumerate(name for name in schema.names if name not in columns)
    }
    return pa.table({name: columns[name] for name in schema.names}, schema=schema)


def join(rows: Sequence[Floats]) -> "np.ndarray[Any, np.dtype[np.float32]]":
    """Rows of numbers, one after the other."""
    return np.concatenate(rows).astype(np.float32) if rows else np.empty(0, np.float32)


def nest(values: Any, lengths: Iterable[int]) -> "pyarrow.ListArray":
    """Lists of these lengths, cut from one array of values; much faster than Python's lists."""
    import pyarrow as pa

    return pa.ListArray.from_arrays(
        pa.array(np.cumsum([0, *lengths]), pa.int32()), pa.array(values)
    )


def make_error_table(failures: Sequence[Failure]) -> "pyarrow.Table":
    """One row per failure, with the beginning of its text, escaped where it cannot be encoded."""
    import pyarrow as pa

    content = [
        {
            "id": failure.row.id,
            "row": failure.row.number,
            "reason": failure.reason,
            "detail": escape(failure.detail),
            "text": (escape(failure.row.text[:SHOWN_CHARACTERS]) or "")[:SHOWN_CHARACTERS],
        }
        for failure in failures
    ]
    return pa.Table.from_pylist(content, schema=error_schema())


def count_reasons(errors: "pyarrow.Table") -> dict[str, int]:
    """How many rows failed for which reason."""
    return dict(sorted(Counter(errors.column("reason").to_pylist()).items()))
