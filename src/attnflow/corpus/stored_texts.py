"""`list_texts`: the stored texts of a corpus, every result as places on one scale, for pages."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from attnflow.core.arrays import Floats
from attnflow.core.checks import check_count
from attnflow.core.comparison import DOUBLINGS, compare_rows
from attnflow.core.io.formatting import format_count
from attnflow.core.text import show_token
from attnflow.corpus.job import StoredJob
from attnflow.corpus.manifest import Manifest
from attnflow.corpus.rows import require_pyarrow
from attnflow.corpus.scores import choose_stored
from attnflow.corpus.text_rows import TextRow, read_text_rows
from attnflow.errors import FileError, OptionError

DOMINANT = 0.5  # a token that holds more of a row is not compared: its share would hide all others


@dataclass(frozen=True, eq=False)
class StoredRow:
    """A row of one result of a text.

    Parameters
    ----------
    name
        The result or the importance.
    layer
        The layer; None for importance.
    tones
        [token], from -1 to 1: log2 of the share over that of even attention, divided by 3, without
        special tokens and what holds more than half of the row; for importance the value over
        the largest. NaN where left out.
    top, share
        The token with the largest share of those compared, and its share of the whole row (its
        importance).
    """

    name: str
    layer: int | None
    tones: Floats  # [token]
    top: str
    share: float


@dataclass(frozen=True, eq=False)
class StoredText:
    """A text of a corpus with its strips.

    Parameters
    ----------
    id
        Its id.
    tokens
        Its tokens, for people to read.
    starts
        Which of them begin a word.
    label, prediction, probability
        As stored, or None.
    strips
        One per result and layer, and per importance.
    """

    id: str
    tokens: tuple[str, ...]
    starts: tuple[bool, ...]
    label: str | None
    prediction: str | None
    probability: float | None
    strips: tuple[StoredRow, ...]


def list_texts(folder: str | os.PathLike[str], *, limit: int | None = None) -> Iterator[StoredText]:
    """The texts that have a result, in the order of the input.

    Parameters
    ----------
    folder
        The folder that `explain_corpus` wrote.
    limit
        The maximum number of texts; all if None.
    """
    require_pyarrow()
    manifest = Manifest.read(folder)
    if limit is not None:
        check_count("limit", limit)
    if not any(shard.rows for shard in manifest.shards.values()):
        raise FileError(f"{folder} has no text with a result yet; attnflow corpus status {folder}")
    job = manifest.options
    columns = ["id", "tokens", "words", "label", "prediction", "probability"]
    rows = read_text_rows(Path(folder), manifest, [*job.results, *job.importance], columns)
    for row in islice(rows, limit):
        yield read_stored_text(row, job)


def read_stored_text(row: TextRow, job: StoredJob) -> StoredText:
    """One row of a corpus, with a strip per result and layer, and per importance."""
    tokens = tuple(map(show_token, row.tokens))
    strips = []
    for name, numbers in job.layers.items():
        for layer, shares in zip(numbers, row.scores[name], strict=True):
            tones = compare_even(shares, row.special)
            strips.append(make_strip(name, layer, shares, tones, tokens))
    for name in job.importance:
        values = row.scores[name]
        largest = np.abs(values).max(initial=0.0)
        tones = np.where(row.special, np.nan, values / (largest or 1.0))
        strips.append(make_strip(name, None, values, tones, tokens))
    words = row.words or [None] * len(tokens)
    starts = tuple(
        place > 0 and (word is None or word != words[place - 1]) for place, word in enumerate(words)
    )
    return StoredText(
        row.id, tokens, starts, row.label, row.prediction, row.probability, tuple(strips)
    )


def compare_even(shares: Floats, special: npt.NDArray[np.bool_]) -> Floats:
    """[token]: the place of each share on the scale; NaN where it is left out."""
    total = shares.sum()
    out = special | (shares > DOMINANT * total) | (shares < 0)
    if out.all() or total <= 0:
        return np.full(len(shares), np.nan)
    seen = np.ones((1, len(shares)), np.int64)
    kept, even, _ = compare_rows(shares[None], seen, np.flatnonzero(out).tolist(), "even")
    with np.errstate(divide="ignore", invalid="ignore"):
        tones = np.clip(np.log2(kept[0] / even[0]) / DOUBLINGS, -1.0, 1.0)
    return np.where(out, np.nan, tones)


def make_strip(
    name: str, layer: int | None, values: Floats, tones: Floats, tokens: tuple[str, ...]
) -> StoredRow:
    """A strip and what stands out in it."""
    told = np.where(np.isnan(tones), -np.inf, values)
    top = int(told.argmax())
    if not np.isfinite(told[top]):
        return StoredRow(name, layer, tones, "", 0.0)
    return StoredRow(name, layer, tones, tokens[top], float(values[top]))


def count_failed(folder: str | os.PathLike[str]) -> str:
    """How many texts have no result, and why; empty if all have one."""
    manifest = Manifest.read(folder)
    if not manifest.errors:
        return ""
    told = ", ".join(f"{count:,} {reason}" for reason, count in manifest.reasons.items())
    return (
        f"{manifest.errors:,} of {format_count(manifest.rows, 'text')} without a result ({told}):"
        " see errors.parquet"
    )


def choose_strip(
    folder: str | os.PathLike[str], method: str | None, layer: int | None
) -> tuple[str, int]:
    """The result and the layer that a list shows: rollout of the top layer, if it is stored.

    Parameters
    ----------
    folder
        The folder that `explain_corpus` wrote.
    method
        One of the stored results; if None, rollout, or the first.
    layer
        One of its stored layers; the top one if None.
    """
    manifest = Manifest.read(folder)
    results = manifest.options.results
    name = method or ("rollout" if "rollout" in results else results[0])
    choose_stored([name], results, "method", folder)
    layers = manifest.options.layers[name]
    if layer is not None and layer not in layers:
        raise OptionError(
            f"layer {layer} of {name} is not stored in {folder}; choose from"
            f" {', '.join(map(str, layers))}"
        )
    return name, max(layers) if layer is None else layer
