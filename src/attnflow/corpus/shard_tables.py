"""The tables of a shard: one row per text that has a result, one per text that has none."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from attnflow.core.arrays import Floats
from attnflow.core.groups import Group
from attnflow.corpus.formats import escape
from attnflow.corpus.job import StoredJob
from attnflow.corpus.rows import CorpusRow
from attnflow.models.encoded import Encoded

if TYPE_CHECKING:
    import pyarrow

SHOWN_CHARACTERS = 200  # of a text that failed


@dataclass(frozen=True)
class Failure:
    """A row that has no result, and why."""

    row: CorpusRow
    reason: str
    detail: str


@dataclass(frozen=True, eq=False)
class ScoredRow:
    """A row with all its scores."""

    row: CorpusRow
    encoded: Encoded
    prediction: tuple[str, float] | None
    scores: dict[str, Floats]  # by result: [layer, token]; by importance: [token]
    removed: tuple[int, ...] = ()  # positions that its graph was made without
    segments: tuple[Group, ...] = ()  # that have scores instead of tokens


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


def make_result_table(rows: Sequence[ScoredRow], job: StoredJob) -> "pyarrow.Table":
    """One row per text, in the columns of the job's schema."""
    import pyarrow as pa

    facts = [describe_scored_row(row, job.keep) for row in rows]
    columns: dict[str, list[object] | pyarrow.Array] = {
        name: [fact.get(name) for fact in facts] for name in job.schema.names
    }
    for name in job.results:
        layers = [layer for row in rows for layer in row.scores[name]]  # [token] each
        depths = (len(row.scores[name]) for row in rows)
        columns[name] = nest(nest(join(layers), map(len, layers)), depths)
    for name in job.importance:
        scores = [row.scores[name] for row in rows]
        columns[name] = nest(join(scores), map(len, scores))
    return pa.table(columns, schema=job.schema)


def describe_scored_row(row: ScoredRow, keep: Iterable[str]) -> dict[str, object]:
    """The values of a row besides its scores, by column; keep: the columns kept from the input."""
    given, encoded = row.row, row.encoded
    tokens = (*encoded.tokens, *encoded.decoder_tokens)
    further = len(encoded.decoder_tokens)
    words = None if encoded.words is None else [*encoded.words, *[None] * further]
    label, probability = row.prediction or (None, None)
    return {
        "id": given.id,
        "row": given.number,
        "text": given.text,
        "tokens": [escape(token) for token in tokens],
        "special": [*encoded.special, *[False] * further],
        "words": words,
        "label": given.label,
        "prediction": escape(label),
        "probability": probability,
        "removed": row.removed,
        "segments": [escape(group.name) for group in row.segments],
        "segment_tokens": [len(group.positions) for group in row.segments],
        **dict(zip(keep, given.kept, strict=True)),
    }


def join(rows: Sequence[Floats]) -> npt.NDArray[np.float32]:
    """Rows of numbers, one after the other."""
    return np.concatenate(rows).astype(np.float32) if rows else np.empty(0, np.float32)


def nest(
    values: "npt.NDArray[np.float32] | pyarrow.Array", lengths: Iterable[int]
) -> "pyarrow.ListArray":
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
